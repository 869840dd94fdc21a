"""What may go wrong on a rank, as values: given to `simulate`, or injected into the carrier of a real rank.

A rank's *points* are its communicating calls, counted from 0: every exchange, every collective, and every comparison of
the agreement check. A fault happens at the beginning of its point, before anything of that call has been sent.
"""

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True)
class Kill:
    """The rank is gone, without a word, as after ``kill -9``.

    Attributes:
        rank: global rank.
        at: its point.
    """

    rank: int
    at: int


@dataclass(frozen=True)
class Stall:
    """The rank stands still for a while, and then goes on.

    Attributes:
        rank: global rank.
        at: its point.
        seconds: for how long.
    """

    rank: int
    at: int
    seconds: float


@dataclass(frozen=True)
class Raise:
    """The rank's own call raises, as after a failure of its memory or its disk; its program may go on.

    Attributes:
        rank: global rank.
        at: its point.
    """

    rank: int
    at: int


@dataclass(frozen=True)
class Corrupt:
    """One bit of what the rank sends is flipped on the way.

    Attributes:
        rank: global rank.
        at: its point; nothing happens where it sends nothing there.
        bit: which, counted over the call's messages, one after the other; beyond their end it begins anew.
    """

    rank: int
    at: int
    bit: int


Fault: TypeAlias = Kill | Stall | Raise | Corrupt
"""Any of them."""


class InjectedFault(RuntimeError):
    """What `Raise` raises."""


__all__ = ["Corrupt", "Fault", "InjectedFault", "Kill", "Raise", "Stall"]
