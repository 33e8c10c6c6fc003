"""safetensors files: the format byte for byte, and none that is cut short.

python -m pytest tests/test_safetensors.py
"""

import io
import json
import struct

import pytest
import torch
from conftest import refusal

from support.weights import safetensors

# Two tensors: a, of bytes 1 2 3, and b, of 1.0 and -2.0 in fp32, which come first as they are wider
HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
    b'"a":{"dtype":"U8","shape":[3,1],"data_offsets":[8,11]}}'
)
EXAMPLE = (
    b"\x90\x00\x00\x00\x00\x00\x00\x00"  # 144 bytes of header
    + HEADER
    + b" " * (144 - len(HEADER))
    + b"\x00\x00\x80\x3f\x00\x00\x00\xc0"  # 1.0, -2.0
    + b"\x01\x02\x03"
)
TENSORS = {"a": torch.tensor([[1], [2], [3]], dtype=torch.uint8), "b": torch.tensor([1.0, -2.0])}


def written(tensors) -> bytes:
    out = io.BytesIO()
    safetensors.save(out, tensors, {"format": "pt"})
    return out.getvalue()


def file_of(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def of_every_dtype() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    drawn = {"none": torch.empty(0, 4), "one": torch.tensor(3.5), '"é"': torch.tensor([1.0])}
    for name, dtype in safetensors.DTYPES.items():
        small = torch.randint(0, 2, (3, 5), generator=random)
        wide = torch.randn(3, 5, generator=random)
        drawn[f"of {name}"] = (wide if dtype.is_floating_point else small).to(dtype)
    return drawn


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name


def test_the_worked_example_is_mapped_and_its_file_never_written(tmp_path):
    assert len(HEADER) == 140 and written(TENSORS) == EXAMPLE
    path = tmp_path / "example.safetensors"
    path.write_bytes(EXAMPLE)
    found = safetensors.load(path)
    assert_same(found, TENSORS)
    found["b"].fill_(5)
    assert path.read_bytes() == EXAMPLE and found["b"].tolist() == [5, 5]


def test_every_dtype_comes_back_and_so_does_what_is_turned_or_not_aligned(tmp_path):
    path = tmp_path / "all.safetensors"
    wanted = of_every_dtype() | {"turned": torch.randn(4, 3).T}
    path.write_bytes(written(wanted))
    assert_same(safetensors.load(path), wanted)
    header = {"a": entry("U8", (1,), (0, 1)), "b": entry("F32", (2,), (1, 9))}
    path.write_bytes(file_of(header, b"\x07" + EXAMPLE[152:160]))
    found = safetensors.load(path)
    assert found["b"].tolist() == [1.0, -2.0] and found["a"].item() == 7


def test_what_the_format_does_not_have_is_not_begun():
    out = io.BytesIO()
    with pytest.raises(ValueError, match=r"a of torch\.complex64"):
        safetensors.save(out, {"a": torch.zeros(2, dtype=torch.complex64)}, {})
    assert out.getvalue() == b""


def test_a_file_cut_short_anywhere_and_a_dtype_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "bad.safetensors"
    for size in range(len(EXAMPLE)):
        path.write_bytes(EXAMPLE[:size])
        assert f"has {size} bytes" in refusal(safetensors.load, path)
    path.write_bytes(file_of({"a": entry("F8_E4M3", (8,))}, bytes(8)))
    assert "has a in F8_E4M3: readable are " in refusal(safetensors.load, path)


def test_the_formats_own_library_writes_and_reads_the_same_bytes(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    theirs, ours = tmp_path / "theirs.safetensors", tmp_path / "ours.safetensors"
    library.save_file(of_every_dtype(), theirs, metadata={"format": "pt"})
    ours.write_bytes(written(of_every_dtype()))
    assert ours.read_bytes() == theirs.read_bytes()
    assert_same(safetensors.load(theirs), of_every_dtype())
    assert_same(library.load_file(ours), of_every_dtype())
