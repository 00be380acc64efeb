"""Snapshots of a Hugging Face Trainer: `Trainer(..., callbacks=[Snapshots("runs/a")])`.

Snapshots contain model, optimizer, scheduler and the global step. A callback cannot set the
Trainer's position in the data. After a restore the Trainer counts epochs from 0 again, its first
epoch skips the batches that the interrupted epoch had used, and training ends at the same step as
it would have without the interruption. In its first epoch this equals an uninterrupted run; later
epochs repeat the data order of earlier ones. Random states are those at the start of the step: a
model's random numbers (dropout) are the same, a dataset's may differ. Do not set
`resume_from_checkpoint`. Only DDP and single ranks are supported.
"""

from __future__ import annotations

import importlib
from typing import Any

from elasticrun.training import Checkpointer

# an optional dependency without types
TrainerCallback: Any = importlib.import_module("transformers").TrainerCallback


class Snapshots(TrainerCallback):  # type: ignore[misc]
    """Restores when training begins, and takes a snapshot after a step if one is due.

    `folder` and `options` are the Checkpointer's; `checkpointer` is set once training has begun.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        self.checkpointer: Checkpointer | None = None
        self._folder, self._options = folder, options
        self._skipping: Any = None
        self._is_fresh = True  # no training since the restore

    def on_train_begin(self, args: Any, state: Any, control: Any, **has: Any) -> None:
        """Restore: everything is set up, and no training has happened yet."""
        optimizer = getattr(has["optimizer"], "optimizer", has["optimizer"])
        parts = {"model": has["model"], "optimizer": optimizer, "scheduler": has["lr_scheduler"]}
        self.checkpointer = Checkpointer(self._folder, **self._options, **parts)
        step = self.checkpointer.restore()
        if step > state.global_step:
            self._resume_from(step, args, state, has["train_dataloader"])

    def _resume_from(self, step: int, args: Any, state: Any, loader: Any) -> None:
        accumulated = args.gradient_accumulation_steps
        steps_per_epoch = max(1, -(-len(loader) // accumulated))
        state.global_step = step
        loader.skip_batches = step % steps_per_epoch * accumulated
        self._skipping = loader

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """The epoch that the restore resumed is complete: stop skipping batches."""
        if self._skipping is not None:
            self._skipping.skip_batches = 0
            self._skipping = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Restore random states, after the loader's new iterator has drawn its seed."""
        if self.checkpointer is not None and self._is_fresh:
            self.checkpointer.restore_rng()
        self._is_fresh = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer and the scheduler have stepped: take a snapshot if one is due."""
        if self.checkpointer is not None:
            self.checkpointer.step(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Close the checkpointer. The Trainer does not call this after a failure."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None
