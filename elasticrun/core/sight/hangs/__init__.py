"""Hangs: quiet nodes, looks at their ranks, who waits for whom, and the verdict.

Forbidden here: I/O, a clock, an order about rounds; the other parts of `core/sight`, but for the
records of the picture."""
