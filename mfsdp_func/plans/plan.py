"""A plan: which contiguous elements of which tensors move between which ranks. Integers only.

One side of a group's plan is a `GlobalLayout`: owners are a layout too, one segment per owner. It goes from one layout
of some tensors to another; its transpose goes back. Nothing is materialised for all ranks: one rank's view is found by
bisection in sorted offsets, once, and kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import torch

from mfsdp_func.plans.linear_map import LinearMap
from mfsdp_func.plans.rank_view import Copy, GroupSlots, RankView, Slot, Transfer, join_views
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import build_for_tensor_atomic
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.ranges import Range
from mfsdp_func.values.value import PlacedValue, Value

Side = Literal["source", "target"]
_OTHER: dict[Side, Side] = {"source": "target", "target": "source"}


class Piece(NamedTuple):
    """Elements `part` of a tensor, on their way from global rank `src` to global rank `dst`."""

    tensor: int
    src: int
    dst: int
    part: Range


@dataclass(frozen=True, eq=False)
class GroupPlan(Value):
    """One group's part of a plan: from `source` to `target`, two layouts of the same tensors.

    Attributes:
        name: label of the parameter group, for messages.
        axes: the mesh axes that cut the buffer; ranks that share one copy of it exchange among themselves.
        shapes: logical shape of every tensor of the layouts.
        source: where elements are before.
        target: where they are after.
        tensors: the tensors that take part, ascending.
        without_own: the side, if any, that leaves out elements which stay on their rank (`include_own=False`).
        empty: tensors without elements, each with the shard index that has it on side `empty_side`; no layout can tell.
        empty_side: see `empty`.
        dtype: of the elements, where the group says it.
    """

    name: str
    axes: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    source: GlobalLayout
    target: GlobalLayout
    tensors: tuple[int, ...]
    without_own: Side | None = None
    empty: tuple[tuple[int, int], ...] = ()
    empty_side: Side = "target"
    dtype: torch.dtype | None = None

    @cached_property
    def transpose(self) -> "GroupPlan":
        """Every piece the other way."""
        return replace(
            self,
            source=self.target,
            target=self.source,
            without_own=_OTHER[self.without_own] if self.without_own else None,
            empty_side=_OTHER[self.empty_side],
        )

    def peers(self, mesh: Mesh, rank: int) -> tuple[int, ...]:
        """The ranks that share one copy of the buffer with `rank`, in buffer order."""
        return _all_ranks(mesh, self.axes) if len(self.axes) == mesh.ndim else mesh.shard_ranks(self.axes, rank)

    @cached_property
    def _participating(self) -> frozenset[int]:
        return frozenset(self.tensors)

    def view(self, mesh: Mesh, rank: int) -> RankView:
        """What `rank` holds, sends, receives and copies of this group."""
        peers = self.peers(mesh, rank)
        me = mesh.shard_index(self.axes, rank)
        inputs = self._slots("source", me, len(peers))
        outputs = self._slots("target", me, len(peers))
        output_at = {slot.tensor: n for n, slot in enumerate(outputs)}
        sends: list[Transfer] = []
        receives: list[Transfer] = []
        copies: list[Copy] = []
        for n, slot in enumerate(inputs):
            for k, part in self.target.shards_of(slot.tensor, slot.part, len(peers)):
                if k != me:
                    sends.append(Transfer(peers[k], n, part.start - slot.part.start, part.numel))
                elif self.without_own is None:
                    m = output_at[slot.tensor]
                    to = part.start - outputs[m].part.start
                    copies.append(Copy(n, part.start - slot.part.start, m, to, part.numel))
        for m, slot in enumerate(outputs):
            for k, part in self.source.shards_of(slot.tensor, slot.part, len(peers)):
                if k != me:
                    receives.append(Transfer(peers[k], m, part.start - slot.part.start, part.numel))
        return RankView((GroupSlots(inputs, outputs),), tuple(sends), tuple(receives), tuple(copies))

    def _slots(self, side: Side, shard: int, count: int) -> tuple[Slot, ...]:
        here, there = (self.source, self.target) if side == "source" else (self.target, self.source)
        held = [(i, part) for i, part in here.tensors_in(here.get_segment(shard, count)) if i in self._participating]
        if self.without_own == side:
            held = [(i, part) for i, part in held if any(k != shard for k, _ in there.shards_of(i, part, count))]
        if self.empty_side == side:
            held += [(i, Range(0, 0)) for i, owner in self.empty if owner == shard]
        return tuple(Slot(i, part, here.part_shape(i, part.numel, count, self.shapes[i])) for i, part in sorted(held))

    def pieces(self, mesh: Mesh) -> list[Piece]:
        """Every piece that moves between different ranks, by sender; derived on the fly, for tables and tests."""
        order = {rank: place for place, rank in enumerate(mesh.ranks)}
        found: list[Piece] = []
        for first in mesh.ranks:
            if mesh.shard_index(self.axes, first):
                continue
            peers = self.peers(mesh, first)
            for i in self.tensors:
                for src, held in self.source.shards_of(i, Range(0, self.shapes[i].numel()), len(peers)):
                    for dst, part in self.target.shards_of(i, held, len(peers)):
                        if src != dst:
                            found.append(Piece(i, peers[src], peers[dst], part))
        return sorted(found, key=lambda piece: (order[piece.src], piece.tensor, piece.part.start))

    def table(self, mesh: Mesh, title: str) -> str:
        """Who sends which elements of which tensor to whom, and the totals."""
        rows = [f"{title} on {mesh}", f"{'tensor':>8} {'shape':>20} {'src':>6} {'dst':>6}  elements"]
        moved, pairs = 0, set[tuple[int, int]]()
        for piece in self.pieces(mesh):
            shape = str(tuple(self.shapes[piece.tensor]))
            part = f"{piece.part.start}..{piece.part.end} ({piece.part.numel})"
            rows.append(f"{piece.tensor:>8} {shape:>20} {piece.src:>6} {piece.dst:>6}  {part}")
            moved += piece.part.numel
            pairs.add((piece.src, piece.dst))
        rows.append(f"{len(rows) - 2} pieces between {len(pairs)} pairs of ranks, {moved} elements")
        return "\n".join(rows)


@lru_cache(maxsize=1024)
def _all_ranks(mesh: Mesh, axes: tuple[int, ...]) -> tuple[int, ...]:
    return mesh.shard_ranks(axes)


@dataclass(frozen=True, eq=False)
class Plan(LinearMap, PlacedValue):
    """The exchange of one or more groups over the ranks of a mesh, their small pieces sharing messages.

    Inputs and outputs of each group stand behind those of the one before. Print a plan to see its tables.

    Attributes:
        operation: what it does, for messages and for telling plans apart: "gather", "scatter", ...
        mesh: the ranks.
        groups: what moves of each group.

    >>> layout = build_for_tensor_atomic([(1, 2), (2, 2)], 2, tensor_owners=[0, 0])
    >>> print(gather_plan(GroupOwnerLayout(Mesh(2), layout, {0: 0, 1: 1}), "weights"))
    gather 'weights' on Mesh(axis0=2, ranks=(0, 1), rank=None)
      tensor                shape    src    dst  elements
           1               (2, 2)      0      1  0..4 (4)
    1 pieces between 1 pairs of ranks, 4 elements
    """

    operation: str
    mesh: Mesh
    groups: tuple[GroupPlan, ...]

    @cached_property
    def label(self) -> str:
        """How errors and traces call this plan."""
        return self.label_of(0) + (f" and {len(self.groups) - 1} more" if len(self.groups) > 1 else "")

    def label_of(self, group: int) -> str:
        """How errors call one group's part of this plan."""
        name = self.groups[group].name
        return f"{self.operation} {name!r}" if name else self.operation

    @cached_property
    def dtype(self) -> torch.dtype | None:
        """Of the elements, where groups say it.

        Raises:
            TypeError: if groups say different ones.
        """
        known = [group.dtype for group in self.groups if group.dtype is not None]
        for dtype in known:
            if dtype != known[0]:
                raise TypeError(
                    f"{self.operation}: one group is of {known[0]}, another of {dtype}; one call moves one dtype: make one call"
                    " per dtype, or pass dtype="
                )
        return known[0] if known else None

    @cached_property
    def transpose(self) -> "Plan":
        """The plan back: every piece the other way. `plan.transpose.transpose is plan`."""
        operation = _TRANSPOSED.get(self.operation, f"transpose of {self.operation}")
        back = Plan(operation, self.mesh, tuple(group.transpose for group in self.groups))
        vars(back)["transpose"] = self
        return back

    def view(self, rank: int) -> RankView:
        """What `rank` holds, sends, receives and copies.

        Raises:
            ValueError: if the rank is not in the mesh.
        """
        return join_views([group.view(self.mesh, rank) for group in self.groups])

    @cached_property
    def local(self) -> RankView:
        """The view of this process (`mesh.rank`), found once."""
        return self.view(self.mesh.get_rank())

    @cached_property
    def input_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor that this process gives."""
        return tuple(slot.part.numel for slot in self.local.inputs)

    @cached_property
    def output_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor that this process gets."""
        return tuple(slot.part.numel for slot in self.local.outputs)

    @cached_property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor that this process gets: logical, or flat where rows are split."""
        return tuple(slot.shape for slot in self.local.outputs)

    @cached_property
    def takes_part(self) -> bool:
        """Whether this process sends or receives anything."""
        return bool(self.local.sends or self.local.receives)

    def input_name(self, n: int) -> str:
        """How errors call an input: by its index, and of several groups also by group."""
        if len(self.groups) == 1:
            return str(self.local.inputs[n].tensor)
        for k, tensors in enumerate(self.local.input_tensors):
            if n < len(tensors):
                return f"{tensors[n]} of group {self.groups[k].name or f'number {k}'}"
            n -= len(tensors)
        raise IndexError(f"{self.label} has no input {n} more")

    def input_shape(self, n: int) -> tuple[int, ...]:
        """Logical, or flat where rows are split."""
        return self.local.inputs[n].shape

    def pieces(self) -> list[Piece]:
        """Every piece that moves between different ranks, group by group."""
        return [piece for group in self.groups for piece in group.pieces(self.mesh)]

    def __str__(self) -> str:
        """A table for each group: who sends which elements of which tensor to whom, and the totals."""
        return "\n\n".join(group.table(self.mesh, self.label_of(k)) for k, group in enumerate(self.groups))


_BACK = {"gather": "transpose of gather", "scatter": "transpose of scatter"}
_TRANSPOSED = _BACK | {back: forth for forth, back in _BACK.items()}


@lru_cache(maxsize=1024)
def gather_plan(owners: GroupOwnerLayout, name: str) -> Plan:
    """From the rows of the flat buffer to whole tensors on their owners."""
    cut, shards = _owner_shards(owners)
    empty = tuple((i, shard) for i, shard in shards if not owners.layout.tensor_numels[i])
    return Plan("gather", owners.mesh, (_to_owners(name, owners.layout, cut, shards, owners.dtype, empty=empty),))


@lru_cache(maxsize=1024)
def scatter_plan(owners: GroupOwnerLayout, name: str, include_own: bool = True) -> Plan:
    """From whole tensors on their owners back to the rows of the flat buffer. Tensors without elements are not asked for."""
    cut, shards = _owner_shards(owners)
    without: Side | None = None if include_own else "source"
    there = _to_owners(name, owners.layout, cut, shards, owners.dtype, without_own=without)
    return Plan("transpose of scatter", owners.mesh, (there,)).transpose


@lru_cache(maxsize=1024)
def join_plans(plans: Sequence[Plan]) -> Plan:
    """One plan for the groups of all.

    Raises:
        ValueError: if there is no plan, or the plans are not all of one mesh.
    """
    if not plans:
        raise ValueError("join_plans: needs at least one plan")
    for plan in plans:
        if plan.mesh != plans[0].mesh:
            raise ValueError(
                f"{plans[0].label} and {len(plans) - 1} more: all groups of one exchange must lie on one mesh, but"
                f" {plan.label} is on {plan.mesh}, {plans[0].label} on {plans[0].mesh}; make one call per mesh"
            )
    groups = tuple(group for plan in plans for group in plan.groups)
    return plans[0] if len(plans) == 1 else Plan(plans[0].operation, plans[0].mesh, groups)


def _owner_shards(
    owners: GroupOwnerLayout,
) -> tuple[tuple[tuple[int, ...], int], tuple[tuple[int, int], ...]]:
    """The axes that cut the buffer and the number of shards; and each tensor with the shard index of its owner."""
    mesh = owners.mesh
    axes = owners.layout.check_placements(mesh, owners.placements)
    shard = {rank: mesh.shard_index(axes, rank) for rank in set(owners.tensor_to_owner.values())}
    return (axes, mesh.shard_count(axes)), tuple((i, shard[rank]) for i, rank in owners.tensor_to_owner.items())


@lru_cache(maxsize=1024)
def _to_owners(
    name: str,
    layout: GlobalLayout,
    cut: tuple[tuple[int, ...], int],
    owner_shards: tuple[tuple[int, int], ...],
    dtype: torch.dtype | None,
    *,
    without_own: Side | None = None,
    empty: tuple[tuple[int, int], ...] = (),
) -> GroupPlan:
    """From a layout to its owners. It tells nothing of this rank, so the ranks of a simulation share it."""
    (axes, count), owner = cut, dict(owner_shards)
    tensor_owners = [owner.get(i, 0) for i in range(len(layout.tensor_shapes))]
    target = build_for_tensor_atomic([(numel,) for numel in layout.tensor_numels], count, tensor_owners=tensor_owners)
    return GroupPlan(*(name, axes, layout.tensor_shapes, layout, target, tuple(owner), without_own, empty), dtype=dtype)
