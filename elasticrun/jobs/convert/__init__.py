"""Converts jobs written for other operators into an ElasticJob or a Slurm script.

Pure: a document in, a document and sentences out. Forbidden here: files, processes, a cluster, the
launcher's own code. Each part that cannot be converted is reported, and an unknown field is
refused: a job that silently trains differently is worse than one that is not converted.
"""
