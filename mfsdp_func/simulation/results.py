"""What a simulation gives back."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

Result = TypeVar("Result")


class Sent(NamedTuple):
    """One message of a simulated run."""

    operation: str
    src: int
    dst: int
    nbytes: int


@dataclass(frozen=True)
class Simulation(Generic[Result]):
    """What `simulate` returns. It unpacks into ``results, trace``.

    Attributes:
        results: global rank -> what the program returned there, in mesh order.
        trace: every message, in the order of sending.
        errors: global rank -> what a fault made the program raise there; ranks that were killed are neither here nor in
            `results`.
        points: global rank -> how many points it passed at which a fault may happen.
        tape: the choices that were made; as ``choices=`` they give the same run.
        replay: the call that gives the same run, in one line; empty where all settings are as usual.
        seconds: how long the run took on the virtual clock, which only stalls and timeouts move.
    """

    results: dict[int, Result]
    trace: tuple[Sent, ...]
    errors: dict[int, Exception] = field(default_factory=dict)
    points: dict[int, int] = field(default_factory=dict)
    tape: tuple[int, ...] = ()
    seconds: float = 0.0
    replay: str = ""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.results, self.trace))
