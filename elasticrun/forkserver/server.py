"""The fork server's main program, started by its path: see `wire.spawning`.

Its first statements note what a plain interpreter has imported, and take this folder off the path,
so that no module of ours, and none in a folder of the user's, can stand in front of another. In a
forked child this program ends with an exception, and the interpreter calls the hook that is the
user's program (`program.py`).
"""

import sys

_MODULES = frozenset(sys.modules)  # what every script finds imported
if not sys.flags.safe_path:
    del sys.path[0]


def _serve() -> BaseException:
    """Serve; returns in forked children alone, whose `__main__` has become the user's by then."""
    import importlib.util
    import sys

    root = __file__.rpartition("/")[0].rpartition("/")[0]
    spec = importlib.util.spec_from_file_location(
        "elasticrun", f"{root}/__init__.py", submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["elasticrun"] = package  # found beside this file, and its folder is on no path
    spec.loader.exec_module(package)
    from elasticrun.forkserver import life
    from elasticrun.forkserver.program import BecomeRank

    try:
        life.live(sys.argv[1:], _MODULES)
    except BecomeRank as become:
        sys.excepthook = become.program.hook()
        return become.with_traceback(None)


if __name__ == "__main__":
    raise _serve()
