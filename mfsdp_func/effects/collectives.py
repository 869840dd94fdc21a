"""Running a `Collective`: the backend's own where there is one, else messages between the ranks of a line."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from mfsdp_func.effects.carrier import Call, Carrier, Parcel
from mfsdp_func.plans.collective import Collective

Finish = Callable[[], None]


_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.complex32: torch.complex64}


def start_collective(
    collective: Collective, carrier: Carrier, call: Call, source: torch.Tensor, target: torch.Tensor, *, at_once: bool
) -> Finish:
    """Start a collective from `source` into `target`; the function returned waits for its end.

    Args:
        collective: which.
        carrier: who runs it.
        call: this call.
        source: contiguous, of shape ``(input numel, *call.batch)``.
        target: likewise, of the output's number of elements; may not share memory with `source`.
        at_once: see `Carrier.exchange`.
    """
    if len(collective.line) == 1:
        target[: collective.total].copy_(source[: collective.total])
        return _nothing
    if collective.kind == "allgather":
        target = target[: collective.total]
    elif collective.kind == "reduce_scatter":
        source = source[: collective.total]
    if not collective.deterministic or collective.kind == "allgather":
        narrow = source.dtype is torch.float16 and collective.kind != "allgather"  # its largest number is 65504
        into = target.new_empty(target.shape, dtype=torch.float32) if narrow else target
        native = carrier.collective(call, collective, source, into)
        if native is not None:
            return _narrowed(target, into, _averaged(collective, into, native))
    if collective.kind == "allgather":
        return _averaged(collective, target, _all_gather(collective, carrier, call, source, target, at_once))
    if collective.kind == "reduce_scatter":
        return _reduce_scatter(collective, carrier, call, source, target, at_once)
    return _all_reduce(collective, carrier, call, source, target, at_once)


def _narrowed(target: torch.Tensor, wide: torch.Tensor, finish: Finish) -> Finish:
    """Round once, at the end: what float16 cannot hold on the way is not lost."""
    if wide is target:
        return finish

    def finish_narrow() -> None:
        finish()
        target.copy_(wide)

    return finish_narrow


def _averaged(collective: Collective, target: torch.Tensor, finish: Finish) -> Finish:
    if not collective.average:
        return finish

    def finish_average() -> None:
        finish()
        if target.dtype in _WIDE:
            target.copy_(target.to(_WIDE[target.dtype]) / len(collective.line))
        else:
            target.div_(len(collective.line))

    return finish_average


def _all_gather(
    collective: Collective, carrier: Carrier, call: Call, source: torch.Tensor, target: torch.Tensor, at_once: bool
) -> Finish:
    segments = target.split(collective.sizes)
    mine = segments[collective.position]
    piece = source[: mine.shape[0]]
    finish = carrier.exchange(
        call,
        [Parcel(peer, 0, (piece,)) for peer in _peers(collective) if piece.shape[0]],
        _parcels(collective, segments),
        at_once=at_once,
    )
    mine.copy_(piece)
    return finish


def _reduce_scatter(
    collective: Collective, carrier: Carrier, call: Call, source: torch.Tensor, target: torch.Tensor, at_once: bool
) -> Finish:
    segments = source.split(collective.sizes)
    mine = segments[collective.position]
    received = [mine if rank == collective.mesh.rank else torch.empty_like(mine) for rank in collective.line]
    finish = carrier.exchange(
        call,
        _parcels(collective, segments),
        [
            Parcel(peer, 0, (buffer,))
            for peer, buffer in zip(collective.line, received, strict=True)
            if peer != collective.mesh.rank and buffer.shape[0]
        ],
        at_once=at_once,
    )

    def fold() -> None:
        finish()
        target[: mine.shape[0]].copy_(_fold(received, collective.average))

    return fold


def _all_reduce(
    collective: Collective, carrier: Carrier, call: Call, source: torch.Tensor, target: torch.Tensor, at_once: bool
) -> Finish:
    """Reduce-scatter in even parts, then all-gather: the same sums in the same order, element by element."""
    ranks = len(collective.line)
    bounds = [k * collective.total // ranks for k in range(ranks + 1)]
    sizes = tuple(after - before for before, after in pairwise(bounds))
    parts = replace(collective, kind="reduce_scatter", sizes=sizes, stored=None)
    piece = source.new_empty((parts.segment, *source.shape[1:]))
    reduced = _reduce_scatter(parts, carrier, call, source, piece, at_once)

    def gather() -> None:
        reduced()
        _all_gather(parts, carrier, call, piece, target, at_once)()

    return gather


def _parcels(collective: Collective, segments: Sequence[torch.Tensor]) -> list[Parcel]:
    return [
        Parcel(peer, 0, (segment,))
        for peer, segment in zip(collective.line, segments, strict=True)
        if peer != collective.mesh.rank and segment.shape[0]
    ]


def _peers(collective: Collective) -> list[int]:
    return [rank for rank in collective.line if rank != collective.mesh.rank]


def _fold(terms: Sequence[torch.Tensor], average: bool) -> torch.Tensor:
    """The sum, or the mean, from left to right; halves are added and divided in single precision, and rounded once."""
    dtype = terms[0].dtype
    total = terms[0].to(_WIDE.get(dtype, dtype), copy=True)
    for term in terms[1:]:
        total += term
    return (total.div_(len(terms)) if average else total).to(dtype)


def compact(stored: torch.Tensor, target: torch.Tensor, sizes: Sequence[int]) -> None:
    """Copy segments stored at equal distances into `target`, side by side."""
    step = stored.shape[0] // len(sizes)
    for k, segment in enumerate(target.split(list(sizes))):
        segment.copy_(stored[k * step : k * step + segment.shape[0]])


def spread(source: torch.Tensor, sizes: Sequence[int], step: int) -> torch.Tensor:
    """The inverse of `compact`: zeros fill the rest."""
    stored = source.new_zeros((step * len(sizes), *source.shape[1:]))
    for k, (start, size) in enumerate(zip(accumulate(sizes, initial=0), sizes, strict=False)):
        stored[k * step : k * step + size].copy_(source[start : start + size])
    return stored


def _nothing() -> None:
    pass
