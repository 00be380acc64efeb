"""Generated from protos/ by scripts/gen_proto.py; only `wire/codec.py` imports it."""
