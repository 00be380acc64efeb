"""The page over HTTP: the status for programs, metrics for scrapers.

Forbidden here: anything that changes the job, a fetch from outside, and an import of a server or a
client before somebody has knocked.
"""
