"""A cluster, for the tests of this folder."""

from tests.kubernetes.conftest import cluster, standin

__all__ = ["cluster", "standin"]
