"""The page over HTTP, for people (/, /events), programs (/status, /picture), scrapers (/metrics).

Forbidden here: anything that changes the job, loading external resources, and importing an HTTP
server or a metrics library before the first connection.
"""
