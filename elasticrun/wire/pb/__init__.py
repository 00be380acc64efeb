"""Generated from protos/ by scripts/gen_proto.py; for `wire/codec.py`, `wire/etcd.py`."""
