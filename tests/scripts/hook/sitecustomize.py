"""Runs the code that a test wants in every Python of its job, before all else (tests/hooked.py)."""

import os

exec(os.environ.get("ELASTICRUN_TEST_HOOK", ""))
