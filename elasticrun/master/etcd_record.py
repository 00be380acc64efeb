"""The facts as one value of etcd: a line that names the format, then JSON, compressed.

etcd takes requests of 1.5 MB. Ten thousand nodes are 2.5 MB of JSON and about 0.5 MB compressed
(tests/etcd/test_record.py); what is too large all the same is refused here with a sentence.
"""

from __future__ import annotations

import zlib
from typing import Final

from elasticrun import config_json
from elasticrun.core.facts import Facts

HEAD: Final = b"elasticrun facts 1\n"
MAX_BYTES: Final = 1_400_000
"""What etcd takes (1.5 MiB by default), less room for the rest of the transaction."""
MAX_TEXT: Final = 64 * 1024 * 1024
"""Longest JSON that is unpacked: nobody's record grows without bound in memory."""


def encode(facts: Facts) -> bytes:
    """The value to be stored. ValueError if it is too large for etcd."""
    data = HEAD + zlib.compress(config_json.dumps(facts).encode(), 6)
    if len(data) > MAX_BYTES:
        raise ValueError(f"the job's record of {len(data)} bytes is more than etcd takes")
    return data


def decode(data: bytes) -> Facts:
    """The facts in a value. ValueError with a sentence if there are none of this format."""
    if not data.startswith(HEAD):
        raise ValueError("it was written by another version")
    unpack = zlib.decompressobj()
    try:
        text = unpack.decompress(data[len(HEAD) :], MAX_TEXT)
    except zlib.error as wrong:
        raise ValueError(f"it is damaged: {wrong}") from None
    if unpack.unconsumed_tail or not unpack.eof:
        raise ValueError("it is damaged: it does not end")
    return config_json.loads(text, Facts)
