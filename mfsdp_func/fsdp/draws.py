"""Random operators where the first run was compiled: it has no random state that another run could go back to."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class DrawsRefused(TorchDispatchMode):
    """Raises where a random operator draws."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _draws(func, args, kwargs or {}):
            raise NotImplementedError(
                f"apply in compiled code: {func} draws random numbers where a unit runs twice (under vmap, for"
                " derivatives beyond the first, or with recompute), and could not draw the same again; switch dropout off"
                " (apply.eval()), or leave out the transform, or the compiled region, or FsdpContext(compile=...)"
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
