"""Ways to gather and to scatter: this library's, the documented one, and the limits."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from measure import Message, medians, post, ratio, time_rounds
from workloads import Owning, Placed, Workload, check_gathered, check_scattered, place

import mfsdp_func as mf
from mfsdp_func import Mesh, Range, inplace, intersect_ranges
from mfsdp_func.operations.gather_scatter import plan_of
from mfsdp_func.plans.plan import Plan
from mfsdp_func.plans.rank_view import Transfer

Tensors: TypeAlias = dict[int, torch.Tensor]


Direction: TypeAlias = Literal["gather", "scatter"]
Method: TypeAlias = Callable[[], Tensors]
"""Moves one group one way; returns tensors by index, or what a limit has in their place."""


def methods_of(placed: Placed, direction: Direction) -> dict[str, Method]:
    """All ways to move one group, by name; what they need is prepared here, some copies of what moves."""
    owners, dtype = placed.owners, placed.flat.dtype
    pure: Callable[..., tuple[Tensors, mf.Token]] = mf.gather
    into, documented = inplace.gather, documented_gather
    if direction == "scatter":
        pure, into, documented = mf.scatter, inplace.scatter, documented_scatter
    given, room = _given(placed, direction), _room(placed, direction)
    limit = Limit([plan_of(direction, owners, True)], dtype)
    # In place, an owner keeps its own part of what it scatters.
    small = limit if direction == "gather" else Limit([plan_of(direction, owners, False)], dtype)

    def fill_in_place() -> Tensors:
        into(given, room, owner_layout=owners)
        return room

    def fill_as_documented() -> Tensors:
        documented(given, room, owners)
        return room

    preallocated = torch.zeros(small.total, dtype=dtype)
    target = torch.zeros(small.total, dtype=dtype)
    return {
        "pure": lambda: pure(given, owner_layout=owners, dtype=dtype)[0],
        "in place": fill_in_place,
        "documented": fill_as_documented,
        "limit, fresh": lambda: limit.run(torch.empty(limit.total, dtype=dtype)),
        "limit, preallocated": lambda: small.run(preallocated),
        "copy, preallocated": lambda: {-1: target.copy_(preallocated)},
    }


def coalesced_methods_of(placed: Sequence[Placed], direction: Direction) -> dict[str, Callable[[], object]]:
    """All ways to move several groups in one exchange, by name."""
    owners, dtype = [group.owners for group in placed], placed[0].flat.dtype
    pure: Callable[..., tuple[list[Tensors], mf.Token]] = mf.gather_coalesced
    into = inplace.gather_coalesced
    if direction == "scatter":
        pure, into = mf.scatter_coalesced, inplace.scatter_coalesced
    given, rooms = ([make(group, direction) for group in placed] for make in (_given, _room))
    limit = Limit([plan_of(direction, group, True) for group in owners], dtype)
    small = limit if direction == "gather" else Limit([plan_of(direction, group, False) for group in owners], dtype)
    preallocated = torch.zeros(small.total, dtype=dtype)

    def fill_in_place() -> list[Tensors]:
        into(given, rooms, owner_layouts=owners)
        return rooms

    return {
        "coalesced": lambda: pure(given, owner_layouts=owners, dtype=dtype)[0],
        "coalesced in place": fill_in_place,
        "coalesced limit, fresh": lambda: limit.run(torch.empty(limit.total, dtype=dtype)),
        "coalesced limit, preallocated": lambda: small.run(preallocated),
    }


def _given(placed: Placed, direction: Direction) -> Tensors:
    """What moves: shards, or the tensors gathered from them."""
    if direction == "gather":
        return placed.source
    return mf.gather(placed.source, owner_layout=placed.owners, dtype=placed.flat.dtype)[0]


def _room(placed: Placed, direction: Direction) -> Tensors:
    """Destinations of the in-place form."""
    view = plan_of(direction, placed.owners, direction == "gather").local
    return {slot.tensor: torch.empty(slot.shape, dtype=placed.flat.dtype) for slot in view.outputs}


def movement_rows(workload: Workload, mesh: Mesh, owning: Owning, rounds: int) -> list[dict[str, Any]]:
    """Seconds and ratios of all methods, gather and scatter, one group after the other. Every rank calls.

    Raises:
        ValueError: if a method moves anything wrongly.
    """
    placed = place(workload, mesh, owning)
    plans = [plan_of("gather", group.owners, True) for group in placed]
    received = sum(transfer.numel for plan in plans for transfer in plan.local.receives)
    most = torch.tensor(received * workload.dtype.itemsize)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    about = {"workload": workload.name, "owners": owning, "ranks": mesh.size(), "received nbytes": int(most)}
    return [about | _time_direction(placed, direction, rounds) for direction in ("gather", "scatter")]


def _time_direction(placed: Sequence[Placed], direction: Direction, rounds: int) -> dict[str, Any]:
    methods = [methods_of(group, direction) for group in placed]
    check = check_gathered if direction == "gather" else check_scattered
    for group, found in zip(placed, methods, strict=True):
        for name in ("pure", "in place", "documented"):
            check(group, found[name]())
    runs: dict[str, Callable[[], object]] = {
        name: lambda name=name: [found[name]() for found in methods] for name in methods[0]
    }
    if len(placed) > 1:
        runs |= coalesced_methods_of(placed, direction)
        for name in ("coalesced", "coalesced in place"):
            found: Any = runs[name]()
            for group, tensors in zip(placed, found, strict=True):
                check(group, tensors)
    seconds = time_rounds(runs, rounds)
    row: dict[str, Any] = {"operation": direction}
    row |= {f"{name} (s)": value for name, value in medians(seconds).items()}
    row["pure / limit"] = ratio(seconds, "pure", "limit, fresh")
    row["in place / limit"] = ratio(seconds, "in place", "limit, preallocated")
    row["limit: fresh / preallocated"] = ratio(seconds, "limit, fresh", "limit, preallocated")
    row["documented / limit"] = ratio(seconds, "documented", "limit, preallocated")
    row["in place / documented"] = ratio(seconds, "in place", "documented")
    if len(placed) > 1:
        row["coalesced / limit"] = ratio(seconds, "coalesced", "coalesced limit, fresh")
        row["coalesced in place / limit"] = ratio(seconds, "coalesced in place", "coalesced limit, preallocated")
        row["coalesced in place / documented"] = ratio(seconds, "coalesced in place", "documented")
        row["coalesced / pure"] = ratio(seconds, "coalesced", "pure")
        row["coalesced in place / in place"] = ratio(seconds, "coalesced in place", "in place")
        row["coalesced limit / limit"] = ratio(seconds, "coalesced limit, preallocated", "limit, preallocated")
    return row


class Limit:
    """The same bytes in one message per pair of ranks, packed and precomputed, and one copy of what stays."""

    def __init__(self, plans: Sequence[Plan], dtype: torch.dtype) -> None:
        views = [plan.local for plan in plans]
        self._incoming = _by_peer(transfer for view in views for transfer in view.receives)
        self._own = torch.zeros(sum(copy.numel for view in views for copy in view.copies), dtype=dtype)
        outgoing = _by_peer(transfer for view in views for transfer in view.sends)
        self._buffers = [(torch.zeros(numel, dtype=dtype), peer) for peer, numel in outgoing.items()]
        self.total = sum(self._incoming.values()) + self._own.numel()

    def run(self, room: torch.Tensor) -> Tensors:
        """Fill `room`, of `total` elements; what is returned keeps it alive until the clock has stopped."""
        receives: list[Message] = []
        at = 0
        for peer, numel in self._incoming.items():
            receives.append((room[at : at + numel], peer))
            at += numel
        works = post(receives, self._buffers)
        room[at:].copy_(self._own)
        for work in works:
            work.wait()
        return {-1: room}


def _by_peer(transfers: Iterable[Transfer]) -> dict[int, int]:
    numels: dict[int, int] = {}
    for transfer in transfers:
        numels[transfer.peer] = numels.get(transfer.peer, 0) + transfer.numel
    return numels


# The documented way: every call recomputes the ranges of all ranks; every received chunk has a buffer of its own;
# chunks are concatenated and copied into the destination.


def documented_gather(source: Tensors, destination: Tensors, owners: mf.GroupOwnerLayout) -> None:
    """Fill `destination` with the full tensors that this rank owns."""
    me = owners.mesh.get_rank()
    receives, sends = list[Message](), list[Message]()
    chunks: dict[int, list[torch.Tensor]] = {}
    for i, owner in owners.tensor_to_owner.items():
        for rank, held in _held_ranges(owners, i).items():
            if owner == me:
                own = source[i].reshape(-1) if rank == me else torch.empty(held.numel, dtype=destination[i].dtype)
                if rank != me:
                    receives.append((own, rank))
                chunks.setdefault(i, []).append(own)
            elif rank == me:
                sends.append((source[i].reshape(-1).contiguous(), owner))
    for work in post(receives, sends):
        work.wait()
    for i, found in chunks.items():
        destination[i].copy_(torch.cat(found).view(destination[i].shape))


def documented_scatter(source: Tensors, destination: Tensors, owners: mf.GroupOwnerLayout) -> None:
    """Fill `destination` with this rank's parts of the tensors that others own."""
    me = owners.mesh.get_rank()
    receives, sends = list[Message](), list[Message]()
    received: dict[int, torch.Tensor] = {}
    for i, owner in owners.tensor_to_owner.items():
        for rank, held in _held_ranges(owners, i).items():
            if owner == me and rank != me:
                flat = source[i].reshape(-1)
                sends.append((flat[held.start : held.start + held.numel], rank))
            elif rank == me and owner != me:
                received[i] = torch.empty(held.numel, dtype=destination[i].dtype)
                receives.append((received[i], owner))
    for work in post(receives, sends):
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
