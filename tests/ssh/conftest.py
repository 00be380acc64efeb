from tests.ssh.town import town

__all__ = ["town"]
