"""What faults do to a rank when it comes to its points."""

from collections.abc import Iterable

from mfsdp_func.effects.faults import Corrupt, Fault, InjectedFault, Kill, Raise, Stall
from mfsdp_func.simulation.baton import Baton, Rank
from mfsdp_func.simulation.errors import Killed


class Injection:
    """The faults of one rank.

    Attributes:
        points: how many points the rank has come to.
    """

    def __init__(self, baton: Baton, rank: Rank, faults: Iterable[Fault]) -> None:
        self._baton, self._rank = baton, rank
        self._faults: dict[int, list[Fault]] = {}
        for fault in faults:
            if fault.rank == rank.id:
                self._faults.setdefault(fault.at, []).append(fault)
        self._dead = False
        self.points = 0

    def come_to_point(self, label: str) -> list[int]:
        """The rank is about to communicate.

        Returns:
            The bits to flip in what it sends.

        Raises:
            InjectedFault: if that is its fault.
        """
        if self._dead:  # what a program does on its way out happens no more
            raise Killed
        at, flips = self.points, list[int]()
        self.points += 1
        for fault in self._faults.get(at, ()):
            self._baton.faulty = True
            if isinstance(fault, Corrupt):
                flips.append(fault.bit)
            if isinstance(fault, Kill):
                self._dead = True
                raise Killed
            if isinstance(fault, Stall):
                self._baton.sleep(self._rank, fault.seconds)
            elif isinstance(fault, Raise):
                raise InjectedFault(f"{label}: rank {self._rank.id} fails at its point {at}, as asked by {fault}")
        return flips
