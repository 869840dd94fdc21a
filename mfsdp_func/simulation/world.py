"""A program on all simulated ranks: their threads, from the first line to the last."""

import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from typing import Any, TypeVar

from mfsdp_func.effects.carrier import SIMULATED, Simulated
from mfsdp_func.effects.exchange_error import ExchangeError
from mfsdp_func.effects.faults import InjectedFault
from mfsdp_func.effects.token import IN_FLIGHT
from mfsdp_func.simulation.baton import Baton, Rank
from mfsdp_func.simulation.carrier import SimulatedCarrier
from mfsdp_func.simulation.choices import Tape
from mfsdp_func.simulation.device import Device
from mfsdp_func.simulation.errors import Aborted, Killed, SimulationError, SlowRankWarning
from mfsdp_func.simulation.injection import Injection
from mfsdp_func.simulation.network import Network
from mfsdp_func.simulation.poison import PoisonMode
from mfsdp_func.simulation.rank_state import Modes, ProcessState, outlive_fake_devices, shared_dual_level
from mfsdp_func.simulation.results import Simulation
from mfsdp_func.simulation.settings import Settings
from mfsdp_func.simulation.streams import RankStreams, record_on_streams
from mfsdp_func.simulation.torch_distributed import RANK_WORLD, RankWorld, simulated_distributed
from mfsdp_func.values.mesh import Mesh

Result = TypeVar("Result")


class World:
    """All simulated ranks, and what they share."""

    def __init__(self, mesh: Mesh, settings: Settings) -> None:
        settings.check(mesh)
        self.mesh, self.settings, self.tape = mesh, settings, Tape(settings.choices)
        self.baton = Baton(mesh, settings.seed, self.tape)
        self.network = Network(settings, self.baton)
        self.injections = {rank.id: Injection(self.baton, rank, settings.faults) for rank in self.baton.ranks.values()}
        self.device = Device() if settings.streams else None
        self.store: dict[str, bytes] = {}
        """That of torch.distributed."""
        self.errors: dict[int, Exception] = {}

    def run(self, program: Callable[[Mesh], Result]) -> Simulation[Result]:
        """Run the program on every rank."""
        results: dict[int, Result] = {}
        outlive_fake_devices()
        before, modes = ProcessState.current(), Modes.current()
        try:
            distributed = simulated_distributed(self.mesh) if self.settings.torch_distributed else nullcontext()
            with shared_dual_level(), _enough_recompiles(self.mesh.size()), distributed:
                for rank in self.baton.ranks.values():
                    # Each in a copy of the caller's context, where torch keeps its settings (and we the agreement check).
                    rank.thread = threading.Thread(
                        target=copy_context().run,
                        args=(self._run_rank, rank, program, results, modes),
                        name=f"rank {rank.id}",
                        daemon=True,
                    )
                    rank.thread.start()
                self.baton.begin()
                self._wait_for_the_end()
        finally:
            before.restore()
        if self.baton.failure is not None:
            rank, error = self.baton.failure
            if replay := self.settings.replay(self.tape.taken):
                error.add_note(replay)
            where = "while a message arrived in the simulation" if rank is None else f"on simulated rank {rank}"
            error.add_note(f"raised {where} of {self.mesh}")
            raise error
        return Simulation(
            {rank: results[rank] for rank in self.mesh.ranks if rank in results},
            tuple(self.network.trace),
            {rank: self.errors[rank] for rank in self.mesh.ranks if rank in self.errors},
            {rank: injection.points for rank, injection in self.injections.items()},
            self.tape.taken,
            self.baton.now,
            self.settings.replay(self.tape.taken),
        )

    def _run_rank(
        self, rank: Rank, program: Callable[[Mesh], Result], results: dict[int, Result], modes: Modes
    ) -> None:
        rank.turn.wait()
        try:
            if self.baton.failure is None:
                rank.process.restore()
                with ExitStack() as stack:
                    stack.enter_context(modes.entered())
                    poison = None
                    if self.device is not None:
                        record_on_streams(RankStreams(self.device, rank.id), stack)
                    elif self.settings.poison:
                        poison = stack.enter_context(PoisonMode(rank.id))
                    carrier = SimulatedCarrier(self.network, rank, self.injections[rank.id], poison)
                    IN_FLIGHT.set(set())
                    SIMULATED.set(Simulated(rank.id, carrier))
                    if self.settings.torch_distributed:
                        RANK_WORLD.set(RankWorld(carrier, self.baton, rank, self.store))
                    results[rank.id] = program(rank.mesh)
                    if poison is not None and (forgotten := poison.pending()):
                        raise SimulationError(f"rank {rank.id} never waited for the token of {', '.join(forgotten)}")
        except (Aborted, Killed):
            pass
        except BaseException as error:
            if self.settings.faults and isinstance(error, Exception) and _is_of_fault(error):
                self.errors[rank.id] = error
            else:
                self.baton.fail(rank, error)
        if self.baton.faulty:
            self.network.let_go(rank.id)
        self.baton.end(rank)

    def _wait_for_the_end(self) -> None:
        baton, warned = self.baton, 0.0
        try:
            while True:
                rank, since = baton.running
                due = (
                    None
                    if self.settings.warn_after is None
                    else max(since, warned) + self.settings.warn_after - time.monotonic()
                )
                if baton.ended.wait(due if due is None else max(0.01, due)):
                    break
                if baton.running == (rank, since) and due is not None:
                    warned = time.monotonic()
                    warnings.warn(self._slow(rank, warned - since), SlowRankWarning, stacklevel=4)
        except BaseException as error:  # an interrupt, or the warning as an error: let the ranks end where they can
            baton.failure = baton.failure or (None, error)
            baton.ended.wait(1.0)
            raise
        for rank in baton.ranks.values():
            if rank.thread is not None:
                rank.thread.join()

    def _slow(self, rank: Rank, seconds: float) -> str:
        ident = rank.thread.ident if rank.thread is not None else None
        frame = sys._current_frames().get(ident or 0)  # pyright: ignore[reportPrivateUsage]
        while frame is not None and frame.f_code.co_filename == threading.__file__:
            frame = frame.f_back
        where = "its start" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
        waiting = [
            f"rank {r.id} waits {r.wait.words()}" for r in self.baton.ranks.values() if r.wait and not r.finished
        ]
        others = f" Meanwhile {'; '.join(waiting[:4])}{'; ...' if len(waiting) > 4 else ''}." if waiting else ""
        return (
            f"simulated rank {rank.id} has neither ended nor come to an exchange for {seconds:.3g} s; it is at {where}."
            f"{others} Only one simulated rank runs at a time: where it waits for a lock or a barrier that another rank"
            " holds across an exchange, or has still to reach, it waits for ever"
        )


def _is_of_fault(error: BaseException | None) -> bool:
    """Whether an error is a fault's, or what was made of one."""
    while error is not None and not isinstance(error, ExchangeError | InjectedFault):
        error = error.__cause__ or error.__context__
    return error is not None


def _enough_recompiles(ranks: int) -> Any:
    """Every rank compiles a region for itself: raise torch.compile's limits while the ranks run."""
    import torch._dynamo.config as config

    return config.patch(  # pyright: ignore[reportAttributeAccessIssue]
        recompile_limit=max(config.recompile_limit, 8 * ranks),
        accumulated_recompile_limit=max(config.accumulated_recompile_limit, 256 * ranks),
    )
