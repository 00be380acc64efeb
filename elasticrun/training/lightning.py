"""Snapshots of a Lightning run: `Trainer(callbacks=[Snapshots("runs/a")])`, and nothing else.

Module, optimizers, schedulers and the loops' progress are kept; Lightning goes on in the middle of
an epoch as it does from a checkpoint of its own. Random states are as they were when the batch
begins: what a model draws is the same, what a dataset draws for a batch may not be. A data loader
without a state of its own begins its epoch again there, as it does then too.
"""

from __future__ import annotations

import importlib
from typing import Any

from elasticrun.training import Checkpointer

Callback: Any = importlib.import_module("lightning").Callback  # an extra: unknown to the types


class Snapshots(Callback):  # type: ignore[misc]
    """Restores when the fit begins, and takes a snapshot after a batch when one is due.

    `folder` and `options` are the Checkpointer's; `checkpointer` is there once the fit has begun.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        self.checkpointer: Checkpointer | None = None
        self._folder, self._options = folder, options
        self._last = 0
        self._is_fresh = True  # nothing has been trained since the restore

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """All is set up, and nothing has been trained: state may be put back."""
        state: dict[str, Any] = {"model": pl_module, "loops": trainer.fit_loop}
        for number, optimizer in enumerate(trainer.optimizers):
            state[f"optimizer{number}"] = getattr(optimizer, "optimizer", optimizer)
        for number, config in enumerate(trainer.lr_scheduler_configs):
            state[f"scheduler{number}"] = config.scheduler
        self.checkpointer = Checkpointer(self._folder, **self._options, **state)
        self._last = self.checkpointer.restore()

    def on_train_batch_start(self, *_: Any) -> None:
        """The loader's iterator, which was made since the restore, has drawn its seed."""
        if self.checkpointer is not None and self._is_fresh:
            self.checkpointer.restore_rng()
        self._is_fresh = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """A batch is not a step where gradients are accumulated: only steps count."""
        if self.checkpointer is not None and trainer.global_step > self._last:
            self._last = trainer.global_step
            self.checkpointer.step(self._last)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The fit is over, or has failed."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None
