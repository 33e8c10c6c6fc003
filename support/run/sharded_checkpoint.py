"""Checkpoints of --fsdp: a folder with one file a rank, each verified when it is read.

    step-00001234.sharded/
        rank-0-of-2.pt      {"save": "5f2c...", "file": "rank-0-of-2.pt", "state": ..., "rows": ...}
        rank-1-of-2.pt      the same "save", no state, the rows that rank 1 held

`state` is the dictionary that step-00001234.pt would be, but each tensor in it is only a shape and
a dtype (a tensor on torch's meta device). `rows` has the values by name, model/wte.weight: FSDP2
shards by rows, so a tensor is the concatenation of its rows in all files. A tensor that is not
sharded is among the rows of rank 0. Each file is one of support/run/checkpoint.py, with its sha256.

The folder has a hidden name until every rank's file is on the disk. Any number of ranks can read
it, whatever number wrote it, and so can a single process, which gets whole tensors. To turn one
form of a checkpoint into the other:

    python -m support.run.sharded_checkpoint to-file runs/a/step-00001234.sharded --out a.pt
    python -m support.run.sharded_checkpoint to-folder a.pt --out a.sharded
"""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from support.base.atomic import sync
from support.base.runtime import Parser, Runtime, exit_cleanly
from support.base.sharded import is_shard, of_rows, rows_here
from support.run import checkpoint
from support.run.checkpoint import SUFFIX

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

    Args:     state  the same on every rank, except that each holds its own rows of DTensors
    Raises:   ValueError, on every rank, if one of them cannot write or if a weight is not finite
    Cost:     each rank writes its own rows
    """
    path = checkpoint.step_path(folder, step, SUFFIX)
    weights = {name: rows_here(tensor) for name, tensor in state.get("model", {}).items()}
    agreed(runtime, lambda: checkpoint.check_finite(weights, path))
    runtime.on_rank0(lambda: path.parent.mkdir(parents=True, exist_ok=True))
    runtime.on_rank0(lambda: checkpoint.clean(path.parent))
    write(path, state, runtime, best)
    runtime.on_rank0(lambda: checkpoint.forget_older(path, keep, best))
    return path


def write(path: Path, state: dict, runtime: Runtime, best: bool = False) -> None:
    """Write the folder, and one of links to its files if it is the best.

    Raises: ValueError on every rank; what had these names before is then unchanged
    """
    # the best first, for the reason given in checkpoint.save
    target = checkpoint.best_path(path) if best else path
    unfinished = checkpoint.hidden(target)
    file = unfinished / name_of(runtime.rank, runtime.world_size)

    def begin() -> str:
        checkpoint.remove(unfinished)
        unfinished.mkdir()
        return secrets.token_hex(8)

    def publish() -> None:
        sync(unfinished)
        checkpoint.put(unfinished, target)
        if best:
            checkpoint.link(target, path)

    try:
        content = {"save": runtime.on_rank0(begin), "file": file.name, "state": None}
        outline, content["rows"] = split(state, runtime.is_rank0)
        if runtime.is_rank0:
            content["state"] = outline
        agreed(runtime, lambda: checkpoint.write_file(file, content))
        runtime.on_rank0(publish)
    except ValueError as error:
        raise checkpoint.not_written(path, error, state) from None
    finally:
        if runtime.is_rank0:
            checkpoint.remove(unfinished)


def load(path: str | Path) -> dict:
    """Verify a checkpoint, file or folder, and read it as `checkpoint.load` does: whole tensors."""
    is_folder = Path(path).is_dir()
    return load_shards(path, {}, ALONE, ALONE.device) if is_folder else checkpoint.load(path)


def load_shards(
    path: str | Path, shards: dict[str, Tensor], runtime: Runtime, device: torch.device
) -> dict:
    """Verify a checkpoint, file or folder, and read on each rank the rows that it shall hold.

    Args:    shards DTensors by name: model.state_dict(), which may be on the meta device
             device for the rows that are read
    Returns: the training state. A tensor with such a name, or in a dict with such a name, becomes a
             DTensor like that one, if it has the same shape; any other tensor is whole
    Raises:  ValueError, on every rank, if one of them cannot read
    Cost:    the files are read once for their sha256, shared out among the ranks; then each rank
             reads only its rows (mmap)
    """
    path = Path(path)
    made: dict[int, Tensor] = {}  # tied tensors stay tied

    def fill(name: str, tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor.clone()
        if id(tensor) not in made:
            held = [file["rows"][name] for file in files if name in file["rows"]]
            parts = held if tensor.is_meta else [tensor]
            made[id(tensor)] = joined(parts, shard_like(name, tensor, shards), device)
        return made[id(tensor)]

    try:
        agreed(runtime, lambda: verify(files_of(path)[runtime.rank :: runtime.world_size]))
        files = agreed(runtime, lambda: opened(files_of(path)))
        return agreed(runtime, lambda: mapped(files[0]["state"], fill))
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {checkpoint.others(path)}") from None


def outlined(path: Path) -> dict:
    """A checkpoint whose tensors are not read yet; it is not verified either.

    Raises: ValueError for one that cannot be read
    """
    try:
        return opened(files_of(path)[:1])[0]["state"]
    except Exception as error:  # torch.load raises half a dozen kinds
        raise ValueError(f"{path}: {checkpoint.reason_of(error)}") from error


def agreed(runtime: Runtime, action: Callable[[], Any]) -> Any:
    """Do something on every rank; if it fails on one, all raise the same ValueError."""
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = checkpoint.reason_of(error)
    failure = next(filter(None, runtime.gather(failure)), None)
    if failure:
        raise ValueError(failure)
    return result


# ---- the files of a folder


def name_of(rank: int, world_size: int) -> str:
    return f"rank-{rank}-of-{world_size}.pt"


def files_of(path: Path) -> list[Path]:
    """The files of a checkpoint: itself, or one for each rank that wrote the folder."""
    if not path.is_dir():
        return [path]
    counts = [int(file.stem.rpartition("-")[2]) for file in path.glob("rank-*-of-*.pt")]
    files = [path / name_of(rank, max(counts)) for rank in range(max(counts, default=0))]
    if not files:
        raise ValueError("has no file of any rank: not a checkpoint, or not all of one")
    for file in files:
        if not file.is_file():
            raise ValueError(f"{file.name} is missing")
    return files


def verify(paths: list[Path]) -> None:
    for path in paths:
        try:
            with open(path, "rb") as file:
                checkpoint.verify(file)
        except (ValueError, OSError) as error:
            raise ValueError(f"{path.name} {checkpoint.reason_of(error)}") from None


def opened(paths: list[Path]) -> list[dict]:
    """What each file holds, mapped into memory; a plain checkpoint is a state without rows.

    Raises: ValueError unless all files are of one save
    """
    files = [torch.load(p, map_location="cpu", mmap=True, weights_only=True) for p in paths]
    if len(paths) == 1 and "rows" not in files[0]:
        return [{"state": files[0], "rows": {}}]
    for path, file in zip(paths, files, strict=True):
        if (file.get("file"), file.get("save")) != (path.name, files[0].get("save")):
            raise ValueError(f"{path.name} is not of the same save as {paths[0].name}")
    return files


# ---- the tensors of a state


def mapped(
    value: object, change: Callable[[str, Tensor], object], path: tuple[str, ...] = ()
) -> object:
    """The same dicts in dicts, with `change(name, tensor)` in place of each tensor.

    A name consists of the keys on the way, model/wte.weight. Lists stay as they are.
    """
    if isinstance(value, dict):
        return {key: mapped(inner, change, (*path, str(key))) for key, inner in value.items()}
    return change("/".join(path), value) if isinstance(value, Tensor) else value


def split(state: dict, is_rank0: bool) -> tuple[dict, dict[str, Tensor]]:
    """The state with meta tensors in place of its tensors, and the rows that this rank writes.

    A tied tensor is one in both, under its first name. A number (0 dimensions) stays as it is.
    """
    outlines: dict[tuple, Tensor] = {}
    rows: dict[str, Tensor] = {}

    def outline(name: str, tensor: Tensor) -> Tensor:
        if not tensor.ndim:
            return tensor
        held = rows_here(tensor).detach()
        place = held.data_ptr() or name  # an empty tensor has no place
        key = (place, held.device, tensor.shape, tensor.stride(), tensor.dtype)
        if key not in outlines:
            outlines[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            if is_rank0 or is_shard(tensor):
                # torch.save would write all of a storage, of which FSDP2 pads those of uneven rows
                is_padded = held.untyped_storage().nbytes() != held.nbytes
                rows[name] = held.clone() if is_padded else held
        return outlines[key]

    return mapped(state, outline), rows


def shard_like(name: str, tensor: Tensor, shards: dict[str, Tensor]) -> Tensor | None:
    """The DTensor that a tensor of this name is sharded like: the parameter that it belongs to."""
    named = (shards[key] for key in name.split("/") if key in shards)
    return next((like for like in named if like.shape == tensor.shape), None)


def joined(parts: list[Tensor], like: Tensor | None, device: torch.device) -> Tensor:
    """A tensor from the parts of its rows: all of it or, with `like`, this rank's rows.

    Every rank holds ceil(rows / ranks), the last ones fewer or none, as torch.chunk deals them out.

    Example: of parts with 3, 3 and 1 rows rank 1 of 2 takes rows 4 to 6: 2 of the second part, 1 of
             the third
    """
    if like is None:
        return torch.cat(parts)
    mesh = like.device_mesh
    share = -(-len(like) // mesh.size())
    first = mesh.get_local_rank() * share
    pieces, begin = [], 0
    for part in parts:
        pieces.append(part[max(first - begin, 0) : max(first + share - begin, 0)])
        begin += len(part)
    return of_rows(torch.cat(pieces).to(device), like)


def main(argv: list[str] | None = None) -> None:
    parser = Parser(
        prog="python -m support.run.sharded_checkpoint",
        description="Turn a checkpoint of --fsdp into one file, or a file into such a folder.",
    )
    verbs = parser.add_subparsers(required=True, dest="verb")
    for verb, source, target in (("to-file", "folder", "file"), ("to-folder", "file", "folder")):
        command = verbs.add_parser(verb, help=f"write a {target} with the content of the {source}")
        command.add_argument("path", type=Path, metavar=source.upper(), help="a checkpoint")
        command.add_argument("--out", type=Path, required=True, help=f"the new {target}")
    args = parser.parse_args(argv)
    path, out = args.path, args.out
    verb = "to-file" if path.is_dir() else "to-folder"
    if path.exists() and args.verb != verb:
        raise ValueError(f"{path} is not what {args.verb} takes: use {verb}")
    if out.exists():
        raise ValueError(f"--out {out} exists: name another, or delete it")
    state = load(path)
    if args.verb == "to-folder":
        write(out, state, ALONE)
    else:
        checkpoint.write_file(out, state)
    print(f"{out}: written from {path}, step {state.get('step', '?')}")


if __name__ == "__main__":
    exit_cleanly(main)
