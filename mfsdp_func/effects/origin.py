"""Where a call comes from, in words that ranks can compare: its line, its names, its number, the caller's label."""

import os
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch

LABEL: ContextVar[str] = ContextVar("mfsdp_func_label", default="")
"""The caller's label of all calls in a context."""


@dataclass(eq=False)
class Ledger:
    """What a rank counts on one mesh: alike on all ranks as long as they agree."""

    calls: int = 0
    """Number of calls that were compared and have begun."""
    groups: int = 0
    """Number of unnamed groups met so far."""
    numbers: "dict[int, tuple[ref[Any], int]]" = field(default_factory=dict)
    """The number of each living one, by `id`: kept beside the values, which are equal to one another."""
    compared: bool = False
    """Whether the ranks have compared their environment variables."""

    def numbers_of(self, groups: Sequence[object]) -> list[int]:
        """The number that each group has, or will have."""
        found: dict[int, int] = {}
        following = self.groups
        for group in groups:
            known = self.numbers.get(id(group))
            if known is not None and known[0]() is group:
                found[id(group)] = known[1]
            elif id(group) not in found:
                found[id(group)] = following
                following += 1
        return [found[id(group)] for group in groups]

    def keep(self, groups: Sequence[object]) -> None:
        """Give the groups their numbers for good."""
        for group, number in zip(groups, self.numbers_of(groups), strict=True):
            key = id(group)
            if number >= self.groups:
                self.numbers[key] = ref(group, lambda _, key=key: self.numbers.pop(key, None)), number  # pyright: ignore[reportUnknownLambdaType]
                self.groups = number + 1


@dataclass(eq=False)
class Origin:
    """The call of the program behind a call of a carrier; autograd's calls keep that of the forward call.

    Attributes:
        name: of what moves, where the map's own label does not say it.
        groups: the unnamed groups that the caller gave.
        line: where in the program.
        label: the caller's, see `agreement_check`.
        number: of this call among those of its mesh, once it has begun; None where not all ranks can know it.
    """

    name: str
    groups: tuple[object, ...]
    line: str
    label: str
    number: int | None = None

    def facts(self, ledger: Ledger) -> dict[str, str]:
        """What ranks compare of a call of the program."""
        numbers = ledger.numbers_of(self.groups)
        return {
            "name": self.name,
            "label": self.label,
            "line": self.line,
            "unnamed groups, numbered by first use": ", ".join(map(str, numbers)),
        }

    def facts_behind(self) -> dict[str, str]:
        """What ranks compare of autograd's calls."""
        if self.number is None:
            return {}
        label = f" ({self.label})" if self.label else ""
        return {"forward call": f"number {self.number} at {self.line}{label}"}

    def begin(self, ledger: Ledger, known: bool) -> None:
        """Count the call, on which the ranks agree."""
        ledger.keep(self.groups)
        self.number = ledger.calls if known else None
        ledger.calls += 1


def origin_here(name: str, groups: Sequence[object]) -> Origin:
    """The origin of the call that is being made."""
    return Origin(name, tuple(groups), line_here(), LABEL.get())


_INSIDE = tuple(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__))


def line_here() -> str:
    """The innermost line outside of this package and of torch."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    if frame is None:
        return ""
    return f"{'/'.join(frame.f_code.co_filename.split(os.sep)[-2:])}:{frame.f_lineno}"
