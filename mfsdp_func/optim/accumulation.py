"""Gradients of several micro-batches, and one update of their mean."""

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.optim.facts import NOWHERE, Count, Needs, Where
from mfsdp_func.optim.host_count import HostCount
from mfsdp_func.optim.transformation import GradientTransformation, device_of, refuse_count, run_part, unchanged


class AccumulateState(NamedTuple):
    """State of `accumulate`."""

    mini_step: HostCount
    """Number of micro-batches since the last update; the host knows it."""
    gradients: Any
    """Of the micro-batches since the last update, each divided by their number in an update: like the parameters."""
    count: torch.Tensor
    """What these updates got as ``count=`` on this rank: 0-D, float64."""
    inner_state: Any
    """As the last update left it."""


def accumulate(inner: GradientTransformation[Any], every: int) -> GradientTransformation[AccumulateState]:
    """Hand the mean of the gradients of `every` updates to `inner`; the updates in between change nothing.

    The host counts, alike on all ranks, so that there is no communication in between; a compiled update has two graphs.
    Counts given to the updates are added up.

    Args:
        inner: what updates. What it decides for all ranks, it decides from the mean.
        every: number of micro-batches, at least 1.

    Raises:
        ValueError: on another number.

    >>> from mfsdp_func.optim import scale
    >>> optimizer = accumulate(scale(-1.0), 2)
    >>> params = {"w": torch.ones(1)}
    >>> state = optimizer.init(params)
    >>> for value in (1.0, 3.0):
    ...     updates, state = optimizer.update({"w": torch.tensor([value])}, state, params)
    ...     print(updates["w"].item(), state.mini_step.value)
    -0.0 1
    -2.0 0
    """
    if every < 1:
        raise ValueError(f"accumulate: every must be at least 1, got {every}")
    asks = inner.needs.facts or inner.needs.count
    needs = Needs(count=asks, where=inner.needs.where, host_count=True)

    def init(params: Any) -> AccumulateState:
        zeros = pytree.tree_map(torch.zeros_like, params)
        count = torch.zeros((), dtype=torch.float64, device=device_of(params))
        return AccumulateState(HostCount.of(0), zeros, count, inner.init(params))

    def update(
        grads: Any, state: AccumulateState, params: Any, *, count: Count | None = None, where: Where = NOWHERE
    ) -> tuple[Any, AccumulateState]:
        refuse_count("accumulate", needs, count)
        total = state.count if count is None else state.count + count
        mean = pytree.tree_map(lambda old, grad: old + (grad / every).to(old.dtype), state.gradients, grads)
        if state.mini_step.value == every - 1:
            given = total if asks and count is not None else None
            updates, new = run_part(inner, mean, state.inner_state, params, None, given, where)
            zeros = pytree.tree_map(torch.zeros_like, mean)
            return updates, AccumulateState(HostCount.of(0), zeros, torch.zeros_like(total), new)
        return unchanged(params), AccumulateState(state.mini_step.next(), mean, total, state.inner_state)

    return GradientTransformation(init, update, inner.whole, needs)
