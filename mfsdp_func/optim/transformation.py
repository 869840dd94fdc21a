"""The shape of every optimizer here: two pure functions, and what combines them."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch.utils import _pytree as pytree

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
    update: Callable[[Any, State, Any], tuple[Any, State]]
    whole: bool | frozenset[Hashable] = False
    """Whether tensors (or those of which keys) must be whole: of shards, the results would be wrong."""


def apply_updates(params: Any, updates: Any) -> Any:
    """``params + updates`` for every tensor of a pytree; dtypes stay those of `params`."""
    return pytree.tree_map(lambda param, update: (param + update).to(param.dtype), params, updates)


def partition(
    *parts: tuple[Iterable[Hashable], GradientTransformation[Any]],
) -> GradientTransformation[tuple[Any, ...]]:
    """One transformation for a dict of tensors, each part of its keys handled by a transformation of its own.

    A rank may hold tensors of some keys only; every part is called on every rank. The state is the tuple of the
    parts' states.

    Args:
        parts: the keys of a part, and its transformation.

    Raises:
        ValueError: if two parts claim one key.
        KeyError: in `init` and `update`, on a tensor that no part claims.
    """
    claims = [frozenset(keys) for keys, _ in parts]
    claimed = {key for claim in claims for key in claim}
    if sum(map(len, claims)) != len(claimed):
        raise ValueError("partition: two parts claim the same key; give each tensor to one transformation")

    def split(tensors: Mapping[Hashable, torch.Tensor]) -> list[dict[Hashable, torch.Tensor]]:
        for key in tensors:
            if key not in claimed:
                raise KeyError(f"partition: no part claims tensor {key!r}; list its key in one of the parts")
        return [{key: tensors[key] for key in tensors if key in claim} for claim in claims]

    def init(params: Mapping[Hashable, torch.Tensor]) -> tuple[Any, ...]:
        return tuple(part.init(own) for (_, part), own in zip(parts, split(params), strict=True))

    def update(
        grads: Mapping[Hashable, torch.Tensor], state: tuple[Any, ...], params: Mapping[Hashable, torch.Tensor]
    ) -> tuple[dict[Hashable, torch.Tensor], tuple[Any, ...]]:
        updates: dict[Hashable, torch.Tensor] = {}
        states: list[Any] = []
        for (_, part), given, old, own in zip(parts, split(grads), state, split(params), strict=True):
            some, new = part.update(given, old, own)
            updates.update(some)
            states.append(new)
        return {key: updates[key] for key in params}, tuple(states)

    whole = [claim if part.whole is True else part.whole or () for claim, (_, part) in zip(claims, parts, strict=True)]
    return GradientTransformation(init, update, frozenset().union(*whole))


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
    leaves = pytree.tree_leaves(params)
    return torch.zeros((), dtype=torch.int64, device=leaves[0].device if leaves else None)
