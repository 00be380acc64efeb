"""A rank that takes memory until the kernel ends it (2 GiB, should it not); the others wait.

Arguments: which rank eats; "itself" or "parent": which process the kernel is to prefer.
"""

from __future__ import annotations

import os
import signal
import sys

if os.environ["RANK"] == sys.argv[1]:
    victim = {"itself": os.getpid(), "parent": os.getppid()}[sys.argv[2]]
    with open(f"/proc/{victim}/oom_score_adj", "w") as file:
        file.write("1000")
    held = [b"x" * (1 << 24) for _ in range(128)]
while True:
    signal.pause()
