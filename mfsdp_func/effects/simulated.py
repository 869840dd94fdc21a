"""A mesh of simulated ranks in one process: the same program, one thread per rank, one of them running at a time.

Ranks pass a baton: a rank runs until it needs what another has not sent yet, then the next one that can go on, in mesh
order, takes over. So the order of events, and every bit of every result, depends on the program alone. Messages are
copied when they are sent.
"""

import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from mfsdp_func.effects.agreement import compare_calls
from mfsdp_func.effects.blocks import packed, unpack
from mfsdp_func.effects.carrier import SIMULATED, Call, Parcel, Simulated
from mfsdp_func.effects.origin import Ledger
from mfsdp_func.effects.poison import PoisonMode, SimulationError, fill_with_poison
from mfsdp_func.effects.rank_state import Modes, ProcessState, refuse_inside_transforms, shared_dual_level
from mfsdp_func.plans.collective import Collective
from mfsdp_func.values.mesh import Mesh

Result = TypeVar("Result")

_PACKING_NBYTES = (128 * 1024, 1024 * 1024)


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


class SlowRankWarning(RuntimeWarning):
    """A simulated rank has not come to an exchange, or to its end, for a long time; maybe it waits for a lock."""


class _Aborted(BaseException):
    """Ends a rank's thread after another rank has failed."""


def simulate(
    program: Callable[[Mesh], Result],
    shape: Iterable[int] | int,
    *,
    axis_names: Iterable[str] | None = None,
    ranks: Iterable[int] | None = None,
    seed: int = 0,
    poison: bool = False,
    warn_after: float | None = 60.0,
) -> Simulation[Result]:
    """Run ``program(mesh)`` once per rank of a mesh, in this process and without any process group. Deterministic.

    The program is the one that runs under torchrun: `gather`, `scatter`, buffers, `torch.func` and compiled regions
    work inside. Each rank has random states of its own (torch's and Python's), seeded with `seed` plus its rank.
    The caller's modes hold inside: `no_grad`, inference mode, autocast, `torch.device`, torch's function and dispatch
    modes.

    Only one rank runs at a time, until it waits for another in an exchange. So a lock or a barrier of `threading` that
    is held across an exchange blocks all of them.

    Args:
        program: called on every rank with the mesh as that rank sees it.
        shape: number of ranks along each axis.
        axis_names: see `Mesh`.
        ranks: the global ranks in row-major order; by default ``0, 1, 2, ...``.
        seed: of the random states.
        poison: fill results in flight with NaN (or the smallest integer), and raise when one is read before its token
            was waited for, or when a token is never waited for.
        warn_after: seconds after which a `SlowRankWarning` names a rank that has neither ended nor come to an exchange,
            and the line where it is; None for never.

    Returns:
        The results by rank and the trace of messages.

    Raises:
        SimulationError: on a deadlock, or what `poison` finds.
        ValueError: if ranks call different operations or disagree on a plan.
        RuntimeError: inside a `torch.func` transform, forward-mode differentiation, a compiled region or a tracer, which
            the ranks' threads would not see: put those into `program`.
        Exception: what the program raised, on the first rank that failed, with a note naming the rank.

    >>> simulate(lambda mesh: mesh.get_rank() ** 2, 3).results
    {0: 0, 1: 1, 2: 4}
    """
    refuse_inside_transforms("simulate")
    return _World(Mesh(shape, axis_names, ranks), seed, poison, warn_after).run(program)


@dataclass
class _Rank:
    """One simulated rank: its thread, its turn, and what it waits for."""

    mesh: Mesh
    process: ProcessState
    turn: threading.Event = field(default_factory=threading.Event)
    ready: Callable[[], bool] | None = None
    waits: Callable[[], str] = lambda: ""
    finished: bool = False
    made: dict[Hashable, int] = field(default_factory=dict)
    """How many calls of each kind this rank has made."""
    thread: threading.Thread | None = None

    @property
    def id(self) -> int:
        return self.mesh.get_rank()


@dataclass
class _Posted:
    """A call that a rank has made: its facts, and copies of what it sent to each peer."""

    call: Call
    payloads: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    copied: Any = None
    """On CUDA, the event after which the copies are done: ranks may work on different streams."""


Entry = TypeVar("Entry")


class _Meeting(Generic[Entry]):
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


class _World:
    """All simulated ranks, and the carrier that serves them."""

    def __init__(self, mesh: Mesh, seed: int, poison: bool, warn_after: float | None) -> None:
        self.mesh, self.poison, self.warn_after = mesh, poison, warn_after
        self.ranks = {rank: _Rank(mesh.with_rank(rank), ProcessState.seeded(seed + rank)) for rank in mesh.ranks}
        self.place = {rank: n for n, rank in enumerate(mesh.ranks)}
        self.meetings: dict[Hashable, list[_Meeting[Any]]] = {}
        self.known_meshes: set[Hashable] = set()
        self.trace: list[Sent] = []
        self.failure: tuple[int | None, BaseException] | None = None
        self.ended = threading.Event()
        self.running: tuple[_Rank, float] = self.ranks[mesh.ranks[0]], time.monotonic()
        """Who has the baton, and since when."""

    def run(self, program: Callable[[Mesh], Result]) -> Simulation[Result]:
        results: dict[int, Result] = {}
        before, modes = ProcessState.current(), Modes.current()
        try:
            with shared_dual_level(), _enough_recompiles(self.mesh.size()):
                for rank, state in self.ranks.items():
                    # Each in a copy of the caller's context, where torch keeps its settings (and we the agreement check).
                    state.thread = threading.Thread(
                        target=copy_context().run,
                        args=(self._run_rank, rank, program, results, modes),
                        name=f"rank {rank}",
                        daemon=True,
                    )
                    state.thread.start()
                self._hand_to(self.ranks[self.mesh.ranks[0]])
                self._wait_for_the_end()
        finally:
            before.restore()
        if self.failure is not None:
            rank, error = self.failure
            error.add_note(f"raised on simulated rank {rank} of {self.mesh}")
            raise error
        return Simulation({rank: results[rank] for rank in self.mesh.ranks}, tuple(self.trace))

    def _wait_for_the_end(self) -> None:
        warned = 0.0
        try:
            while True:
                rank, since = self.running
                due = None if self.warn_after is None else max(since, warned) + self.warn_after - time.monotonic()
                if self.ended.wait(due if due is None else max(0.01, due)):
                    break
                if self.running == (rank, since) and due is not None:
                    warned = time.monotonic()
                    warnings.warn(self._slow(rank, warned - since), SlowRankWarning, stacklevel=4)
        except BaseException as error:  # an interrupt, or the warning as an error: let the ranks end where they can
            self.failure = self.failure or (None, error)
            self.ended.wait(1.0)
            raise
        for state in self.ranks.values():
            if state.thread is not None:
                state.thread.join()

    def _slow(self, rank: _Rank, seconds: float) -> str:
        ident = rank.thread.ident if rank.thread is not None else None
        frame = sys._current_frames().get(ident or 0)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code.co_filename == threading.__file__:
            frame = frame.f_back
        where = "its start" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        waiting = [f"rank {r.id} waits {r.waits()}" for r in self.ranks.values() if r.ready and not r.finished]
        others = f" Meanwhile {'; '.join(waiting[:4])}{'; ...' if len(waiting) > 4 else ''}." if waiting else ""
        return (
            f"simulated rank {rank.id} has neither ended nor come to an exchange for {seconds:.3g} s; it is at {where}."
            f"{others} Only one simulated rank runs at a time: where it waits for a lock or a barrier that another rank"
            " holds across an exchange, or has still to reach, it waits for ever"
        )

    def _run_rank(self, rank: int, program: Callable[[Mesh], Result], results: dict[int, Result], modes: Modes) -> None:
        state = self.ranks[rank]
        state.turn.wait()
        try:
            if self.failure is None:
                state.process.restore()
                with ExitStack() as stack:
                    stack.enter_context(modes.entered())
                    poison = stack.enter_context(PoisonMode(rank)) if self.poison else None
                    SIMULATED.set(Simulated(rank, _SimulatedCarrier(self, state, poison)))
                    results[rank] = program(state.mesh)
                    if poison is not None and (forgotten := poison.pending()):
                        raise SimulationError(f"rank {rank} never waited for the token of {', '.join(forgotten)}")
        except _Aborted:
            pass
        except BaseException as error:
            self.failure = self.failure or (rank, error)
        state.finished = True
        self._pass_on(state)

    # The baton.

    def _pass_on(self, state: _Rank) -> None:
        """Give the baton to the next rank that can go on; end the run if there is none."""
        able = next((r for r in self._after(state) if self.failure or r.ready is None or r.ready()), None)
        if able is None:
            following = list(self._after(state))
            if not following:
                self.ended.set()
                return
            self.failure = (following[0].id, SimulationError(self._deadlock(following)))
            able = following[0]
        self._hand_to(able)

    def _hand_to(self, rank: _Rank) -> None:
        self.running = rank, time.monotonic()
        rank.turn.set()

    def _after(self, state: _Rank) -> Iterable[_Rank]:
        """The ranks that have not ended, in mesh order, from the one after `state` on to itself."""
        order, at = self.mesh.ranks, self.place[state.id] + 1
        for rank in chain(islice(order, at, None), islice(order, at)):
            if not self.ranks[rank].finished:
                yield self.ranks[rank]

    def join(self, state: _Rank, kind: Hashable, entry: Entry) -> _Meeting[Entry]:
        """Put a rank's next call of a kind to those of the others."""
        number, meetings = state.made.get(kind, 0), self.meetings.setdefault(kind, [])
        state.made[kind] = number + 1
        if number == len(meetings):
            meetings.append(_Meeting(number))
        meetings[number].entries[state.id] = entry
        return meetings[number]

    def wait_until(self, state: _Rank, ready: Callable[[], bool], waits: Callable[[], str]) -> None:
        """Let other ranks run until `ready()`."""
        if self.failure is not None:
            raise _Aborted
        if ready():
            return
        if is_fx_symbolic_tracing():  # a tracer is open to the whole process: other ranks would write into its graph
            raise SimulationError(
                f"rank {state.id} communicates ({waits()}) while make_fx traces real tensors; in a simulated mesh trace"
                ' with make_fx(..., tracing_mode="fake")'
            )
        state.process = ProcessState.current()
        state.ready, state.waits = ready, waits
        state.turn.clear()
        self._pass_on(state)
        state.turn.wait()
        state.ready = None
        state.process.restore()  # also for what is to be left behind, such as levels of forward-mode differentiation
        if self.failure is not None:
            raise _Aborted

    def _deadlock(self, waiting: Sequence[_Rank]) -> str:
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


def _enough_recompiles(ranks: int) -> Any:
    """Every rank compiles a region for itself: raise torch.compile's limits while the ranks run."""
    import torch._dynamo.config as config

    return config.patch(  # pyright: ignore[reportAttributeAccessIssue]
        recompile_limit=max(config.recompile_limit, 8 * ranks),
        accumulated_recompile_limit=max(config.accumulated_recompile_limit, 256 * ranks),
    )


class _SimulatedCarrier:
    """One rank's carrier; see `Carrier`. Ranks that disagree about a call are told so, check or no check."""

    def __init__(self, world: _World, state: _Rank, poison: PoisonMode | None) -> None:
        self._world, self._state, self._poison = world, state, poison
        self.inside: dict[str, tuple[int, Any]] = {}
        self.compares = True
        self._ledgers: dict[str, Ledger] = {}

    def ledger(self, mesh: Mesh) -> Ledger:
        return self._ledgers.setdefault(mesh.digest, Ledger())

    def number_of_ranks(self) -> int:
        return self._world.mesh.size()

    def packing(self, mesh: Mesh) -> tuple[int, int]:
        return _PACKING_NBYTES

    def device(self, mesh: Mesh) -> torch.device:
        return torch.device("cpu")

    def exchange(
        self, call: Call, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, at_once: bool
    ) -> Callable[[], None]:
        self._check_mesh(call.label, call.mesh)
        mine = _Posted(call)
        for parcel in outgoing:
            payload = packed(parcel.parts).detach().clone()
            mine.payloads.setdefault(parcel.peer, []).append(payload)
            self._world.trace.append(Sent(call.operation or call.label, self._state.id, parcel.peer, payload.nbytes))
        if outgoing and outgoing[0].parts[0].is_cuda:
            mine.copied = torch.cuda.current_stream(outgoing[0].parts[0].device).record_event()
        meeting = self._world.join(self._state, self._kind(call), mine)
        if self._poison is not None and at_once:
            for parcel in incoming:
                for part in parcel.parts:
                    fill_with_poison(part)

        def finish() -> None:
            me = self._state.id
            if call.forward:
                partners, first = call.mesh.ranks, meeting.missing_of(call.mesh)
            else:
                partners = {me, *(parcel.peer for parcel in (*outgoing, *incoming))}
                first = meeting.missing(partners)
            self._wait_for(meeting, call, first)
            if not meeting.compared:  # all ranks compare the same, if they are the same
                compare_calls({rank: meeting.entries[rank].call for rank in sorted(partners)})
                meeting.compared = call.forward
            for peer in dict.fromkeys(parcel.peer for parcel in incoming):
                self._receive(meeting.entries[peer], [parcel for parcel in incoming if parcel.peer == peer])

        return finish

    def watch(self, call: Call, outputs: Sequence[torch.Tensor]) -> Callable[[], None]:
        if self._poison is None:
            return _nothing
        poison = self._poison
        poison.hold(call.label, outputs)
        return lambda: poison.release(call.label, outputs)

    def _receive(self, posted: _Posted, parcels: Sequence[Parcel]) -> None:
        sent = posted.payloads.pop(self._state.id)
        if posted.copied is not None:
            stream = torch.cuda.current_stream(sent[0].device)
            stream.wait_event(posted.copied)
            for tensor in sent:
                tensor.record_stream(stream)
        for parcel, payload in zip(parcels, sent, strict=True):
            unpack(payload, parcel.parts)

    def _kind(self, call: Call) -> Hashable:
        """Of a rank's calls of one kind, the n-th meets the n-th of the others.

        Calls of the program come in one order on all ranks of a mesh; autograd's own calls are told apart by plan.
        """
        return call.mesh.digest if call.forward else (call.digest, call.label)

    def _check_mesh(self, label: str, mesh: Mesh) -> None:
        known = self._world.known_meshes
        if mesh.digest not in known and self._world.ranks.keys() >= set(mesh.ranks):
            known.add(mesh.digest)
        if mesh.rank != self._state.id or mesh.digest not in known:
            raise RuntimeError(
                f"{label}: simulated rank {self._state.id} of {self._world.mesh} communicates over {mesh}, which is not a"
                " mesh of this simulation as this rank sees it; use the one that simulate gives to the program, or a part"
                " of it"
            )

    def _wait_for(self, meeting: _Meeting[_Posted], call: Call, first: Callable[[], int | None]) -> None:
        line = (call.origin or {}).get("line")
        at = f", at {line}" if line else ""
        self._world.wait_until(
            self._state,
            lambda: first() is None,
            lambda: f"in {call.label} (call {meeting.number}) for rank {first()}{at}",
        )

    def collective(
        self, call: Call, collective: Collective, source: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None] | None:
        return None

    def world(self) -> Mesh:
        return Mesh(self._state.mesh.size(), ranks=self._state.mesh.ranks, rank=self._state.id)

    def all_gather_bytes(self, mesh: Mesh, record: bytes) -> list[bytes]:
        self._check_mesh("agreement check", mesh)
        meeting = self._world.join(self._state, ("records", mesh.digest), record)
        first = meeting.missing_of(mesh)
        self._world.wait_until(
            self._state,
            lambda: first() is None,
            lambda: f"in an agreement check (number {meeting.number}) for rank {first()}",
        )
        return [meeting.entries[rank] for rank in mesh.ranks]


def _nothing() -> None:
    pass
