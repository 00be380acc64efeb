"""Changes the process while it is imported: one of each kind that packages are known for."""

import asyncio
import atexit
import builtins
import contextvars
import decimal
import faulthandler
import gc
import logging
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import uuid
import warnings

RUN = uuid.uuid4().hex
FOLDER = tempfile.mkdtemp(prefix="fidelity-effects-")
RANDOM = random.Random().random()
PID = os.getpid()
MAIN_THREAD = threading.current_thread() is threading.main_thread()
STDOUT = sys.stdout

random.seed(7)

logging.basicConfig(level=logging.ERROR, format="effects %(message)s")
logging.getLogger("fidelity_effects").addHandler(logging.StreamHandler())
logging.captureWarnings(True)
warnings.filterwarnings("ignore", message="fidelity.*")
warnings.simplefilter("ignore", ResourceWarning)


def excepthook(kind, value, trace):
    sys.__excepthook__(kind, value, trace)


sys.excepthook = excepthook
sys.unraisablehook = excepthook
threading.excepthook = excepthook

sys.setrecursionlimit(5000)
sys.setswitchinterval(0.01)
gc.set_threshold(50000, 20, 20)
gc.callbacks.append(lambda phase, info: None)
socket.setdefaulttimeout(77)
decimal.getcontext().prec = 50
os.umask(0o027)
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
os.environ["FIDELITY_NEW"] = "new"
os.environ["FIDELITY_CHANGED"] = "changed"
os.environ.pop("FIDELITY_REMOVED", None)
builtins.fidelity = True
faulthandler.enable()
tempfile.tempdir = FOLDER


def farewell():
    print("effects: atexit", flush=True)


atexit.register(farewell)


def heard(number, frame):
    pass


for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, heard)

VARIABLE = contextvars.ContextVar("fidelity")
VARIABLE.set(1)
LOOP = asyncio.new_event_loop()
asyncio.set_event_loop(LOOP)


class Wrapped:
    """A stream around another one, as packages for colors put one there."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)


sys.stdout = Wrapped(sys.stdout)
sys.stderr.reconfigure(line_buffering=True)
