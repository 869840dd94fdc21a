"""Whose turn it is: ranks are threads that pass a baton, and only the one that has it runs.

A rank runs until it needs what another has not sent yet, then the next one that can go on, in mesh order, takes over. So
the order of events, and every bit of every result, depends on the program alone.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from mfsdp_func.simulation.errors import Aborted, SimulationError
from mfsdp_func.simulation.rank_state import ProcessState
from mfsdp_func.values.mesh import Mesh


@dataclass
class Rank:
    """One simulated rank: its thread, its turn, and what it waits for."""

    mesh: Mesh
    process: ProcessState
    turn: threading.Event = field(default_factory=threading.Event)
    ready: Callable[[], bool] | None = None
    waits: Callable[[], str] = lambda: ""
    finished: bool = False
    thread: threading.Thread | None = None

    @property
    def id(self) -> int:
        return self.mesh.get_rank()


class Baton:
    """All simulated ranks, and which of them runs."""

    def __init__(self, mesh: Mesh, seed: int) -> None:
        self.mesh = mesh
        self.ranks = {rank: Rank(mesh.with_rank(rank), ProcessState.seeded(seed + rank)) for rank in mesh.ranks}
        self.failure: tuple[int | None, BaseException] | None = None
        self.ended = threading.Event()
        self.running: tuple[Rank, float] = self.ranks[mesh.ranks[0]], time.monotonic()
        """Who has the baton, and since when."""
        self._place = {rank: n for n, rank in enumerate(mesh.ranks)}

    def begin(self) -> None:
        """Let the first rank run."""
        self._hand_to(self.ranks[self.mesh.ranks[0]])

    def end(self, rank: Rank) -> None:
        """The rank has come to its end."""
        rank.finished = True
        self._pass_on(rank)

    def fail(self, rank: Rank, error: BaseException) -> None:
        """The rank has raised; the first that does so ends all of them."""
        self.failure = self.failure or (rank.id, error)

    def wait_until(self, rank: Rank, ready: Callable[[], bool], waits: Callable[[], str]) -> None:
        """Let other ranks run until `ready()`."""
        if self.failure is not None:
            raise Aborted
        if ready():
            return
        if is_fx_symbolic_tracing():  # a tracer is open to the whole process: other ranks would write into its graph
            raise SimulationError(
                f"rank {rank.id} communicates ({waits()}) while make_fx traces real tensors; in a simulated mesh trace"
                ' with make_fx(..., tracing_mode="fake")'
            )
        rank.process = ProcessState.current()
        rank.ready, rank.waits = ready, waits
        rank.turn.clear()
        self._pass_on(rank)
        rank.turn.wait()
        rank.ready = None
        rank.process.restore()  # also for what is to be left behind, such as levels of forward-mode differentiation
        if self.failure is not None:
            raise Aborted

    def _pass_on(self, rank: Rank) -> None:
        """Give the baton to the next rank that can go on; end the run if there is none."""
        able = next((r for r in self._after(rank) if self.failure or r.ready is None or r.ready()), None)
        if able is None:
            following = list(self._after(rank))
            if not following:
                self.ended.set()
                return
            self.failure = (following[0].id, SimulationError(self._deadlock(following)))
            able = following[0]
        self._hand_to(able)

    def _hand_to(self, rank: Rank) -> None:
        self.running = rank, time.monotonic()
        rank.turn.set()

    def _after(self, rank: Rank) -> Iterable[Rank]:
        """The ranks that have not ended, in mesh order, from the one after `rank` on to itself."""
        order, at = self.mesh.ranks, self._place[rank.id] + 1
        for other in chain(islice(order, at, None), islice(order, at)):
            if not self.ranks[other].finished:
                yield self.ranks[other]

    def _deadlock(self, waiting: Sequence[Rank]) -> str:
        lines = [f"rank {rank.id} waits {rank.waits()}" for rank in sorted(waiting, key=lambda rank: rank.id)]
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
