"""Settings of a transformation as part of its state: changed between steps, saved and loaded with it."""

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch

from mfsdp_func.optim.facts import NOWHERE, Count, Facts, Needs, Where
from mfsdp_func.optim.transformation import GradientTransformation, first_step, run_part


class InjectHyperparamsState(NamedTuple):
    """State of a transformation made by `inject_hyperparams`."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64."""
    hyperparams: dict[str, Any]
    """Values of the last update: 0-D tensors, float64, or tuples of them. New values are used by the next one."""
    inner_state: Any
    """Of the transformation itself."""


def inject_hyperparams(
    inner_factory: Callable[..., GradientTransformation[Any]], static_args: Collection[str] = ()
) -> Callable[..., GradientTransformation[InjectHyperparamsState]]:
    """The factory of a transformation, with its numbers in the state, and schedules for any of them.

    Args:
        inner_factory: such as `adamw`.
        static_args: names of arguments that are neither numbers that may change nor schedules (functions that are used
            as they are). Ints, bools and strings are static anyway.

    Returns:
        A function of the same arguments. Of them, floats, 0-D tensors and tuples of these become hyperparameters;
        functions are schedules, called with the number of updates before (0-D, int64).

    >>> from mfsdp_func.optim import adamw
    >>> optimizer = inject_hyperparams(adamw)(0.1, weight_decay=lambda step: 0.5 * 0.1 ** step.double())
    >>> params = {"w": torch.ones(1)}
    >>> state = optimizer.init(params)
    >>> state.hyperparams["learning_rate"] = torch.tensor(1.0)
    >>> updates, state = optimizer.update({"w": torch.zeros(1)}, state, params)
    >>> updates["w"].item()
    -0.5
    """

    def make(*args: Any, **kwargs: Any) -> GradientTransformation[InjectHyperparamsState]:
        bound = inspect.signature(inner_factory).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        numbers = {name: value for name, value in given.items() if name not in static_args and _is_number(value)}
        schedules = {name: value for name, value in given.items() if name not in static_args and callable(value)}
        rest = {name: value for name, value in given.items() if name not in numbers and name not in schedules}
        positional = [
            name
            for name, parameter in inspect.signature(inner_factory).parameters.items()
            if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]

        def inner_of(hyperparams: Mapping[str, Any]) -> GradientTransformation[Any]:
            values = {**rest, **hyperparams}
            first = [values[name] for name in positional]
            return inner_factory(*first, **{name: values[name] for name in values if name not in positional})

        def scheduled(step: torch.Tensor) -> dict[str, Any]:
            return {name: _as_tensor(schedule(step), step.device) for name, schedule in schedules.items()}

        def init(params: Any) -> InjectHyperparamsState:
            step = first_step(params)
            hyperparams = {name: _as_tensors(value, step.device) for name, value in numbers.items()} | scheduled(step)
            return InjectHyperparamsState(step, hyperparams, inner_of(hyperparams).init(params))

        def update(
            grads: Any,
            state: InjectHyperparamsState,
            params: Any,
            *,
            facts: Facts | None = None,
            count: Count | None = None,
            where: Where = NOWHERE,
        ) -> tuple[Any, InjectHyperparamsState]:
            hyperparams = state.hyperparams | scheduled(state.step)
            inner = inner_of(hyperparams)
            updates, new = run_part(inner, grads, state.inner_state, params, facts, count, where)
            return updates, InjectHyperparamsState(state.step + 1, hyperparams, new)

        example = inner_factory(*args, **kwargs) if not schedules else inner_of(scheduled(torch.zeros(())) | numbers)
        asks = example.needs
        needs = Needs(asks.facts, asks.count, asks.where, None, asks.host_count)
        return GradientTransformation(init, update, example.whole, needs)

    return make


def _is_number(value: Any) -> bool:
    if isinstance(value, tuple):
        return bool(value) and all(map(_is_number, value))  # pyright: ignore[reportUnknownArgumentType]
    return isinstance(value, float) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _as_tensors(value: Any, device: torch.device) -> Any:
    return tuple([_as_tensor(one, device) for one in value]) if isinstance(value, tuple) else _as_tensor(value, device)


def _as_tensor(value: Any, device: torch.device) -> torch.Tensor:
    return torch.as_tensor(value, dtype=torch.float64, device=device).clone()
