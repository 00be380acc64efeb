"""Like ends.py, under torch's @record."""

from __future__ import annotations

import ends
from torch.distributed.elastic.multiprocessing.errors import record

if __name__ == "__main__":
    record(ends.main)()
