"""A mesh of simulated ranks in one process: the same program, one thread per rank, one of them running at a time.

Ranks pass a baton: a rank runs until it needs what another has not sent yet, then the next one that can go on, in mesh
order, takes over. So the order of events, and every bit of every result, depends on the program alone. Messages are
copied when they are sent.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from mfsdp_func.effects.agreement import compare_facts
from mfsdp_func.effects.blocks import packed, unpack
from mfsdp_func.effects.carrier import SIMULATED, Call, Parcel, Simulated
from mfsdp_func.effects.poison import PoisonMode, SimulationError, fill_with_poison
from mfsdp_func.effects.rank_state import ProcessState, shared_dual_level
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
) -> Simulation[Result]:
    """Run ``program(mesh)`` once per rank of a mesh, in this process and without any process group. Deterministic.

    The program is the one that runs under torchrun: `gather`, `scatter`, buffers, `torch.func` and compiled regions
    work inside. Each rank has random states of its own (torch's and Python's), seeded with `seed` plus its rank.

    Args:
        program: called on every rank with the mesh as that rank sees it.
        shape: number of ranks along each axis.
        axis_names: see `Mesh`.
        ranks: the global ranks in row-major order; by default ``0, 1, 2, ...``.
        seed: of the random states.
        poison: fill results in flight with NaN (or the smallest integer), and raise when one is read before its token
            was waited for, or when a token is never waited for.

    Returns:
        The results by rank and the trace of messages.

    Raises:
        SimulationError: on a deadlock, or what `poison` finds.
        ValueError: if ranks call different operations or disagree on a plan.
        Exception: what the program raised, on the first rank that failed, with a note naming the rank.

    >>> simulate(lambda mesh: mesh.get_rank() ** 2, 3).results
    {0: 0, 1: 1, 2: 4}
    """
    return _World(Mesh(shape, axis_names, ranks), seed, poison).run(program)


@dataclass
class _Rank:
    """One simulated rank: its thread, its turn, and what it waits for."""

    mesh: Mesh
    process: ProcessState
    turn: threading.Event = field(default_factory=threading.Event)
    ready: Callable[[], bool] | None = None
    waits: Callable[[], str] = lambda: ""
    finished: bool = False
    calls: dict[object, list["_Posted"]] = field(default_factory=dict)
    gathers: dict[object, list[bytes]] = field(default_factory=dict)

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


class _World:
    """All simulated ranks, and the carrier that serves them."""

    def __init__(self, mesh: Mesh, seed: int, poison: bool) -> None:
        self.mesh, self.poison = mesh, poison
        self.ranks = {rank: _Rank(mesh.with_rank(rank), ProcessState.seeded(seed + rank)) for rank in mesh.ranks}
        self.trace: list[Sent] = []
        self.failure: tuple[int, BaseException] | None = None
        self.ended = threading.Event()

    def run(self, program: Callable[[Mesh], Result]) -> Simulation[Result]:
        results: dict[int, Result] = {}
        before = ProcessState.current()
        with shared_dual_level(), _enough_recompiles(self.mesh.size()):
            # Each in a copy of the caller's context, where torch keeps its settings (and we the agreement check).
            threads = [
                threading.Thread(
                    target=copy_context().run,
                    args=(self._run_rank, rank, program, results),
                    name=f"rank {rank}",
                    daemon=True,
                )
                for rank in self.mesh.ranks
            ]
            for thread in threads:
                thread.start()
            self.ranks[self.mesh.ranks[0]].turn.set()
            self.ended.wait()
            for thread in threads:
                thread.join()
        before.restore()
        if self.failure is not None:
            rank, error = self.failure
            error.add_note(f"raised on simulated rank {rank} of {self.mesh}")
            raise error
        return Simulation({rank: results[rank] for rank in self.mesh.ranks}, tuple(self.trace))

    def _run_rank(self, rank: int, program: Callable[[Mesh], Result], results: dict[int, Result]) -> None:
        state = self.ranks[rank]
        state.turn.wait()
        try:
            if self.failure is None:
                state.process.restore()
                with ExitStack() as stack:
                    poison = stack.enter_context(PoisonMode(rank)) if self.poison else None
                    SIMULATED.set(Simulated(_SimulatedCarrier(self, state, poison)))
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
        following = [rank for rank in self._after(state) if not rank.finished]
        if not following:
            self.ended.set()
            return
        able = following if self.failure else [r for r in following if r.ready is None or r.ready()]
        if not able:
            self.failure = (following[0].id, SimulationError(self._deadlock(following)))
            able = following
        able[0].turn.set()

    def _after(self, state: _Rank) -> list[_Rank]:
        order = self.mesh.ranks
        at = order.index(state.id) + 1
        return [self.ranks[rank] for rank in (*order[at:], *order[:at])]

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
        if self.failure is not None:
            raise _Aborted
        state.ready = None
        state.process.restore()

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

    def number_of_ranks(self) -> int:
        return self._world.mesh.size()

    def packing(self, mesh: Mesh) -> tuple[int, int]:
        return _PACKING_NBYTES

    def device(self, mesh: Mesh) -> torch.device:
        return torch.device("cpu")

    def exchange(
        self, call: Call, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, at_once: bool
    ) -> Callable[[], None]:
        mine = _Posted(call)
        for parcel in outgoing:
            payload = packed(parcel.parts).detach().clone()
            mine.payloads.setdefault(parcel.peer, []).append(payload)
            self._world.trace.append(Sent(call.label, self._state.id, parcel.peer, payload.nbytes))
        if outgoing and outgoing[0].parts[0].is_cuda:
            mine.copied = torch.cuda.current_stream(outgoing[0].parts[0].device).record_event()
        number = self._post(mine)
        if self._poison is not None and at_once:
            for parcel in incoming:
                for part in parcel.parts:
                    fill_with_poison(part)

        def finish() -> None:
            partners = call.mesh.ranks if call.forward else {parcel.peer for parcel in (*outgoing, *incoming)}
            calls = {self._state.id: call}
            for peer in partners:
                if peer != self._state.id:
                    calls[peer] = self._posted(call, peer, number).call
            compare_facts(call.label, {rank: calls[rank].facts for rank in sorted(calls)})
            for peer in dict.fromkeys(parcel.peer for parcel in incoming):
                parcels = [parcel for parcel in incoming if parcel.peer == peer]
                self._receive(self._posted(call, peer, number), parcels)

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

    def _post(self, mine: _Posted) -> int:
        calls = self._calls(self._state, mine.call)
        calls.append(mine)
        return len(calls) - 1

    def _calls(self, state: _Rank, call: Call) -> list[_Posted]:
        """A rank's calls, among which the n-th of one rank meets the n-th of the others.

        Calls of the program come in one order on all ranks of a mesh; autograd's own calls are told apart by plan.
        """
        return state.calls.setdefault(call.mesh.digest if call.forward else (call.digest, call.label), [])

    def _posted(self, call: Call, peer: int, number: int) -> _Posted:
        other = self._world.ranks[peer]
        self._world.wait_until(
            self._state,
            lambda: len(self._calls(other, call)) > number,
            lambda: f"in {call.label} (call {number}) for rank {peer}",
        )
        return self._calls(other, call)[number]

    def collective(
        self, call: Call, collective: Collective, source: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None] | None:
        return None

    def world(self) -> Mesh:
        return Mesh(self._state.mesh.size(), ranks=self._state.mesh.ranks, rank=self._state.id)

    def all_gather_bytes(self, mesh: Mesh, record: bytes) -> list[bytes]:
        mine = self._state.gathers.setdefault(mesh.digest, [])
        number = len(mine)
        mine.append(record)
        for peer in mesh.ranks:
            other = self._world.ranks[peer]
            self._world.wait_until(
                self._state,
                lambda other=other: len(other.gathers.get(mesh.digest, ())) > number,
                lambda peer=peer: f"in an agreement check (number {number}) for rank {peer}",
            )
        return [self._world.ranks[peer].gathers[mesh.digest][number] for peer in mesh.ranks]


def _nothing() -> None:
    pass
