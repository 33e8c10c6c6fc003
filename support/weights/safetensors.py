"""Read and write .safetensors files: named tensors, and nothing in them that could run.

    byte 0       8                        8 + N                              end
    +------------+------------------------+----------------------------------+
    | N, u64     | N bytes of JSON, UTF-8 | the tensors' bytes, each after   |
    | little-end | (spaces at its end)    | the other, without gaps          |
    +------------+------------------------+----------------------------------+

The JSON is {"wte.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}: offsets
count from byte 8 + N, and tensors are row after row, little-endian. "__metadata__" is a dict of
strings. Everything that a header says is checked against the file before a tensor is made. Eight-
and four-bit floats are not read. Format: github.com/huggingface/safetensors, README.md.
"""

import json
import math
import mmap
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

from support.base.typed_json import At, Each, mismatch, shortened

DTYPES = {  # widest first, in the order in which the format's own library writes them
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MOST_HEADER_BYTES = 100_000_000  # what the format's own library reads
MOST_DIMENSIONS = 64  # of a tensor, in torch
METADATA = "__metadata__"
COUNTS = [At(0, 2**48 - 1)]
ENTRY = {"dtype": str, "shape": COUNTS, "data_offsets": COUNTS}


def load(path: str | Path) -> dict[str, Tensor]:
    """Map the tensors of a file, in the order in which they lie there.

    Returns: tensors that are read from the disk where they are used; writing to one changes memory
             alone, never the file
    Raises:  ValueError in one line for a file that is not exactly as the format says; OSError
    Example: a file of 8 + 64 + 8 bytes, worked byte for byte in tests/test_safetensors.py
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        if size < 8:
            raise ValueError(f"has {size} bytes, fewer than the 8 that a safetensors file begins")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    start = 8 + int.from_bytes(mapped[:8], "little")
    if start - 8 > min(MOST_HEADER_BYTES, size - 8):
        most = f"{size - 8:,} bytes follow, {MOST_HEADER_BYTES:,} are allowed"
        raise ValueError(f"says that its header has {start - 8:,} bytes: {most}")
    entries = checked_header(mapped[8:start], size - start)
    return {name: tensor_at(mapped, start, entry) for name, entry in entries.items()}


def checked_header(text: bytes, data_bytes: int) -> dict[str, dict]:
    """The tensors that a header names, sorted by place; ValueError for whatever is not right."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        why = str(error) or "nested too deep"
        raise ValueError(f"has a header that is not JSON with each name once: {why}") from None
    metadata = header.pop(METADATA, {}) if isinstance(header, dict) else {}
    if wrong := mismatch(header, Each(ENTRY)) or mismatch(metadata, Each(str), METADATA):
        raise ValueError(f"has a header in which {wrong}")
    for name, entry in header.items():
        check_entry(shortened(name), entry)
    entries = dict(sorted(header.items(), key=lambda item: item[1]["data_offsets"]))
    end = 0
    for name, entry in entries.items():
        begin, stop = entry["data_offsets"]
        if begin != end:
            raise ValueError(
                f"{shortened(name)} begins at byte {begin} of the data, and {end} is next"
            )
        end = stop
    if end != data_bytes:
        raise ValueError(f"has {data_bytes:,} bytes of data, and its tensors have {end:,}")
    return entries


def without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    header = dict(pairs)
    if len(header) < len(pairs):
        raise ValueError("a name is there twice")
    return header


def check_entry(name: str, entry: dict) -> None:
    """Refuse what the header says of one tensor, if this contradicts itself."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if entry.keys() != ENTRY.keys():
        raise ValueError(f"{name} has more than {', '.join(ENTRY)}")
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype!r:.40}: readable are {', '.join(DTYPES)}")
    # torch multiplies the dimensions, whatever the zeros
    if len(shape) > MOST_DIMENSIONS or math.prod(filter(None, shape)) >= 2**60:
        raise ValueError(f"{name} has a shape that no memory holds: {shape!s:.60}")
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != needed:
        wanted = f"are not the bytes that {dtype} of shape {shape!s:.60} takes"
        raise ValueError(f"{name} has data_offsets {offsets!s:.60}, which {wanted}")


def tensor_at(mapped: mmap.mmap, start: int, entry: dict) -> Tensor:
    """One tensor of a mapped file whose data begin at byte `start`."""
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    data, offset = mapped, start + begin
    if offset % dtype.itemsize:  # nobody promised alignment: this tensor is copied
        data, offset = bytearray(mapped[offset : start + end]), 0
    count = (end - begin) // dtype.itemsize
    return torch.frombuffer(data, dtype=dtype, count=count, offset=offset).view(shape)


def save(out: BinaryIO, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a file's bytes to `out`, with a progress bar where there is a terminal.

    The order is that of the format's own library: widest dtype first, then by name, so that every
    tensor is aligned.

    Raises: ValueError for a dtype that the format does not have, before anything is written
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in NAMES or name == METADATA:
            raise ValueError(f"{name} of {tensor.dtype} cannot be in a safetensors file")
    order = list(NAMES)  # of dtypes
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    header: dict[str, object] = {METADATA: metadata}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        shape, offsets = list(tensor.shape), [begin, end]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    out.write(len(text).to_bytes(8, "little") + text)
    for name in tqdm(names, unit="tensor", disable=None, leave=False):
        flat = tensors[name].detach().cpu().contiguous().flatten()
        out.write(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
