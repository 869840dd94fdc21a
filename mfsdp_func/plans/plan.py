"""A plan: which contiguous elements of which tensors move between which ranks. Integers only.

One side of a plan is a `GlobalLayout`: owners are a layout too, one segment per owner. A plan goes from one layout of
some tensors to another; its transpose goes back. Nothing is materialised for all ranks: one rank's view is found by
bisection in sorted offsets, once, and kept.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Literal, NamedTuple

import torch

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import build_for_tensor_atomic
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.ranges import Range
from mfsdp_func.values.value import PlacedValue

Side = Literal["source", "target"]


class Piece(NamedTuple):
    """Elements `part` of a tensor, on their way from global rank `src` to global rank `dst`."""

    tensor: int
    src: int
    dst: int
    part: Range


class Slot(NamedTuple):
    """One tensor as one rank holds it: which elements, and in which shape."""

    tensor: int
    part: Range
    shape: tuple[int, ...]


class Transfer(NamedTuple):
    """Elements ``start, ..., start + numel - 1`` of local slot `slot`, to or from global rank `peer`."""

    peer: int
    slot: int
    start: int
    numel: int


class Copy(NamedTuple):
    """Elements that stay on this rank: from an input slot into an output slot."""

    input_slot: int
    input_start: int
    output_slot: int
    output_start: int
    numel: int


class Message(NamedTuple):
    """What travels from one rank to another in one piece; `stage` is the order in which messages may need a buffer."""

    peer: int
    stage: int
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, eq=False)
class RankView:
    """All that one rank needs to take its part in a plan.

    Slots and transfers stand in ascending order of the tensor, and of several groups in the order of the groups.
    """

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copies: tuple[Copy, ...]

    @cached_property
    def input_numels(self) -> tuple[int, ...]:
        """Number of elements of each input slot."""
        return tuple(slot.part.numel for slot in self.inputs)

    @cached_property
    def output_numels(self) -> tuple[int, ...]:
        """Number of elements of each output slot."""
        return tuple(slot.part.numel for slot in self.outputs)

    @cached_property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each output slot."""
        return tuple(slot.shape for slot in self.outputs)


class Exchange(PlacedValue, ABC):
    """A plan, of one group or of several, as this process (``mesh.rank``) runs it."""

    mesh: Mesh

    @abstractmethod
    def view(self, rank: int) -> RankView:
        """What `rank` holds, sends, receives and copies."""

    @cached_property
    def key(self) -> str:
        """The plan as one rank runs it, as a string: what compiled code holds in place of the plan."""
        return f"{self.digest}/{self.mesh.rank}"

    @property
    def input_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor that this process gives."""
        return self.local.input_numels

    @property
    def output_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor that this process gets."""
        return self.local.output_numels

    @property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor that this process gets: logical, or flat where rows are split."""
        return self.local.output_shapes

    @property
    def takes_part(self) -> bool:
        """Whether this process sends or receives anything."""
        return bool(self.local.sends or self.local.receives)

    @cached_property
    def local(self) -> RankView:
        """The view of this process (`mesh.rank`), found once."""
        return self.view(self.mesh.get_rank())


@dataclass(frozen=True, eq=False)
class Plan(Exchange):
    """The exchange from `source` to `target`, two layouts of the same tensors over the ranks that share a buffer.

    Attributes:
        operation: what it does, for messages and for telling plans apart: "gather", "scatter", ...
        name: label of the parameter group, for messages.
        mesh: the ranks; each group of them that shares one copy of the buffer exchanges within itself.
        axes: the mesh axes that cut the buffer.
        shapes: logical shape of every tensor of the layouts.
        source: where elements are before.
        target: where they are after.
        tensors: the tensors that take part, ascending.
        without_own: the side, if any, that leaves out elements which stay on their rank (`include_own=False`).
    """

    operation: str
    name: str
    mesh: Mesh
    axes: tuple[int, ...]
    shapes: tuple[torch.Size, ...]
    source: GlobalLayout
    target: GlobalLayout
    tensors: tuple[int, ...]
    without_own: Side | None = None

    @property
    def label(self) -> str:
        """How errors and traces call this plan."""
        return f"{self.operation} {self.name!r}" if self.name else self.operation

    @cached_property
    def transpose(self) -> "Plan":
        """The plan back: every piece the other way. `plan.transpose.transpose is plan`."""
        swapped: dict[Side, Side] = {"source": "target", "target": "source"}
        back = Plan(
            operation=_TRANSPOSED.get(self.operation, f"transpose of {self.operation}"),
            name=self.name,
            mesh=self.mesh,
            axes=self.axes,
            shapes=self.shapes,
            source=self.target,
            target=self.source,
            tensors=self.tensors,
            without_own=swapped[self.without_own] if self.without_own else None,
        )
        vars(back)["transpose"] = self
        return back

    def _peers(self, rank: int) -> tuple[int, ...]:
        """The ranks that share one copy of the buffer with `rank`, in buffer order."""
        return self._all_ranks if len(self.axes) == self.mesh.ndim else self.mesh.shard_ranks(self.axes, rank)

    @cached_property
    def _all_ranks(self) -> tuple[int, ...]:
        return self.mesh.shard_ranks(self.axes)

    @cached_property
    def _participating(self) -> frozenset[int]:
        return frozenset(self.tensors)

    def view(self, rank: int) -> RankView:
        """What `rank` holds, sends, receives and copies.

        Raises:
            ValueError: if the rank is not in the mesh.
        """
        peers = self._peers(rank)
        me = self.mesh.shard_index(self.axes, rank)
        inputs = self._slots(self.source, "source", me, len(peers))
        outputs = self._slots(self.target, "target", me, len(peers))
        output_at = {slot.tensor: n for n, slot in enumerate(outputs)}
        sends, receives, copies = [], [], []
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
        return RankView(inputs, outputs, tuple(sends), tuple(receives), tuple(copies))

    def _slots(self, layout: GlobalLayout, side: Side, shard: int, count: int) -> tuple[Slot, ...]:
        held = [
            (i, part) for i, part in layout.tensors_in(layout.get_segment(shard, count)) if i in self._participating
        ]
        if self.without_own == side:
            other = self.target if side == "source" else self.source
            held = [(i, part) for i, part in held if any(k != shard for k, _ in other.shards_of(i, part, count))]
        return tuple(Slot(i, part, self._part_shape(layout, i, part, count)) for i, part in sorted(held))

    def _part_shape(self, layout: GlobalLayout, tensor: int, part: Range, count: int) -> tuple[int, ...]:
        shape = self.shapes[tensor]
        if part.numel == shape.numel():
            return tuple(shape)
        row = shape[1:].numel()
        if layout.keeps_rows(tensor, count, row):
            return (part.numel // row, *shape[1:])
        return (part.numel,)

    def pieces(self) -> list[Piece]:
        """Every piece that moves between different ranks, by sender; derived on the fly, for tables and tests."""
        order = {rank: place for place, rank in enumerate(self.mesh.ranks)}
        found: list[Piece] = []
        for first in self.mesh.ranks:
            if self.mesh.shard_index(self.axes, first):
                continue
            peers = self._peers(first)  # those that share one copy of the buffer
            for i in self.tensors:
                for src, held in self.source.shards_of(i, Range(0, self.shapes[i].numel()), len(peers)):
                    for dst, part in self.target.shards_of(i, held, len(peers)):
                        if src != dst:
                            found.append(Piece(i, peers[src], peers[dst], part))
        return sorted(found, key=lambda piece: (order[piece.src], piece.tensor, piece.part.start))

    def __str__(self) -> str:
        """A table: who sends which elements of which tensor to whom, and the totals."""
        rows = [f"{self.label} on {self.mesh}", f"{'tensor':>8} {'shape':>20} {'src':>6} {'dst':>6}  elements"]
        moved, pairs = 0, set[tuple[int, int]]()
        for piece in self.pieces():
            shape = str(tuple(self.shapes[piece.tensor]))
            part = f"{piece.part.start}..{piece.part.end} ({piece.part.numel})"
            rows.append(f"{piece.tensor:>8} {shape:>20} {piece.src:>6} {piece.dst:>6}  {part}")
            moved += piece.part.numel
            pairs.add((piece.src, piece.dst))
        rows.append(f"{len(rows) - 2} pieces between {len(pairs)} pairs of ranks, {moved} elements")
        return "\n".join(rows)


_BACK = {"gather": "transpose of gather", "scatter": "transpose of scatter"}
_TRANSPOSED = _BACK | {back: forth for forth, back in _BACK.items()}


@lru_cache(maxsize=1024)
def gather_plan(owners: GroupOwnerLayout, name: str) -> Plan:
    """From the rows of the flat buffer to whole tensors on their owners."""
    return _owner_plan(owners, "gather", name)


@lru_cache(maxsize=1024)
def scatter_plan(owners: GroupOwnerLayout, name: str, include_own: bool = True) -> Plan:
    """From whole tensors on their owners back to the rows of the flat buffer."""
    there = _owner_plan(owners, "transpose of scatter", name, None if include_own else "source")
    return there.transpose


def _owner_plan(owners: GroupOwnerLayout, operation: str, name: str, without_own: Side | None = None) -> Plan:
    mesh, layout = owners.mesh, owners.layout
    axes = layout.check_placements(mesh, owners.placements)
    shard_of = {rank: mesh.shard_index(axes, rank) for rank in set(owners.tensor_to_owner.values())}
    count = max(1, mesh.size()) if len(axes) == mesh.ndim else len(mesh.shard_ranks(axes, mesh.ranks[0]))
    target = build_for_tensor_atomic(
        [(numel,) for numel in layout.tensor_numels],
        count,
        tensor_owners=[
            shard_of[owners.tensor_to_owner[i]] if i in owners.tensor_to_owner else 0
            for i in range(len(layout.tensor_shapes))
        ],
    )
    return Plan(
        operation, name, mesh, axes, layout.tensor_shapes, layout, target, tuple(owners.tensor_to_owner), without_own
    )


@lru_cache(maxsize=4096)
def group_messages(
    view: RankView, direct_numel: int, packed_numel: int
) -> tuple[tuple[Message, ...], tuple[Message, ...]]:
    """Pack what a rank sends and what it receives into messages, by rules that both ends compute alike.

    A transfer of at least `direct_numel` elements travels alone; smaller ones of a pair share messages of at most
    about `packed_numel` elements. Messages that may need a buffer to pack or unpack are numbered by `stage` from 1
    on, per pair; the others have stage 0.
    """
    return tuple(_group(transfers, direct_numel, packed_numel) for transfers in (view.sends, view.receives))  # pyright: ignore[reportReturnType]


def _group(transfers: tuple[Transfer, ...], direct_numel: int, packed_numel: int) -> tuple[Message, ...]:
    by_peer: dict[int, list[Transfer]] = {}
    for transfer in transfers:
        by_peer.setdefault(transfer.peer, []).append(transfer)
    messages: list[Message] = []
    for peer, items in by_peer.items():
        groups, packed, filled = [], [], 0
        for item in items:
            if item.numel >= direct_numel:
                groups.append((item,))
                continue
            if packed and filled + item.numel > packed_numel:
                groups.append(tuple(packed))
                packed, filled = [], 0
            packed.append(item)
            filled += item.numel
        if packed:
            groups.append(tuple(packed))
        stages = accumulate(len(group) > 1 for group in groups)
        messages += [
            Message(peer, stage if len(group) > 1 else 0, group) for stage, group in zip(stages, groups, strict=True)
        ]
    return tuple(sorted(messages, key=lambda message: message.stage))
