"""Faults that happen to a real rank, at its points."""

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from mfsdp_func.effects.carrier import SIMULATED
from mfsdp_func.effects.faults import Corrupt, Fault, InjectedFault, Kill, Stall
from mfsdp_func.effects.process_group import PROCESS_GROUPS


@dataclass
class Points:
    """The points of this rank.

    Attributes:
        number: how many it has come to.
    """

    number: int = 0


@contextmanager
def injected(*faults: Fault) -> Generator[Points, None, None]:
    """Let faults happen to this process, a real rank, inside; points are counted from 0. `simulate` has ``faults=``.

    Raises:
        RuntimeError: inside a simulation, inside another `injected`, or where no process group tells the rank.
        ValueError: on `Corrupt`: what process groups carry is not looked into.
    """
    if SIMULATED.get() is not None or PROCESS_GROUPS.reach is not None or not dist.is_initialized():
        raise RuntimeError(
            "faults.injected: faults happen to a real rank, once its process group is there, and one set at a time; give"
            " those of simulated ranks to simulate(..., faults=...)"
        )
    points, mine, rank = Points(), dict[int, list[Fault]](), dist.get_rank()
    for fault in faults:
        if isinstance(fault, Corrupt):
            raise ValueError(f"faults.injected: {fault} is for simulated ranks; real ranks take Kill, Stall and Raise")
        if fault.rank == rank:
            mine.setdefault(fault.at, []).append(fault)

    def reach(label: str) -> None:
        at, points.number = points.number, points.number + 1
        for fault in mine.get(at, ()):
            if isinstance(fault, Kill):
                os.kill(os.getpid(), signal.SIGKILL)
            elif isinstance(fault, Stall):
                time.sleep(fault.seconds)
            else:
                raise InjectedFault(f"{label}: rank {rank} fails at its point {at}, as asked by {fault}")

    PROCESS_GROUPS.reach = reach
    try:
        yield points
    finally:
        PROCESS_GROUPS.reach = None
