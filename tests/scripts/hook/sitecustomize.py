"""Runs the code that a test wants in every Python of its job, before all else (tests/hooked.py)."""

import os

exec(os.environ.get("ELASTICRUN_TEST_HOOK", ""))

# That code is meant for agents and masters. A fork server takes this module for an empty one, so
# its ranks are forked and do not import torch themselves.
__file__ = os.devnull
