"""A unit's own forward: as it was written, or compiled for itself."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mfsdp_func.effects.torch_internals import is_untransformed


class Forward:
    """The forward of a module.

    Args:
        plain: as it was written.
        options: keywords of `torch.compile`; None for not compiled.

    Attributes:
        is_checked: whether a watched run of the plain forward has let nothing in or out unseen.
    """

    def __init__(self, plain: Callable[..., Any], options: Mapping[str, Any] | None) -> None:
        self.plain, self.is_checked = plain, False
        self._options = options
        self._compiled = None if options is None else torch.compile(plain, **options)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Forward":
        return Forward(copy.deepcopy(self.plain, memo), self._options)

    @property
    def is_plain(self) -> bool:
        """Whether it is never compiled."""
        return self._compiled is None

    @property
    def is_compiled(self) -> bool:
        """Whether a call runs compiled code, which nobody can watch: where it shall, once that was done or need not be."""
        return self._compiled is not None and (self.is_checked or not torch.is_grad_enabled())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The results of the compiled code; of the plain forward under transforms and tracers, and where there is none."""
        run = self.plain if self._compiled is None or not is_untransformed() else self._compiled
        return run(*args, **kwargs)
