"""Whole training runs, compared bit by bit: torchrun beside each way in which we start ranks."""
