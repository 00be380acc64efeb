"""Hangs: quiet nodes, samples of their ranks, which ranks wait for which, and the verdict.

Forbidden here: I/O, a clock, an order about rounds; the other parts of `core/sight`, except for the
records of the picture.
"""
