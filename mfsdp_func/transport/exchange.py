"""From a plan and tensors to parcels: how one rank takes its part in an exchange, over any carrier."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from mfsdp_func.plan import Message, Plan, RankView, group_messages
from mfsdp_func.transport.carrier import Call, Carrier, Parcel

_ALIGNMENT_NBYTES = 64


def start_exchange(
    plan: Plan,
    carrier: Carrier,
    call: Call,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    *,
    at_once: bool,
) -> Callable[[], None]:
    """Start moving elements from `inputs` to `outputs`; the function returned waits until they have arrived.

    Args:
        plan: what moves; `inputs` and `outputs` match the slots of ``plan.local``.
        carrier: who moves it.
        call: this call; its dtype is known.
        inputs: contiguous, of shape ``(slot numel, *call.batch)``; read until the exchange has ended.
        outputs: likewise; written.
        at_once: see `Carrier.exchange`.
    """
    view = plan.local
    scale = math.prod(call.batch)
    element_nbytes = scale * call.dtype.itemsize if call.dtype else 0
    told = carrier.tell(call, view.told) if view.told and carrier.tells_dtype(inputs[0].device) else None
    sends, receives = (), ()  # a rank that moves nothing makes its call all the same
    if element_nbytes:
        direct, packed = carrier.packing(call.mesh)
        sends, receives = group_messages(view, max(1, direct // element_nbytes), max(1, packed // element_nbytes))
    finish = carrier.exchange(call, _parcels(sends, inputs), _parcels(receives, outputs), at_once=at_once)
    _copy(view, inputs, outputs)  # while messages are under way

    def wait() -> None:
        finish()
        if told is not None:
            told()

    return wait


def empty_outputs(
    plan: Plan, dtype: torch.dtype, device: torch.device, batch: Sequence[int], *, one_storage: bool
) -> tuple[torch.Tensor, ...]:
    """New tensors of shape ``(slot numel, *batch)``; zero where the exchange may leave elements unwritten.

    Side by side in one storage, in the order of the slots and aligned to 64 bytes, they take one allocation, and
    messages for neighbours need no buffer.
    """
    view = plan.local
    unit = max(1, _ALIGNMENT_NBYTES // dtype.itemsize) if one_storage else 1
    steps, snug, complete = _room(view, unit)
    make = torch.empty if complete else torch.zeros
    if not one_storage:
        return tuple(make((numel, *batch), dtype=dtype, device=device) for numel in steps)
    if not steps:
        return ()
    parts = make((sum(steps), *batch), dtype=dtype, device=device).split_with_sizes(steps)
    return parts if snug else tuple(map(_shortened, parts, view.output_numels))


@lru_cache(maxsize=4096)
def _room(view: RankView, unit: int) -> tuple[tuple[int, ...], bool, bool]:
    """Elements to allocate per output, whether that is just what they need, and whether all of it gets written."""
    steps = tuple(-(-numel // unit) * unit for numel in view.output_numels)
    written = sum(transfer.numel for transfer in view.receives) + sum(copy.numel for copy in view.copies)
    return steps, steps == view.output_numels, written == sum(view.output_numels)


def _shortened(part: torch.Tensor, numel: int) -> torch.Tensor:
    return part[:numel]


def _parcels(messages: Sequence[Message], tensors: Sequence[torch.Tensor]) -> list[Parcel]:
    return [
        Parcel(
            message.peer,
            message.stage,
            tuple(_slice(tensors[slot], start, numel) for _, slot, start, numel in message.transfers),
        )
        for message in messages
    ]


def _copy(view: RankView, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
    if view.copies:
        sources = [_slice(inputs[slot], start, numel) for slot, start, _, _, numel in view.copies]
        targets = [_slice(outputs[slot], start, numel) for _, _, slot, start, numel in view.copies]
        torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateUsage]


def _slice(tensor: torch.Tensor, start: int, numel: int) -> torch.Tensor:
    return tensor if numel == tensor.shape[0] else tensor.narrow(0, start, numel)
