"""The cases on every carrier: simulated, real and compiled."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from tests.meshes import MeshFacts, mesh_on_rank
from tests.movement import elements, gradients, memory
from tests.movement.groups import CASES, Run, bits
from tests.spawn import RankPool

MODULES = (elements, memory, gradients)
"""Each adds its cases to `CASES`."""


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def compiled(backend: str) -> Run:
    def run(function: Callable[..., Any], *args: Any) -> Any:
        return torch.compile(function, fullgraph=True, backend=backend)(*args)

    return run


TWO: MeshFacts = ((2,), (1, 0))
FOUR: tuple[MeshFacts, ...] = (((4,), (2, 0, 3, 1)), ((2, 2), (3, 1, 0, 2)))
MESHES: tuple[MeshFacts, ...] = (((1,), (5,)), TWO, ((3,), (4, 1, 7)), *FOUR, ((2, 1, 3), (9, 0, 3, 4, 1, 7)))


def name_of(mesh: MeshFacts) -> str:
    return "x".join(map(str, mesh[0])) + ":" + ",".join(map(str, mesh[1]))


def run_case(rank: int, name: str, facts: MeshFacts, kind: str, run: str, check: bool) -> Any:
    """On a real rank: one case, where the mesh has this rank."""
    mesh = mesh_on_rank(rank, facts, kind)
    if rank not in mesh:
        return None
    with mf.agreement_check(check):
        return as_bytes(CASES[name].function(mesh, plain if run == "plain" else compiled(run)))


def as_bytes(results: Any) -> Any:
    """Results with every tensor as its dtype, shape and bytes: cheap to send between processes, in any dtype."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: (str(t.dtype), tuple(t.shape), bits(t).numpy().tobytes()), results
    )


def simulated(name: str, facts: MeshFacts, *, poison: bool = False, streams: bool = False) -> dict[int, Any]:
    program = partial(CASES[name].function, run=plain)
    return as_bytes(mf.simulate(program, facts[0], ranks=facts[1], poison=poison, streams=streams).results)


remembered = lru_cache(maxsize=None)(simulated)


def on_real_ranks(pool: RankPool, name: str, facts: MeshFacts, kind: str, run: str, check: bool) -> dict[int, Any]:
    results = pool.run(run_case, name, facts, kind, run, check, timeout=120)
    return {rank: results[rank] for rank in facts[1]}
