"""The program of a helper: `python -u main.py KIND ORDER_FD SAYS_FD PARENT_PID`.

A forked saver runs `main` of this file too, and so imports our package anew: the fork server is
spared the saver's modules, and a forked saver differs from an exec'd one in nothing but that it has
torch already.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder's modules must not stand in front of the standard library


def main(kind: str, order_fd: int, says_fd: int, parent: int) -> None:
    import importlib.util

    root = __file__.rsplit("/", 3)[0]
    spec = importlib.util.spec_from_file_location(
        "elasticrun", f"{root}/__init__.py", submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["elasticrun"] = package  # found beside this file, and its folder is on no path
    spec.loader.exec_module(package)
    from elasticrun.forkserver.helpers import helper

    helper.enter(kind, order_fd, says_fd, parent)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:5]))
