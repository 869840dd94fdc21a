"""What a simulation gives back."""

from typing import Generic, NamedTuple, TypeVar

Result = TypeVar("Result")


class Sent(NamedTuple):
    """One message of a simulated run."""

    operation: str
    src: int
    dst: int
    nbytes: int


class Simulation(NamedTuple, Generic[Result]):
    """What `simulate` returns.

    Attributes:
        results: global rank -> what the program returned there, in mesh order.
        trace: every message, in the order of sending.
    """

    results: dict[int, Result]
    trace: tuple[Sent, ...]
