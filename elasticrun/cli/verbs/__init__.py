"""What `elasticrun status`, `doctor`, `master`, `render`, `replay` and `warm` do.

Forbidden here: torch; and grpc before the verb needs it.
"""
