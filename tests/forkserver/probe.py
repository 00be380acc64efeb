# ruff: noqa: E402, SIM115
"""Everything that a script can see of itself, as one JSON object in the file argv[1].

Run by plain exec and by fork; the test compares field by field. What identifies the one process
(pids, addresses, times) is turned into a statement that must be the same for both.
"""

import sys

seen = {}
seen["modules"] = sorted(sys.modules)
seen["depth"] = []
frame = sys._getframe()
while frame is not None:
    seen["depth"].append([frame.f_code.co_name, frame.f_code.co_filename])
    frame = frame.f_back
del frame
seen["main: names"] = list(globals())
seen["main: __file__"] = globals().get("__file__")
seen["main: __name__"] = __name__
seen["main: __doc__"] = __doc__
seen["main: __package__"] = __package__
seen["main: __spec__"] = getattr(__spec__, "name", None)
seen["main: __spec__ type"] = type(__spec__).__name__
seen["main: __cached__"] = globals().get("__cached__")
seen["main: __loader__"] = [
    type(__loader__).__name__,
    getattr(__loader__, "name", None),
    getattr(__loader__, "path", None),
    __loader__ if isinstance(__loader__, str) else None,
]
seen["main: __builtins__"] = type(__builtins__).__name__
seen["main: __annotations__"] = globals().get("__annotations__")
seen["main: module"] = [
    repr(sys.modules["__main__"]),
    sys.modules["__main__"].__dict__ is globals(),
]
seen["sys.argv"] = sys.argv[:1] + sys.argv[2:]
seen["sys.orig_argv"] = [word for word in sys.orig_argv if word != sys.argv[1]]
seen["sys.path"] = list(sys.path)
seen["sys.flags"] = repr(sys.flags)
seen["sys.executable"] = [sys.executable, sys._base_executable, sys.prefix, sys.exec_prefix]
seen["sys.xoptions"] = [sys._xoptions, sys.warnoptions]
seen["sys.hooks"] = [
    getattr(sys, name) is getattr(sys, f"__{name}__")
    for name in ("excepthook", "displayhook", "unraisablehook", "breakpointhook")
]
seen["sys.last"] = [hasattr(sys, f"last_{n}") for n in ("type", "value", "traceback", "exc")]
seen["sys.exc_info"] = sys.exc_info() == (None, None, None)
seen["sys.meta_path"] = [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path]
seen["sys.path_hooks"] = len(sys.path_hooks)
seen["sys.limits"] = [sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags()]
seen["sys.bytecode"] = [sys.dont_write_bytecode, sys.pycache_prefix]
seen["sys.trace"] = [sys.gettrace(), sys.getprofile()]
seen["sys.encoding"] = [sys.getdefaultencoding(), sys.getfilesystemencoding()]
seen["hash seed"] = hash("layer.0")


def stream(s):
    buffer = s.buffer
    raw = getattr(buffer, "raw", buffer)
    return [
        *(s.line_buffering, s.write_through, s.encoding, s.errors, s.mode, s.name, s.newlines),
        *(s.fileno(), s.isatty(), s.closed, s.seekable(), s.readable(), s.writable()),
        *(type(buffer).__name__, type(raw).__name__, raw.mode, raw.closefd, raw.name),
    ]


for name in ("stdin", "stdout", "stderr"):
    seen[f"sys.{name}"] = stream(getattr(sys, name))
    seen[f"sys.__{name}__"] = getattr(sys, name) is getattr(sys, f"__{name}__")

import gc
import os

fds = {}
for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
    try:
        os.fstat(fd)
        fds[fd] = [os.readlink(f"/proc/self/fd/{fd}").partition(":")[0], os.get_inheritable(fd)]
    except OSError:
        pass  # the listing's own
seen["fds"] = sorted(fds)
seen["fds: inheritable"] = {fd: kind[1] for fd, kind in fds.items()}
seen["gc"] = [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)]
seen["cwd"] = os.getcwd()
umask = os.umask(0o22)
os.umask(umask)
seen["umask"] = umask
seen["nice"] = os.nice(0)
seen["affinity"] = sorted(os.sched_getaffinity(0))
seen["scheduler"] = os.sched_getscheduler(0)
seen["process group"] = [os.getpgid(0) == os.getpid(), os.getsid(0) == os.getpid()]
seen["tasks"] = len(os.listdir("/proc/self/task"))
seen["parent lives"] = os.path.exists(f"/proc/{os.getppid()}/stat")
seen["os.environ"] = dict(os.environ)
seen["os.environ: order"] = list(os.environ)
seen["/proc/self/environ"] = open("/proc/self/environ", errors="surrogateescape").read().split("\0")
seen["/proc/self/cmdline"] = [
    word for word in open("/proc/self/cmdline").read().split("\0") if word != sys.argv[1]
]
seen["/proc/self/comm"] = open("/proc/self/comm").read()
seen["/proc/self/exe"] = os.readlink("/proc/self/exe")
seen["/proc/self/status"] = [
    line
    for line in open("/proc/self/status")
    if line.split(":")[0]
    in (
        *("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp", "CapEff", "CapAmb"),
        *("SigBlk", "SigIgn", "SigCgt", "ShdPnd", "SigPnd", "THP_enabled"),
    )
]

import resource
import signal

seen["limits"] = {
    n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")
}
seen["signals"] = {str(s): str(signal.getsignal(s)) for s in sorted(signal.valid_signals())}
seen["signal mask"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
seen["wakeup fd"] = signal.set_wakeup_fd(-1)
seen["timers"] = [signal.getitimer(signal.ITIMER_REAL), signal.alarm(0)]

import faulthandler
import locale
import threading
import warnings

seen["faulthandler"] = faulthandler.is_enabled()
seen["locale"] = [locale.getlocale(), locale.setlocale(locale.LC_ALL)]
seen["warnings.filters"] = [str(f) for f in warnings.filters]
main_thread = threading.main_thread()
seen["threading"] = [
    main_thread is threading.current_thread(),
    main_thread.name,
    main_thread.daemon,
    main_thread.ident == threading.get_ident(),
    main_thread.native_id == os.getpid(),
    [t.name for t in threading.enumerate()],
    threading.stack_size(),
    threading.excepthook is threading.__excepthook__,
]

import site

seen["site"] = [site.ENABLE_USER_SITE, site.PREFIXES, "usercustomize" in sys.modules]

import logging
import multiprocessing
import tempfile
import time

seen["multiprocessing"] = [
    multiprocessing.current_process().name,
    multiprocessing.parent_process() is None,
    multiprocessing.get_start_method(allow_none=True),
    multiprocessing.active_children(),
    len(multiprocessing.current_process().authkey),
]
seen["logging"] = [logging.root.level, logging.root.handlers, time.time() - logging._startTime < 60]
seen["tempfile"] = [tempfile.gettempdir(), tempfile.gettempprefix()]

import inspect
import pickle


class Thing:
    """For pickling and for inspect."""


seen["inspect.getsource"] = [inspect.getsource(Thing), inspect.getfile(Thing)]
seen["inspect.stack"] = [[f.filename, f.lineno, f.function] for f in inspect.stack()]
seen["inspect.getmodule"] = inspect.getmodule(Thing).__name__
seen["pickle"] = type(pickle.loads(pickle.dumps(Thing()))) is Thing

import importlib.util

spec = importlib.util.find_spec("torch")
seen["find_spec"] = [
    spec.name,
    spec.origin,
    spec.submodule_search_locations,
    spec.parent,
    spec.has_location,
    spec.cached,
    "torch" in sys.modules,
    spec.loader.get_filename("torch"),
    type(spec.loader).__name__,
]
handlers = logging.root.manager.loggerDict
seen["logging: names"] = sorted(handlers)
before = set(os.environ)

import numpy
import torch
import torch.distributed

seen["torch: threads"] = [torch.get_num_threads(), torch.get_num_interop_threads()]
seen["torch: state"] = [
    str(torch.get_default_dtype()),
    torch.is_grad_enabled(),
    torch.get_float32_matmul_precision(),
    torch.are_deterministic_algorithms_enabled(),
    str(torch.distributed.get_debug_level()),
    torch.backends.mkldnn.enabled,
    torch.is_inference_mode_enabled(),
    logging.getLogger("torch").level,
    logging.getLogger("torch._dynamo").level,
]
seen["torch: module"] = [
    torch.__spec__.name,
    type(torch.__spec__.loader).__name__,
    torch.__spec__.origin,
    type(torch.__loader__).__name__,
    torch.__file__,
    torch.__spec__._initializing,
]
seen["torch: sys.modules"] = sorted(sys.modules)
seen["torch: sys.meta_path"] = [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path]
seen["torch: logging"] = [
    [name, getattr(each, "level", None), str(getattr(each, "parent", None))]
    for name, each in sorted(logging.root.manager.loggerDict.items())
]
seen["torch: streams"] = sorted(
    {
        getattr(handler, "stream", None) in (sys.stderr, sys.stdout)
        for each in logging.root.manager.loggerDict.values()
        for handler in getattr(each, "handlers", ())
        if hasattr(handler, "stream")
    }
)
seen["sys: names"] = sorted(vars(sys))
seen["torch: environ"] = sorted(set(os.environ) - before)
seen["torch: warnings.filters"] = [str(f) for f in warnings.filters]
seen["torch: bad fork"] = [torch.cuda._is_in_bad_fork(), torch.xpu._is_in_bad_fork()]
seen["torch: work"] = bool((torch.ones(64, 64) @ torch.ones(64, 64) == 64).all())
seen["torch: tasks"] = len(os.listdir("/proc/self/task"))
seen["torch: affinity"] = sorted(os.sched_getaffinity(0))
seen["numpy"] = [
    numpy.__spec__.origin,
    str(numpy.geterr()),
    bool((numpy.ones((64, 64)) @ numpy.ones(64) == 64).all()),
]
seen["torch: imports"] = sorted(
    m for m in ("torch._dynamo", "torch._inductor", "sympy", "numpy") if m in sys.modules
)

import json

with open(sys.argv[1], "w") as out:
    json.dump(seen, out, default=repr)
