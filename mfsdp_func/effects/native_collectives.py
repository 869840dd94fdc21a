"""The backend's own collectives, for segments of equal size. Process groups sort their ranks; results are in buffer order."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from einops import rearrange

from mfsdp_func.effects.blocks import as_bytes
from mfsdp_func.effects.collectives import compact, spread
from mfsdp_func.effects.groups import axis_groups
from mfsdp_func.effects.waiting import Waiter
from mfsdp_func.plans.collective import Collective


def _first_of(*names: str) -> Callable[..., Any]:
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


# Newer torch has new names for the same two collectives, and warns about the old ones.
_all_gather_single = _first_of("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _first_of("reduce_scatter_single", "reduce_scatter_tensor")

_ADDED = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int32, torch.int64, torch.uint8}
)


class Start(NamedTuple):
    """A collective that the backend can run: on which group, and where each segment of the buffer is there."""

    group: dist.ProcessGroup
    to_buffer: list[int]


def starting(collective: Collective, source: torch.Tensor) -> Start | None:
    """How to start it; None where messages must do: unequal segments, no group, no such sum."""
    groups = axis_groups(collective.mesh)
    if not groups or collective.total == 0 or not (collective.equal or collective.kind == "allreduce"):
        return None
    if collective.kind != "allgather" and source.dtype not in _ADDED:
        return None
    group = groups[collective.axis]
    order = dist.get_process_group_ranks(group)
    return Start(group, [order.index(rank) for rank in collective.line])


def start_native(
    waiter: Waiter, collective: Collective, start: Start, source: torch.Tensor, target: torch.Tensor
) -> Callable[[], None]:
    """Start it and return what waits for it. Sums are those of the target's dtype.

    Args:
        waiter: this call.
        collective: which.
        start: see `starting`.
        source: see `start_collective`.
        target: likewise.
    """
    if collective.kind == "allreduce":
        target.copy_(source)
        return _waiting(waiter, collective, partial(dist.all_reduce, target))
    if collective.kind == "allgather":
        return _all_gather(waiter, collective, start.to_buffer, source, target)
    return _reduce_scatter(waiter, collective, start.to_buffer, source, target)


def _all_gather(
    waiter: Waiter, collective: Collective, to_buffer: Sequence[int], source: torch.Tensor, target: torch.Tensor
) -> Callable[[], None]:
    if collective.stored is None and to_buffer == sorted(to_buffer):
        return _waiting(waiter, collective, partial(_all_gather_single, as_bytes(target), as_bytes(source)), source)
    gathered = source.new_empty((len(to_buffer), *source.shape))
    wait = _waiting(waiter, collective, partial(_all_gather_single, as_bytes(gathered), as_bytes(source)))

    def finish() -> None:
        wait()
        compact(rearrange(gathered[list(to_buffer)], "rank n ... -> (rank n) ..."), target, collective.sizes)

    return finish


def _reduce_scatter(
    waiter: Waiter, collective: Collective, to_buffer: Sequence[int], source: torch.Tensor, target: torch.Tensor
) -> Callable[[], None]:
    ranks, step = len(to_buffer), target.shape[0]
    stored = source if collective.stored is None else spread(source, collective.sizes, step)
    if to_buffer != sorted(to_buffer):
        from_buffer = sorted(range(ranks), key=to_buffer.__getitem__)
        segments = rearrange(stored, "(rank n) ... -> rank n ...", rank=ranks, n=step)
        stored = rearrange(segments[from_buffer], "rank n ... -> (rank n) ...")
    stored = stored.to(target.dtype)
    return _waiting(waiter, collective, partial(_reduce_scatter_single, target, stored), stored)


def _waiting(
    waiter: Waiter, collective: Collective, begin: Callable[..., "dist.Work | None"], *keep: torch.Tensor
) -> Callable[[], None]:
    """Begin it; return what waits for its end, and holds what it reads until then."""
    others = [rank for rank in collective.line if rank != collective.mesh.rank]
    try:
        work = begin(group=waiter.group, async_op=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise waiter.failure(others, error) from error

    def finish(held: Sequence[torch.Tensor] = keep) -> None:
        if work is not None:
            waiter.wait([work], others)

    return finish
