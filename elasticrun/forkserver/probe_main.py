"""A probe that is exec'd, where forking is not trusted: `python -u probe_main.py ORDER_FD WORDS_FD
PARENT_PID`. The order is a frame with a SpawnProbe; what it says are frames with ProbeSaid.
"""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    del sys.path[0]  # this folder's modules must not stand in front of the standard library


def _main() -> None:
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
    from elasticrun.forkserver import probes

    probes.exec_probe(*map(int, sys.argv[1:4]))


if __name__ == "__main__":
    _main()
