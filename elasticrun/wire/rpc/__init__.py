"""Everything that needs protobuf and gRPC: envelopes, channels, etcd.

Forbidden here: torch. Ranks, the fork server and `core` never import it.
"""
