"""Checkpoints of --fsdp: a folder into which every rank writes its rows, verified when it is read.

    step-00001234.sharded/
        manifest.json       bytes and sha256 of every other file (support/run/sharded_checkpoint.py)
        state.pt            the training state as step-00001234.pt has it, but of each tensor only
                            shape and dtype (a tensor on torch's meta device)
        __0_0.distcp ...    rows of the tensors, by the rank that held them
        .metadata           which rows of which tensor stand where; as torch.distributed.checkpoint
                            writes it, which can read the tensors without this file

The folder has a temporary name until all of it is on the disk, the manifest last. Any number of
ranks can load it, whatever number wrote it, and so can a process alone, which gets whole tensors.
To turn one form of a checkpoint into the other:

    python -m support.sharded_checkpoint to-file runs/a/step-00001234.sharded --out a.pt
    python -m support.sharded_checkpoint to-folder a.pt --out a.sharded

Nothing is read before its sha256 is verified, and no code in a checkpoint can run: tensors and
state.pt are read with weights_only=True, and .metadata by support/run/sharded_checkpoint.py.
"""

import hashlib
import io
import json
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from support.base.atomic import sync
from support.base.runtime import Parser, Runtime, exit_cleanly
from support.base.sharded import rows_here, shard_of, space_for
from support.run import checkpoint

# ---- manifest
#
# What a checkpoint folder consists of, and that it still does: its manifest.json.
#
#     {"step": 1234, "world_size": 8, "files": {"state.pt": {"bytes": 20125, "sha256": "5f2c..."},
#      ".metadata": ..., "__0_0.distcp": ..., ...}, "sha256": "91ab..."}
#
# The last entry is the digest of all others, so a damaged manifest is known as well. It finds what
# went wrong by chance. Who changes a file on purpose can change the manifest too, and so choose the
# weights, but cannot make code run: of .metadata, the one file that is read as a pickle, only the
# classes are read that torch.distributed.checkpoint writes there.


NAME, METADATA = "manifest.json", ".metadata"


def write_manifest(folder: Path, step: int, world_size: int, files: dict[str, dict]) -> None:
    """Write it last, when all files are on the disk, and wait until it is as well."""
    text = rendered({"step": step, "world_size": world_size, "files": files})
    (folder / NAME).write_text(text)
    sync(folder / NAME)
    sync(folder)


def of_file(file: Path) -> dict[str, Any]:
    with open(file, "rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
        return {"bytes": opened.tell(), "sha256": digest}


def rendered(manifest: dict) -> str:
    """The text of manifest.json, which ends with the sha256 of what precedes it."""
    digest = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    return json.dumps({**manifest, "sha256": digest}, indent=1)


def verified(folder: Path, runtime: Runtime) -> Any:
    """Compare the files with the manifest, each on one rank; return what .metadata holds.

    Raises: ValueError naming the file, or pickle.UnpicklingError; perhaps on one rank only
    """
    if not (folder / NAME).is_file():
        raise ValueError(f"has no {NAME}: it is no checkpoint, or not all of one")
    try:
        text = (folder / NAME).read_text()
        manifest = json.loads(text)
        manifest.pop("sha256")
        if text != rendered(manifest):
            raise ValueError
        files = manifest["files"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{NAME} is damaged") from None
    for name in sorted(files)[runtime.rank :: runtime.world_size]:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        check(name, of_file(folder / name)["sha256"], files)
    packed = (folder / METADATA).read_bytes()
    check(METADATA, hashlib.sha256(packed).hexdigest(), files)
    metadata = MetadataUnpickler(io.BytesIO(packed)).load()
    for part in metadata.storage_data.values():
        if part.relative_path not in files:
            raise ValueError(f"{METADATA} names {part.relative_path}, which {NAME} does not")
    return metadata


def check(name: str, sha256: str, files: dict[str, Any]) -> None:
    expected = files[name]["sha256"]
    if sha256 != expected:
        raise ValueError(f"{name} is damaged: sha256 is {sha256[:12]}..., not {expected[:12]}...")


class MetadataUnpickler(pickle.Unpickler):
    """Reads .metadata and refuses whatever else a pickle may name: it could be any function."""

    ALLOWED: ClassVar = {
        "torch": {"Size"},
        "torch.serialization": {"_get_layout"},
        "pathlib": {"PosixPath"},
        "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
        "torch.distributed.checkpoint.metadata": {
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        },
    }

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in self.ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{METADATA} names {module} {name}, which is not read")


# torch.distributed.checkpoint is imported where it is used: it takes half a second.
STATE, SUFFIX = "state.pt", ".sharded"
ALONE = Runtime(0, 1, torch.device("cpu"), torch.float32, "")


def save(
    folder: str | Path,
    state: dict,
    runtime: Runtime,
    *,
    step: int,
    keep: int = 2,
    best: bool = False,
) -> Path:
    """`checkpoint.save` by all ranks together: same arguments, guarantees and errors.

    Args:     state  the same on every rank, but that each holds its own rows of DTensors
    Raises:   ValueError, on every rank, if one of them cannot write or if a weight is not finite
    Cost:     each rank writes its rows, and reads them once more for their sha256
    """
    path = checkpoint.step_path(folder, step, keep, SUFFIX)
    weights = {name: rows_here(tensor) for name, tensor in state.get("model", {}).items()}
    agreed(runtime, lambda: checkpoint.check_finite(weights, path))
    runtime.on_rank0(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    runtime.on_rank0(lambda: checkpoint.clean(path.parent))
    write(path, state, runtime, step, path.with_name(f"best-{step:08d}{SUFFIX}") if best else None)
    runtime.on_rank0(lambda: checkpoint.forget_older(path, keep, best))
    return path


def load(path: str | Path) -> dict:
    """Verify a checkpoint, file or folder, and read it as `checkpoint.load` does: whole tensors."""
    return (
        read(Path(path), {}, ALONE, ALONE.device) if Path(path).is_dir() else checkpoint.load(path)
    )


def load_shards(
    path: str | Path, shards: dict[str, Tensor], runtime: Runtime, device: torch.device
) -> dict:
    """Verify a checkpoint, file or folder, and read on each rank the rows that it shall hold.

    Args:    shards DTensors by name: model.state_dict(), which may be on the meta device
             device of the rows that are read
    Returns: the training state. A tensor with such a name, or in a dict with such a name, is a
             DTensor as that one is, if it has the same shape; any other tensor is whole
    Raises:  ValueError, on every rank, if one of them cannot read
    Cost:    a folder is read once for its sha256, shared out among the ranks, then each rank reads
             its rows; a file is read by each rank from end to end
    """
    if Path(path).is_dir():
        return read(Path(path), shards, runtime, device)
    whole = agreed(runtime, lambda: checkpoint.load(path))

    def cut(name: str, tensor: Tensor) -> Tensor:
        like = shard_like(name, tensor, shards)
        return tensor if like is None else shard_of(tensor, like, device)

    return mapped(whole, cut)


def agreed(runtime: Runtime, action: Callable[[], Any]) -> Any:
    """Do something on every rank; if it fails on one, all raise the same ValueError."""
    result, failure = None, None
    try:
        result = action()
    except BaseException as error:
        # torch.distributed.checkpoint's own error, of what failed on which rank, is no Exception
        failures = getattr(error, "failures", None)
        if not failures and not isinstance(error, Exception):
            raise
        failure = checkpoint.reason_of(next(iter(failures.values()))[0] if failures else error)
    failure = next(filter(None, runtime.gather(failure)), None)
    if failure:
        raise ValueError(failure)
    return result


# ---- the tensors of a state


def mapped(value: Any, change: Callable[[str, Tensor], Any], path: tuple[str, ...] = ()) -> Any:
    """The same dicts in dicts, with `change(name, tensor)` in place of each tensor.

    A name is the keys on the way, model/wte.weight. Numbers are not worth a file: a tensor without
    dimensions stays as it is, and so does whatever stands in a list.
    """
    if isinstance(value, dict):
        return {key: mapped(inner, change, (*path, str(key))) for key, inner in value.items()}
    is_rows = isinstance(value, Tensor) and value.ndim and value.numel()
    return change("/".join(path), value) if is_rows else value


def named_tensors(state: dict) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    mapped(state, found.setdefault)
    return found


def outline(state: dict) -> tuple[dict, list[str]]:
    """The state with meta tensors for its tensors, and their names; tied ones are one, with one."""
    outlined: dict[tuple, Tensor] = {}
    names = []

    def drawn(name: str, tensor: Tensor) -> Tensor:
        here = rows_here(tensor)
        what = (here.data_ptr(), here.device, tensor.shape, tensor.stride(), tensor.dtype)
        if what not in outlined:
            outlined[what] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            names.append(name)
        return outlined[what]

    return mapped(state, drawn), names


def shard_like(name: str, tensor: Tensor, shards: dict[str, Tensor]) -> Tensor | None:
    """The DTensor that a tensor of this name is sharded like: the parameter that it belongs to."""
    found = (shards[key] for key in name.split("/") if key in shards)
    return next((like for like in found if like.shape == tensor.shape), None)


# ---- the folder


def write(path: Path, state: dict, runtime: Runtime, step: int, twin: Path | None = None) -> None:
    """Write the folder under a temporary name, then rename it; `twin` is a second one of links.

    Raises: ValueError on every rank; what stood there before is then as it was
    """
    import torch.distributed.checkpoint as dcp

    unfinished, links = unfinished_of(path), unfinished_of(twin or path)
    tensors, alone = named_tensors(state), runtime.world_size == 1

    def begin() -> list[str] | None:
        if not runtime.is_rank0:
            return None
        checkpoint.remove([unfinished])
        unfinished.mkdir()
        outlined, names = outline(state)
        checkpoint.write_file(unfinished / STATE, outlined)
        return names

    def write_rows() -> dict:
        own = {name: tensors[name] for name in names}
        with warnings.catch_warnings(action="ignore"):  # that there is only one process
            dcp.save(own, storage_writer=dcp.FileSystemWriter(unfinished), no_dist=alone)
        return {file.name: of_file(file) for file in unfinished.glob(f"__{runtime.rank}_*")}

    def publish() -> None:
        files = {name: of_file(unfinished / name) for name in (STATE, METADATA)}
        for rows_of_rank in written:
            files |= rows_of_rank
        write_manifest(unfinished, step, runtime.world_size, files)
        if twin:  # before the other, for the reason that checkpoint.save has
            links.mkdir()
            for file in unfinished.iterdir():
                checkpoint.link_or_copy(file, links / file.name)
            sync(links)
            put(links, twin)
        put(unfinished, path)
        sync(path.parent)

    try:
        names = runtime.gather(agreed(runtime, begin))[0]
        written = runtime.gather(agreed(runtime, write_rows))
        agreed(runtime, publish if runtime.is_rank0 else lambda: None)
    except ValueError as error:
        size = sum(tensor.nbytes for tensor in tensors.values())
        raise checkpoint.not_written(path, str(error), size) from None
    finally:
        if runtime.is_rank0:
            checkpoint.remove([unfinished, links])


def unfinished_of(path: Path) -> Path:
    return path.with_name(f".tmp-{path.name}")


def put(folder: Path, path: Path) -> None:
    """Give a folder its name. One that has the name already, from the same step, is deleted first:
    no system call replaces a folder that is not empty.
    """
    checkpoint.remove([path])
    os.rename(folder, path)


def read(path: Path, shards: dict[str, Tensor], runtime: Runtime, device: torch.device) -> dict:
    """Verify the folder, then read it: whole tensors but for those that `shard_like` knows."""
    import torch.distributed.checkpoint as dcp

    targets: dict[str, Tensor] = {}
    made: dict[int, Tensor] = {}  # tied tensors stay tied

    def space(name: str, outlined: Tensor) -> Tensor:
        if id(outlined) not in made:
            made[id(outlined)] = space_for(outlined, shard_like(name, outlined, shards), device)
            targets[name] = made[id(outlined)]
        return made[id(outlined)]

    try:
        metadata = agreed(runtime, lambda: verified(path, runtime))
        outlined = agreed(runtime, lambda: checkpoint.load(path / STATE))
        state, reader = mapped(outlined, space), dcp.FileSystemReader(path)
        reader.read_metadata = lambda **_: metadata  # not with pickle.load, and not once more
        with warnings.catch_warnings(action="ignore"):  # that there is only one process
            alone = runtime.world_size == 1
            agreed(runtime, lambda: dcp.load(targets, storage_reader=reader, no_dist=alone))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {checkpoint.others(path)}") from None
    return state


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        prog="python -m support.sharded_checkpoint",
        description="Turn a checkpoint of --fsdp into one file, or a file into such a folder.",
    )
    verbs = parser.add_subparsers(required=True, dest="verb")
    for verb, source, target in (("to-file", "folder", "file"), ("to-folder", "file", "folder")):
        command = verbs.add_parser(verb, help=f"write a {target} that holds what the {source} does")
        command.add_argument("path", type=Path, metavar=source.upper(), help="a checkpoint")
        command.add_argument("--out", type=Path, required=True, help=f"the new {target}")
    args = parser.parse_args(argv)
    path, out, is_folder = args.path, args.out, args.path.is_dir()
    other = "to-file" if is_folder else "to-folder"
    for refused, message in (
        (not path.exists(), f"{path}: not found"),
        (is_folder and path.suffix != SUFFIX, f"{path} is no checkpoint: name one *{SUFFIX} in it"),
        (args.verb != other, f"{path} is not what {args.verb} takes: use {other}"),
        (out.exists(), f"--out {out} exists: name another, or delete it"),
        (not out.parent.is_dir(), f"--out {out}: there is no folder {out.parent}: make it first"),
    ):
        if refused:
            raise ValueError(message)
    state = load(path)
    if args.verb == "to-folder":
        write(out, state, ALONE, state.get("step", 0))
    else:
        checkpoint.write_file(unfinished_of(out), state)
        os.rename(unfinished_of(out), out)
    print(f"{out}: written from {path}, step {state.get('step', '?')}")


def outlined(path: Path) -> dict:
    """A checkpoint whose tensors are not read yet; it is not verified either.

    Raises: ValueError for one that cannot be read
    """
    if path.is_dir():
        return checkpoint.load(path / STATE)
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # torch.load raises half a dozen kinds
        raise ValueError(f"{path}: {checkpoint.reason_of(error)}") from error


if __name__ == "__main__":
    exit_cleanly(main)
