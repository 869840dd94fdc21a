"""Operations as NCCL runs them: in the order of their launch, each holding its stream until its peers have come.

NCCL's documentation asks that operations on several communicators be launched in one order on all ranks, because the
kernel of the first may keep that of the second from running while it waits for its peers. Here it always does: one queue
per rank and stream, whose head waits for the same operation to be at the head on all its peers. So a program that passes
here cannot deadlock in this way on hardware, whatever runs at once there.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from mfsdp_func.simulation.meetings import Meeting


@dataclass(eq=False)
class Operation:
    """One rank's part in one operation.

    Attributes:
        label: what it is.
        rank: whose it is.
        stream: on which stream of the rank.
        communicator: over which ranks, by their mesh's digest.
        meeting: where it meets the others.
        peers: with whom it must run at once.
    """

    label: str
    rank: int
    stream: Hashable
    communicator: str
    meeting: Meeting[object]
    peers: frozenset[int]
    started: bool = False
    done: bool = False

    def __post_init__(self) -> None:
        self.awaited = set(self.peers)
        """The peers whose part has not started yet."""


class Queues:
    """The queues of all ranks."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, Hashable], deque[Operation]] = {}
        self._operations: dict[tuple[Meeting[object], int], Operation] = {}
        self._first: dict[str, Meeting[object]] = {}

    def launch(
        self,
        label: str,
        rank: int,
        meeting: Meeting[object],
        communicator: str,
        peers: Iterable[int],
        everybody: Iterable[int],
        stream: Hashable = None,
    ) -> Operation:
        """Put an operation at the end of a stream's queue.

        Args:
            label: what it is.
            rank: whose it is.
            meeting: where it meets the others.
            communicator: the first operation of each needs all its ranks, as they set it up together.
            peers: with whom it exchanges something.
            everybody: the communicator's ranks.
            stream: of the rank.
        """
        sets_up = self._first.setdefault(communicator, meeting) is meeting
        operation = Operation(
            label, rank, stream, communicator, meeting, frozenset(everybody if sets_up else peers) - {rank}
        )
        self._operations[meeting, rank] = operation
        self._queues.setdefault((rank, stream), deque()).append(operation)
        self._advance((rank, stream))
        return operation

    def drop(self, rank: int, communicator: str) -> None:
        """A rank gives a communicator up, and everything that it has launched there."""
        for queue, waiting in self._queues.items():
            if queue[0] == rank and any(operation.communicator == communicator for operation in waiting):
                left = [operation for operation in waiting if operation.communicator != communicator]
                waiting.clear()
                waiting.extend(left)
                self._advance(queue)

    def words(self, operation: Operation) -> str:
        """What an operation that is not done waits for."""
        holder = self._queues[operation.rank, operation.stream][0]
        if holder is not operation:
            peers = ", ".join(map(str, sorted(holder.awaited)))
            return (
                f"its stream, which {holder.label} (call {holder.meeting.number}) holds until ranks {peers} come to it"
            )
        return f"rank {min(operation.awaited)}, whose stream another operation holds"

    def _advance(self, queue: tuple[int, Hashable]) -> None:
        """Start whatever is at the head; what is done makes room for the next."""
        changed = [queue]
        while changed:
            waiting = self._queues.get(changed.pop())
            if not waiting:
                continue
            head = waiting[0]
            if not head.started:
                head.started = True
                for peer in head.peers:
                    other = self._operations.get((head.meeting, peer))
                    if other is None:
                        continue
                    if other.started:
                        head.awaited.discard(peer)
                    other.awaited.discard(head.rank)
                    if other.started and not other.awaited and not other.done:
                        changed.append((other.rank, other.stream))
            if not head.awaited:
                head.done = True
                waiting.popleft()
                changed.append((head.rank, head.stream))
