from tests.jobs.hosts.town import town

__all__ = ["town"]
