"""From a view of a plan and tensors to parcels: how one rank takes its part in an exchange, over any carrier."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import NamedTuple, TypeAlias

import torch

from mfsdp_func.effects.blocks import Block, Memory, Pair, Places, blocks_of, copy_all, pair_blocks
from mfsdp_func.effects.carrier import Call, Carrier, Parcel
from mfsdp_func.plans.rank_view import Message, RankView, Slot, group_messages

_ALIGNMENT_NBYTES = 64


def start_exchange(
    view: RankView,
    carrier: Carrier,
    call: Call,
    sources: Memory,
    targets: Memory,
    *,
    at_once: bool,
) -> Callable[[], None]:
    """Start moving elements from `sources` to `targets`; the function returned waits until they have arrived.

    Args:
        view: what moves; `sources` and `targets` match its slots.
        carrier: who moves it.
        call: this call.
        sources: where tensors lie that hold the elements of the input slots, each element with its ``call.batch``; read
            until the exchange has ended.
        targets: likewise of the output slots; written.
        at_once: see `Carrier.exchange`.
    """
    scale = math.prod(call.batch)
    element_nbytes = scale * call.dtype.itemsize if call.dtype else 0
    outgoing, incoming = [], []  # a rank that moves nothing makes its call all the same
    copied, copied_to = [], []
    if element_nbytes:
        direct, packed = carrier.packing(call.mesh)
        limits = max(1, direct // element_nbytes), max(1, packed // element_nbytes)
        route = _route(view, limits, scale, sources.places, targets.places)
        outgoing = _parcels(route.sends, sources) if route.sends else []
        incoming = _parcels(route.receives, targets) if route.receives else []
        copied, copied_to = sources.views(*route.copied), targets.views(*route.copied_to)
    finish = carrier.exchange(call, outgoing, incoming, at_once=at_once)
    copy_all(copied_to, copied)  # while messages are under way
    return finish


_Cut: TypeAlias = tuple[tuple[Message, tuple[Block, ...]], ...]
_Views: TypeAlias = tuple[tuple[Block, ...], tuple[Block, ...]]
"""What `Memory.views` takes."""


class _Route(NamedTuple):
    """One rank's part in an exchange between tensors that lie in a certain way."""

    sends: _Cut
    receives: _Cut
    copied: _Views
    copied_to: _Views


@lru_cache(maxsize=256)
def _route(view: RankView, limits: tuple[int, ...], scale: int, sources: Places, targets: Places) -> _Route:
    def place(places: Places, slot: int, start: int) -> tuple[int, int]:
        storage, at = places[slot]
        return storage, at + start * scale

    def blocks(messages: Sequence[Message], places: Places) -> _Cut:
        return tuple(
            (message, blocks_of((place(places, slot, at), numel * scale) for _, slot, at, numel in message.transfers))
            for message in messages
        )

    sends, receives = group_messages(view, *limits)
    copied, copied_to = _views_to_copy(
        Pair(place(sources, slot, start), place(targets, to, at), numel * scale)
        for slot, start, to, at, numel in view.copies
    )
    return _Route(blocks(sends, sources), blocks(receives, targets), copied, copied_to)


def _views_to_copy(pairs: Iterable[Pair]) -> tuple[_Views, _Views]:
    """Views of sources and of targets: of blocks where both sides lie alike, else the views of each side made together."""
    alike = pair_blocks(pairs)
    together = [pair for pair in alike if pair[0].count > 1]
    alone = [pair for pair in alike if pair[0].count == 1]

    def views(side: int) -> _Views:
        runs = (((pair[side].storage, pair[side].start), pair[side].numel) for pair in alone)
        return tuple(pair[side] for pair in together), blocks_of(runs, join=False)

    return views(0), views(1)


def _parcels(messages: _Cut, memory: Memory) -> list[Parcel]:
    return [Parcel(message.peer, message.stage, tuple(map(memory.view, blocks))) for message, blocks in messages]


_Row: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], int]
"""What `as_strided` takes."""


def empty_outputs(
    view: RankView, dtype: torch.dtype, device: torch.device, batch: Sequence[int] | None, *, one_storage: bool
) -> tuple[torch.Tensor, ...]:
    """New tensors, of shape ``(slot numel, *batch)``, or with None of the slots' own shapes.

    Zero where the exchange may leave elements unwritten. Side by side in one storage per group (whose memory can be freed
    when the group is done with), in the order of the slots and aligned to 64 bytes, they take one allocation, and messages
    for neighbours need no buffer.
    """
    make = torch.empty if _fills(view) else torch.zeros
    if not one_storage:
        return tuple(make((numel, *(batch or ())), dtype=dtype, device=device) for numel in _numels(view))
    unit = max(1, _ALIGNMENT_NBYTES // dtype.itemsize)
    parts: list[torch.Tensor] = []
    for numel, rows in _storages(view, None if batch is None else tuple(batch), unit):
        storage = make(numel, dtype=dtype, device=device)
        for row in rows:
            parts += storage.as_strided(*row).unbind()
    return tuple(parts)


@lru_cache(maxsize=4096)
def _storages(view: RankView, batch: tuple[int, ...] | None, unit: int) -> tuple[tuple[int, tuple[_Row, ...]], ...]:
    """For each group, the elements of a storage for its outputs, and the rows of outputs of equal shapes in it."""
    return tuple(_rows(group.outputs, batch, unit) for group in view.groups)


def _rows(slots: Sequence[Slot], batch: tuple[int, ...] | None, unit: int) -> tuple[int, tuple[_Row, ...]]:
    rows: list[_Row] = []
    scale, end = math.prod(batch or ()), 0
    for slot in slots:
        shape = slot.shape if batch is None else (slot.part.numel, *batch)
        step = -(-slot.part.numel // unit) * unit * scale
        if rows and rows[-1][0][1:] == shape:
            (count, *_), strides, start = rows.pop()
        else:
            count, start = 0, end
            strides = (step, *tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1])
        rows.append(((count + 1, *shape), strides, start))
        end += step
    return end, tuple(rows)


@lru_cache(maxsize=4096)
def _fills(view: RankView) -> bool:
    """Whether the exchange writes every element of the outputs."""
    written = sum(transfer.numel for transfer in view.receives) + sum(copy.numel for copy in view.copies)
    return written == sum(_numels(view))


def _numels(view: RankView) -> tuple[int, ...]:
    return tuple(slot.part.numel for slot in view.outputs)
