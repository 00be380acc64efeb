"""Imports torch._dynamo, as a line at the top of a script does, and runs the script argv[1]."""

from __future__ import annotations

import runpy
import sys

import torch._dynamo  # noqa: F401

del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
