"""The program of a helper: `python -u main.py KIND ORDER_FD SAYS_FD PARENT_PID`.

A forked saver runs `main` too and so imports our package again. The fork server then does not need
to import the saver's modules, and the only difference between a forked and an exec'd saver is that
the forked one has torch imported.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # modules in this folder must not shadow the standard library


def main(kind: str, order_fd: int, says_fd: int, parent: int) -> None:
    import importlib.util

    root = __file__.rsplit("/", 3)[0]
    spec = importlib.util.spec_from_file_location(
        "elasticrun", f"{root}/__init__.py", submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["elasticrun"] = package  # the package's folder is not on sys.path
    spec.loader.exec_module(package)
    from elasticrun.forkserver.helpers import helper

    helper.enter(kind, order_fd, says_fd, parent)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
