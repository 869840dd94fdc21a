"""Programs of a mesh, `program(mesh, *args)`, run on simulated ranks or on real ones: one function serves both."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh, as_mesh
from tests.spawn import RankPool

MeshFacts: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and ranks."""
Program: TypeAlias = Callable[..., Any]
RunOnMesh: TypeAlias = Callable[..., dict[int, Any]]
"""``run(program, shape, *args, ranks=None, check=None)``: rank -> what ``program(mesh, *args)`` returned there.

The program is a module-level function. With `check`, the agreement check is switched on or off around it.
"""


def mesh_on_rank(rank: int, facts: MeshFacts, kind: str = "DeviceMesh") -> Mesh:
    """On a real rank: a mesh with process groups of its own, or ("Mesh") one that only has the default group."""
    shape, ranks = facts
    if kind == "DeviceMesh":
        return as_mesh(DeviceMesh("cpu", torch.tensor(ranks).view(shape)))
    return Mesh(shape, ranks=ranks, rank=rank)


def run_simulated(
    program: Program,
    shape: int | tuple[int, ...],
    *args: Any,
    ranks: Iterable[int] | None = None,
    check: bool | None = None,
    **_: Any,
) -> dict[int, Any]:
    """See `RunOnMesh`; limits of time are for real ranks."""
    return mf.simulate(partial(_run_checked, program=program, args=args, check=check), shape, ranks=ranks).results


def run_real(
    pool: RankPool,
    program: Program,
    shape: int | tuple[int, ...],
    *args: Any,
    ranks: Iterable[int] | None = None,
    check: bool | None = None,
    kind: str = "DeviceMesh",
    **limits: Any,
) -> dict[int, Any]:
    """See `RunOnMesh`; `kind` as in `mesh_on_rank`, `limits` as in `RankPool.run`."""
    sizes = (shape,) if isinstance(shape, int) else tuple(shape)
    facts = sizes, tuple(range(math.prod(sizes)) if ranks is None else ranks)
    results = pool.run(_run_on_rank, program, facts, kind, check, args, **limits)
    return {rank: results[rank] for rank in facts[1]}


def _run_checked(mesh: Mesh, *, program: Program, args: tuple[Any, ...], check: bool | None) -> Any:
    if check is None:
        return program(mesh, *args)
    with mf.agreement_check(check):
        return program(mesh, *args)


def _run_on_rank(
    rank: int, program: Program, facts: MeshFacts, kind: str, check: bool | None, args: tuple[Any, ...]
) -> Any:
    mesh = mesh_on_rank(rank, facts, kind)
    return _run_checked(mesh, program=program, args=args, check=check) if rank in mesh else None
