"""Messages between processes: their types and encodings, and the names of environment variables.

This folder imports no other folder of elasticrun. Forbidden here: decisions, torch, and (outside
`rpc`) protobuf and grpc. The fork server and the ranks load modules of this folder, so everything
except `rpc` imports only the standard library and msgspec.
"""
