"""What is sure to be done before what, on streams that run beside one another: vector clocks.

Pieces of work are numbered in the order in which they are queued. For each stream and each event, the last piece of
every stream that is sure to be done then. The laws are those of ``torch.cuda._sanitizer``, which a test compares.
"""

from collections.abc import Mapping
from typing import TypeAlias

Moment: TypeAlias = Mapping[int, int]
"""Stream -> the last piece of its work that is done."""


class Clocks:
    """The clocks of all streams, which are numbers here."""

    def __init__(self) -> None:
        self._done: dict[int, dict[int, int]] = {}
        self._last = 0

    def begin(self, stream: int, after: Moment) -> None:
        """A new stream, made by a host that knows what is done."""
        self._done[stream] = dict(after)

    def queue(self, stream: int) -> int:
        """Queue a piece of work; its number."""
        self._last += 1
        self._done[stream][stream] = self._last
        return self._last

    def moment(self, stream: int) -> Moment:
        """When all that is queued on a stream now is done."""
        return dict(self._done[stream])

    def wait(self, stream: int, moment: Moment) -> None:
        """Let what is queued on a stream from now on begin after a moment."""
        self._done[stream] = later(self._done[stream], moment)

    def is_done(self, stream: int, number: int, before: int) -> bool:
        """Whether a piece of a stream's work is sure to be done before what is queued on `before` next."""
        return number <= self._done[before].get(stream, 0)


def later(one: Moment, other: Moment) -> dict[int, int]:
    """The first moment after two."""
    return {stream: max(one.get(stream, 0), other.get(stream, 0)) for stream in one.keys() | other.keys()}
