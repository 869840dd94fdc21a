"""A count that the host knows without asking a device, in a state that may be compiled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class HostCount:
    """A small number that is the same on all ranks. A pytree of a Python int, `value`.

    Attributes:
        counter: holds no element; its first dim is 2 more than the number. So one compiled graph serves all numbers that
            take the same branch, where a Python int would be compiled once per value.

    >>> HostCount.of(3).next(), HostCount.of(3).value
    (HostCount(4), 3)
    """

    counter: torch.Tensor

    @staticmethod
    def of(value: int) -> "HostCount":
        """The count of a number."""
        counter = torch.empty((value + 2, 0))
        if not torch.compiler.is_compiling():
            torch._dynamo.maybe_mark_dynamic(counter, 0)
        return HostCount(counter)

    @property
    def value(self) -> int:
        """The number."""
        return self.counter.shape[0] - 2

    def next(self) -> "HostCount":
        """One more."""
        return HostCount(torch.empty((self.counter.shape[0] + 1, 0)))

    def __repr__(self) -> str:
        return f"HostCount({self.value})"

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, HostCount) else other)

    def __hash__(self) -> int:
        return hash(self.value)


def _flatten(count: HostCount) -> tuple[list[Any], None]:
    given: Any = count.counter  # a placeholder, where there are no two dims
    return [count.value if isinstance(given, torch.Tensor) and given.dim() == 2 else given], None


def _flatten_with_keys(count: HostCount) -> tuple[list[tuple[Any, Any]], None]:
    return [(pytree.GetAttrKey("value"), _flatten(count)[0][0])], None


def _unflatten(children: Sequence[Any], context: None) -> HostCount:
    (value,) = children
    # Transforms put placeholders of all kinds here.
    return HostCount.of(value) if isinstance(value, int) else HostCount(value)


pytree.register_pytree_node(
    HostCount,
    _flatten,  # pyright: ignore[reportArgumentType]
    _unflatten,  # pyright: ignore[reportArgumentType]
    serialized_type_name="mfsdp_func.HostCount",
    flatten_with_keys_fn=_flatten_with_keys,
)
