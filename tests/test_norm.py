import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests import strategies
from tests.buffers import AVG, FULL, KINDS, MESHES, ROWS, SUM, dense, layout_of, local_of, shard_of
from tests.meshes import run_real, run_simulated
from tests.spawn import RankPool

Local = list[tuple[mf.GlobalLayout, Any, int, torch.dtype]]
"""Layout, placements, seed and dtype of each buffer."""


def buffers_of(mesh: Mesh, given: Local) -> list[mf.DBuffer]:
    return [local_of(mf.BufferSpec(mesh, p, layout), dense(layout, seed, dtype)) for layout, p, seed, dtype in given]


def dense_norm(given: Local) -> float:
    """From whole buffers, with plain sums."""
    return math.sqrt(
        sum(float(dense(layout, seed, dtype).double().square().nansum()) for layout, _, seed, dtype in given)
    )


def all_kinds(mesh: Mesh) -> Local:
    """Every kind of layout, sharded on any suffix of the axes."""
    return [
        (
            layout_of(kind, mesh.size()),
            [*[FULL] * whole, *[shard_of(kind)] * (mesh.ndim - whole)],
            10 * n + whole,
            torch.float64,
        )
        for n, kind in enumerate(KINDS)
        for whole in range(mesh.ndim + 1)
    ]


def norms(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
    buffers = buffers_of(mesh, all_kinds(mesh))
    with torch.no_grad():
        tree = {"list": buffers[:2], "tuple": (buffers[2], {"rest": buffers[3:]})}
        return mf.global_norm(tree), mf.global_norm(tree, deterministic=True)


@pytest.mark.parametrize("shape", [(1,), (2,), (4,), (2, 2), (2, 1, 3)])
@pytest.mark.parametrize("poison", [False, True])
def test_padding_is_left_out_and_replicas_count_once(shape: tuple[int, ...], poison: bool) -> None:
    """Every gap and everything behind a segment is NaN."""
    results = mf.simulate(norms, shape, poison=poison).results
    expected = dense_norm(all_kinds(Mesh(shape)))
    for value, fixed in results.values():
        assert value.shape == ()
        assert value.dtype == torch.float64
        assert float(value) == pytest.approx(expected, rel=1e-13)
        assert torch.equal(value, fixed)
    assert len({float(value) for value, _ in results.values()}) == 1


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", MESHES[4], ids=["4", "2x2"])
def test_on_real_ranks(mesh: Any, ranks4: RankPool) -> None:
    simulated = run_simulated(norms, mesh[0], ranks=mesh[1])
    for rank, (value, fixed) in run_real(ranks4, norms, mesh[0], ranks=mesh[1]).items():
        assert torch.equal(fixed, simulated[rank][1])
        assert float(value) == pytest.approx(float(fixed), rel=1e-14)


@given(st.data())
def test_any_mesh(data: st.DataObject) -> None:
    mesh = data.draw(strategies.meshes(max_ranks=6, nobody=True))
    given: Local = []
    for seed in range(data.draw(st.integers(0, 3))):
        case = data.draw(strategies.cases(mesh.size()))
        whole = data.draw(st.integers(0, mesh.ndim))
        given.append((case.layout, [*[FULL] * whole, *[case.placement] * (mesh.ndim - whole)], seed, torch.float64))

    def program(mesh: Mesh) -> float:
        return float(mf.global_norm(buffers_of(mesh, given)))

    for value in mf.simulate(program, mesh.shape, ranks=mesh.ranks).results.values():
        assert value == pytest.approx(dense_norm(given), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.bfloat16], torch.float32),
        ([torch.float16, torch.float32], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
        ([torch.complex64], torch.float32),
        ([], torch.float32),
    ],
)
def test_dtypes(dtypes: list[torch.dtype], expected: torch.dtype) -> None:
    def program(mesh: Mesh) -> torch.Tensor:
        layout = mf.build_for_row_atomic_unpadding([(33, 7), (5, 3)], 2)
        return mf.global_norm(buffers_of(mesh, [(layout, [ROWS], n, dtype) for n, dtype in enumerate(dtypes)]))

    for value in mf.simulate(program, 2).results.values():
        assert value.dtype == expected
        if dtypes == [torch.bfloat16]:
            layout = mf.build_for_row_atomic_unpadding([(33, 7), (5, 3)], 2)
            assert float(value) == pytest.approx(dense_norm([(layout, [], 0, torch.bfloat16)]), rel=1e-6)


def test_clipping() -> None:
    """The use it is made for: one factor for all gradients, alike on all ranks."""

    def program(mesh: Mesh) -> float:
        given: Local = [(layout_of(kind, 4), [shard_of(kind)], n, torch.float64) for n, kind in enumerate(KINDS)]
        grads = {f"group {n}": buffer for n, buffer in enumerate(buffers_of(mesh, given))}
        factor = (0.5 / mf.global_norm(grads)).clamp(max=1)
        clipped = torch.utils._pytree.tree_map(partial(torch.mul, factor), grads)
        return float(mf.global_norm(clipped))

    assert all(norm == pytest.approx(0.5) for norm in mf.simulate(program, 4).results.values())


@pytest.mark.parametrize("ord", [1.5, 2.0, math.inf])
def test_compiled(ord: float) -> None:
    """One graph; buffers over a part of the ranks too, and an error with its text."""

    def program(mesh: Mesh) -> None:
        torch._dynamo.reset()
        column = Mesh(2, ranks=[r for r in mesh.ranks if r % 2 == mesh.get_rank() % 2], rank=mesh.get_rank())
        buffers = buffers_of(mesh, [(layout_of("unpadded", 4), [ROWS, ROWS], 0, torch.float64)])
        mixed = buffers + buffers_of(column, [(layout_of("unpadded", 2), [FULL], 1, torch.float64)])
        norm = torch.compile(lambda tree: mf.global_norm(tree, ord=ord), fullgraph=True, backend="aot_eager")
        for tree in (buffers, mixed):
            torch.testing.assert_close(norm(tree), mf.global_norm(tree, ord=ord), rtol=1e-13, atol=0)
        other = buffers_of(column, [(layout_of("unpadded", 2), [mf.Partial("sum")], 1, torch.float64)])
        with pytest.raises(Exception, match="is not summed yet"):
            norm(other)

    mf.simulate(program, (2, 2))


def test_nan_in_a_tensor_is_seen_on_every_rank() -> None:
    def program(mesh: Mesh) -> bool:
        (buffer,) = buffers_of(mesh, [(layout_of("unpadded", 2), [ROWS], 0, torch.float64)])
        if mesh.get_rank() == 1:
            buffer.local_buffer[0] = float("nan")
        return bool(mf.global_norm(buffer).isnan())

    assert mf.simulate(program, 2).results == {0: True, 1: True}


def test_one_number_per_sharded_axis() -> None:
    def program(mesh: Mesh) -> None:
        mf.global_norm(buffers_of(mesh, [(layout_of("padded", 4), [FULL, ROWS], n, torch.float64) for n in range(5)]))

    trace = mf.simulate(program, (2, 2)).trace
    assert {sent.operation for sent in trace} == {"allreduce over 'axis1'"}
    assert sum(sent.nbytes for sent in trace) == 4 * 8


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        (lambda: torch.ones(3), TypeError, "expected DBuffers, got a Tensor"),
        (
            lambda: mf.DBuffer.empty(Mesh(2, rank=0), [ROWS], layout_of("padded", 2), dtype=torch.int64),
            TypeError,
            "holds no floating-point numbers; cast it first",
        ),
        (
            lambda: mf.DBuffer.empty(Mesh(2, rank=0), [SUM], layout_of("padded", 2)),
            ValueError,
            "not summed yet; reduce_scatter or allreduce its Partial axes first",
        ),
        (lambda: mf.DBuffer.empty(Mesh(2, rank=0), [AVG], layout_of("padded", 2)), ValueError, "not summed yet"),
    ],
)
def test_refused(leaf: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        mf.global_norm([leaf()])


def experts(mesh: Mesh) -> tuple[mf.DBuffer, mf.DBuffer]:
    """A dense buffer of 4 ones on all four ranks, and this column's experts: of ranks 0 and 2 ones, of 1 and 3 twos."""
    dense = mf.DBuffer.distribute_tensors([torch.ones(4)], mesh, [ROWS], mf.build_for_row_atomic([(4,)], 4))
    column = mesh.get_rank() % 2
    own = Mesh(2, ranks=(column, column + 2), rank=mesh.get_rank())
    value = torch.full((4, 1), float(column + 1))
    return dense, mf.DBuffer.distribute_tensors([value], own, [ROWS], mf.build_for_row_atomic([(4, 1)], 2))


@pytest.mark.parametrize("deterministic", [False, True])
def test_meshes_within_a_mesh(deterministic: bool) -> None:
    """Other columns hold other experts, so all of them count: 4 + 4 * 1 + 4 * 4."""

    def program(mesh: Mesh) -> float:
        return float(mf.global_norm(experts(mesh), deterministic=deterministic))

    simulation = mf.simulate(program, 4)
    assert {round(norm**2, 5) for norm in simulation.results.values()} == {24.0}
    assert {sent.operation for sent in simulation.trace} == {"allreduce over 'axis0'"}


def test_experts_alone_need_the_mesh_of_all() -> None:
    def program(mesh: Mesh) -> tuple[float, float]:
        _, alone = experts(mesh)
        return float(mf.global_norm(alone)) ** 2, float(mf.global_norm(alone, mesh=mesh)) ** 2

    for rank, (column, total) in mf.simulate(program, 4).results.items():
        assert (round(column, 5), round(total, 5)) == (16 if rank % 2 else 4, 20)


@pytest.mark.parametrize("shape", [(1,), (4,), (2, 2)])
@pytest.mark.parametrize("ord", [1, 2, 3, math.inf])
def test_orders(shape: tuple[int, ...], ord: float) -> None:
    given = all_kinds(Mesh(shape))
    for buffers in (given, given[: 1 + len(shape)], given[:1]):
        flat = torch.cat([dense(layout, seed, dtype).nan_to_num() for layout, _, seed, dtype in buffers])

        def program(mesh: Mesh, buffers: Local = buffers) -> float:
            return float(mf.global_norm(buffers_of(mesh, buffers), ord=ord))

        for value in mf.simulate(program, shape, poison=True).results.values():
            assert value == pytest.approx(float(torch.linalg.vector_norm(flat, ord)), rel=1e-12)


def test_meshes_side_by_side_are_refused() -> None:
    def program(mesh: Mesh) -> None:
        rank = mesh.get_rank()
        pairs = [Mesh(2, ranks=ranks, rank=rank) for ranks in ((0, 1), (0, 2)) if rank in ranks]
        layout = mf.build_for_row_atomic([(4, 1)], 2)
        buffers = [mf.DBuffer.distribute_tensors([torch.ones(4, 1)], pair, [ROWS], layout) for pair in pairs]
        if rank == 0:
            with pytest.raises(ValueError, match="contains all others, so ranks would disagree; give mesh="):
                mf.global_norm(buffers)
            with pytest.raises(ValueError, match="lacks ranks of"):
                mf.global_norm(buffers, mesh=pairs[0])
        with pytest.raises(ValueError, match=r"ord must be a positive number or math\.inf, got 0"):
            mf.global_norm(buffers, ord=0)

    mf.simulate(program, 3)
