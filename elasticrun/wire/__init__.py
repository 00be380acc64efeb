"""WHAT PROCESSES SAY TO EACH OTHER.

Typed messages, their encodings, and the names of environment variables. Of elasticrun this room
knows `system` alone. Forbidden here: decisions, torch, and (outside `rpc`) protobuf and grpc. The
fork server and the ranks load modules of this room, so all but `rpc` imports the standard library
and msgspec alone.
"""
