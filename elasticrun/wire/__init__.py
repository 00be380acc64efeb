"""THE MESSAGES BETWEEN PROCESSES.

Typed messages, their encodings, and the names of environment variables. Of elasticrun this folder
imports `system` alone. Forbidden here: decisions, torch, and (outside `rpc`) protobuf and grpc. The
fork server and the ranks load modules of this folder, so everything except `rpc` imports only the
standard library and msgspec.
"""
