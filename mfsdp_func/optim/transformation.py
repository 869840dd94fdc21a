"""The shape of every optimizer here: two pure functions, and what combines them."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.optim.facts import NOWHERE, Count, Facts, Needs, Where

State = TypeVar("State")

LearningRate: TypeAlias = float | torch.Tensor | Callable[[torch.Tensor], float | torch.Tensor]
"""A number, a 0-D tensor, or a schedule: a function of the number of updates before this one (0-D int64).

A tensor or a schedule may change its value without a recompilation: a compiled step takes a 0-D learning rate as an
argument and builds the transformation, which is cheap, inside. (Python numbers as arguments are compiled once more at
their first change.) Updates keep the dtype of the parameters; where that is float64, give a float64 tensor.
"""


class GradientTransformation(NamedTuple, Generic[State]):
    """A functional optimizer, in the shape of Optax (DeepMind, 2020): pure, all state explicit.

    ``state = init(params)`` and ``updates, state = update(grads, state, params)``, then
    ``params = apply_updates(params, updates)``. States are pytrees. Both run under `torch.func` and inside
    ``torch.compile(fullgraph=True)``.
    """

    init: Callable[[Any], State]
    update: Callable[..., tuple[Any, State]]
    """``(grads, state, params) -> (updates, state)``; with ``count=`` where a part counts."""
    whole: bool | frozenset[Hashable] = False
    """Whether tensors (or those of which keys) must be whole: of shards, the results would be wrong."""
    needs: Needs = Needs()
    """What it must know of all ranks; a transformation of your own leaves it out."""


def apply_updates(params: Any, updates: Any) -> Any:
    """``params + updates`` for every tensor of a pytree; dtypes stay those of `params`."""
    return pytree.tree_map(lambda param, update: (param + update).to(param.dtype), params, updates)


def run_part(
    part: GradientTransformation[Any],
    updates: Any,
    state: Any,
    params: Any,
    facts: Facts | None = None,
    count: Count | None = None,
    where: Where = NOWHERE,
) -> tuple[Any, Any]:
    """``part.update`` with those of the last three arguments that it takes."""
    if part.needs.facts:
        return part.update(updates, state, params, facts=facts, count=count, where=where)
    if part.needs.count:
        return part.update(updates, state, params, count=count, where=where)
    return part.update(updates, state, params)


def needs_of(parts: Sequence[GradientTransformation[Any]]) -> Needs:
    """What parts need that see the same gradients."""
    where = NOWHERE
    for part in parts:
        where = where + part.needs.where
    return Needs(
        facts=any(part.needs.facts for part in parts),
        count=any(part.needs.count for part in parts),
        where=where,
        host_count=any(part.needs.host_count for part in parts),
    )


def whole_of(parts: Sequence[GradientTransformation[Any]]) -> bool | frozenset[Hashable]:
    """Which tensors must be whole for all of `parts`."""
    keys: frozenset[Hashable] = frozenset()
    for part in parts:
        if part.whole is True:
            return True
        keys = keys | (part.whole or frozenset())
    return keys


def refuse_count(label: str, part: Needs, count: Count | None) -> None:
    """Refuse a count that nothing asks for.

    Raises:
        TypeError: see above.
    """
    if count is not None and not (part.facts or part.count):
        raise TypeError(f"{label}: got count={count}, but no part of it counts; leave it out, or add divide_by_count()")


def check_not_negative(where: str, **values: float | torch.Tensor) -> None:
    """Refuse numbers below zero, and NaN; tensors are taken as they are.

    Raises:
        ValueError: naming the first.
    """
    for name, value in values.items():
        if not isinstance(value, torch.Tensor) and not value >= 0:
            raise ValueError(f"{where}: {name} must be a number >= 0, got {value}")


def check_learning_rate(optimizer: str, learning_rate: LearningRate) -> None:
    """Refuse what can be seen to be no learning rate.

    Raises:
        ValueError: on a negative number or NaN, or a tensor that is not 0-D.
    """
    if isinstance(learning_rate, torch.Tensor):
        if learning_rate.dim():
            raise ValueError(f"{optimizer}: a learning rate tensor must be 0-D, got shape {tuple(learning_rate.shape)}")
    elif not callable(learning_rate) and not learning_rate >= 0:
        raise ValueError(f"{optimizer}: learning_rate must be a number >= 0, got {learning_rate}")


def learning_rate_at(learning_rate: LearningRate, step: torch.Tensor) -> float | torch.Tensor:
    """The learning rate of the update that follows `step` others."""
    return learning_rate(step) if callable(learning_rate) else learning_rate


def first_step(params: Any) -> torch.Tensor:
    """A step counter at zero, 0-D int64, on the device of the parameters."""
    return torch.zeros((), dtype=torch.int64, device=device_of(params))


def device_of(params: Any) -> torch.device | None:
    """Where the parameters live; None where there are none."""
    leaves = pytree.tree_leaves(params)
    return leaves[0].device if leaves else None


def select(condition: torch.Tensor, new: Any, old: Any) -> Any:
    """The leaves of `new` where the 0-D `condition` holds, else those of `old`, bit for bit. No host waits for it.

    What the host counts goes on, as the host does not know the condition.
    """

    def choose(one: Any, other: Any) -> Any:
        return torch.where(condition.to(one.device), one, other) if isinstance(one, torch.Tensor) else one

    return pytree.tree_map(choose, new, old)


def unchanged(params: Any) -> Any:
    """Updates that leave every parameter as it is, bit for bit: minus zero, as zero would turn minus zero into zero."""
    return pytree.tree_map(lambda param: torch.full_like(param, -0.0), params)
