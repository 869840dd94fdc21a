"""Looking at checkpoints without loading them: what is in one, whether it is as written, which is the newest."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from mfsdp_func.checkpoint.boxes import Box, find_fault
from mfsdp_func.checkpoint.consensus import all_ranks, share
from mfsdp_func.checkpoint.dcp import Wanted, box_of, read_into
from mfsdp_func.checkpoint.error import CheckpointError, listed
from mfsdp_func.checkpoint.loading import Folder, open_folder
from mfsdp_func.checkpoint.manifest import NAME, find_damage, read_manifest
from mfsdp_func.values.mesh import Mesh, MeshLike


class TensorFacts(NamedTuple):
    """What a file says about a tensor."""

    dtype: torch.dtype
    shape: torch.Size
    boxes: int

    @property
    def nbytes(self) -> int:
        """Of all elements."""
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Inspection:
    """What is in a checkpoint; printing it shows a table.

    Attributes:
        path: its folder.
        tensors: name -> dtype, shape and the number of boxes in which it is stored.
        objects: names of plain values.
        aliases: names that share the bytes of another: name -> the other.
        ranks: how many ranks wrote it; None if it does not say.
        hashed: whether it has hashes, by which `load` and `verify` check what they read.
        faults: tensors with holes or overlaps, in words.
    """

    path: Path
    tensors: Mapping[str, TensorFacts]
    objects: tuple[str, ...]
    aliases: Mapping[str, str]
    ranks: int | None
    hashed: bool
    faults: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Of all elements, each counted once."""
        return sum(facts.nbytes for name, facts in self.tensors.items() if name not in self.aliases)

    def __str__(self) -> str:
        width = max(map(len, [*self.tensors, *self.objects]), default=0)
        lines = [
            f"{self.path}: {len(self.tensors) - len(self.aliases)} tensors, {self.nbytes} bytes,"
            f" {len(self.objects)} plain values, written by {'?' if self.ranks is None else self.ranks} rank(s)",
            "every byte has a hash" if self.hashed else "NO HASHES: written by others; nothing that is read is checked",
        ]
        for name, facts in sorted(self.tensors.items()):
            dtype = str(facts.dtype).removeprefix("torch.")
            same = f"  = {self.aliases[name]}" if name in self.aliases else f"  {facts.boxes} box(es)"
            lines.append(f"  {name:{width}}  {dtype:9} {tuple(facts.shape)!s:18}{same}")
        lines += [f"  {name:{width}}  plain value" for name in sorted(self.objects)]
        lines += [f"  BROKEN: {fault}" for fault in self.faults]
        return "\n".join(lines)


def inspect(path: str | os.PathLike[str]) -> Inspection:
    """What is in a checkpoint, of this package or of `torch.distributed.checkpoint`. Reads no data, no communication.

    Raises:
        CheckpointError: if manifest or metadata are missing, or not as they were written.
    """
    return _inspection(open_folder(path))


def _inspection(folder: Folder) -> Inspection:
    stored: Mapping[str, Any] = folder.metadata.state_dict_metadata
    tensors = {
        name: TensorFacts(facts.properties.dtype, torch.Size(facts.size), len(facts.chunks))
        for name, facts in stored.items()
        if isinstance(facts, TensorStorageMetadata)
    }
    faults = [
        f"{name!r} {fault}"
        for name, facts in stored.items()
        if isinstance(facts, TensorStorageMetadata)
        and (fault := find_fault(facts.size, [box_of(chunk) for chunk in facts.chunks]))
    ]
    ranks = None if folder.manifest is None else folder.manifest.facts.get("ranks")
    objects = tuple(name for name in stored if name not in tensors)
    return Inspection(
        folder.path, tensors, objects, _aliases(folder.metadata), ranks, folder.manifest is not None, tuple(faults)
    )


def _aliases(metadata: Metadata) -> dict[str, str]:
    """Names whose first box lies where that of another does."""
    first: dict[tuple[str, int], str] = {}
    found: dict[str, str] = {}
    places: Mapping[Any, Any] = metadata.storage_data
    for index, info in places.items():
        owner = first.setdefault((info.relative_path, info.offset), index.fqn)
        if owner != index.fqn:
            found[index.fqn] = owner
    return found


def verify(path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None) -> Inspection:
    """Read every byte of a checkpoint and compare it with its hash. No communication; any process may call.

    Returns:
        What is in it, if all is well.

    Raises:
        CheckpointError: naming every file, and the bytes in it, that is not as it was written, missing or surplus
            (see its `problems`); or if the folder has no hashes.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if manifest is None:
        raise CheckpointError(
            f"{folder}: has no {NAME}, so that nothing can be compared; others wrote it, or it was lost"
        )
    if problems := find_damage(folder, manifest, progress):
        raise CheckpointError(f"{folder}: is not as it was written:{listed(problems)}", problems)
    inspection = _inspection(open_folder(folder))
    if inspection.faults:
        raise CheckpointError(f"{folder}: is no whole:{listed(inspection.faults)}", inspection.faults)
    return inspection


class Latest(type(Path())):
    """The path that `latest` found.

    Attributes:
        skipped: what is newer, and why it was not taken.
    """

    skipped: tuple[str, ...] = ()


def latest(folder: str | os.PathLike[str], *, mesh: Mesh | MeshLike | None = None) -> Latest | None:
    """The newest checkpoint in a folder that verifies, whose `skipped` says what was passed over.

    Newest by the time that its manifest tells, or that of its folder where that is lost; then by name.

    Args:
        folder: holds checkpoints as folders; it need not exist yet.
        mesh: ranks that all call; then the first of them looks, and all have its answer. By default this rank looks,
            without communication.

    Returns:
        Its path; None if there is no checkpoint.

    Raises:
        CheckpointError: if there are checkpoints, but none of them verifies.
    """
    if mesh is None:
        answer = _look_for_latest(Path(folder))
    else:
        ranks = all_ranks(mesh)
        mine = _look_for_latest(Path(folder)) if ranks.get_rank() == ranks.ranks[0] else None
        answer = share(ranks, mine)[ranks.ranks[0]]
    found, skipped, failed = answer
    if failed:
        raise CheckpointError(f"{folder}: no checkpoint verifies:{listed(skipped)}", skipped)
    if found is None:
        return None
    path = Latest(found)
    path.skipped = tuple(skipped)
    return path


def _look_for_latest(folder: Path) -> tuple[str | None, list[str], bool]:
    skipped: list[str] = []
    if not folder.is_dir():
        return None, skipped, False
    others = [path for path in folder.iterdir() if path.is_dir()]
    candidates = [path for path in others if not path.name.startswith(".")]
    skipped += [f"{path.name}: a save that was not finished" for path in others if path.name.endswith(".partial")]
    candidates = [path for path in candidates if (path / NAME).exists() or (path / ".metadata").exists()]
    for path in sorted(candidates, key=_age, reverse=True):
        try:
            verify(path)
        except CheckpointError as error:
            skipped += [f"{path.name}: {problem}" for problem in error.problems]
            continue
        return str(path), skipped, False
    return None, skipped, bool(candidates)


def _age(path: Path) -> tuple[int, list[Any]]:
    try:
        manifest = read_manifest(path)
    except CheckpointError:
        manifest = None
    time = path.stat().st_mtime_ns if manifest is None else int(manifest.facts.get("time_ns", 0))
    return time, [(len(word), word) for word in re.split(r"(\d+)", path.name)]


@dataclass(frozen=True)
class Difference:
    """What two checkpoints do not share; printing it shows a list. False where they hold the same.

    Attributes:
        only_first: names that the second lacks.
        only_second: names that the first lacks.
        kinds: names of other dtypes or shapes, in words.
        values: names of other elements: tensor -> the largest absolute difference; plain value -> None.
    """

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    kinds: Mapping[str, str]
    values: Mapping[str, float | None]

    def __bool__(self) -> bool:
        return bool(self.only_first or self.only_second or self.kinds or self.values)

    def __str__(self) -> str:
        lines = [f"- {name}" for name in self.only_first] + [f"+ {name}" for name in self.only_second]
        lines += [f"! {name}: {words}" for name, words in self.kinds.items()]
        for name, most in self.values.items():
            lines.append(f"~ {name}" + ("" if most is None else f": differs by up to {most:.3g}"))
        return "\n".join(lines) or "no difference"


def diff(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Difference:
    """Compare two checkpoints by name, bitwise, whatever layouts wrote them. One tensor at a time; no communication.

    Raises:
        CheckpointError: if one of them is not as it was written.
    """
    folders = open_folder(first), open_folder(second)
    one, two = (folder.metadata.state_dict_metadata for folder in folders)
    kinds: dict[str, str] = {}
    values: dict[str, float | None] = {}
    for name in sorted(set(one) & set(two)):
        left, right = (_kind(stored[name]) for stored in (one, two))
        if left != right:
            kinds[name] = f"{left} against {right}"
            continue
        a, b = (read_whole(folder, name) for folder in folders)
        if not isinstance(a, torch.Tensor):
            values |= {} if a == b else {name: None}
        elif not torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)):
            wide = torch.complex128 if a.is_complex() else torch.float64
            values[name] = float((a.to(wide) - b.to(wide)).abs().max())
    return Difference(tuple(sorted(set(one) - set(two))), tuple(sorted(set(two) - set(one))), kinds, values)


def _kind(stored: Any) -> str:
    if not isinstance(stored, TensorStorageMetadata):
        return "plain value"
    return f"{str(stored.properties.dtype).removeprefix('torch.')} {tuple(stored.size)}"


def read_whole(folder: Folder, name: str) -> Any:
    """One value of a checkpoint, whole, on CPU.

    Raises:
        CheckpointError: if it is not there, or not as it was written.
    """
    stored = folder.metadata.state_dict_metadata.get(name)
    if stored is None:
        raise CheckpointError(f"{folder.path}: holds no {name!r}")
    if not isinstance(stored, TensorStorageMetadata):
        return read_into(folder.path, folder.manifest, folder.metadata, [], [name])[name]
    if fault := find_fault(stored.size, [box_of(chunk) for chunk in stored.chunks]):
        raise CheckpointError(f"{folder.path}: {name!r} {fault}")
    whole = torch.zeros(stored.size, dtype=stored.properties.dtype)
    box = Box((0,) * whole.ndim, tuple(whole.shape))
    wanted = [Wanted(name, [(box, whole)])] if whole.numel() else []
    read_into(folder.path, folder.manifest, folder.metadata, wanted, [])
    return whole
