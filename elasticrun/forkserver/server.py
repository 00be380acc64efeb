"""The fork server's main program, started by file path: see `wire.spawning`.

Its first statements record what a plain interpreter has imported and remove this folder from
sys.path, so that neither our modules nor files in a user's folder can shadow others. In a forked
child this program ends with an exception, and the interpreter calls the hook that runs the user's
program (`program.py`).
"""

import sys

_MODULES = frozenset(sys.modules)  # what every script finds imported
if not sys.flags.safe_path:
    del sys.path[0]


def _serve() -> BaseException:
    """Run the server. Returns only in forked children, where `__main__` is already the user's."""
    import importlib.util
    import sys

    root = __file__.rpartition("/")[0].rpartition("/")[0]
    spec = importlib.util.spec_from_file_location(
        "elasticrun", f"{root}/__init__.py", submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["elasticrun"] = package  # the package's folder is not on sys.path
    spec.loader.exec_module(package)
    from elasticrun.forkserver import loop
    from elasticrun.forkserver.program import BecomeRank

    try:
        loop.run(sys.argv[1:], _MODULES)
    except BecomeRank as become:
        sys.excepthook = become.program.hook()
        return become.with_traceback(None)


if __name__ == "__main__":
    raise _serve()
