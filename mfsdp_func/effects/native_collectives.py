"""The backend's own collectives, for segments of equal size. Process groups sort their ranks; results are in buffer order."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from einops import rearrange

from mfsdp_func.effects.blocks import as_bytes
from mfsdp_func.effects.carrier import Call
from mfsdp_func.effects.collectives import compact, spread
from mfsdp_func.effects.groups import axis_groups
from mfsdp_func.plans.collective import Collective


def _first_of(*names: str) -> Callable[..., Any]:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


# Newer torch has new names for the same two collectives, and warns about the old ones.
_all_gather_single = _first_of("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _first_of("reduce_scatter_single", "reduce_scatter_tensor")

_ADDED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8}
)


def native_collective(
    call: Call,
    collective: Collective,
    source: torch.Tensor,
    target: torch.Tensor,
    lead: Callable[[dist.ProcessGroup], None] | None = None,
) -> Callable[[], None] | None:
    """Start it and return what waits for it; None where messages must do: unequal segments, no group, no such sum.

    Sums are those of the target's dtype.

    Args:
        call: this call.
        collective: which.
        source: see `start_collective`.
        target: likewise.
        lead: called with the group before anything is sent.
    """
    groups = axis_groups(collective.mesh)
    if not groups or collective.total == 0 or not (collective.equal or collective.kind == "allreduce"):
        return None
    if collective.kind != "allgather" and source.dtype not in _ADDED:
        return None
    group = groups[collective.axis]
    order = dist.get_process_group_ranks(group)
    to_buffer = [order.index(rank) for rank in collective.line]
    if lead is not None:
        lead(group)
    if collective.kind == "allreduce":
        target.copy_(source)
        return _waiting(dist.all_reduce(target, group=group, async_op=True))
    if collective.kind == "allgather":
        return _all_gather(collective, group, to_buffer, source, target)
    return _reduce_scatter(collective, group, to_buffer, source, target)


def _all_gather(
    collective: Collective,
    group: dist.ProcessGroup,
    to_buffer: Sequence[int],
    source: torch.Tensor,
    target: torch.Tensor,
) -> Callable[[], None]:
    if collective.stored is None and to_buffer == sorted(to_buffer):
        work = _all_gather_single(as_bytes(target), as_bytes(source), group=group, async_op=True)
        return _waiting(work, source)
    gathered = source.new_empty((len(to_buffer), *source.shape))
    work = _all_gather_single(as_bytes(gathered), as_bytes(source), group=group, async_op=True)

    def finish() -> None:
        work.wait()
        compact(rearrange(gathered[list(to_buffer)], "rank n ... -> (rank n) ..."), target, collective.sizes)

    return finish


def _reduce_scatter(
    collective: Collective,
    group: dist.ProcessGroup,
    to_buffer: Sequence[int],
    source: torch.Tensor,
    target: torch.Tensor,
) -> Callable[[], None]:
    ranks, step = len(to_buffer), target.shape[0]
    stored = source if collective.stored is None else spread(source, collective.sizes, step)
    if to_buffer != sorted(to_buffer):
        from_buffer = sorted(range(ranks), key=to_buffer.__getitem__)
        segments = rearrange(stored, "(rank n) ... -> rank n ...", rank=ranks, n=step)
        stored = rearrange(segments[from_buffer], "rank n ... -> (rank n) ...")
    stored = stored.to(target.dtype)
    return _waiting(_reduce_scatter_single(target, stored, group=group, async_op=True), stored)


def _waiting(work: "dist.Work | None", *keep: torch.Tensor) -> Callable[[], None]:
    def finish(held: Sequence[torch.Tensor] = keep) -> None:
        if work is not None:
            work.wait()

    return finish
