"""What agents and ranks agree on about signals."""

from __future__ import annotations

from typing import Final

SAID_AGAIN: Final = 1.0
"""Seconds after a SIGTERM in which another one is the same: Slurm says it twice within
milliseconds, to every process, at a time limit and where another job takes the place. (A second ^C
is meant.)"""
