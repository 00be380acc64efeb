"""The manifest: back and forth, and every changed byte of it found."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from elasticrun.snapshots.storage.manifest import FileEntry, Manifest, ManifestError, decode, encode
from elasticrun.wire.types import RoundName

ENTRY = FileEntry("__0_3.1.a.distcp", 0, True, 77, 10_000, 8192, 4096, (1, 2**64 - 1, 3))
MANIFEST = Manifest(
    step=7,
    round=RoundName(1, 3, "aabb"),
    world_size=2,
    attempt="a",
    reason="periodic",
    torch="2.13.0",
    marker_size=100,
    marker_hash=2**63,
    files=(ENTRY, replace(ENTRY, name="__1_3.1.a.distcp", rank=1)),
)


def test_it_is_json_and_comes_back_as_it_was() -> None:
    data = encode(MANIFEST)
    assert decode(data) == MANIFEST
    assert json.loads(data)["files"][0]["hashes"] == [f"{1:016x}", "f" * 16, f"{3:016x}"]


def test_any_changed_byte_is_found() -> None:
    data = encode(MANIFEST)
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x01
        with pytest.raises(ManifestError):
            decode(bytes(changed))
    for cut in (0, 1, 30, len(data) - 1):
        with pytest.raises(ManifestError):
            decode(data[:cut])


@pytest.mark.parametrize(
    ("entry", "wrong"),
    [
        (replace(ENTRY, name="../escape"), "not a valid file name"),
        (replace(ENTRY, stretch=20_000), "impossible sizes"),
        (replace(ENTRY, block=0), "impossible sizes"),
        (replace(ENTRY, hashes=(1, 2)), "number of hashes .2"),
        (replace(ENTRY, size=2**60), "not a valid number"),
    ],
)
def test_what_cannot_be_is_refused_though_its_checksum_holds(entry: FileEntry, wrong: str) -> None:
    with pytest.raises(ManifestError, match=wrong):
        decode(encode(replace(MANIFEST, files=(entry,))))


def test_spans_cover_the_file() -> None:
    assert list(ENTRY.spans()) == [(0, 4096), (4096, 8192), (8192, 10_000)]
    empty = replace(ENTRY, size=0, stretch=0, hashes=(5,))
    assert list(empty.spans()) == [(0, 0)]
