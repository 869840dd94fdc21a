"""The front door: a program on a mesh of simulated ranks, in this process."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from mfsdp_func.simulation.rank_state import refuse_inside_transforms
from mfsdp_func.simulation.results import Simulation
from mfsdp_func.simulation.world import World
from mfsdp_func.values.mesh import Mesh

Result = TypeVar("Result")


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
    return World(Mesh(shape, axis_names, ranks), seed, poison, warn_after).run(program)
