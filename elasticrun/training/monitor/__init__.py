"""A thread in every forked rank that answers its agent's questions about what the rank is doing.

Forbidden here: a lock that the script's threads may hold, an import of torch, an unsolicited
message. It must have no measurable cost for a rank, and end with it.
"""
