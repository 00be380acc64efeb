"""Generated from protos/ by scripts/gen_proto.py; for `wire/rpc`."""
