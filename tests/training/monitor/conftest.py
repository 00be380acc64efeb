"""The fork server of its own tests serves these, too."""

from tests.forkserver.conftest import server as server
