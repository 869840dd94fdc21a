"""What is raised where ranks wait for one another in vain."""

from collections.abc import Iterable

from mfsdp_func.values.mesh import Mesh


class ExchangeError(RuntimeError):
    """An exchange that did not end: a peer died, stalled, or left the call out.

    Inputs are bitwise as they were, and no result is handed out. The error of the backend is its ``__cause__``.

    Attributes:
        operation: the call, with the name of what it moves.
        mesh: the ranks that take part.
        rank: this one.
        awaited: the peers from whom something was still to come; they need not be guilty, as they may wait themselves.
        elapsed: seconds since this rank began the call.
        timeout: seconds after which the process group gives up; None where it is not known.
        group: the process group, by name; empty on simulated ranks.
        cause: what the rank said that failed first, where it could leave word, and it was another; else None.
    """

    operation: str
    mesh: Mesh
    rank: int
    awaited: tuple[int, ...]
    elapsed: float
    timeout: float | None
    cause: str | None
    group: str

    def __init__(
        self,
        operation: str,
        mesh: Mesh,
        *,
        rank: int,
        awaited: Iterable[int] = (),
        elapsed: float = 0.0,
        timeout: float | None = None,
        cause: str | None = None,
        reason: str = "",
        group: str = "",
    ) -> None:
        self.operation, self.mesh, self.rank = operation, mesh, rank
        self.awaited, self.elapsed, self.timeout, self.cause = tuple(awaited), elapsed, timeout, cause
        self.reason, self.group = reason, group
        super().__init__(self._message())

    def _message(self) -> str:
        if self.awaited:
            limit = "" if self.timeout is None else f" (timeout {self.timeout:.3g} s)"
            what = f"waited {self.elapsed:.3g} s{limit} for {_named(self.awaited)}, who may have waited in turn"
        else:
            what = "did not begin this call"
        said = f": {self.reason}" if self.reason else ""
        first = f". The first to fail was {self.cause}" if self.cause else ""
        group = f" in process group {self.group!r}" if self.group else ""
        return (
            f"{self.operation} over {self.mesh}{group}: rank {self.rank} {what}{said}{first}. A rank ended, stalled, or made"
            " other calls (agreement_check() tells which). Inputs are as they were; this process group is of no more use: on the"
            " ranks that are left, destroy it, make a new one, load, and try again"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), dict(self.__dict__))


def _named(ranks: tuple[int, ...]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"


def _again(kind: type[ExchangeError], known: dict[str, object]) -> ExchangeError:
    error = kind.__new__(kind)
    error.__dict__.update(known)
    RuntimeError.__init__(error, error._message())  # pyright: ignore[reportPrivateUsage]
    return error
