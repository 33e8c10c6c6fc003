"""What a checkpoint folder consists of, and that it still does: its manifest.json.

    {"step": 1234, "world_size": 8, "files": {"state.pt": {"bytes": 20125, "sha256": "5f2c..."},
     ".metadata": ..., "__0_0.distcp": ..., ...}, "sha256": "91ab..."}

The last entry is the digest of all others, so a damaged manifest is known as well. It finds what
went wrong by chance. Who changes a file on purpose can change the manifest too, and so choose the
weights, but cannot make code run: of .metadata, the one file that is read as a pickle, only the
classes are read that torch.distributed.checkpoint writes there.
"""

import hashlib
import io
import json
import pickle
from pathlib import Path
from typing import Any, ClassVar

import torch

from support.atomic import sync
from support.runtime import Runtime

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
