"""What the programs are made of: two matrices cut by rows, an owner, a buffer."""

from typing import Any

import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout

Tensors = dict[int, torch.Tensor]


def group(mesh: Mesh, name: str = "group", owner: int | None = None, rows: int = 2, **options: Any) -> GroupOwnerLayout:
    """Two matrices of `rows` rows per rank, all on one owner (by default the last rank)."""
    layout = mf.build_for_row_atomic_unpadding([(rows * mesh.size(), 3)] * 2, mesh.size())
    owners = dict.fromkeys(range(2), mesh.ranks[-1] if owner is None else owner)
    return GroupOwnerLayout(mesh, layout, owners, name=name, **options)


def shards(owners: GroupOwnerLayout) -> Tensors:
    layout = owners.layout
    local = layout.get_local_range(owners.mesh, owners.placements)
    return {i: torch.arange(float(part.start), part.end) + 1000 * i for i, part in layout.tensors_in(local)}


def gather(owners: GroupOwnerLayout, source: Tensors | None = None, **options: Any) -> tuple[Tensors, mf.Token]:
    """The matrices on their owner."""
    options.setdefault("dtype", torch.float32)
    return mf.gather(shards(owners) if source is None else source, owner_layout=owners, **options)


def step(owners: GroupOwnerLayout, factor: float = 2.0) -> Tensors:
    """Gather, multiply, scatter."""
    full, token = gather(owners)
    return mf.scatter({i: factor * t for i, t in full.items()}, owner_layout=owners, after=token)[0]


def buffer(mesh: Mesh, value: float, placement: Any) -> mf.DBuffer:
    """Two by two elements of one value on each rank, or sharded so; the layout serves up to four ranks."""
    layout = mf.build_for_row_atomic_unpadding([(4, 2)], mesh.shape[-1])
    placements = [mf.Replicate()] * (mesh.ndim - 1) + [placement]
    spec = mf.BufferSpec(mesh, placements, layout)
    return mf.DBuffer(spec, torch.full((spec.local_numel,), value))


def is_first(mesh: Mesh) -> bool:
    return mesh.get_rank() == mesh.ranks[0]
