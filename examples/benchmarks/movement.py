"""Ways to gather and to scatter: this library's, the documented one, and the limits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from workloads import Placed

import mfsdp_func as mf
from mfsdp_func import Range, inplace, intersect_ranges
from mfsdp_func.gather_scatter import plan_of
from mfsdp_func.plan import Plan

Tensors = dict[int, torch.Tensor]


@dataclass(frozen=True)
class Method:
    """One way to move one group.

    Attributes:
        name: in tables.
        gather: to the owners; returns full tensors by index, or what a limit has in their place.
        scatter: from full tensors back; returns parts by index, likewise.
    """

    name: str
    gather: Callable[[], Tensors]
    scatter: Callable[[], Tensors]


def methods_of(placed: Placed) -> list[Method]:
    """All methods for one group; preparing them costs a few copies of what moves."""
    owners, source = placed.owners, placed.source
    full, _ = mf.gather(source, owner_layout=owners, dtype=placed.flat.dtype)
    parts, _ = mf.scatter(full, owner_layout=owners, include_own=False, dtype=placed.flat.dtype)
    full_room = {i: torch.empty_like(tensor) for i, tensor in full.items()}
    part_room = {i: torch.empty_like(tensor) for i, tensor in parts.items()}

    def gather_into() -> Tensors:
        inplace.gather(source, full_room, owner_layout=owners)
        return full_room

    def scatter_into() -> Tensors:
        inplace.scatter(full, part_room, owner_layout=owners)
        return part_room

    def gather_documented() -> Tensors:
        documented_gather(source, full_room, owners)
        return full_room

    def scatter_documented() -> Tensors:
        documented_scatter(full, part_room, owners)
        return part_room

    there, back = plan_of("gather", owners, True), plan_of("scatter", owners, False)
    whole = plan_of("scatter", owners, True)
    dtype = placed.flat.dtype
    return [
        Method(
            "pure",
            lambda: mf.gather(source, owner_layout=owners, dtype=dtype)[0],
            lambda: mf.scatter(full, owner_layout=owners, dtype=dtype)[0],
        ),
        Method("in place", gather_into, scatter_into),
        Method("documented", gather_documented, scatter_documented),
        Method("limit, fresh", _Limit(there, dtype, fresh=True), _Limit(whole, dtype, fresh=True)),
        Method("limit, preallocated", _Limit(there, dtype, fresh=False), _Limit(back, dtype, fresh=False)),
        Method("copy, preallocated", _Copy(there, dtype), _Copy(back, dtype)),
    ]


class _Limit:
    """The same bytes in one message per pair of ranks, everything packed and precomputed, and one copy of what stays."""

    def __init__(self, plan: Plan, dtype: torch.dtype, *, fresh: bool) -> None:
        view = plan.local
        self._outgoing = _by_peer(view.sends)
        self._incoming = _by_peer(view.receives)
        self._own = torch.zeros(sum(copy.numel for copy in view.copies), dtype=dtype)
        self._total = sum(self._incoming.values()) + self._own.numel()
        self._buffers = [(peer, torch.zeros(numel, dtype=dtype)) for peer, numel in self._outgoing.items()]
        self._room = None if fresh else torch.zeros(self._total, dtype=dtype)
        self._dtype = dtype

    def __call__(self) -> Tensors:
        room = torch.empty(self._total, dtype=self._dtype) if self._room is None else self._room
        works: list[Any] = []
        at = 0
        for peer, numel in self._incoming.items():
            works.append(dist.irecv(_bytes(room[at : at + numel]), peer))
            at += numel
        works += [dist.isend(_bytes(buffer), peer) for peer, buffer in self._buffers]
        room[at:].copy_(self._own)
        for work in works:
            work.wait()
        return {-1: room}  # alive, like the results of the other methods, until the clock has stopped


class _Copy:
    """A plain memory copy of what this rank must end up with."""

    def __init__(self, plan: Plan, dtype: torch.dtype) -> None:
        self._source = torch.zeros(sum(plan.output_numels), dtype=dtype)
        self._target = torch.zeros_like(self._source)

    def __call__(self) -> Tensors:
        return {-1: self._target.copy_(self._source)}


def _by_peer(transfers: Any) -> dict[int, int]:
    numels: dict[int, int] = {}
    for transfer in transfers:
        numels[transfer.peer] = numels.get(transfer.peer, 0) + transfer.numel
    return numels


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


# The documented way: every call recomputes the ranges of all ranks; every received chunk has a buffer of its own; chunks
# are concatenated and copied into the destination.


def documented_gather(source: Tensors, destination: Tensors, owners: mf.GroupOwnerLayout) -> None:
    """Fill `destination` with the full tensors that this rank owns."""
    me = owners.mesh.get_rank()
    works: list[Any] = []
    chunks: dict[int, list[torch.Tensor]] = {}
    for i, owner in owners.tensor_to_owner.items():
        for rank, held in _held_ranges(owners, i).items():
            if owner == me:
                own = source[i].reshape(-1) if rank == me else torch.empty(held.numel, dtype=destination[i].dtype)
                if rank != me:
                    works.append(dist.irecv(_bytes(own), rank))
                chunks.setdefault(i, []).append(own)
            elif rank == me:
                works.append(dist.isend(_bytes(source[i].reshape(-1).contiguous()), owner))
    for work in works:
        work.wait()
    for i, found in chunks.items():
        destination[i].copy_(torch.cat(found).view(destination[i].shape))


def documented_scatter(source: Tensors, destination: Tensors, owners: mf.GroupOwnerLayout) -> None:
    """Fill `destination` with this rank's parts of the tensors that others own."""
    me = owners.mesh.get_rank()
    works: list[Any] = []
    received: dict[int, torch.Tensor] = {}
    for i, owner in owners.tensor_to_owner.items():
        for rank, held in _held_ranges(owners, i).items():
            if owner == me and rank != me:
                flat = source[i].reshape(-1)
                works.append(dist.isend(_bytes(flat[held.start : held.start + held.numel]), rank))
            elif rank == me and owner != me:
                received[i] = torch.empty(held.numel, dtype=destination[i].dtype)
                works.append(dist.irecv(_bytes(received[i]), owner))
    for work in works:
        work.wait()
    for i, chunk in received.items():
        destination[i].copy_(chunk.view(destination[i].shape))


def _held_ranges(owners: mf.GroupOwnerLayout, tensor: int) -> dict[int, Range]:
    """The elements of a tensor that each rank holds, in buffer order."""
    whole = owners.layout.get_tensor_range(tensor)
    found: dict[int, Range] = {}
    for rank, segment in inplace._get_rank_ranges(owners.layout, owners.mesh).items():
        met = intersect_ranges(whole, segment)
        if met.numel:
            found[rank] = Range(met.start - whole.start, met.numel)
    return found
