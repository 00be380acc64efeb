"""The verbs `elasticrun status`, `doctor`, `master`, `render`, `replay` and `warm`.

Forbidden here: torch; and grpc before the verb needs it.
"""
