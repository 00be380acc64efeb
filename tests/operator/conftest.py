"""The stand-in, for the tests of this folder."""

from tests.kubernetes.conftest import standin

__all__ = ["standin"]
