"""Where calls of different ranks meet: the n-th call of one kind on each rank."""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Generic, TypeVar

from mfsdp_func.values.mesh import Mesh

Entry = TypeVar("Entry")


class Meeting(Generic[Entry]):
    """The n-th calls of one kind, one of each rank, which meet one another."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: dict[int, Entry] = {}
        self.compared = False
        self._first_missing: Callable[[], int | None] | None = None

    def missing_of(self, mesh: Mesh) -> Callable[[], int | None]:
        """`missing` of all ranks of the mesh on which the calls are; what one rank has seen come, no other looks for."""
        self._first_missing = self._first_missing or self.missing(mesh.ranks)
        return self._first_missing

    def missing(self, ranks: Iterable[int]) -> Callable[[], int | None]:
        """A function that gives the first of `ranks` that has not come yet."""
        remaining = iter(ranks)
        awaited = next(remaining, None)

        def first() -> int | None:
            nonlocal awaited
            while awaited in self.entries:
                awaited = next(remaining, None)
            return awaited

        return first


class Meetings:
    """All meetings of a simulation."""

    def __init__(self) -> None:
        self._of_kind: dict[Hashable, list[Meeting[Any]]] = {}
        self._made: dict[tuple[int, Hashable], int] = {}
        """How many calls of each kind each rank has made."""

    def join(self, rank: int, kind: Hashable, entry: Entry) -> Meeting[Entry]:
        """Put a rank's next call of a kind to those of the others."""
        number, meetings = self._made.get((rank, kind), 0), self._of_kind.setdefault(kind, [])
        self._made[rank, kind] = number + 1
        if number == len(meetings):
            meetings.append(Meeting(number))
        meetings[number].entries[rank] = entry
        return meetings[number]
