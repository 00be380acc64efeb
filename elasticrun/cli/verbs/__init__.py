"""The verbs `elasticrun doctor`, `master`, `replay` and `warm`, and code that verbs share.

Forbidden here: torch; and grpc before the verb needs it.
"""
