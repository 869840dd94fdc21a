"""`gather` and `scatter`: examples that are documentation, and laws over random layouts, meshes and owners."""

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad
from torch.multiprocessing.reductions import StorageWeakRef

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests import strategies
from tests.meshes import MeshFacts, RunOnMesh, run_real
from tests.movement.carriers import as_bytes
from tests.movement.gradients import dense_inputs, dense_loss, inputs_for, like, loss_of
from tests.movement.groups import (
    DTYPES,
    Group,
    Tensors,
    assert_close,
    assert_same,
    linked_owner_compute,
    mix_rows,
    one_group,
)
from tests.spawn import RankPool

# torch's forward mode scripts a few decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


# Examples that are documentation.


def gather_what_ranks_fill(mesh: Mesh) -> list[float]:
    """Every rank fills its rows of an (8, 4) tensor with its number; the first column of the tensor, on its owner."""
    layout = mf.build_for_row_atomic([(8, 4)], mesh.size())
    owners = GroupOwnerLayout(mesh, layout, {0: mesh.ranks[2]})
    shard = torch.full((8 // mesh.size(), 4), float(mesh.get_rank()))
    full, _ = mf.gather({0: shard}, owner_layout=owners)
    return full[0][:, 0].tolist() if full else []


BUFFER_ORDERS = [(((2, 2), (3, 1, 0, 2)), (3, 0, 1, 2)), (((4,), (2, 0, 3, 1)), (2, 0, 3, 1))]


@pytest.mark.parametrize(("mesh", "order"), BUFFER_ORDERS)
def test_rows_come_in_buffer_order(mesh: MeshFacts, order: tuple[int, ...], run_on_mesh: RunOnMesh) -> None:
    results = run_on_mesh(gather_what_ranks_fill, mesh[0], ranks=mesh[1])
    assert results[mesh[1][2]] == [float(rank) for rank in order for _ in range(2)]
    assert sum(map(len, results.values())) == 8


@pytest.mark.parametrize("async_op", [False, True])
def test_a_token_keeps_no_memory_once_it_was_waited_for(async_op: bool) -> None:
    def program(mesh: Mesh) -> None:
        group = one_group(mesh)
        source = group.shards(group.fill())
        gathered, token = group.gather(source, async_op=async_op)
        token.wait()
        memory = [StorageWeakRef(t.untyped_storage()) for t in (*source.values(), *gathered.values())]
        source.clear()
        gathered.clear()
        assert all(one.expired() for one in memory)
        assert token.link.item() == 0

    mf.simulate(program, 2)


# The law over random layouts, meshes and owners.


def round_trip_of(mesh: Mesh, owners: GroupOwnerLayout, dtype: torch.dtype, said: bool) -> Any:
    """`scatter(gather(x)) == x`, bitwise, on this rank of a random case."""
    group = Group(GroupOwnerLayout(mesh, owners.layout, owners.tensor_to_owner, owners.placements, owners.name))
    group = group.of(None if said else dtype)
    full = group.fill(dtype)
    keywords = {"dtype": dtype} if said else {}
    source = group.shards(full)
    gathered, token = group.gather(source, **keywords)
    assert_same(gathered, group.full(full), "gather")
    parts, _ = group.scatter(gathered, after=token, **keywords)
    assert_same(parts, group.parts(full), "scatter")
    without, _ = group.scatter(gathered, include_own=False, **keywords)
    assert_same(without, group.parts(full, include_own=False), "scatter without own parts")
    return as_bytes((gathered, parts))


@given(strategies.owner_layouts(), st.sampled_from(DTYPES), st.booleans())
def test_round_trip_law(owners: GroupOwnerLayout, dtype: torch.dtype, said: bool) -> None:
    mesh = owners.mesh
    mf.simulate(lambda mesh: round_trip_of(mesh, owners, dtype, said), mesh.shape, ranks=mesh.ranks)


@st.composite
def meshes_of_four(draw: st.DrawFn) -> Mesh:
    shape = draw(st.sampled_from([(4,), (2, 2), (3,), (2,), (1, 2, 2), (2, 1), (1,)]))
    return Mesh(shape, ranks=draw(st.permutations(range(4)))[: torch.Size(shape).numel()])


@pytest.mark.distributed
@settings(max_examples=30)
@given(owners=strategies.owner_layouts(mesh=meshes_of_four()), dtype=st.sampled_from(DTYPES), said=st.booleans())
def test_round_trip_law_on_real_ranks(
    ranks4: RankPool, owners: GroupOwnerLayout, dtype: torch.dtype, said: bool
) -> None:
    mesh = owners.mesh
    results = run_real(
        ranks4, round_trip_of, mesh.shape, owners, dtype, said, ranks=mesh.ranks, kind="Mesh", group_timeout=10
    )
    expected = mf.simulate(lambda mesh: round_trip_of(mesh, owners, dtype, said), mesh.shape, ranks=mesh.ranks).results
    assert_same(results, expected)


def gradients_of(mesh: Mesh, owners: GroupOwnerLayout) -> None:
    """The gradient of the sum over ranks of their losses is that of the dense function."""
    group = Group(GroupOwnerLayout(mesh, owners.layout, owners.tensor_to_owner, owners.placements, owners.name))
    full = group.normal()
    source = inputs_for(group, full)
    link = torch.zeros((), requires_grad=True)

    def loss(source: Tensors, link: torch.Tensor) -> torch.Tensor:
        return loss_of(group, after=lambda _: mf.Token.linked_to(link))(source)

    gradient, zero = grad(loss, argnums=(0, 1))(source, link.detach())
    wanted = like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source) if source else {}
    assert_close(gradient, wanted)
    assert float(zero) == 0
    leaves = {i: tensor.clone().requires_grad_() for i, tensor in source.items()}
    loss(leaves, link).backward()
    assert_same({i: tensor.grad for i, tensor in leaves.items()}, gradient)


@settings(max_examples=50)
@given(strategies.owner_layouts(replicate=False))
def test_gradients_are_those_of_the_dense_function(owners: GroupOwnerLayout) -> None:
    if any(owners.layout.tensor_shapes[i].numel() for i in owners.tensor_to_owner):
        mesh = owners.mesh
        mf.simulate(lambda mesh: gradients_of(mesh, owners), mesh.shape, ranks=mesh.ranks)


# Compiled regions.


def repeat_compiled_step(rank: int) -> tuple[int, list[bool]]:
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = Mesh(2, rank=rank)
    counter = CompileCounterWithBackend("aot_eager")

    @partial(torch.compile, fullgraph=True, backend=counter)
    def step(group: Group, source: Tensors) -> Tensors:
        return linked_owner_compute(group, source, dtype=torch.float64)[0]

    right = []
    for k in range(3):
        group = one_group(mesh)  # an equal value, not the same object
        full = {i: tensor * k for i, tensor in group.normal().items()}
        parts = step(group, group.shards(full))
        torch.testing.assert_close(parts, group.parts({i: mix_rows(full[i]) for i in (0, 1, 3)}))
        right.append(True)
    return counter.frame_count, right


@pytest.mark.distributed
def test_equal_owners_do_not_recompile(ranks2: RankPool) -> None:
    assert ranks2.run(repeat_compiled_step) == [(1, [True] * 3)] * 2


@pytest.mark.slow
@settings(max_examples=2000)
@given(strategies.owner_layouts(), st.sampled_from(DTYPES), st.booleans())
def test_round_trip_law_at_length(owners: GroupOwnerLayout, dtype: torch.dtype, said: bool) -> None:
    test_round_trip_law.hypothesis.inner_test(owners, dtype, said)
