"""A saver's program: `python -u saver_main.py ORDER_FD PARENT_PID`. The order is a frame with a
SpawnSaver. A forked saver runs `main` of this file too (`savers.py`).
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder's modules must not stand in front of the standard library


def main(order_fd: int, parent: int) -> None:
    import importlib.util

    root = __file__.rpartition("/")[0].rpartition("/")[0]
    spec = importlib.util.spec_from_file_location(
        "elasticrun", f"{root}/__init__.py", submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["elasticrun"] = package  # found beside this file, and its folder is on no path
    spec.loader.exec_module(package)
    from elasticrun.saver import start as savers

    savers.enter(order_fd, parent)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
