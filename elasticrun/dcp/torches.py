"""Names that stand elsewhere in older torches."""

from __future__ import annotations

try:
    from torch.distributed.tensor import DTensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import DTensor  # type: ignore[attr-defined]

__all__ = ["DTensor"]
