"""Transformations in a row, and the short ones of which the long ones are made."""

from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.optim.transformation import (
    GradientTransformation,
    LearningRate,
    check_learning_rate,
    check_not_negative,
    first_step,
    learning_rate_at,
)

State = TypeVar("State")


class EmptyState(NamedTuple):
    """State of a transformation that remembers nothing."""


class ScheduleState(NamedTuple):
    """State of `scale_by_learning_rate`."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64."""


def chain(*parts: GradientTransformation[Any]) -> GradientTransformation[tuple[Any, ...]]:
    """One transformation that hands the updates of each part to the next. The state is the tuple of the parts' states.

    >>> optimizer = chain(add_decayed_weights(0.5), scale_by_learning_rate(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> updates, _ = optimizer.update({"w": torch.zeros(2)}, optimizer.init(params), params)
    >>> updates["w"]
    tensor([-0.0500, -0.0500])
    """

    def init(params: Any) -> tuple[Any, ...]:
        return tuple(part.init(params) for part in parts)

    def update(updates: Any, state: tuple[Any, ...], params: Any) -> tuple[Any, tuple[Any, ...]]:
        states: list[Any] = []
        for part, old in zip(parts, state, strict=True):
            updates, new = part.update(updates, old, params)
            states.append(new)
        return updates, tuple(states)

    return GradientTransformation(init, update, _whole(parts))


def counted_chain(
    first: GradientTransformation[State], *then: GradientTransformation[Any]
) -> GradientTransformation[State]:
    """A `chain` whose later parts remember nothing but a count, which they share with the first part's ``step``.

    So the state is that of the first part alone.
    """

    def update(updates: Any, state: State, params: Any) -> tuple[Any, State]:
        step: torch.Tensor = state.step  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
        updates, new = first.update(updates, state, params)
        for part in then:
            updates, _ = part.update(updates, ScheduleState(step), params)
        return updates, new

    return GradientTransformation(first.init, update, _whole((first, *then)))


def _whole(parts: Iterable[GradientTransformation[Any]]) -> bool | frozenset[Hashable]:
    keys: frozenset[Hashable] = frozenset()
    for part in parts:
        if part.whole is True:
            return True
        keys = keys | (part.whole or frozenset())
    return keys


def add_decayed_weights(weight_decay: float | torch.Tensor) -> GradientTransformation[Any]:
    """Add ``weight_decay * param`` to every update.

    Raises:
        ValueError: on a negative number.
    """
    check_not_negative("add_decayed_weights", weight_decay=weight_decay)

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if isinstance(weight_decay, float | int) and not weight_decay:
            return updates, state
        decayed = {key: update + weight_decay * params[key] for key, update in updates.items()}
        return decayed, state

    return GradientTransformation(lambda _: EmptyState(), update)


def scale_by_learning_rate(learning_rate: LearningRate) -> GradientTransformation[ScheduleState]:
    """Multiply every update by minus the learning rate, and give it the dtype of the parameter.

    Raises:
        ValueError: on a negative learning rate.
    """
    check_learning_rate("scale_by_learning_rate", learning_rate)

    def update(updates: Any, state: ScheduleState, params: Any) -> tuple[Any, ScheduleState]:
        rate = learning_rate_at(learning_rate, state.step)
        return pytree.tree_map(lambda update: -rate * update, updates), ScheduleState(state.step + 1)

    return GradientTransformation(lambda params: ScheduleState(first_step(params)), update)
