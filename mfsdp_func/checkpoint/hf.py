"""Folders that Hugging Face libraries open: safetensors, an index, a configuration.

The header of a safetensors file follows from names, shapes and dtypes alone. So every file is laid out before a single
element moves, and each tensor is written at its place by the one rank to which it was gathered.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from mfsdp_func.checkpoint.boxes import Box
from mfsdp_func.checkpoint.consensus import all_ranks
from mfsdp_func.checkpoint.dcp import Wanted, chunk_of
from mfsdp_func.checkpoint.error import CheckpointError, listed
from mfsdp_func.checkpoint.loading import load_from
from mfsdp_func.checkpoint.manifest import Manifest
from mfsdp_func.checkpoint.matching import Only, Options, Rename
from mfsdp_func.checkpoint.saving import Progress
from mfsdp_func.values.mesh import Mesh, MeshLike

INDEX = "model.safetensors.index.json"

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_WORDS = {dtype: word for word, dtype in _DTYPES.items()}


Kind: TypeAlias = tuple[str, torch.dtype, torch.Size]


class HfFolder(NamedTuple):
    """A folder of safetensors, as `loading` reads it.

    Attributes:
        path: the folder.
        manifest: none: the format has no hashes.
        metadata: one box per tensor.
        files: name -> file.
    """

    path: Path
    manifest: Manifest | None
    metadata: Metadata
    files: Mapping[str, str]

    def read_into(self, wanted: Sequence[Wanted], objects: Sequence[str], progress: Progress | None) -> dict[str, Any]:
        """Fill tensors, each with those bytes of the files alone that it needs."""
        from safetensors import safe_open

        total, done = sum(view.nbytes for _, pieces in wanted for _, view in pieces), 0
        by_file: dict[str, list[Wanted]] = {}
        for item in wanted:
            by_file.setdefault(self.files[item.name], []).append(item)
        for name, items in by_file.items():
            try:
                with safe_open(self.path / name, framework="pt") as file, torch.no_grad():
                    for item in items:
                        for box, view in item.pieces:
                            view.copy_(_slice(file, item.name, box))
                            done += view.nbytes
                            if progress is not None:
                                progress(done, total)
            except CheckpointError:
                raise
            except Exception as error:
                raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from error
        return {}


def _slice(file: Any, name: str, box: Box) -> torch.Tensor:
    if not box.sizes:
        return file.get_tensor(name)
    return file.get_slice(name)[tuple(slice(o, o + size) for o, size in zip(box.offsets, box.sizes, strict=True))]


def open_hf(folder: Path) -> HfFolder:
    """Read the index and the headers of a folder of safetensors.

    Raises:
        CheckpointError: if a file is missing or cut, a dtype is unknown, or index and files contradict one another.
    """
    from safetensors import safe_open

    names = sorted(path.name for path in folder.glob("*.safetensors"))
    index: dict[str, str] | None = None
    try:
        if (folder / INDEX).exists():
            index = json.loads((folder / INDEX).read_text())["weight_map"]
            names = sorted(set((index or {}).values()))
    except (ValueError, KeyError, OSError) as error:
        raise CheckpointError(f"{folder}: {INDEX} cannot be read: {error}") from error
    if not names:
        raise CheckpointError(f"{folder}: holds no safetensors")
    tensors: dict[str, Any] = {}
    files: dict[str, str] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118
                    part = file.get_slice(key)
                    shape = torch.Size(part.get_shape())
                    whole = chunk_of(Box((0,) * len(shape), tuple(shape)))
                    tensors[key] = TensorStorageMetadata(TensorProperties(_DTYPES[part.get_dtype()]), shape, [whole])
                    files[key] = name
        except Exception as error:
            raise CheckpointError(f"{folder}: {name} cannot be read: {error}") from error
    if index is not None and (wrong := sorted(set(index.items()) ^ set(files.items()))):
        raise CheckpointError(f"{folder}: {INDEX} and the files disagree:{listed([str(pair) for pair in wrong])}")
    return HfFolder(folder, None, Metadata(tensors), files)


def import_hf(
    folder: str | os.PathLike[str],
    like: Any,
    *,
    names: Any = None,
    rename: Rename | None = None,
    only: Only | None = None,
    cast: bool = False,
    mesh: Mesh | MeshLike | None = None,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Any:
    """New parameters like `like` from a folder of safetensors. Every rank calls; each reads just its own elements.

    Arguments, result and errors are those of `load`. The format has no hashes: a cut file is found, a flipped bit is not.
    """
    options = Options(names, rename, only, cast, device, progress)
    return load_from(f"import from {Path(folder)}", lambda: open_hf(Path(folder)), like, options, all_ranks(mesh))
