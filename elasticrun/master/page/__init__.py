"""The page over HTTP, for people (/, /events), programs (/status, /picture), scrapers (/metrics).

Forbidden here: anything that changes the job, loading external resources, and importing a server or
client before the first connection.
"""
