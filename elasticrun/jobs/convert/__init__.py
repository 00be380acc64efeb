"""Jobs written for other operators, as an ElasticJob or a Slurm script.

Pure: a document in, a document and sentences out. Forbidden here: files, processes, a cluster, and
what the launcher does with the result. What cannot be carried over is named, and a field that
nobody knows is refused: a job that trains otherwise than before is worse than one that is not
converted.
"""
