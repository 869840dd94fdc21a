"""Which elements of a tensor this rank holds, and which rank writes them."""

import ctypes
from collections.abc import Sequence

import torch

from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import Placement, shard_axes
from mfsdp_func.values.ranges import Range, intersect_ranges


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements without a gradient, 1-D."""
    return tensor.detach().reshape(-1)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which are not copied; they keep the tensor."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr() if tensor.nbytes else 0)
    array.tensor = tensor  # pyright: ignore[reportAttributeAccessIssue]
    return memoryview(array).cast("B")


def part_of(owners: GroupOwnerLayout, index: int) -> Range:
    """The elements of a tensor that this rank holds."""
    return _part(owners.layout, owners.layout.get_local_range(owners.mesh, owners.placements), index)


def _part(layout: GlobalLayout, local: Range, index: int) -> Range:
    whole = layout.get_tensor_range(index)
    met = intersect_ranges(whole, local)
    return Range(met.start - whole.start, met.numel) if met.numel else Range(0, 0)


def owner_coordinate(owners: GroupOwnerLayout, index: int) -> tuple[int, ...]:
    """Where the tensor's owner for this rank's replica group stands."""
    if index not in owners.tensor_to_owner:
        raise CheckpointError(f"Shards: tensor {index} has no owner, so that none can hold it whole")
    axes = shard_axes(owners.placements)
    owner = owners.mesh.coordinate(owners.tensor_to_owner[index])
    return tuple(owner[a] if a in axes else c for a, c in enumerate(owners.mesh.coordinate()))


def is_writer(mesh: Mesh, placements: Sequence[Placement], index: int) -> bool:
    """Whether this rank's replica writes a tensor: replicas take turns, which all ranks know without a word."""
    axes, copies, own = shard_axes(placements), 1, 0
    for axis, digit in enumerate(mesh.coordinate()):
        if axis not in axes:
            copies, own = copies * mesh.size(axis), own * mesh.size(axis) + digit
    return index % copies == own


def counts_as(part: Range, shape: torch.Size, mesh: Mesh, placements: Sequence[Placement]) -> bool:
    """Whether there is something to write; a tensor without elements is written by the first shard."""
    return bool(part.numel) or (not shape.numel() and not mesh.shard_index(shard_axes(placements)))
