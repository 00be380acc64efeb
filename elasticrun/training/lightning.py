"""Snapshots of a Lightning run: `Trainer(callbacks=[Snapshots("runs/a")])`.

Snapshots contain the module, optimizers, schedulers and the progress of the loops; Lightning
resumes in the middle of an epoch as it does from its own checkpoints. Random states are those at
the start of the batch: a model's random numbers are the same, a dataset's may differ. A data loader
without a state restarts its epoch, as it does with Lightning's checkpoints.
"""

from __future__ import annotations

import importlib
from typing import Any

from elasticrun.training import Checkpointer, ElasticBatchSampler

Callback: Any = importlib.import_module("lightning").Callback  # optional, without types


class Snapshots(Callback):  # type: ignore[misc]
    """Restores when the fit begins, and takes a snapshot after a batch if one is due.

    `folder` and `options` are the Checkpointer's; `checkpointer` is set once the fit has begun.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        self.checkpointer: Checkpointer | None = None
        self._folder, self._options = folder, options
        self._last = 0
        self._is_fresh = True  # no training since the restore

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore: everything is set up, and no training has happened yet."""
        state: dict[str, Any] = {"model": pl_module, "loops": trainer.fit_loop}
        for number, optimizer in enumerate(trainer.optimizers):
            state[f"optimizer{number}"] = getattr(optimizer, "optimizer", optimizer)
        for number, config in enumerate(trainer.lr_scheduler_configs):
            state[f"scheduler{number}"] = config.scheduler
        self.checkpointer = Checkpointer(self._folder, **self._options, **state)
        self._last = self.checkpointer.restore()
        for sampler in self._options.values():
            if self._last and isinstance(sampler, ElasticBatchSampler):
                _set_batches(trainer, sampler.batches_until(self._last))

    def on_train_batch_start(self, *_: Any) -> None:
        """Restore random states, after the loader's new iterator has drawn its seed."""
        if self.checkpointer is not None and self._is_fresh:
            self.checkpointer.restore_rng()
        self._is_fresh = False

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Take a snapshot if one is due. With gradient accumulation, batches that do not complete a
        step are ignored."""
        if self.checkpointer is not None and trainer.global_step > self._last:
            self._last = trainer.global_step
            self.checkpointer.step(self._last)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the checkpointer, because the fit has ended or failed."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None


def _set_batches(trainer: Any, done: int) -> None:
    """Set the number of batches that the interrupted epoch has used. The saved number counts
    micro-batches at the former world size."""
    count = trainer.fit_loop.epoch_loop.batch_progress.current
    count.ready = count.started = count.processed = done
    count.completed = done - 1  # Lightning completes the batch in which it was saved
