"""Records what a rank sees of itself, for a comparison with the same rank under torchrun.

    witness.look("imports")            the state of the process, at a named moment
    witness.generators("seeded", ...)  states of the seeded generators; the others must be unique
    witness.loss(x), witness.weights(model), witness.say(key, value), witness.unique(key, value)
    witness.end()                      writes the record; kills the rank in all lives but the last

Standard library only. To look must not change what is looked at: nothing here imports torch, numpy
or a part of them, and a module that looking has imported is recorded as a difference.
"""

import sys

FIRST_MODULES = sorted(sys.modules)
FIRST_META_PATH = [getattr(finder, "__name__", type(finder).__name__) for finder in sys.meta_path]

import atexit
import ctypes
import decimal
import faulthandler
import gc
import hashlib
import json
import locale
import logging
import mimetypes
import os
import random
import re
import resource
import secrets
import signal
import socket
import tempfile
import threading
import time
import uuid
import warnings
import weakref

LIFE = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
RANK = int(os.environ.get("RANK", "0"))
LAST = int(os.environ.get("FIDELITY_LAST_LIFE", "0"))
BRIEF = tuple(map(int, filter(None, os.environ.get("FIDELITY_BRIEF_LIVES", "").split(","))))
"""Lives that end at once: they make later ones later."""

ALL = ("random", "numpy", "torch", "torch seed")
"""The generators of a process."""

OUT = os.environ.get("FIDELITY_OUT", "")
LATE = bool(os.environ.get("FIDELITY_LATE"))
"""Looks before the process group are left out: they would park a standby at the first line."""
PARKED = bool(os.environ.get("FIDELITY_PARKED"))
"""A life ends once the standbys of the next one are parked."""

PATIENCE = 120.0
"""Seconds for the other ranks' records; a rank that fails takes the others with it."""

record = {
    "state": {"first": {"modules": FIRST_MODULES, "meta_path": FIRST_META_PATH}},
    "generators": {},
    "losses": {},
    "weights": {},
    "said": {},
    "unique": {},
}


def digest(data):
    return hashlib.sha256(data).hexdigest()[:16]


def plain(value):
    """`repr` without addresses; sets in order."""
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(plain, value))) + "}"
    return re.sub(r" at 0x[0-9a-f]+|<class |>", "", repr(value))


def loaded(name):
    """The module, if somebody has imported it."""
    return sys.modules.get(name)


def read(path):
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError as error:
        return type(error).__name__


# ---------------------------------------------------------------- the interpreter


def interpreter():
    main = sys.modules["__main__"]
    yield "flags", plain(sys.flags)
    yield "argv", sys.argv
    yield "orig_argv", sys.orig_argv
    yield "path", sys.path
    yield "path_hooks", list(map(plain, sys.path_hooks))
    yield "meta_path", [getattr(f, "__name__", type(f).__name__) for f in sys.meta_path]
    yield "modules", sorted(sys.modules)
    yield "executable", [sys.executable, sys._base_executable, sys.prefix, sys.exec_prefix]
    for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook"):
        yield name, plain(getattr(sys, name))
    yield "threading.excepthook", plain(threading.excepthook)
    yield "last exception", sorted(name for name in vars(sys) if name.startswith("last_"))
    yield "tracing", [sys.gettrace(), sys.getprofile(), threading.gettrace()]
    yield "gc", [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)]
    yield "gc frozen", gc.get_freeze_count()
    yield "limits", [sys.getrecursionlimit(), sys.getswitchinterval(), sys.getdlopenflags()]
    yield "int digits", sys.get_int_max_str_digits()
    yield "bytecode", [sys.dont_write_bytecode, sys.pycache_prefix]
    yield "atexit", atexit._ncallbacks()
    yield "stack depth", depth()
    yield "main", {name: plain(value) for name, value in vars(main).items() if name[:2] == "__"}
    yield "main spec", getattr(main.__spec__, "name", None)
    yield "builtins", sorted(vars(sys.modules["builtins"]))
    yield "warnings.filters", [plain(entry) for entry in warnings.filters]
    yield "warnings.show", [plain(warnings.showwarning), plain(warnings.formatwarning)]
    for name in ("stdin", "stdout", "stderr"):
        yield name, stream(getattr(sys, name))
        yield name + " is the first", getattr(sys, name) is getattr(sys, f"__{name}__")


def depth():
    frame, count = sys._getframe(1), 0
    while frame:
        frame, count = frame.f_back, count + 1
    return count


def stream(found):
    if found is None:
        return None
    names = ("encoding", "errors", "line_buffering", "write_through", "mode", "name", "newlines")
    kinds = [type(each).__name__ for each in (found, getattr(found, "buffer", None))]
    return [*kinds, *(plain(getattr(found, name, "-")) for name in names), found.isatty()]


# ---------------------------------------------------------------- the standard library


def library():
    yield "environ", dict(os.environ)
    yield "umask", oct(umask())
    yield "cwd", os.getcwd()
    # a queue's feeder ends when it has written out: later than its loader's iterator, or not
    there = [t for t in threading.enumerate() if t.name != "QueueFeederThread"]
    yield "threads", [(t.name, t.daemon) for t in there]
    main = threading.main_thread()
    yield (
        "main thread",
        [
            main is threading.current_thread(),
            main.ident == threading.get_ident(),
            main.native_id == os.getpid() == threading.get_native_id(),
            threading.stack_size(),
        ],
    )
    yield "signals", {int(n): plain(signal.getsignal(n)) for n in signal.valid_signals()}
    yield "signal mask", sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    yield "timer", signal.getitimer(signal.ITIMER_REAL)
    yield "locale", [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)]
    yield "time zone", [time.tzname, time.timezone]
    yield "decimal", plain(decimal.getcontext())
    yield "socket timeout", socket.getdefaulttimeout()
    yield "faulthandler", faulthandler.is_enabled()
    yield "tempdir", [tempfile.tempdir, tempfile._name_sequence is None]
    yield "mimetypes", mimetypes.inited
    finalize = weakref.finalize
    yield "finalizers", [finalize._registered_with_atexit, len(finalize._registry)]
    if found := loaded("multiprocessing.process"):
        current = found.current_process()
        yield (
            "process",
            [current.name, found.parent_process() is None, len(found.active_children())],
        )
        yield "process parent", current._parent_pid
    if found := loaded("multiprocessing.context"):
        yield "start method", found._default_context.get_start_method(allow_none=True)
    if found := loaded("multiprocessing.reduction"):
        yield "reducers", sorted(map(plain, found.ForkingPickler._extra_reducers))
    if found := loaded("asyncio.events"):
        yield "event loop", [plain(found._event_loop_policy), found._get_running_loop()]
    if found := loaded("concurrent.futures.thread"):
        yield "pool threads", len(found._threads_queues)


def umask():
    mask = os.umask(0o77)
    os.umask(mask)
    return mask


def logs():
    root = logging.root
    yield "root", [root.level, list(map(handler, root.handlers)), logging.lastResort.level]
    yield "class", plain(logging.getLoggerClass())
    yield "factory", plain(logging.getLogRecordFactory())
    yield "captured warnings", logging._warnings_showwarning is not None
    yield "disabled", root.manager.disable
    for name, logger in sorted(root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger):
            handlers = list(map(handler, logger.handlers))
            yield name, [logger.level, logger.propagate, logger.disabled, handlers]


def handler(found):
    """Kind, level, and where it writes to."""
    target = getattr(found, "stream", None)
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    streams |= {"first stdout": sys.__stdout__, "first stderr": sys.__stderr__}
    where = next((name for name, each in streams.items() if each is target), type(target).__name__)
    return [
        type(found).__name__,
        found.level,
        where,
        plain(found.formatter and found.formatter._fmt),
    ]


# ---------------------------------------------------------------- the process


def process():
    status = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
    for name in ("SigBlk", "SigIgn", "SigCgt", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        yield name, status.get(name, "").strip()
    for name in ("NoNewPrivs", "Seccomp", "Cpus_allowed", "Mems_allowed", "Groups", "THP_enabled"):
        yield name, status.get(name, "").strip()
    yield "tasks", len(os.listdir("/proc/self/task"))
    for name in ("limits", "oom_score_adj", "cgroup", "comm", "coredump_filter", "timerslack_ns"):
        yield name, read(f"/proc/self/{name}")
    yield "command line", read("/proc/self/cmdline").split("\0")
    names = [word.partition("=")[0] for word in read("/proc/self/environ").split("\0")]
    yield "first environ", sorted(filter(None, names))
    yield "exe", os.readlink("/proc/self/exe")
    yield "descriptors", descriptors()
    libc = ctypes.CDLL(None)
    options = {"dumpable": 3, "keep capabilities": 7, "timer slack": 30, "no huge pages": 42}
    yield "prctl", {name: libc.prctl(number, 0, 0, 0, 0) for name, number in options.items()}
    yield "parent death signal", parent_death_signal(libc)
    yield "leads", [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()]
    yield "nice", os.nice(0)
    yield "scheduler", [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority]
    yield "cores", sorted(os.sched_getaffinity(0))
    limits = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    yield "resources", {name: resource.getrlimit(getattr(resource, name)) for name in limits}
    yield "float rounding", ctypes.CDLL("libm.so.6").fegetround()
    libc.setlocale.restype = ctypes.c_char_p
    yield "C locale", plain(libc.setlocale(6, None))


def parent_death_signal(libc):
    number = ctypes.c_int()
    libc.prctl(2, ctypes.byref(number), 0, 0, 0)
    return number.value


def descriptors():
    """Kind of each, and whether children inherit it."""
    found = {}
    for number in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            os.fstat(number)
        except OSError:  # that of the listing
            continue
        target = os.readlink(f"/proc/self/fd/{number}")
        found[number] = [re.sub(r":\[\d+\]", "", target), os.get_inheritable(number)]
    return found


def sharers():
    """How many ancestors, next first, have this process' memory layout: none of a process that was
    executed, one or more of a fork."""
    mine, count, pid = libc_base("self"), 0, os.getppid()
    while mine and pid > 1 and libc_base(pid) == mine:
        count += 1
        pid = int(read(f"/proc/{pid}/stat").rpartition(")")[2].split()[1])
    return count


def libc_base(pid):
    found = re.search(r"^([0-9a-f]+)-.*/libc[.-][^/]*$", read(f"/proc/{pid}/maps"), re.M)
    return found and found[1]


# ---------------------------------------------------------------- numpy and torch


def arrays():
    if numpy := loaded("numpy"):
        yield "numpy errors", plain(numpy.geterr())
        yield "numpy print", {k: plain(v) for k, v in numpy.get_printoptions().items()}
    torch = loaded("torch")
    if torch is None:
        return
    yield "threads", [torch.get_num_threads(), torch.get_num_interop_threads()]
    yield "dtype", str(torch.get_default_dtype())
    yield "device", plain(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None))
    yield "matmul", torch.get_float32_matmul_precision()
    yield (
        "deterministic",
        [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch._C._get_deterministic_fill_uninitialized_memory(),
        ],
    )
    yield (
        "cudnn",
        [
            torch._C._get_cudnn_enabled(),
            torch._C._get_cudnn_benchmark(),
            torch._C._get_cudnn_deterministic(),
        ],
    )
    yield "mkldnn", [torch._C._get_mkldnn_enabled(), torch._C._has_mkldnn]
    yield "cpu", torch._C._get_cpu_capability()
    yield "grad", [torch.is_grad_enabled(), torch.is_inference_mode_enabled()]
    yield "anomaly", [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]
    yield "autocast", [torch.is_autocast_enabled("cpu"), str(torch.get_autocast_dtype("cpu"))]
    yield "print", plain(torch._tensor_str.PRINT_OPTS)
    yield "flush denormals", torch.tensor([1e-310], dtype=torch.float64).mul(0.5).item() == 0
    functions = ("dropout", "linear", "relu", "cross_entropy", "scaled_dot_product_attention")
    yield "functions", {n: plain(getattr(torch.nn.functional, n)) for n in functions}
    yield "compile", torch.compile.__module__
    if found := loaded("torch.multiprocessing"):
        yield "sharing", found.get_sharing_strategy()
    if found := loaded("torch.distributed"):
        yield "debug level", str(found.get_debug_level())
    for name in ("torch._dynamo.config", "torch._inductor.config"):
        if (found := loaded(name)) and hasattr(found, "get_config_copy"):
            yield name, {key: plain(value) for key, value in found.get_config_copy().items()}
    if found := loaded("torch._logging._internal"):
        yield "logs", sorted(map(plain, found.log_state.get_log_level_pairs()))


PARTS = {
    "interpreter": interpreter,
    "library": library,
    "log": logs,
    "process": process,
    "arrays": arrays,
}


def look(moment):
    """Record the state of the whole process."""
    if LATE and "torch.distributed" not in sys.modules:
        return
    before = set(sys.modules)
    state = {f"{part}: {name}": value for part, see in PARTS.items() for name, value in see()}
    state["imported by looking"] = sorted(set(sys.modules) - before)
    record["state"][moment] = json.loads(json.dumps(state, default=plain))


def generators(moment, *seeded):
    """The states of `random`, `numpy` and `torch`: equal to torchrun's where the script has seeded
    them (`seeded`), else unlike all others'."""
    for name, state in states():
        if name in seeded:
            record["generators"][f"{moment}: {name}"] = state
        else:
            unique(f"{moment}: {name}", state)


def states():
    yield "random", digest(repr(random.getstate()).encode())
    if found := loaded("numpy.random"):
        _, keys, position, *gauss = found.get_state()
        yield "numpy", digest(keys.tobytes() + repr((position, gauss)).encode())
    if (found := loaded("torch")) is not None:
        yield "torch", digest(bytes(found.get_rng_state().tolist()))
        yield "torch seed", found.initial_seed()


def identities():
    """What no two processes may have in common."""
    unique("uuid1", uuid.uuid1().hex)
    unique("uuid4", uuid.uuid4().hex)
    unique("secrets", secrets.token_hex(8))
    unique("urandom", os.urandom(8).hex())
    unique("Random()", random.Random().random())
    unique("temporary name", next(tempfile._RandomNameSequence()))
    unique("temporary folder", tempfile.mkdtemp(prefix="fidelity-"))
    unique("pid", os.getpid())
    if found := loaded("multiprocessing.process"):
        unique("authkey", bytes(found.current_process().authkey).hex())
    if found := loaded("numpy.random"):
        unique("numpy default_rng", found.default_rng().random())
        sequence = found.get_bit_generator().seed_seq
        say("numpy seed_seq", type(sequence).__name__)
        if sequence is not None:
            unique("numpy seed_seq", sequence.entropy)


def loss(value, stage):
    record["losses"].setdefault(stage, []).append(
        float(getattr(value, "detach", lambda: value)()).hex()
    )


def weights(model, stage):
    whole = hashlib.sha256()
    for key, value in sorted(model.state_dict().items()):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole.update(key.encode() + value.detach().cpu().contiguous().numpy().tobytes())
    record["weights"][stage] = whole.hexdigest()[:16]


def say(key, value):
    record["said"][key] = json.loads(json.dumps(value, default=plain))


def unique(key, value):
    """To differ between all ranks and lives of a job."""
    record["unique"][key] = value


def _file(rank):
    return os.path.join(OUT, f"life-{LIFE}-rank-{rank}.json")


def end():
    """Write the record, wait for the other ranks', and die unless this life is the last one."""
    record["sharers"] = sharers()
    notes = [name for name in os.listdir(OUT) if name.startswith(f"parked-{LIFE}-")]
    record["parked"] = any(str(os.getpid()) in read(os.path.join(OUT, n)).split() for n in notes)
    with open(_file(RANK) + ".new", "w") as file:
        json.dump(record, file)
    os.replace(file.name, _file(RANK))
    until = time.monotonic() + PATIENCE
    others = list(map(_file, range(int(os.environ.get("WORLD_SIZE", "1")))))
    while time.monotonic() < until and not all(map(os.path.exists, others)):
        time.sleep(0.02)
    if LIFE < LAST:
        die()


def standbys():
    """CPU ticks of each standby of the next life that stands still at its tracer's."""
    following = f"TORCHELASTIC_RESTART_COUNT={LIFE + 1}"
    found = {}
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        words = read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        stands = bool(words) and words[0] == "t" and int(words[1]) == os.getppid()
        if stands and following in read(f"/proc/{pid}/environ").split("\0"):
            found[int(pid)] = words[11:13]
    return found


def die():
    """Kill this process, once the next life is parked if there are standbys."""
    until, before = time.monotonic() + PATIENCE, {}
    while PARKED and time.monotonic() < until:
        time.sleep(0.5)
        before, last = standbys(), before
        if before == last and len(before) == int(os.environ["LOCAL_WORLD_SIZE"]):
            break
    with open(os.path.join(OUT, f"parked-{LIFE + 1}-{RANK}"), "w") as file:
        file.write(" ".join(map(str, before)))
    os.kill(os.getpid(), signal.SIGKILL)


if LIFE in BRIEF:
    die()
