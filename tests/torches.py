"""What tests need of torch that stands elsewhere in older versions of it."""

from __future__ import annotations

from elasticrun.dcp.torches import DTensor

try:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
except ImportError:  # torch 2.4
    from torch.distributed._tensor import (  # type: ignore[attr-defined,no-redef]
        Replicate,
        Shard,
        distribute_tensor,
    )
try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # torch 2.4, 2.5
    from torch.distributed._composable.fsdp import fully_shard  # type: ignore[no-redef]

__all__ = ["DTensor", "Replicate", "Shard", "distribute_tensor", "fully_shard"]
