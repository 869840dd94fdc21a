"""Gradients of several micro-batches, and one update of their mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.optim.facts import NOWHERE, Count, Needs, Where
from mfsdp_func.optim.transformation import GradientTransformation, device_of, refuse_count, run_part, unchanged


@dataclass(frozen=True)
class AccumulateState:
    """State of `accumulate`: a pytree of a Python int, `mini_step`, and the last three fields."""

    counter: torch.Tensor
    """Holds no element; its first dim is 2 more than `mini_step`.

    The host knows it, and one compiled graph serves all sizes: a Python int would be compiled once per value.
    """
    gradients: Any
    """Of the micro-batches since the last update, each divided by their number in an update: like the parameters."""
    count: torch.Tensor
    """What these updates got as ``count=`` on this rank: 0-D, float64."""
    inner_state: Any
    """As the last update left it."""

    @property
    def mini_step(self) -> int:
        """Number of micro-batches since the last update."""
        return self.counter.shape[0] - 2


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
    ...     print(updates["w"].item(), state.mini_step)
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
        return AccumulateState(_counter(0), zeros, count, inner.init(params))

    def update(
        grads: Any, state: AccumulateState, params: Any, *, count: Count | None = None, where: Where = NOWHERE
    ) -> tuple[Any, AccumulateState]:
        refuse_count("accumulate", needs, count)
        total = state.count if count is None else state.count + count
        mean = pytree.tree_map(lambda old, grad: old + (grad / every).to(old.dtype), state.gradients, grads)
        if state.counter.shape[0] == every + 1:
            given = total if asks and count is not None else None
            updates, new = run_part(inner, mean, state.inner_state, params, None, given, where)
            zeros = pytree.tree_map(torch.zeros_like, mean)
            return updates, AccumulateState(_counter(0), zeros, torch.zeros_like(total), new)
        counter = torch.empty((state.counter.shape[0] + 1, 0))
        return unchanged(params), AccumulateState(counter, mean, total, state.inner_state)

    return GradientTransformation(init, update, inner.whole, needs)


def _counter(mini_step: int) -> torch.Tensor:
    counter = torch.empty((mini_step + 2, 0))
    if not torch.compiler.is_compiling():
        torch._dynamo.maybe_mark_dynamic(counter, 0)
    return counter


def _flatten(state: AccumulateState) -> tuple[list[Any], None]:
    return [state.mini_step, state.gradients, state.count, state.inner_state], None


def _flatten_with_keys(state: AccumulateState) -> tuple[list[tuple[Any, Any]], None]:
    names = ("mini_step", "gradients", "count", "inner_state")
    return [(pytree.GetAttrKey(name), value) for name, value in zip(names, _flatten(state)[0], strict=True)], None


def _unflatten(children: Sequence[Any], context: None) -> AccumulateState:
    mini_step, gradients, count, inner_state = children
    # Transforms put placeholders of all kinds here.
    counter: Any = _counter(mini_step) if isinstance(mini_step, int) else mini_step
    return AccumulateState(counter, gradients, count, inner_state)


pytree.register_pytree_node(
    AccumulateState,
    _flatten,  # pyright: ignore[reportArgumentType]
    _unflatten,  # pyright: ignore[reportArgumentType]
    serialized_type_name="mfsdp_func.AccumulateState",
    flatten_with_keys_fn=_flatten_with_keys,
)
