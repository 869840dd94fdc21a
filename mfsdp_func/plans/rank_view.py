"""One rank's part in a plan: the tensors it gives and gets, and what travels to and from whom."""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import NamedTuple

from mfsdp_func.values.ranges import Range


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


class GroupSlots(NamedTuple):
    """What one rank gives and gets of one group, in ascending order of the tensor."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    @property
    def input_tensors(self) -> tuple[int, ...]:
        """Tensor index of each input."""
        return tuple(slot.tensor for slot in self.inputs)

    @property
    def output_tensors(self) -> tuple[int, ...]:
        """Tensor index of each output."""
        return tuple(slot.tensor for slot in self.outputs)


@dataclass(frozen=True, eq=False)
class RankView:
    """All that one rank needs to take its part in a plan; slots are numbered through all groups, one after the other."""

    groups: tuple[GroupSlots, ...]
    sends: tuple[Transfer, ...]
    receives: tuple[Transfer, ...]
    copies: tuple[Copy, ...]

    @cached_property
    def inputs(self) -> tuple[Slot, ...]:
        """What goes in."""
        return tuple(chain.from_iterable(group.inputs for group in self.groups))

    @cached_property
    def outputs(self) -> tuple[Slot, ...]:
        """What comes out."""
        return tuple(chain.from_iterable(group.outputs for group in self.groups))

    @cached_property
    def input_tensors(self) -> tuple[tuple[int, ...], ...]:
        """For each group, the tensor index of each input."""
        return tuple(group.input_tensors for group in self.groups)

    @cached_property
    def output_tensors(self) -> tuple[tuple[int, ...], ...]:
        """For each group, the tensor index of each output."""
        return tuple(group.output_tensors for group in self.groups)


def join_views(views: list[RankView]) -> RankView:
    """The views of several groups as one; transfers to and from one peer in the order of the groups."""
    if len(views) == 1:
        return views[0]
    sends: list[Transfer] = []
    receives: list[Transfer] = []
    copies: list[Copy] = []
    i = o = 0  # the first input slot and the first output slot of a group
    for view in views:
        sends += [t._replace(slot=t.slot + i) for t in view.sends]
        receives += [t._replace(slot=t.slot + o) for t in view.receives]
        copies += [c._replace(input_slot=c.input_slot + i, output_slot=c.output_slot + o) for c in view.copies]
        i, o = i + len(view.inputs), o + len(view.outputs)
    groups = tuple(group for view in views for group in view.groups)
    return RankView(groups, tuple(sends), tuple(receives), tuple(copies))


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
