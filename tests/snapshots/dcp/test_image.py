"""Slots as images of files: what torch makes of them."""

from __future__ import annotations

import io

import pytest
import torch

from elasticrun.snapshots.dcp.image import arrange, envelope, image_problem, views, write_envelopes
from elasticrun.snapshots.dcp.items import pieces
from elasticrun.snapshots.dcp.restoring import copy_all
from elasticrun.snapshots.shm.layout import PAGE, decode

TENSORS = {
    "matrix": torch.arange(12, dtype=torch.float64).reshape(3, 4),
    "scalar": torch.tensor(-7, dtype=torch.int16),
    "empty": torch.empty(0, 5),
    "half": torch.linspace(-1, 1, 4097).to(torch.float16),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "flags": torch.tensor([True, False, True]),
    "columns": torch.arange(6.0).reshape(2, 3).t(),
}


def test_this_torch_reads_images() -> None:
    assert image_problem() == ""


def test_one_that_does_not_is_told_in_a_sentence() -> None:
    assert "does not read" in image_problem(lambda dtype, sizes: (b"", b""))

    def mistaken(dtype: str, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
        return envelope("int32" if dtype == "float32" else dtype, sizes)

    assert "as another tensor" in image_problem(mistaken)


def test_each_tensor_of_a_slot_is_a_file_of_torch() -> None:
    found = pieces(TENSORS)
    layout = arrange(found, 100)
    assert decode(layout.encode()) == layout
    storage = torch.UntypedStorage(PAGE + layout.slot_bytes)
    payload = memoryview(torch.empty(0, dtype=torch.uint8).set_(storage).numpy())[PAGE:]
    write_envelopes(payload, layout)
    copy_all(views(storage, PAGE, layout), [one.value for one in found])
    for item in layout.tensors:
        data = bytes(payload[item.extent : item.extent + item.length])
        loaded = torch.load(io.BytesIO(data), weights_only=True)
        assert loaded.dtype == TENSORS[item.fqn].dtype
        assert torch.equal(loaded, TENSORS[item.fqn])


def test_a_large_envelope_takes_no_room() -> None:
    head, tail = envelope("float32", (1 << 40,))
    assert 0 < len(head) + len(tail) < 8192


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "float8_e4m3fn"])
def test_elements_lie_as_the_layout_says(dtype: str) -> None:
    head, tail = envelope(dtype, (3, 5))
    tensor = torch.zeros(3, 5).to(getattr(torch, dtype))
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    assert len(buffer.getvalue()) == len(head) + 15 * tensor.element_size() + len(tail)
    assert len(head) % 64 == 0
