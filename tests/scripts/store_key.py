"""Looks for a key of an earlier life in the store at MASTER_ADDR:MASTER_PORT, then leaves one."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

from torch.distributed import TCPStore

from stage import Stage  # isort: skip

store = TCPStore(
    os.environ["MASTER_ADDR"],
    int(os.environ["MASTER_PORT"]),
    is_master=False,
    timeout=timedelta(seconds=240),
)
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
stale = store.check(["left-by-an-earlier-life"])
store.set("left-by-an-earlier-life", life)
Stage(stale=stale)
sys.exit(3 if life == "0" else 0)
