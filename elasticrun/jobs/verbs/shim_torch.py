"""The package `torch` on the PYTHONPATH of `elasticrun shim`. A copy of this file is its
`__init__.py`; elasticrun itself never imports it.

Python imports it in place of torch, once for each process below the shim's command. If the process
is a launcher (`python -m torch.distributed.run`, `python -m torch.distributed.launch`, torchrun's
console script), it is replaced by elasticrun. Otherwise this module removes itself and imports the
real torch, whose module `torch.distributed.run` then has elasticrun's functions, because some
launchers, such as `accelerate launch`, call them. Ranks never see this module: elasticrun removes
the shim from their environment.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

RUN = "torch.distributed.run"
LAUNCH = "torch.distributed.launch"
FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def launcher_words() -> list[str]:
    """The command line of Python that runs elasticrun in place of this launcher; [] if this process
    is none."""
    arguments = sys.argv[1:]
    at = len(sys.orig_argv) - len(arguments) - 1
    name = sys.orig_argv[at] if at > 0 else ""
    if sys.argv[0] != "-m":  # of runpy, while it looks for the module; else the script
        if os.path.basename(sys.argv[0]) != "torchrun" or name != sys.argv[0]:
            return []
        return [*sys.orig_argv[1:at], "-P", "-m", "elasticrun", *arguments]
    module = name.removeprefix("-m")  # python -mtorch.distributed.run
    python = sys.orig_argv[1 : at if module != name else at - 1]
    if module not in (RUN, LAUNCH):
        return []
    return [*python, "-m", "elasticrun", *(arguments if module == RUN else launch(arguments))]


def launch(arguments: list[str]) -> list[str]:
    """The arguments of torch.distributed.launch as those of torchrun: without --use-env, the script
    gets its local rank as an argument."""
    from elasticrun.cli.flags import get_args_parser

    script = get_args_parser().script_at(arguments)
    flags = [word for word in arguments[:script] if word not in ("--use-env", "--use_env")]
    rank = ["--local-rank=${local_rank}"] if len(flags) == script else []
    return [*flags, *arguments[script : script + 1], *rank, *arguments[script + 1 :]]


class RunFinder(MetaPathFinder):
    """Finds torch.distributed.run, for `RunLoader`."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of the real module, with our loader."""
        spec = PathFinder.find_spec(name, path) if name == RUN else None
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        spec.loader = RunLoader(spec.loader)
        return spec


class RunLoader(Loader):
    """Loads torch.distributed.run and puts elasticrun's functions into it."""

    def __init__(self, real: SourceFileLoader) -> None:
        self._real = real

    def exec_module(self, module: ModuleType) -> None:
        """Execute the real module, then replace its functions."""
        self._real.exec_module(module)
        ours = importlib.import_module("elasticrun.run")
        for name in ours.__all__:
            setattr(module, name, getattr(ours, name))
        for name, instead in (("run", run), ("main", main_of_run)):
            setattr(module, name, instead)

    def get_code(self, name: str) -> CodeType:
        """What `runpy` executes as __main__, for example for `debugpy -m torch.distributed.run`."""
        code = "import sys\nfrom elasticrun.cli.main import main\nsys.exit(main())\n"
        return compile(code, name, "exec")


def run(args: argparse.Namespace) -> None:
    """`elasticrun.run.run` with the settings file and variables, as on the command line."""
    from elasticrun.cli.main import notify
    from elasticrun.cli.settings import UsageError
    from elasticrun.cli.settings_file.find import fill

    try:
        fill(args, notify)
    except UsageError as wrong:
        notify(f"error: {wrong}")
        sys.exit(wrong.exit_code)
    importlib.import_module("elasticrun.run").run(args)


def main_of_run(args: list[str] | None = None) -> None:
    """`elasticrun.run.main` with the settings file."""
    run(importlib.import_module("elasticrun.run").parse_args(args))


def step_aside(*, with_finder: bool) -> None:
    """Remove this module and its folder from this process, and import the real torch."""
    sys.path[:] = [each for each in sys.path if each != FOLDER]
    sys.path_importer_cache.pop(FOLDER, None)
    if with_finder:
        sys.meta_path.insert(0, RunFinder())
    del sys.modules["torch"]
    importlib.import_module("torch")


def main() -> None:
    """Become elasticrun, or step aside."""
    if importlib.util.find_spec("elasticrun") is None:
        sys.stderr.write(
            f"elasticrun: shim: {sys.executable} has no elasticrun, so its torchrun is unchanged\n"
        )
        step_aside(with_finder=False)
    elif words := launcher_words():
        os.execv(sys.executable, [sys.executable, *words])
    else:
        step_aside(with_finder=True)


if __name__ == "torch":
    main()
