"""The front door: a program on a mesh of simulated ranks, in this process."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from mfsdp_func.effects.faults import Fault
from mfsdp_func.simulation.choices import Choices
from mfsdp_func.simulation.rank_state import refuse_inside_transforms
from mfsdp_func.simulation.results import Simulation
from mfsdp_func.simulation.settings import CarrierName, MemoryName, Settings
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
    carrier: CarrierName = "eager",
    memory: MemoryName = "copied",
    faults: Iterable[Fault] = (),
    choices: Choices = None,
    timeout: float = 1800.0,
    poison: bool = False,
    streams: bool = False,
    torch_distributed: bool = False,
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
        carrier: "eager": an operation sends when it is launched and waits at its end, for all ranks of its mesh to have
            launched it. "rendezvous": its launch too waits, for the receivers of what it sends. "nccl": a rank's operations
            run in the order of their launch, each when its peers have come to it.
        memory: "copied": messages are copies, made at the launch. "live": they appear in the receiver's memory at the last
            moment (late delivery), or at an earlier one that `choices` takes; until the sender's call has ended, what it
            sends is lent and not kept alive, and memory that is freed (early free), or written to, is an error.
        faults: values of `mfsdp_func.faults`; see `Simulation.errors` for what becomes of a rank that they hit.
        choices: what goes first wherever the run is free: a seed, `PCT`, or a tape of numbers, 0 past its end. By default
            first in, first out.
        timeout: of an exchange, in virtual seconds, once a fault has happened. Nobody sleeps.
        poison: fill results in flight with NaN (or the smallest integer), and raise when one is read before its token
            was waited for, or when a token is never waited for.
        streams: order work on CPU by simulated streams, as CUDA's do, and raise where nothing keeps an order that the
            results need: a missing wait, or memory that may be given away while another stream uses it. Programs make
            streams of their own with `mfsdp_func.streams`. What is in flight is watched so, and not by `poison`.
        torch_distributed: let ``torch.distributed`` work inside: every rank calls ``init_process_group``, with any backend, and
            collectives, send and recv, groups, `DeviceMesh` and what is made of them run on the simulated ranks.
        warn_after: seconds after which a `SlowRankWarning` names a rank that has neither ended nor come to an exchange,
            and the line where it is; None for never.

    Returns:
        The results by rank, the trace of messages, and more.

    Raises:
        SimulationError: on a deadlock, or what `poison` or `streams` finds.
        ValueError: if ranks call different operations or disagree on a plan; on unknown settings.
        RuntimeError: inside a `torch.func` transform, forward-mode differentiation, a compiled region or a tracer, which
            the ranks' threads would not see: put those into `program`.
        Exception: what the program raised, on the first rank that failed, with a note naming the rank, and
            one with the line that replays the run.

    >>> simulate(lambda mesh: mesh.get_rank() ** 2, 3).results
    {0: 0, 1: 1, 2: 4}

    A rank that is killed, seen from the others; and a tape of choices, which may change the order of events only:

    >>> import torch
    >>> import mfsdp_func as mf
    >>> layout = mf.build_for_row_atomic_unpadding([(2, 2)], 3)
    >>> def total(mesh):
    ...     ones = mf.DBuffer.from_local(torch.ones(4), mesh, [mf.Partial()], layout)
    ...     try:
    ...         return ones.allreduce(0).local_buffer.tolist()
    ...     except mf.ExchangeError as error:
    ...         return f"waited for {error.awaited}"
    >>> simulate(total, 3, faults=[mf.faults.Kill(rank=1, at=0)]).results
    {0: 'waited for (1,)', 2: 'waited for (1,)'}
    >>> simulate(total, 3, choices=[2, 0, 1], carrier="nccl").results[0]
    [3.0, 3.0, 3.0, 3.0]
    """
    refuse_inside_transforms("simulate")
    settings = Settings(
        seed, carrier, memory, tuple(faults), choices, timeout, poison, streams, torch_distributed, warn_after
    )
    return World(Mesh(shape, axis_names, ranks), settings).run(program)
