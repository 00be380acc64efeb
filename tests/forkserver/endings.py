# ruff: noqa: E501
"""Scripts that end in every way a script can end; the test compares what exec and fork make of
each: exit code, stdout and stderr, byte for byte."""

from __future__ import annotations

OUTCOMES: dict[str, str] = {
    "nothing": "",
    "output": "import sys\nprint('out', flush=False)\nprint('err', file=sys.stderr)\n"
    "sys.stdout.write('no newline')",
    "exception": "def f(x):\n    return 1 / x\n\n\ndef g():\n    f(0)\n\n\ng()\n",
    "exception with a cause": "try:\n    {}['a']\nexcept KeyError as e:\n"
    "    raise ValueError('boom') from e\n",
    "exception in the context of another": "try:\n    {}['a']\nfinally:\n    raise ValueError(1)\n",
    "exception group": "raise ExceptionGroup('many', [ValueError(1), TypeError('two')])\n",
    "exception with a note": "e = ValueError('x')\ne.add_note('a note')\nraise e\n",
    "exception in an import": "import json.nothing_of_this_name\n",
    "exception without str": "class E(Exception):\n    def __str__(self):\n        1 / 0\nraise E\n",
    "assertion": "assert 1 == 2, 'no'\n",
    "recursion": "def f(n):\n    return n if n == 0 else f(n - 1)\n\n\nprint(f(900))\n",
    "exit 7": "import sys\nsys.exit(7)\n",
    "exit none": "import sys\nsys.exit()\n",
    "exit true": "raise SystemExit(True)\n",
    "exit 256": "raise SystemExit(256)\n",
    "exit -1": "raise SystemExit(-1)\n",
    "exit text": "raise SystemExit('a text')\n",
    "exit object": "raise SystemExit([1, 2])\n",
    "exit class": "raise SystemExit\n",
    "exit by os._exit": "import os\nos._exit(3)\n",
    "exit in atexit": "import atexit, sys\natexit.register(lambda: sys.exit(4))\n",
    "killed by itself": "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n",
    "abort": "import os\nos.abort()\n",
    "interrupt": "raise KeyboardInterrupt\n",
    "interrupt after exec of text": "exec('x = 1')\nraise KeyboardInterrupt\n",
    "interrupt by signal": "import os, signal\n\n\ndef f():\n"
    "    os.kill(os.getpid(), signal.SIGINT)\n    while True:\n        pass\n\n\nf()\n",
    "interrupt and atexit": "import atexit\natexit.register(print, 'end')\n"
    "raise KeyboardInterrupt\n",
    "interrupt caught": "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n"
    "    while True:\n        pass\nexcept KeyboardInterrupt:\n    print('caught')\n",
    "handler": "import os, signal\nsignal.signal(signal.SIGTERM, lambda *a: print('term'))\n"
    "os.kill(os.getpid(), signal.SIGTERM)\nprint('on')\n",
    "atexit order": "import atexit\nfor i in range(3):\n    atexit.register(print, i)\n"
    "print('main')\n",
    "atexit and __file__": "import atexit\n"
    "atexit.register(lambda: print('__file__' in globals(), '__cached__' in globals()))\n",
    "atexit and __file__ after exit": "import atexit, sys\n"
    "atexit.register(lambda: print('__file__' in globals()))\nsys.exit(0)\n",
    "atexit and __file__ after an exception": "import atexit\n"
    "atexit.register(lambda: print('__file__' in globals()))\n1 / 0\n",
    "atexit that fails": "import atexit\natexit.register(lambda: 1 / 0)\n",
    "atexit depth": "import atexit, sys\n\n\ndef f():\n    try:\n        sys._getframe(1)\n"
    "    except ValueError as e:\n        print(e)\n\n\natexit.register(f)\n",
    "excepthook": "import sys\nsys.excepthook = lambda t, v, tb: print(t.__name__, v, tb.tb_lineno)\n"
    "1 / 0\n",
    "excepthook that fails": "import sys\n\n\ndef hook(*a):\n    raise TypeError('hook')\n\n\n"
    "sys.excepthook = hook\n1 / 0\n",
    "excepthook that exits": "import sys\n\n\ndef hook(*a):\n    sys.exit(9)\n\n\n"
    "sys.excepthook = hook\n1 / 0\n",
    "excepthook and last_value": "import atexit, sys\n"
    "atexit.register(lambda: print(sys.last_type, sys.last_value, sys.last_traceback.tb_lineno))\n"
    "1 / 0\n",
    "unraisable": "class A:\n    def __del__(self):\n        1 / 0\n\n\nA()\n",
    "object alive at the end": "class A:\n    def __del__(self):\n        print('gone')\n\n\na = A()\n",
    "thread after main": "import threading, time\nimport pickle\n\n\nclass Thing:\n    pass\n\n\n"
    "def f():\n    threading.main_thread().join()\n    print(pickle.dumps(Thing()))\n\n\n"
    "threading.Thread(target=f).start()\n",
    "thread and atexit": "import atexit, threading\natexit.register(print, 'atexit')\n\n\n"
    "def f():\n    threading.main_thread().join()\n    print('thread')\n\n\n"
    "threading.Thread(target=f).start()\nprint('main')\n",
    "daemon thread": "import threading\nthreading.Thread(target=threading.Event().wait, "
    "daemon=True).start()\nprint('main')\n",
    "exception in a thread": "import threading\n\n\ndef f():\n    1 / 0\n\n\n"
    "t = threading.Thread(target=f)\nt.start()\nt.join()\n",
    "executor": "from concurrent.futures import ThreadPoolExecutor\n"
    "pool = ThreadPoolExecutor(2)\npool.submit(print, 'in a pool')\n",
    "warning": "import warnings\nwarnings.warn('careful')\n",
    "warning at compile time": "x = 1\nif x is 1:\n    print('one')\n",
    "warning from C": "import os\nopen(os.devnull)\n'\\d'\n",
    "syntax error": "def f(:\n    pass\n",
    "indentation": "if True:\nprint(1)\n",
    "null byte": "x = 1\n\0\n",
    "stack": "import sys, traceback\n\n\ndef f():\n    traceback.print_stack()\n"
    "    print(sys._getframe(1).f_back)\n\n\nf()\n",
    "stdin": "import sys\nprint(repr(sys.stdin.read()))\n",
    "logging": "import logging\nlogging.warning('w')\nlogging.getLogger('a.b').error('e')\n",
    "random seeded": "import random\nrandom.seed(1)\nprint(random.random())\n",
    "fork": "import os\npid = os.fork()\nif pid == 0:\n    print('child')\n    raise SystemExit(5)\n"
    "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n",
    "subprocess": "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', "
    "'import os; print(sorted(os.environ) != [], os.getppid() > 1)'], stdout=-1, text=True).stdout)\n",
    "subprocess and SIGPIPE": "import subprocess\n"
    "print(subprocess.run('yes | head -1', shell=True).returncode)\n",
    "faulthandler": "import faulthandler, os\nfaulthandler.enable()\nprint('on')\n",
    "main guard": "if __name__ == '__main__':\n    print('main')\n",
    "globals": "print(list(globals()), dir())\n",
    "breakpoint without a debugger": "import os\nos.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\n",
    "dataclass in main": "from dataclasses import dataclass\nfrom typing import ClassVar\n\n\n"
    "@dataclass\nclass A:\n    x: int = 1\n    y: ClassVar[int] = 2\n\n\nprint(A(), A.__module__)\n",
    "annotations": "import typing\nx: 'int' = 1\nprint(__annotations__)\n"
    "print(typing.get_type_hints(__import__('__main__')))\n",
    "coding": "# -*- coding: latin-1 -*-\nprint('ok')\n",
    "asyncio": "import asyncio\n\n\nasync def main():\n    await asyncio.sleep(0)\n    print('async')"
    "\n    raise ValueError('in a task')\n\n\nasyncio.run(main())\n",
    "asyncio interrupt": "import asyncio, os, signal\n\n\nasync def main():\n"
    "    os.kill(os.getpid(), signal.SIGINT)\n    await asyncio.sleep(60)\n\n\nasyncio.run(main())\n",
}

RECURSION = (
    "def f(n):\n    try:\n        return f(n + 1)\n    except RecursionError:\n        return n\n\n\n"
    "print(f(0))\n"
)

MULTIPROCESSING = """
import multiprocessing as mp
import os
import sys


class Thing:
    value = 3


def work(queue, thing):
    print("child", thing.value, __name__ != "", flush=True)
    queue.put((type(thing).__name__, os.getppid() > 1, sys.argv[0].endswith(".py")))


if __name__ == "__main__":
    context = mp.get_context("{method}")
    queue = context.Queue()
    process = context.Process(target=work, args=(queue, Thing()))
    process.start()
    print(queue.get())
    process.join()
    print(process.exitcode)
"""

for _method in ("fork", "spawn", "forkserver"):
    OUTCOMES[f"multiprocessing {_method}"] = MULTIPROCESSING.replace("{method}", _method)

TORCH_OUTCOMES: dict[str, str] = {
    "torch after main": "import atexit\nimport torch\natexit.register(print, torch.ones(2).sum())\n",
    "torch exception": "import torch\ntorch.ones(2) @ torch.ones(3)\n",
    "a file left open": "import torch\nout = open(1, 'w', closefd=False)\nout.write('buffered')\n",
    "objects alive at the end": """
import atexit, json, os, sys


class A:
    def __init__(self, word):
        self.word = word

    def __del__(self, print=print, fin=sys.is_finalizing):
        print(self.word, fin(), os is not None, json is not None)


import torch

first, json.kept, torch.kept, sys.kept = A("global"), A("json's"), A("torch's"), A("sys'")
cycle = [A("in a cycle")]
cycle.append(cycle)
atexit.register(print, "atexit")
raise ValueError(A("in an exception"))
""",
    "torch seeded": "import torch\ntorch.manual_seed(1)\nprint(torch.rand(2))\n",
    "data loader": """
import torch
from torch.utils.data import DataLoader, Dataset


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(i)


if __name__ == "__main__":
    for how in ("fork", "spawn"):
        loader = DataLoader(Data(), batch_size=4, num_workers=1, multiprocessing_context=how)
        print(list(loader))
""",
    "record": """
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    raise ValueError("boom")


main()
""",
}
