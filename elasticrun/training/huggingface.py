"""Snapshots of a Hugging Face Trainer: `Trainer(..., callbacks=[Snapshots("runs/a")])`.

Model, optimizer, scheduler and the global step are kept. A callback cannot set the Trainer's place
in the data: after a restore its epochs are counted from 0 again, of the first one the batches that
the interrupted epoch had used are left out, and training ends at the step at which it would have
ended. In the first epoch that is exactly what an undisturbed run does; later ones see their data
in the order of earlier ones. Random states are as they were when the step begins: what a model
draws (dropout) is the same, what a dataset draws for a batch may not be. Leave
`resume_from_checkpoint` alone; DDP and single ranks only.
"""

from __future__ import annotations

import importlib
from typing import Any

from elasticrun.training import Checkpointer

# an extra: unknown to the types
TrainerCallback: Any = importlib.import_module("transformers").TrainerCallback


class Snapshots(TrainerCallback):  # type: ignore[misc]
    """Restores when training begins, and takes a snapshot after a step when one is due.

    `folder` and `options` are the Checkpointer's; `checkpointer` is there once training has begun.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        self.checkpointer: Checkpointer | None = None
        self._folder, self._options = folder, options
        self._skipping: Any = None
        self._is_fresh = True  # nothing has been trained since the restore

    def on_train_begin(self, args: Any, state: Any, control: Any, **has: Any) -> None:
        """All is set up, and nothing has been trained: state may be put back."""
        optimizer = getattr(has["optimizer"], "optimizer", has["optimizer"])
        parts = {"model": has["model"], "optimizer": optimizer, "scheduler": has["lr_scheduler"]}
        self.checkpointer = Checkpointer(self._folder, **self._options, **parts)
        step = self.checkpointer.restore()
        if step > state.global_step:
            self._go_on_from(step, args, state, has["train_dataloader"])

    def _go_on_from(self, step: int, args: Any, state: Any, loader: Any) -> None:
        accumulated = args.gradient_accumulation_steps
        of_an_epoch = max(1, -(-len(loader) // accumulated))
        state.global_step = step
        loader.skip_batches = step % of_an_epoch * accumulated
        self._skipping = loader

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """The epoch that was begun before the restore is over."""
        if self._skipping is not None:
            self._skipping.skip_batches = 0
            self._skipping = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The loader's iterator, which was made since the restore, has drawn its seed."""
        if self.checkpointer is not None and self._is_fresh:
            self.checkpointer.restore_rng()
        self._is_fresh = False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The optimizer has stepped, and the scheduler."""
        if self.checkpointer is not None:
            self.checkpointer.step(state.global_step)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Training is over; it is not told of one that failed."""
        if self.checkpointer is not None:
            self.checkpointer.close()
            self.checkpointer = None
