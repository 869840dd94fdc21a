"""Reading a checkpoint into new values of any layout: checked before anything is believed, whole or not at all."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mfsdp_func.checkpoint.boxes import Box
from mfsdp_func.checkpoint.consensus import all_ranks, together
from mfsdp_func.checkpoint.dcp import BoxTensor, Wanted, read_into, read_metadata
from mfsdp_func.checkpoint.entry import Entry
from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.checkpoint.manifest import Manifest, read_manifest
from mfsdp_func.checkpoint.matching import Found, Only, Options, Readable, Rename, chooser_of, match, refuse_surplus
from mfsdp_func.checkpoint.names import check_names, entries_of, leaves_of
from mfsdp_func.checkpoint.saving import Progress
from mfsdp_func.checkpoint.shards import Shards
from mfsdp_func.effects.here import carrier_of
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.values.buffer_spec import stored_pieces
from mfsdp_func.values.mesh import Mesh, MeshLike


class Folder(NamedTuple):
    """A checkpoint on disk, as far as it was read."""

    path: Path
    manifest: Manifest | None
    metadata: Metadata

    def read_into(self, wanted: Sequence[Wanted], objects: Sequence[str], progress: Progress | None) -> dict[str, Any]:
        """See `dcp.read_into`."""
        return read_into(self.path, self.manifest, self.metadata, wanted, objects, progress)


def open_folder(path: str | os.PathLike[str]) -> Folder:
    """Read manifest and metadata.

    Raises:
        CheckpointError: if something is missing, or not as it was written.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    return Folder(folder, manifest, read_metadata(folder, manifest))


def load(
    path: str | os.PathLike[str],
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
    """New values like `like`, with the elements that a checkpoint holds. Every rank calls.

    The number of ranks, layouts, meshes, owners and groups may be others than those of the save. Folders that
    `torch.distributed.checkpoint` wrote are read, too; they have no hashes to be checked.

    Args:
        path: the folder.
        like: a state whose names, shapes, dtypes and placements the result has. It may hold no memory: see `spec_of`.
        names: of the buffers in `like`; see `save`.
        rename: what names in the file are called in the state; see `Rename`.
        only: load just these; all else comes from `like`, and what else the file holds is left; see `Only`.
        cast: convert other dtypes than those of `like`, as ``tensor.to`` does.
        mesh: the ranks that call; by default all of the process group (or of the simulated mesh).
        device: of values that `like` has on the meta device; by default where the ranks' carrier has its tensors.
        progress: called with the bytes that this rank has read, and those that it has to read.

    Returns:
        A new state; nothing of `like` is written, or shared but where `only` leaves it out. Padding is zero.

    Raises:
        CheckpointError: alike on all ranks: bytes that are not as they were written; missing or surplus names; another
            shape or dtype; a hole, an overlap.

    Effects: communication of a few KiB; each rank reads what it needs of its own elements, in blocks of 4 MiB.
    """
    options = Options(names, rename, only, cast, device, progress)
    return load_from(f"load from {Path(path)}", lambda: open_folder(path), like, options, all_ranks(mesh))


def load_from(what: str, open_it: Callable[[], Readable], like: Any, options: Options, mesh: Mesh) -> Any:
    """See `load`."""
    wanted = chooser_of(options.only)

    def look() -> tuple[Readable, list[Entry], dict[str, Found], list[str]]:
        folder = open_it()
        entries = entries_of(like, options.names, mesh)
        check_names(entries)
        found, surplus = match(folder.metadata, entries, options.rename, wanted, options.cast, mesh)
        return folder, entries, found, surplus

    folder, entries, found, surplus = together(mesh, what, look)
    refuse_surplus(mesh, what, surplus, folder)
    return together(mesh, what, lambda: _read(folder, like, entries, found, options, mesh))


def _read(
    folder: Readable, like: Any, entries: Sequence[Entry], found: Mapping[str, Found], options: Options, mesh: Mesh
) -> Any:
    by_leaf: dict[int, list[Entry]] = {}
    for entry in entries:
        by_leaf.setdefault(entry.leaf, []).append(entry)
    pairs, structure = leaves_of(like)
    place = torch.device(options.device) if options.device is not None else carrier_of(mesh).device(mesh)
    leaves: list[Any] = []
    for number, (path, leaf) in enumerate(pairs):
        asked = [entry.name in found for entry in by_leaf.get(number, ())]
        if not any(asked) and asked:
            leaves.append(leaf)
            continue
        # What is read fills every element of a leaf, but for padding, and for what is no tensor of a name.
        whole = bool(asked) and not isinstance(leaf, Shards)
        leaves.append(_fresh(leaf, place, whole=whole, keep=not all(asked), where=pytree.keystr(path)))
    fresh = pytree.tree_unflatten(leaves, structure)
    wanted: list[Wanted] = []
    objects: dict[str, Entry] = {}
    for entry in entries_of(fresh, options.names, mesh):
        if entry.name not in found:
            continue
        where = found[entry.name]
        source, *others = where.names
        if not entry.is_tensor:
            objects[source] = entry
        elif others:
            _read_equal(folder, entry, where)
        elif where.shape is not None and where.shape.numel():
            wanted.append(Wanted(source, entry.pieces(where.shape)))
    got = folder.read_into(wanted, list(objects), options.progress)
    for name, entry in objects.items():
        leaves[entry.leaf] = got[name]
    return pytree.tree_unflatten(leaves, structure)


def _read_equal(folder: Readable, entry: Entry, where: Found) -> None:
    """Fill a number that the file has under each parameter."""
    values = [torch.empty_like(entry.value.view(())) for _ in where.names]
    wanted = [Wanted(name, [(Box((), ()), value)]) for name, value in zip(where.names, values, strict=True)]
    folder.read_into(wanted, [], None)
    for name, value in zip(where.names, values, strict=True):
        if not torch.equal(value, values[0]):
            raise CheckpointError(
                f"{entry.name!r} is one number in the state, but {name!r} has another than the others"
            )
    entry.value.copy_(values[0].view(-1))


@torch.no_grad()
def _fresh(leaf: Any, device: torch.device, *, whole: bool, keep: bool, where: str) -> Any:
    """New memory for a leaf: zeros, where `whole` unspecified but for padding; or with `keep` a copy of its elements."""

    def made(tensor: torch.Tensor) -> torch.Tensor:
        if keep and tensor.is_meta:
            raise CheckpointError(f"only= loads a part of {where}, and the rest of it is on the meta device")
        target = device if tensor.is_meta else tensor.device
        new = (torch.empty if whole else torch.zeros)(tensor.shape, dtype=tensor.dtype, device=target)
        if keep:
            new.copy_(tensor)
        return new.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    if isinstance(leaf, DBuffer):
        local = made(leaf.local_buffer)
        if not keep:
            pieces = stored_pieces(leaf.spec)
            for (i, _), part in zip(pieces, local.detach().split([numel for _, numel in pieces]), strict=True):
                if i < 0:
                    part.zero_()
        return DBuffer(leaf.spec, local)
    if isinstance(leaf, Shards):
        return pytree.tree_map(made, leaf)
    if isinstance(leaf, BoxTensor):
        return BoxTensor(made(leaf.local), leaf.shape, leaf.part, leaf.writes)
    if isinstance(leaf, DTensor):
        return DTensor.from_local(
            made(leaf.to_local()),
            leaf.device_mesh,
            leaf.placements,
            run_check=False,
            shape=leaf.shape,
            stride=leaf.stride(),
        )
    return made(leaf) if isinstance(leaf, torch.Tensor) else leaf


def spec_of(state: Any) -> Any:
    """The same state without memory, for `load`: tensors on the meta device, plain values as they are.

    >>> spec_of({"weight": torch.ones(2), "step": 3})
    {'weight': tensor(..., device='meta', size=(2,)), 'step': 3}
    """
    return pytree.tree_map(lambda leaf: leaf.detach().to("meta") if isinstance(leaf, torch.Tensor) else leaf, state)
