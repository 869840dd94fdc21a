"""Whose turn it is: ranks are threads that pass a baton, and only the one that has it runs.

A rank runs until it needs what another has not sent yet, then the next one that can go on, in mesh order, takes over; or
whichever the tape of choices says. So the order of events, and every bit of every result, depends on the program and the
tape alone. There is a virtual clock, which moves only when all ranks stand still: to the end of the next stall, or to the
next timeout once a fault has happened.
"""

import math
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from mfsdp_func.simulation.choices import Tape
from mfsdp_func.simulation.errors import Aborted, SimulationError
from mfsdp_func.simulation.rank_state import ProcessState
from mfsdp_func.values.mesh import Mesh


@dataclass
class Wait:
    """What a rank waits for.

    Attributes:
        ready: whether it may go on.
        words: what it waits for.
        lost: whether it will never be, once a fault has happened.
        until: when it gives up, once a fault has happened; or, of a rank that stands still, when it goes on.
    """

    ready: Callable[[], bool]
    words: Callable[[], str]
    lost: Callable[[], bool] = bool
    until: float = math.inf


@dataclass
class Rank:
    """One simulated rank: its thread, its turn, and what it waits for."""

    mesh: Mesh
    process: ProcessState
    turn: threading.Event = field(default_factory=threading.Event)
    wait: Wait | None = None
    sleeps: bool = False
    finished: bool = False
    thread: threading.Thread | None = None

    @property
    def id(self) -> int:
        return self.mesh.get_rank()


class Baton:
    """All simulated ranks, which of them runs, and the time."""

    def __init__(self, mesh: Mesh, seed: int, tape: Tape) -> None:
        self.mesh, self.tape = mesh, tape
        self.ranks = {rank: Rank(mesh.with_rank(rank), ProcessState.seeded(seed + rank)) for rank in mesh.ranks}
        self.failure: tuple[int | None, BaseException] | None = None
        self.ended = threading.Event()
        self.running: tuple[Rank, float] = self.ranks[mesh.ranks[0]], time.monotonic()
        """Who has the baton, and since when."""
        self.now = 0.0
        """Virtual seconds."""
        self.faulty = False
        """Whether a fault has happened: waiting in vain ends at a timeout, and is no deadlock of the program."""
        self.arrivals: dict[Hashable, Callable[[], None]] = {}
        """What may happen at any time without a rank, such as a message that arrives."""
        self._place = {rank: n for n, rank in enumerate(mesh.ranks)}

    def begin(self) -> None:
        """Let the first rank run."""
        self._pass_on(self.ranks[self.mesh.ranks[-1]])

    def end(self, rank: Rank) -> None:
        """The rank has come to its end."""
        rank.finished = True
        self._pass_on(rank)

    def fail(self, rank: Rank, error: BaseException) -> None:
        """The rank has raised; the first that does so ends all of them."""
        self.failure = self.failure or (rank.id, error)

    def wait_until(self, rank: Rank, wait: Wait) -> bool:
        """Let other ranks run until the wait is over; say whether it was not in vain."""
        self._check()
        if wait.ready():
            return True
        if is_fx_symbolic_tracing():  # a tracer is open to the whole process: other ranks would write into its graph
            raise SimulationError(
                f"rank {rank.id} communicates ({wait.words()}) while make_fx traces real tensors; in a simulated mesh trace"
                ' with make_fx(..., tracing_mode="fake")'
            )
        self._stand_back(rank, wait)
        return wait.ready()

    def pause(self, rank: Rank) -> None:
        """A moment at which another rank may take over, or a message arrive, if the tape says so."""
        self._check()
        if self.tape.free and not is_fx_symbolic_tracing():
            self._stand_back(rank, Wait(lambda: True, str), first=True)

    def sleep(self, rank: Rank, seconds: float) -> None:
        """Stand still for some virtual seconds."""
        until = self.now + seconds
        rank.sleeps = True
        self._stand_back(rank, Wait(lambda: self.now >= until, lambda: f"until {until:.3g} s", until=until))
        rank.sleeps = False

    def _check(self) -> None:
        if self.failure is not None:
            raise Aborted

    def _stand_back(self, rank: Rank, wait: Wait, *, first: bool = False) -> None:
        rank.wait, rank.process = wait, ProcessState.current()
        rank.turn.clear()
        self._pass_on(rank, first=first)
        rank.turn.wait()
        rank.wait = None
        rank.process.restore()  # also for what is to be left behind, such as levels of forward-mode differentiation
        self._check()

    def _pass_on(self, rank: Rank, *, first: bool = False) -> None:
        """Give the baton to the next rank that can go on, `rank` itself the last, or `first`; end the run if there is none."""
        following = self._after(rank, first)
        able = self._choose(following) if self.tape.free and self.failure is None else self._next(following)
        while able is None and self._advance():
            able = self._next(self._after(rank, first))
        if able is None:
            waiting = list(self._after(rank, first))
            if not waiting:
                self.ended.set()
                return
            self.failure = (waiting[0].id, SimulationError(self._deadlock(waiting)))
            able = waiting[0]
        self.running = able, time.monotonic()
        able.turn.set()

    def _next(self, ranks: Iterable[Rank]) -> Rank | None:
        return next((rank for rank in ranks if self._is_able(rank)), None)

    def _choose(self, ranks: Iterable[Rank]) -> Rank | None:
        """As the tape says; messages may arrive before."""
        able = [rank for rank in ranks if self._is_able(rank)]
        while able:
            arrivals = list(self.arrivals)
            chosen = self.tape.choose([*(rank.id for rank in able), *arrivals])
            if chosen < len(able):
                return able[chosen]
            try:
                self.arrivals.pop(arrivals[chosen - len(able)])()
            except BaseException as error:
                self.failure = self.failure or (None, error)
                return able[0]
        return None

    def _is_able(self, rank: Rank) -> bool:
        wait = rank.wait
        if wait is None or self.failure is not None or wait.ready():
            return True
        return self.faulty and not rank.sleeps and (self.now >= wait.until or wait.lost())

    def _advance(self) -> bool:
        """Move the clock to the next thing that happens by itself."""
        times = [
            rank.wait.until
            for rank in self.ranks.values()
            if rank.wait is not None and not rank.finished and (rank.sleeps or self.faulty)
        ]
        ahead = [time for time in times if self.now < time < math.inf]
        if ahead:
            self.now = min(ahead)
        return bool(ahead)

    def _after(self, rank: Rank, first: bool = False) -> Iterable[Rank]:
        """The ranks that have not ended, in mesh order, from the one after `rank` on to itself; or `first` from itself on."""
        order, at = self.mesh.ranks, self._place[rank.id] + (0 if first else 1)
        for other in chain(islice(order, at, None), islice(order, at)):
            if not self.ranks[other].finished:
                yield self.ranks[other]

    def _deadlock(self, waiting: Sequence[Rank]) -> str:
        lines = [
            f"rank {rank.id} waits {rank.wait.words() if rank.wait else ''}"
            for rank in sorted(waiting, key=lambda rank: rank.id)
        ]
        finished = sorted(rank.id for rank in self.ranks.values() if rank.finished)
        text = "deadlock: no rank can go on.\n  " + "\n  ".join(lines)
        if finished:
            text += f"\n  finished: ranks {finished}"
            if any("transpose of" in line for line in lines):
                text += (
                    "\nA rank has ended without the backward pass that others wait for: its loss does not depend on the"
                    " operation's results. Let every rank's loss use them, or the token's link"
                )
        return text
