"""Transformations in a row, and the short ones of which the long ones are made."""

from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.operations.views import has_buffers, joined, tensors_of
from mfsdp_func.optim.facts import NOWHERE, Count, Facts, Where, facts_of
from mfsdp_func.optim.masks import Mask, choose
from mfsdp_func.optim.transformation import (
    GradientTransformation,
    LearningRate,
    check_learning_rate,
    check_not_negative,
    first_step,
    learning_rate_at,
    needs_of,
    refuse_count,
    run_part,
    whole_of,
)

State = TypeVar("State")


class EmptyState(NamedTuple):
    """State of a transformation that remembers nothing."""


class ScheduleState(NamedTuple):
    """State of `scale_by_learning_rate`."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64."""


class EmaState(NamedTuple):
    """State of `ema` and `ema_of_params`."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64."""
    ema: Any
    """The running mean: a pytree like the parameters."""


def chain(*parts: GradientTransformation[Any]) -> GradientTransformation[tuple[Any, ...]]:
    """One transformation that hands the updates of each part to the next. The state is the tuple of the parts' states.

    Parts that decide from facts of all ranks (`clip_by_global_norm`, `apply_if_finite`, `divide_by_count`) share one
    all-reduce, as long as the parts before them multiply all gradients by one number, or are of that kind too; one that
    sees other values needs an all-reduce of its own.

    >>> optimizer = chain(add_decayed_weights(0.5), scale_by_learning_rate(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> updates, _ = optimizer.update({"w": torch.zeros(2)}, optimizer.init(params), params)
    >>> updates["w"]
    tensor([-0.0500, -0.0500])
    """
    needs = needs_of(parts)

    def init(params: Any) -> tuple[Any, ...]:
        return tuple([part.init(params) for part in parts])

    def update(
        updates: Any,
        state: tuple[Any, ...],
        params: Any,
        *,
        facts: Facts | None = None,
        count: Count | None = None,
        where: Where = NOWHERE,
    ) -> tuple[Any, tuple[Any, ...]]:
        refuse_count("chain", needs, count)
        known = where + needs.where
        states: list[Any] = []
        for part, old in zip(parts, state, strict=True):
            if part.needs.facts and facts is None:
                facts = facts_of(updates, known, count)
            updates, new = run_part(part, updates, old, params, facts, count, known)
            states.append(new)
            if facts is not None:
                facts = None if part.needs.factor is None else facts.scaled(part.needs.factor(facts))
        return updates, tuple(states)

    return GradientTransformation(init, update, whole_of(parts), needs)


def counted_chain(
    first: GradientTransformation[State], *then: GradientTransformation[Any]
) -> GradientTransformation[State]:
    """A `chain` whose later parts remember nothing but a count, which they share with the first part's ``step``.

    So the state is that of the first part alone.
    """
    parts = (first, *then)

    def update(updates: Any, state: State, params: Any) -> tuple[Any, State]:
        step: torch.Tensor = state.step  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType]
        updates, new = first.update(updates, state, params)
        for part in then:
            updates, _ = part.update(updates, ScheduleState(step), params)
        return updates, new

    return GradientTransformation(first.init, update, whole_of(parts), needs_of(parts))


def on_tensors(transformation: GradientTransformation[State]) -> GradientTransformation[State]:
    """A transformation of a dict of tensors, which then takes buffers and dicts of buffers too.

    It sees tensors under the keys of `mfsdp_func.operations.views.tensors_of`; its updates are joined into buffers.
    """

    def init(params: Any) -> State:
        return transformation.init(tensors_of(params) if has_buffers(params) else params)

    def update(updates: Any, state: State, params: Any, **given: Any) -> tuple[Any, State]:
        if not has_buffers(params):
            return transformation.update(updates, state, params, **given)
        results, new = transformation.update(tensors_of(updates), state, tensors_of(params), **given)
        return joined(results, params), new

    return GradientTransformation(init, update, transformation.whole, transformation.needs)


def add_decayed_weights(rate: float | torch.Tensor, mask: Mask | None = None) -> GradientTransformation[Any]:
    """Add ``rate * param`` to every update, or to those that a mask chooses.

    Args:
        rate: how much; decoupled decay has it before `scale_by_learning_rate`.
        mask: which tensors decay; see `masked`. By default all.

    Raises:
        ValueError: on a negative number.
    """
    check_not_negative("add_decayed_weights: weight_decay", rate=rate)

    def decay(update: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        return update + rate * param

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if not isinstance(rate, torch.Tensor) and rate == 0:
            return updates, state
        if mask is not None:
            shares = choose(mask, params)
            tensors, decaying = tensors_of(updates), tensors_of(params)
            results = {key: decay(one, decaying[key]) if shares[key] else one for key, one in tensors.items()}
            return joined(results, updates), state
        if isinstance(updates, dict) and isinstance(params, dict) and len(updates) < len(params):
            params = {key: params[key] for key in updates}
        return pytree.tree_map(decay, updates, params), state

    return GradientTransformation(lambda _: EmptyState(), update)


def scale_by_learning_rate(learning_rate: LearningRate) -> GradientTransformation[ScheduleState]:
    """Multiply every update by minus the learning rate.

    Raises:
        ValueError: on a negative learning rate.
    """
    check_learning_rate("scale_by_learning_rate", learning_rate)

    def update(updates: Any, state: ScheduleState, params: Any) -> tuple[Any, ScheduleState]:
        rate = learning_rate_at(learning_rate, state.step)
        return pytree.tree_map(lambda update: -rate * update, updates), ScheduleState(state.step + 1)

    return GradientTransformation(lambda params: ScheduleState(first_step(params)), update)


def scale(factor: float | torch.Tensor) -> GradientTransformation[Any]:
    """Multiply every update by a number."""

    def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return pytree.tree_map(lambda update: factor * update, updates), state

    return GradientTransformation(lambda _: EmptyState(), update)


def ema(decay: float | torch.Tensor, debias: bool = True) -> GradientTransformation[EmaState]:
    """Replace every update by the running mean of updates, ``decay`` of which each update keeps.

    Args:
        decay: in [0, 1).
        debias: divide by ``1 - decay ** step``, which corrects the start at zero.

    Raises:
        ValueError: on another `decay`.
    """
    _check_decay("ema", decay)

    def init(params: Any) -> EmaState:
        return EmaState(first_step(params), pytree.tree_map(torch.zeros_like, params))

    def update(updates: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        step = state.step + 1
        means = pytree.tree_map(lambda old, new: old * decay + new.to(old.dtype) * (1 - decay), state.ema, updates)
        correction = 1 - decay ** step.double()
        return pytree.tree_map(lambda mean: mean / correction, means) if debias else means, EmaState(step, means)

    return GradientTransformation(init, update)


def ema_of_params(decay: float | torch.Tensor, debias: bool = True) -> GradientTransformation[EmaState]:
    """Let updates through, and keep the running mean of the parameters that they lead to, in ``state.ema``.

    It stands last in a `chain`, where updates are what is added to the parameters. The mean is ready for use: begun
    with the first parameters; or, with `debias`, a mean of those after updates alone, the weights of which sum to one.

    Args:
        decay: how much of the mean an update keeps, in [0, 1).
        debias: see above.

    Raises:
        ValueError: on another `decay`.
    """
    _check_decay("ema_of_params", decay)

    def init(params: Any) -> EmaState:
        return EmaState(first_step(params), pytree.tree_map(lambda param: param.detach().clone(), params))

    def update(updates: Any, state: EmaState, params: Any) -> tuple[Any, EmaState]:
        step = state.step + 1
        weight = (1 - decay) / (1 - decay ** step.double()) if debias else 1 - decay

        def mean(old: torch.Tensor, param: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
            new = (param + update).to(old.dtype)
            return old + weight * (new - old)

        return updates, EmaState(step, pytree.tree_map(mean, state.ema, params, updates))

    return GradientTransformation(init, update)


def _check_decay(label: str, decay: float | torch.Tensor) -> None:
    if not isinstance(decay, torch.Tensor) and not 0 <= decay < 1:
        raise ValueError(f"{label}: decay must lie in [0, 1), got {decay}")
