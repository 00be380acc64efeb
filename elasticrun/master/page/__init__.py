"""The page over HTTP: for people (/, /events), for programs (/status, /picture), for scrapers
(/metrics).

Forbidden here: anything that changes the job, a fetch from outside, and an import of a server or a
client before somebody has knocked.
"""
