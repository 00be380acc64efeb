"""The fork server that forks these savers is started once, as for the tests of the fork server."""

from tests.forkserver.conftest import server

__all__ = ["server"]
