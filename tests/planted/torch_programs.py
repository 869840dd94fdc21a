"""Programs of ``torch.distributed`` alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mfsdp_func.values.mesh import Mesh
from tests.planted.bug import Bug


def collective_under_a_condition(bug: bool) -> Any:
    total = torch.ones(2)
    if not (bug and dist.get_rank() == 1):
        dist.all_reduce(total)
    return total


def another_collective_on_one_rank(bug: bool) -> None:
    if bug and dist.get_rank() == 0:
        dist.broadcast(torch.ones(2), 0)
    else:
        dist.all_reduce(torch.ones(2))


def another_size_on_one_rank(bug: bool) -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank() if bug else 2))


def groups_in_another_order(bug: bool) -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    for group in reversed(groups) if bug and dist.get_rank() else groups:
        dist.all_reduce(torch.ones(1), group=group)


def both_send_first(bug: bool) -> Any:
    """A send may wait for its receiver."""
    other, room = 1 - dist.get_rank(), torch.zeros(2)
    work = dist.isend(torch.ones(2), other)
    if bug:
        work.wait()
    dist.recv(room, other)
    work.wait()
    return room


def on_rank(mesh: Mesh, bug: bool, *, program: Callable[[bool], Any]) -> Any:
    dist.init_process_group("gloo")
    return program(bug)


BUGS = [
    Bug(name, partial(on_rank, program=program), words, keywords={"torch_distributed": True})
    for name, program, words in (
        (
            "torch.distributed: a collective under `if rank`",
            collective_under_a_condition,
            "deadlock: no rank can go on",
        ),
        ("torch.distributed: another collective on one rank", another_collective_on_one_rank, "operation: broadcast"),
        ("torch.distributed: another size on one rank", another_size_on_one_rank, "sizes: (2,) of float32"),
        ("torch.distributed: groups in another order", groups_in_another_order, "deadlock: no rank can go on"),
        ("torch.distributed: both send before they receive", both_send_first, "waits in send to rank"),
    )
]
