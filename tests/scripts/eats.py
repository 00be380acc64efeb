"""A rank that takes memory until the kernel ends it (2 GiB, should it not); the others wait.

Argument: which rank eats.
"""

from __future__ import annotations

import os
import signal
import sys

if os.environ["RANK"] == sys.argv[1]:
    held = [b"x" * (1 << 24) for _ in range(128)]
while True:
    signal.pause()
