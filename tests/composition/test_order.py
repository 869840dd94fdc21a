"""Compiled regions exchange in the order of the program on every rank, whatever their graphs look like."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import mfsdp_func as mf
from mfsdp_func.effects.launch import launches_watched
from mfsdp_func.plans.linear_map import LinearMap
from mfsdp_func.values.mesh import Mesh
from tests.spawn import RankPool

# torch itself uses what it has deprecated: at the first `jvp`, and when Inductor is imported.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

Sources = list[dict[int, torch.Tensor]]
BACKENDS = ("aot_eager", "inductor")

SHAPES = ((4, 1000), (40, 1000), (4, 10), (8, 3000))
"""Large and small by turns: Inductor brings forward what frees memory."""


@contextmanager
def recorded(rank: int) -> Iterator[list[str]]:
    """The labels of a rank's calls, as they reach the carrier."""
    calls: list[str] = []

    def record(linear: LinearMap, outputs: object) -> None:
        if linear.mesh.get_rank() == rank:
            calls.append(linear.label.replace("'", ""))

    with launches_watched(record):
        yield calls


def groups_of(mesh: Mesh) -> list[mf.GroupOwnerLayout]:
    """Owners by turns; of the third group the second rank holds nothing."""
    layouts = [mf.build_for_row_atomic_unpadding([shape], 2) for shape in SHAPES]
    layouts[2] = mf.GlobalLayout([SHAPES[2]], [0], 40, [0, 40])
    return [mf.GroupOwnerLayout(mesh, layout, {0: mesh.ranks[n % 2]}, name=f"g{n}") for n, layout in enumerate(layouts)]


def sources_of(groups: list[mf.GroupOwnerLayout]) -> Sources:
    sources: Sources = []
    for owners in groups:
        held = owners.layout.get_local_range(owners.mesh, [mf.RowAtomic()])
        sources.append({i: torch.randn(part.numel) for i, part in owners.layout.tensors_in(held)})
    return sources


def total(results: dict[int, torch.Tensor], token: mf.Token) -> torch.Tensor:
    return sum((tensor.sum() for tensor in results.values()), token.link)


# Programs: from sources to a loss. Each names the calls that it makes, forward and backward.


def independent(sources: Sources, groups: list[mf.GroupOwnerLayout]) -> torch.Tensor:
    """All gathers, then, in the other order, what is computed from them: nothing but the order links the groups."""
    found = [
        mf.gather({i: 2 * shard + 1 for i, shard in source.items()}, owner_layout=owners, dtype=torch.float32)
        for source, owners in zip(sources, groups, strict=True)
    ]
    loss = torch.zeros(())
    for (full, token), owners in reversed(list(zip(found, groups, strict=True))):
        squares = {i: (matrix @ matrix.T) @ matrix / 1000 for i, matrix in full.items()}
        loss = loss + total(*mf.scatter(squares, owner_layout=owners, dtype=torch.float32, after=token))
    return loss


def unread(sources: Sources, groups: list[mf.GroupOwnerLayout]) -> torch.Tensor:
    """Nobody reads the results of the first three groups."""
    token = mf.Token.linked_to(*[shard for source in sources for shard in source.values()])
    for source, owners in zip(sources[:3], groups[:3], strict=True):
        full, _ = mf.gather(source, owner_layout=owners, dtype=torch.float32, after=token)
        mf.scatter({i: matrix**2 for i, matrix in full.items()}, owner_layout=owners, dtype=torch.float32, after=token)
    full, token = mf.gather(sources[3], owner_layout=groups[3], after=token)
    cubes = {i: matrix**3 for i, matrix in full.items()}
    return total(*mf.scatter(cubes, owner_layout=groups[3], dtype=torch.float32, after=token))


def checkpointed(sources: Sources, groups: list[mf.GroupOwnerLayout]) -> torch.Tensor:
    """Each group in a region of its own; only owners need what they gathered for their gradients."""
    token = mf.Token.linked_to(*[shard for source in sources for shard in source.values()])
    loss = torch.zeros(())
    for source, owners in zip(sources, groups, strict=True):

        def region(token: mf.Token, source: Any, owners: Any = owners) -> tuple[torch.Tensor, mf.Token]:
            doubles = {i: 2 * shard for i, shard in source.items()}
            full, token = mf.gather(doubles, owner_layout=owners, dtype=torch.float32, after=token)
            cubes = {i: matrix**3 for i, matrix in full.items()}
            parts, token = mf.scatter(cubes, owner_layout=owners, dtype=torch.float32, after=token)
            return total({i: part**2 for i, part in parts.items()}, token), token

        part, token = checkpoint(region, token, source, use_reentrant=False)
        loss = loss + part
    return loss


GATHERS = [f"gather g{n}" for n in range(4)]
SCATTERS = [f"scatter g{n}" for n in range(4)]
PAIRS = [call for pair in zip(GATHERS, SCATTERS, strict=True) for call in pair]


def transposes(calls: list[str]) -> list[str]:
    return [f"transpose of {call}" for call in reversed(calls)]


def expected_calls(case: str, mesh: Mesh) -> tuple[list[str], list[str]]:
    """Forward and backward. The second rank has no part in the third group; only a token would link it."""
    _, forward, backward = CASES[case]
    if case == "independent" and mesh.get_rank() == mesh.ranks[1]:
        return forward, [call for call in backward if not call.endswith("g2")]
    return forward, backward


CASES: dict[str, tuple[Callable[..., torch.Tensor], list[str], list[str]]] = {
    "independent": (independent, GATHERS + SCATTERS[::-1], transposes(GATHERS + SCATTERS[::-1])),
    "unread": (unread, PAIRS, transposes(PAIRS[-2:])),
    "checkpointed": (checkpointed, PAIRS, transposes(PAIRS)),
}


def run(mesh: Mesh, case: str, backend: str) -> None:
    torch._dynamo.reset()
    program = CASES[case][0]
    forward, backward = expected_calls(case, mesh)
    groups = groups_of(mesh)
    sources = sources_of(groups)

    def gradients(fn: Callable[..., torch.Tensor]) -> list[Any]:
        leaves = [{i: shard.clone().requires_grad_() for i, shard in source.items()} for source in sources]
        loss = fn(leaves, groups)
        loss.backward()
        return [loss.detach(), *[shard.grad for source in leaves for shard in source.values()]]

    expected = gradients(program)
    compiled = torch.compile(program, fullgraph=True, backend=backend)
    with recorded(mesh.get_rank()) as calls:
        compiled(sources, groups)
        assert calls == forward, f"without autograd: {calls}"
        calls.clear()
        found = gradients(compiled)
        assert calls == forward + backward, f"with autograd: {calls}"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def run_on_gloo(rank: int, cases: list[tuple[str, str]]) -> None:
    mesh = mf.as_mesh(init_device_mesh("cpu", (2,)))
    for case, backend in cases:
        run(mesh, case, backend)


ALL = [(case, backend) for backend in BACKENDS for case in CASES]
SLOW = [("unread", "inductor"), ("checkpointed", "inductor")]


@pytest.mark.parametrize(
    ("case", "backend"), [pytest.param(*case, marks=[pytest.mark.slow] if case in SLOW else []) for case in ALL]
)
def test_order_on_simulated_ranks(case: str, backend: str) -> None:
    mf.simulate(partial(run, case=case, backend=backend), 2)


@pytest.mark.distributed
def test_order_on_real_ranks(ranks2: RankPool) -> None:
    ranks2.run(run_on_gloo, [("independent", "inductor")], timeout=120)


@pytest.mark.slow
@pytest.mark.distributed
def test_every_order_on_real_ranks(ranks2: RankPool) -> None:
    ranks2.run(run_on_gloo, ALL, timeout=600)


def test_transforms_keep_the_order() -> None:
    """Under vmap of grad, inside one compiled region."""

    def program(mesh: Mesh) -> None:
        groups = groups_of(mesh)
        sources = [{i: shard.expand(2, -1) for i, shard in source.items()} for source in sources_of(groups)]
        step = torch.vmap(torch.func.grad(lambda sources: independent(sources, groups)))
        with recorded(mesh.get_rank()) as calls:
            torch.compile(step, fullgraph=True, backend="aot_eager")(sources)
            forward, backward = expected_calls("independent", mesh)
            assert calls == forward + backward

    mf.simulate(program, 2)
