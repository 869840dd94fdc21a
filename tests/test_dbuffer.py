import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import Shard
from tests import strategies
from tests.buffers import (
    AVG,
    FULL,
    KINDS,
    MESHES,
    ROWS,
    SHAPES,
    SUM,
    all_placements,
    dense,
    expected_of,
    is_reachable,
    layout_of,
    local_of,
    shard_of,
    source_of,
    tensors_of,
)
from tests.meshes import run_real, run_simulated
from tests.spawn import RankPool

Tensors = dict[str, torch.Tensor]


# Every row of the table: from every placements to every one that can be reached, on every carrier.


def check(mesh: Mesh, old: Any, new: Any, layout: mf.GlobalLayout, modes: tuple[bool, ...]) -> tuple[bool, Tensors]:
    """Redistribute, deterministically or not; returns whether elements were added, and the tensors' elements."""
    expected, adds = expected_of(mesh, old, new, layout)
    tolerance = {"rtol": 1e-12, "atol": 1e-12} if adds else {"rtol": 0, "atol": 0}
    found = {}
    for deterministic in modes:
        result = source_of(mesh, old, layout).redistribute(new, deterministic=deterministic)
        assert result.spec == expected.spec
        assert result.local_buffer.shape == expected.local_buffer.shape
        found[f"{old}->{new} {deterministic}"] = tensors_of(result)
        torch.testing.assert_close(tensors_of(result), tensors_of(expected), **tolerance)
    return adds, found


def check_all(mesh: Mesh, kind: str) -> tuple[Tensors, Tensors]:
    """Results that must be bitwise alike everywhere, and those that agree to rounding."""
    exact, rounded = {}, {}
    layout, choices = layout_of(kind, mesh.size()), all_placements(mesh.ndim, shard_of(kind))
    pairs = [pair for pair in itertools.product(choices, choices) if is_reachable(*pair)]
    for old, new in pairs[:: 1 if mesh.ndim < 3 else 11]:
        if mesh.get_rank() in mesh:
            adds, found = check(mesh, old, new, layout, (False, True))
            for name, value in found.items():
                (rounded if adds and name.endswith("False") else exact)[name] = value
    return exact, rounded


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2])
def test_table_simulated(kind: str, count: int) -> None:
    for shape, ranks in MESHES[count]:
        run_simulated(check_all, shape, kind, ranks=ranks)


def compare(pool: RankPool, mesh: Any, kind: str, group: str) -> None:
    real = run_real(pool, check_all, mesh[0], kind, ranks=mesh[1], kind=group)
    simulated = run_simulated(check_all, mesh[0], kind, ranks=mesh[1])
    for rank, (exact, rounded) in simulated.items():
        for name, value in exact.items():
            assert torch.equal(value, real[rank][0][name]), f"{name} on rank {rank}"
        torch.testing.assert_close(real[rank][1], rounded, rtol=1e-13, atol=1e-14)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", ["DeviceMesh", "Mesh"])
def test_table_on_two_real_ranks(kind: str, group: str, ranks2: RankPool) -> None:
    compare(ranks2, MESHES[2][0], kind, group)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES[4], ids=["4", "2x2"])
def test_table_on_four_real_ranks(kind: str, mesh: Any, ranks4: RankPool) -> None:
    compare(ranks4, mesh, kind, "DeviceMesh")


@pytest.mark.distributed
@pytest.mark.parametrize("mesh", [((2, 1, 2), (3, 1, 0, 2)), ((2,), (3, 1))], ids=["three axes", "a part of the ranks"])
def test_table_on_other_real_meshes(mesh: Any, ranks4: RankPool) -> None:
    for kind in ("unpadded", "balanced"):
        compare(ranks4, mesh, kind, "DeviceMesh")


@given(st.data())
def test_table_on_any_mesh(data: st.DataObject) -> None:
    mesh = data.draw(strategies.meshes(max_ranks=8, nobody=True))
    case = data.draw(strategies.cases(mesh.size() * data.draw(st.sampled_from([1, 2]))))
    layout = case.layout
    if data.draw(st.booleans()):  # equal storage for unequal segments, as no builder makes it for every kind
        layout = mf.GlobalLayout(
            *(layout.tensor_shapes, layout.tensor_to_offset, layout.size, layout.rank_to_offset),
            stores_equal_segments=True,
        )
    choices = st.sampled_from(all_placements(mesh.ndim, case.placement))
    old = data.draw(choices)
    new = data.draw(choices.filter(lambda new: is_reachable(old, new)))
    program = partial(check, old=old, new=new, layout=layout, modes=(data.draw(st.booleans()),))
    mf.simulate(program, mesh.shape, ranks=mesh.ranks)


def test_two_axes_are_one_in_another_order() -> None:
    """A (2, 2) mesh with both axes sharded is the mesh of 4 in buffer order, gradients too."""

    def program(mesh: Mesh) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [ROWS] * mesh.ndim
        buffer = source_of(mesh, rows, layout_of("padded", 4))
        weight = dense(buffer.layout, mesh.get_rank() + 100)

        def loss(buffer: mf.DBuffer) -> torch.Tensor:
            whole = buffer.redistribute([FULL] * mesh.ndim, deterministic=True)
            return sum((view.sin() * weight[: view.numel()].view_as(view).nan_to_num()).sum() for view in views(whole))

        return buffer.local_buffer, tensors_of(torch.func.grad(loss)(buffer))

    square = mf.simulate(program, (2, 2), ranks=(3, 1, 0, 2)).results
    line = mf.simulate(program, 4, ranks=(3, 0, 1, 2)).results
    for rank in range(4):
        torch.testing.assert_close(square[rank], line[rank], rtol=1e-12, atol=1e-13, equal_nan=True)


def views(buffer: mf.DBuffer) -> list[torch.Tensor]:
    return [buffer.get_tensor_view(i) for i in range(len(buffer.layout.tensor_shapes))]


# Building buffers, and looking into them.


@pytest.mark.parametrize("kind", KINDS)
def test_distribute_tensors_and_views(kind: str) -> None:
    def program(mesh: Mesh) -> int:
        layout = layout_of(kind, 4)
        flat = dense(layout, 0)
        full = [
            flat[o : o + s.numel()].view(s) for o, s in zip(layout.tensor_to_offset, layout.tensor_shapes, strict=True)
        ]
        held = 0
        for placements in all_placements(mesh.ndim, shard_of(kind)):
            if SUM in placements or AVG in placements:
                continue
            buffer = mf.DBuffer.distribute_tensors(full, mesh, placements, layout)
            needed = dict(layout.tensors_in(buffer.spec.local_range))
            some = mf.DBuffer.distribute_tensors({i: full[i] for i in needed}, mesh, placements, layout)
            assert torch.equal(some.local_buffer, buffer.local_buffer)
            assert not buffer.local_buffer.isnan().any()
            assert list(buffer.tensor_views()) == sorted(needed)
            for i, view in enumerate(views(buffer)):
                part = buffer.get_local_part(i)
                assert torch.equal(view.reshape(-1), full[i].reshape(-1)[part.start : part.end])
                assert (
                    not view.numel()
                    or view.untyped_storage().data_ptr() == buffer.local_buffer.untyped_storage().data_ptr()
                )
                if kind != "handmade" or placements == (FULL, FULL):
                    assert view.shape[1:] == full[i].shape[1:]
                held += view.numel()
        return held

    held = sum(mf.simulate(program, (2, 2), ranks=(3, 1, 0, 2)).results.values())
    assert held == sum(torch.Size(shape).numel() for shape in SHAPES) * (4 + 2 + 1)


def test_layout_that_splits_rows_gives_flat_views_on_all_ranks() -> None:
    layout = mf.GlobalLayout([(2, 3), (2, 2)], [0, 6], 10, [0, 4, 6])

    def shapes(mesh: Mesh) -> list[tuple[int, ...]]:
        return [tuple(view.shape) for view in views(source_of(mesh, [ROWS], layout))]

    assert mf.simulate(shapes, 3).results == {0: [(4,), (0, 2)], 1: [(2,), (0, 2)], 2: [(0,), (2, 2)]}


@pytest.mark.parametrize("kind", KINDS)
def test_empty_and_cast(kind: str) -> None:
    def program(mesh: Mesh) -> None:
        layout = layout_of(kind, 4)
        for placements in all_placements(1, shard_of(kind)):
            empty = mf.DBuffer.empty(mesh, placements, layout, dtype=torch.bfloat16)
            source = source_of(mesh, placements, layout)
            assert empty.dtype == torch.bfloat16
            assert empty.local_buffer.shape == source.local_buffer.shape
            half = source.cast(torch.bfloat16)
            assert half.spec == source.spec
            assert torch.equal(half.local_buffer, source.local_buffer.bfloat16()) or half.local_buffer.isnan().any()
            assert source.cast(torch.float64).local_buffer is source.local_buffer

    mf.simulate(program, 4)
    assert mf.DBuffer.empty(Mesh(1, rank=0), [FULL], layout_of(kind, 1)).dtype == torch.get_default_dtype()


def test_from_local_and_views_share_storage() -> None:
    def program(mesh: Mesh) -> None:
        layout = layout_of("unpadded", 2)
        storage = torch.arange(layout.size)
        whole = mf.DBuffer.from_local(storage, mesh, [FULL], layout)
        assert whole.local_buffer is storage
        part = whole.view([ROWS])
        for view in views(part):
            view.fill_(-1)
        mine = part.spec.local_range
        assert (storage < 0).nonzero().flatten().tolist() == list(range(mine.start, mine.end))

    mf.simulate(program, 2)


def test_is_a_frozen_value_with_one_leaf() -> None:
    buffer = source_of(Mesh(2, rank=1), [ROWS], layout_of("balanced", 2))
    with pytest.raises(AttributeError):
        buffer.local_buffer = torch.zeros(1)  # type: ignore[misc]
    leaves, tree = pytree.tree_flatten(buffer)
    assert leaves == [buffer.local_buffer]
    assert pytree.tree_unflatten(leaves, tree).spec == buffer.spec
    doubled = pytree.tree_map(lambda leaf: leaf * 2, {"w": buffer})
    assert torch.equal(doubled["w"].local_buffer, buffer.local_buffer * 2) or buffer.local_buffer.isnan().any()
    for again in (pickle.loads(pickle.dumps(buffer)), copy.deepcopy(buffer)):
        assert again.spec == buffer.spec
        assert torch.equal(again.local_buffer.nan_to_num(), buffer.local_buffer.nan_to_num())
    assert "RowAtomic()" in repr(buffer)
    assert hash(buffer.spec) == hash(mf.BufferSpec(Mesh(2, rank=1), [ROWS], layout_of("balanced", 2)))
    assert buffer.spec != mf.BufferSpec(Mesh(2, rank=0), [ROWS], layout_of("balanced", 2))


# Averages and labels.


def test_average_of_three_rows_on_two_ranks() -> None:
    def program(mesh: Mesh) -> list[torch.Tensor]:
        layout = mf.build_for_row_atomic([(3,)], 2)
        local = torch.full((4,), float("nan"))
        local[:3] = torch.tensor([1.0, 2.0, 4.0]) * (1 + mesh.get_rank())
        partial = mf.DBuffer.from_local(local, mesh, [AVG], layout)
        return [
            partial.allreduce(0).get_tensor_view(0),
            partial.reduce_scatter("axis0", ROWS).allgather(0).get_tensor_view(0),
            partial.reduce_scatter(0, ROWS, deterministic=True).get_tensor_view(0),
        ]

    results = mf.simulate(program, 2).results
    for rank, (whole, joined, mine) in results.items():
        assert whole.tolist() == joined.tolist() == [1.5, 3.0, 6.0]
        assert mine.tolist() == [[1.5, 3.0], [6.0]][rank]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_deterministic_mean_of_halves_is_rounded_once(dtype: torch.dtype) -> None:
    def program(mesh: Mesh) -> None:
        layout = mf.build_for_row_atomic_unpadding([(4,)], 3)
        terms = [torch.tensor([60000.0, 1.0, 257.0, 3.0]).add(rank).to(dtype) for rank in range(3)]
        buffer = mf.DBuffer.from_local(terms[mesh.get_rank()], mesh, [AVG], layout)
        mean = torch.stack(terms).double().mean(0).to(dtype)
        assert torch.equal(buffer.allreduce(0, deterministic=True).local_buffer, mean)
        assert torch.equal(buffer.redistribute([ROWS], deterministic=True).allgather(0).local_buffer, mean)

    mf.simulate(program, 3)


def test_optimizer_maps_over_buffers() -> None:
    """AdamW on shards is AdamW on tensors; NaN in padding stays there."""

    def steps(params: Any, grads: list[Any]) -> Any:
        optimizer = mf.optim.adamw(0.1)
        state = optimizer.init(params)
        for grad in grads:
            updates, state = optimizer.update(grad, state, params)
            params = mf.optim.apply_updates(params, updates)
        return params

    def program(mesh: Mesh) -> None:
        for kind in KINDS:
            layout, shard = layout_of(kind, 4), shard_of(kind)
            spec, whole = mf.BufferSpec(mesh, [shard], layout), mf.BufferSpec(mesh, [FULL], layout)
            flats = [dense(layout, seed, torch.float32) for seed in range(3)]
            params, *grads = ({"group": local_of(spec, flat)} for flat in flats)
            result = steps(params, grads)["group"]
            alone = steps(flats[0].clone(), flats[1:])
            assert result.spec == spec
            assert torch.equal(tensors_of(result), tensors_of(local_of(spec, alone)))
            assert torch.equal(tensors_of(result.allgather(0)), tensors_of(local_of(whole, alone)))

    mf.simulate(program, 4)


def test_replicated_is_an_average_but_no_sum() -> None:
    def program(mesh: Mesh) -> None:
        whole = source_of(mesh, [FULL], layout_of("padded", 2))
        label = whole.redistribute([AVG])
        assert label.local_buffer is whole.local_buffer
        assert label.placements == (AVG,)
        assert torch.equal(tensors_of(label.allreduce(0)), tensors_of(whole))
        for change in (whole.view, whole.redistribute, source_of(mesh, [ROWS], whole.layout).redistribute):
            with pytest.raises(ValueError, match="multiply the value by the number of ranks; use Partial"):
                change([SUM])

    assert mf.simulate(program, 2).trace[0].operation.startswith("allreduce")


# Wrong input: the object, what was expected, what came, and the remedy.

HERE = Mesh((2, 2), ("replica", "shard"), rank=0)
FOUR = layout_of("padded", 4)


def build(placements: Any, numel: int = FOUR.size, dtype: torch.dtype = torch.float32, **keywords: Any) -> mf.DBuffer:
    return mf.DBuffer.from_local(torch.zeros(numel, dtype=dtype), HERE, placements, keywords.get("layout", FOUR))


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "too few placements": (lambda: build([ROWS]), ValueError, "needs 2 placements, one per axis, got .*RowAtomic"),
    "too many": (lambda: build([FULL] * 3), ValueError, "needs 2 placements"),
    "Shard(1)": (
        lambda: build([FULL, Shard(1)]),
        ValueError,
        "axis 'shard': .*dim=1.* does not cut a flat buffer; use Row",
    ),
    "Shard(0)": (
        lambda: build([FULL, Shard(0)]),
        ValueError,
        "axis 'shard': .*dim=0.* does not cut a flat buffer; use Row",
    ),
    "shard first": (
        lambda: build([ROWS, FULL]),
        ValueError,
        "'shard': a shard stands before Replicate.*must be the last",
    ),
    "shard before partial": (lambda: build([ROWS, SUM]), ValueError, "a shard stands before Partial"),
    "max": (lambda: build([mf.Partial("max"), FULL]), NotImplementedError, "'replica': only Partial"),
    "no placement": (lambda: build([None, FULL]), ValueError, "expected Replicate.., Partial.* or a shard, got None"),
    "other layout": (
        lambda: build([ROWS, ROWS], layout=layout_of("padded", 3)),
        ValueError,
        "3 segments cannot be cut into 4",
    ),
    "local size": (
        lambda: build([FULL, ROWS]),
        ValueError,
        r"rank 0 gave a tensor of shape \(96,\), expected \(48,\)",
    ),
    "2-D": (
        lambda: mf.DBuffer.from_local(torch.zeros(96, 1), HERE, [FULL, FULL], FOUR),
        ValueError,
        r"shape \(96, 1\), expected \(96,\)",
    ),
    "no tensor": (
        lambda: mf.DBuffer.from_local([0.0] * 96, HERE, [FULL, FULL], FOUR),
        TypeError,
        "a list, expected a",
    ),
    "int avg": (
        lambda: build([AVG, FULL], dtype=torch.int64),
        TypeError,
        'int64 buffers cannot be averaged.*use Partial."sum"',
    ),
    "empty int avg": (
        lambda: mf.DBuffer.empty(HERE, [AVG, FULL], FOUR, dtype=torch.int8),
        TypeError,
        "cannot be averaged",
    ),
    "cast to int avg": (lambda: build([AVG, FULL]).cast(torch.int32), TypeError, "cannot be averaged"),
    "int to avg": (
        lambda: build([SUM, FULL], dtype=torch.int32).redistribute([AVG, FULL]),
        TypeError,
        "cannot be averaged",
    ),
    "bool sum": (lambda: build([SUM, FULL], dtype=torch.bool).allreduce(0), TypeError, "bool cannot be added; cast"),
    "fp8 sum": (lambda: build([SUM, FULL], dtype=torch.float8_e5m2).allreduce(0), TypeError, "cannot be added; cast"),
    "uint16 sum": (lambda: build([SUM, FULL], dtype=torch.uint16).allreduce(0), TypeError, "cannot be added; cast"),
    "gather what is whole": (
        lambda: build([FULL, FULL]).allgather("shard"),
        ValueError,
        "axis 'shard' is Replicate.., expected",
    ),
    "gather the inner axis": (
        lambda: build([ROWS, ROWS], 24).allgather(1),
        ValueError,
        "axis 0 .* must be gathered first",
    ),
    "reduce what is whole": (
        lambda: build([FULL, FULL]).allreduce(0),
        ValueError,
        "allreduce: axis 'replica' is Replicate",
    ),
    "scatter what is whole": (
        lambda: build([FULL, FULL]).reduce_scatter(1, ROWS),
        ValueError,
        "reduce_scatter: axis 'shard'",
    ),
    "scatter to whole": (
        lambda: build([FULL, SUM]).reduce_scatter(1, FULL),
        ValueError,
        "must be a shard, got Replicate",
    ),
    "scatter before whole": (
        lambda: build([SUM, FULL]).reduce_scatter(0, ROWS),
        ValueError,
        "a shard stands before Replicate",
    ),
    "view of a shard": (
        lambda: build([FULL, ROWS], 48).view([FULL, FULL]),
        ValueError,
        "view: cannot change RowAtomic",
    ),
    "view of two axes": (
        lambda: build([FULL, FULL]).view([ROWS, ROWS]),
        NotImplementedError,
        "at most one axis may change",
    ),
    "no such axis": (lambda: build([FULL, ROWS], 48).allgather("dp"), ValueError, "has no axis 'dp'; its axes are"),
    "sum out of nothing": (lambda: build([AVG, FULL]).redistribute([FULL, SUM]), ValueError, "multiply the value"),
    "distribute a sum": (
        lambda: mf.DBuffer.distribute_tensors([], HERE, [SUM, FULL], FOUR),
        ValueError,
        "holds a Partial; distribute, then relabel",
    ),
    "missing tensor": (
        lambda: mf.DBuffer.distribute_tensors({}, HERE, [FULL, FULL], FOUR),
        ValueError,
        r"tensor \d must have its full shape .*, got nothing",
    ),
    "shard for a tensor": (
        lambda: mf.DBuffer.distribute_tensors([torch.zeros(1, 4)] * 5, HERE, [FULL, FULL], FOUR),
        ValueError,
        r"tensor 0 must have its full shape \(5, 4\), got \(1, 4\)",
    ),
    "mixed dtypes": (
        lambda: mf.DBuffer.distribute_tensors(
            [torch.zeros(s, dtype=torch.float64 if s == (3,) else None) for s in SHAPES], HERE, [FULL, FULL], FOUR
        ),
        TypeError,
        "one buffer has one dtype",
    ),
    "no such tensor": (lambda: build([FULL, FULL]).get_tensor_view(5), IndexError, "tensor 5 is not one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_before_communication(name: str) -> None:
    """This process is in no process group, so that anything that began to communicate would end in another error."""
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()
