"""A program on all simulated ranks: their threads, from the first line to the last."""

import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from typing import Any, TypeVar

from mfsdp_func.effects.carrier import SIMULATED, Simulated
from mfsdp_func.simulation.baton import Baton, Rank
from mfsdp_func.simulation.carrier import Network, SimulatedCarrier
from mfsdp_func.simulation.errors import Aborted, SimulationError, SlowRankWarning
from mfsdp_func.simulation.poison import PoisonMode
from mfsdp_func.simulation.rank_state import Modes, ProcessState, shared_dual_level
from mfsdp_func.simulation.results import Simulation
from mfsdp_func.values.mesh import Mesh

Result = TypeVar("Result")


class World:
    """All simulated ranks, and what they share."""

    def __init__(self, mesh: Mesh, seed: int, poison: bool, warn_after: float | None) -> None:
        self.mesh, self.poison, self.warn_after = mesh, poison, warn_after
        self.baton, self.network = Baton(mesh, seed), Network()

    def run(self, program: Callable[[Mesh], Result]) -> Simulation[Result]:
        """Run the program on every rank."""
        results: dict[int, Result] = {}
        before, modes = ProcessState.current(), Modes.current()
        try:
            with shared_dual_level(), _enough_recompiles(self.mesh.size()):
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
            error.add_note(f"raised on simulated rank {rank} of {self.mesh}")
            raise error
        return Simulation({rank: results[rank] for rank in self.mesh.ranks}, tuple(self.network.trace))

    def _run_rank(
        self, rank: Rank, program: Callable[[Mesh], Result], results: dict[int, Result], modes: Modes
    ) -> None:
        rank.turn.wait()
        try:
            if self.baton.failure is None:
                rank.process.restore()
                with ExitStack() as stack:
                    stack.enter_context(modes.entered())
                    poison = stack.enter_context(PoisonMode(rank.id)) if self.poison else None
                    SIMULATED.set(Simulated(rank.id, SimulatedCarrier(self.baton, self.network, rank, poison)))
                    results[rank.id] = program(rank.mesh)
                    if poison is not None and (forgotten := poison.pending()):
                        raise SimulationError(f"rank {rank.id} never waited for the token of {', '.join(forgotten)}")
        except Aborted:
            pass
        except BaseException as error:
            self.baton.fail(rank, error)
        self.baton.end(rank)

    def _wait_for_the_end(self) -> None:
        baton, warned = self.baton, 0.0
        try:
            while True:
                rank, since = baton.running
                due = None if self.warn_after is None else max(since, warned) + self.warn_after - time.monotonic()
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
        waiting = [f"rank {r.id} waits {r.waits()}" for r in self.baton.ranks.values() if r.ready and not r.finished]
        others = f" Meanwhile {'; '.join(waiting[:4])}{'; ...' if len(waiting) > 4 else ''}." if waiting else ""
        return (
            f"simulated rank {rank.id} has neither ended nor come to an exchange for {seconds:.3g} s; it is at {where}."
            f"{others} Only one simulated rank runs at a time: where it waits for a lock or a barrier that another rank"
            " holds across an exchange, or has still to reach, it waits for ever"
        )


def _enough_recompiles(ranks: int) -> Any:
    """Every rank compiles a region for itself: raise torch.compile's limits while the ranks run."""
    import torch._dynamo.config as config

    return config.patch(  # pyright: ignore[reportAttributeAccessIssue]
        recompile_limit=max(config.recompile_limit, 8 * ranks),
        accumulated_recompile_limit=max(config.accumulated_recompile_limit, 256 * ranks),
    )
