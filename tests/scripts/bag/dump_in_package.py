"""Run with -m: a relative import and the same picture as dump.py."""

from __future__ import annotations

from . import near

if __name__ == "__main__":
    near.main(globals())
