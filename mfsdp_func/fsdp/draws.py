"""Random operators in compiled code: what they draw in a forward pass is kept, and given again in the backward pass.

Eagerly, a unit draws again from the same random state. Compiled code has no such state to go back to, but its graph can
hold the drawn tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_NATIVE_DROPOUT = torch.ops.aten.native_dropout.default


class Recorded(TorchDispatchMode):
    """Keeps what random operators draw.

    Attributes:
        draws: the tensors.
        operators: the names of the operators, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.draws: list[torch.Tensor] = []
        self.operators: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if _draws(func, args, kwargs or {}):
            kept = results[1] if func is _NATIVE_DROPOUT else results
            self.draws += [leaf.clone() for leaf in pytree.tree_leaves(kept) if isinstance(leaf, torch.Tensor)]
            self.operators.append(str(func))
        return results


class Replayed(TorchDispatchMode):
    """Gives what was drawn before, in the same order.

    Raises:
        RuntimeError: if other operators draw than before.
    """

    def __init__(self, draws: Sequence[torch.Tensor], operators: Sequence[str]) -> None:
        super().__init__()
        self._draws, self._operators = iter(draws), iter(operators)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws(func, args, kwargs):
            return func(*args, **kwargs)
        if (before := next(self._operators, "nothing")) != str(func):
            raise RuntimeError(
                f"apply in a compiled region: {func} draws random numbers where {before} did in the forward pass, so"
                " the same cannot be given again; switch dropout off (apply.eval()), or call apply eagerly"
            )
        if func is _NATIVE_DROPOUT:
            mask = next(self._draws)
            return args[0] * mask * (1 / (1 - args[1])), mask.clone()
        if func._schema.is_mutable:
            return args[0].copy_(next(self._draws))
        if len(func._schema.returns) == 1:
            return next(self._draws).clone()
        # Some of several results may be no tensors: what is drawn here in vain is not used.
        return pytree.tree_map_only(torch.Tensor, lambda _: next(self._draws).clone(), func(*args, **kwargs))


class Refused(TorchDispatchMode):
    """Raises where a random operator draws."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _draws(func, args, kwargs or {}):
            raise NotImplementedError(
                f"apply in a compiled region: {func} draws random numbers under vmap, and the backward pass could not"
                " draw the same again; switch dropout off (apply.eval()), or leave vmap or the compiled region out"
            )
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for n, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":  # attention draws nothing where it drops nothing
            given = args[n] if n < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given)
    return True
