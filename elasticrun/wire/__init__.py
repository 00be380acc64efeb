"""WHAT PROCESSES SAY TO EACH OTHER.

Typed messages, their encodings, and the names of environment variables. This room knows no
other room of elasticrun. Forbidden here: decisions, torch, and (outside `codec.py`, `channel.py`
and `etcd.py`) protobuf and grpc. The fork server and the ranks load modules of this room, so
everything but those three files imports the standard library alone.
"""
