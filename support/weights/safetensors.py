"""Read and write .safetensors files: named tensors, and nothing in them that could run.

    byte 0       8                        8 + N                              end
    +------------+------------------------+----------------------------------+
    | N, u64     | N bytes of JSON, UTF-8 | the tensors' bytes, each after   |
    | little-end | (spaces at its end)    | the other, without gaps          |
    +------------+------------------------+----------------------------------+

The JSON is {"wte.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}: offsets
count from byte 8 + N, and tensors are row after row, little-endian. "__metadata__" is a dict of
strings. Eight- and four-bit floats are not read.
Format: github.com/huggingface/safetensors, README.md.
"""

import json
import mmap
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from tqdm import tqdm

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
METADATA = "__metadata__"


def load(path: str | Path) -> dict[str, Tensor]:
    """Map the tensors of a file, in the order in which its header names them.

    Returns: tensors that are read from the disk where they are used; writing to one changes memory
             alone, never the file
    Raises:  ValueError in one line for a file that is cut short, or a dtype that is not read
    Example: a file of 8 + 64 + 8 bytes, worked byte for byte in tests/test_safetensors.py
    """
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        start = 8 + int.from_bytes(file.read(8), "little")
        if start > size:
            raise ValueError(f"has {size:,} bytes, and its header alone ends at byte {start:,}")
        header = json.loads(file.read(start - 8))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header.pop(METADATA, None)
    end = start + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if end != size:
        raise ValueError(f"has {size:,} bytes, and its tensors end at byte {end:,}")
    return {name: tensor_at(mapped, start, name, entry) for name, entry in header.items()}


def tensor_at(mapped: mmap.mmap, start: int, name: str, entry: dict) -> Tensor:
    """One tensor of a mapped file whose data begin at byte `start`."""
    if entry["dtype"] not in DTYPES:
        raise ValueError(f"has {name} in {entry['dtype']}: readable are {', '.join(DTYPES)}")
    dtype, shape, (begin, end) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if begin == end:
        return torch.empty(0, dtype=dtype).view(shape)
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
