"""What all values share: equality, hash, digest, pickling, another rank's view, and integers that are integers."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given

import mfsdp_func as mf
from mfsdp_func.values.value import KeyedValue, PlacedValue, Value, as_int, as_ints
from tests.strategies import owner_layouts

ROWS = mf.RowAtomic()
LAYOUT = mf.build_for_row_atomic_unpadding([(6, 4), (3, 2)], 2)


def values_on(mesh: mf.Mesh) -> list[Value]:
    owners = mf.GroupOwnerLayout(mesh, LAYOUT, {0: 1}, name="weights")
    spec = mf.BufferSpec(mesh, [ROWS], LAYOUT)
    return [mesh, LAYOUT, owners, spec, mf.plan_of("gather", owners), mf.plan_of("scatter", owners)]


@pytest.mark.parametrize("value", values_on(mf.Mesh(2, rank=0)), ids=lambda value: type(value).__name__)
def test_copies_are_equal(value: Value) -> None:
    loaded = pickle.loads(pickle.dumps(value))
    assert copy.copy(value) is copy.deepcopy(value) is value
    assert loaded == value
    assert hash(loaded) == hash(value)
    assert loaded.digest == value.digest
    assert repr(loaded) == repr(value)


@given(owner_layouts())
def test_another_rank_has_the_same_digest_and_another_identity(owners: mf.GroupOwnerLayout) -> None:
    for rank in owners.mesh.ranks:
        seen = owners.with_rank(rank)
        assert seen == mf.GroupOwnerLayout(
            owners.mesh.with_rank(rank), owners.layout, owners.tensor_to_owner, owners.placements
        )
        assert seen.digest == owners.digest
        assert seen.name == owners.name
        assert (seen == owners) == (rank == owners.mesh.rank)
        assert seen.with_rank(owners.mesh.rank) == owners


def test_equal_values_have_one_key_and_can_be_found_by_it() -> None:
    for first, second in zip(*(values_on(mf.Mesh(2, rank=0)) for _ in range(2)), strict=True):
        assert first == second
        if isinstance(first, KeyedValue) and isinstance(second, KeyedValue):
            assert first.key == second.key
            assert type(first).from_key(first.key) == first
    named = [mf.GroupOwnerLayout(mf.Mesh(2, rank=0), LAYOUT, {0: 1}, name=name) for name in "ab"]
    assert named[0] == named[1]
    assert [mf.GroupOwnerLayout.from_key(owners.key).name for owners in named] == ["a", "b"]


def test_values_of_different_classes_or_fields_differ() -> None:
    values = [*values_on(mf.Mesh(2, rank=0)), *values_on(mf.Mesh(2, rank=1))]
    values += [mf.GlobalLayout(LAYOUT.tensor_shapes, LAYOUT.tensor_to_offset, LAYOUT.size, [0, 0])]
    assert len(set(values)) == len(values) - 1  # the layout, which nobody sees otherwise
    assert mf.Mesh(2) != "Mesh"


def read_view(buffer: mf.DBuffer) -> None:
    buffer.get_tensor_view(0)


def read_all(buffer: mf.DBuffer) -> None:
    buffer.tensor_views()


def cut(buffer: mf.DBuffer) -> None:
    buffer.view([mf.Partial("avg")])


def join(buffer: mf.DBuffer) -> None:
    mf.DBuffer(mf.BufferSpec(buffer.mesh, [ROWS], LAYOUT), torch.zeros(15)).allgather(0)


@pytest.mark.parametrize("use", [read_view, read_all, cut, join], ids=lambda use: use.__name__)
def test_a_buffer_of_another_rank_is_refused(use: Callable[[mf.DBuffer], None]) -> None:
    full = [torch.ones(shape) for shape in LAYOUT.tensor_shapes]
    posted: dict[str, bytes] = {}

    def program(mesh: mf.Mesh) -> None:
        buffer = mf.DBuffer.distribute_tensors(full, mesh, [mf.Replicate()], LAYOUT)
        own = pickle.loads(pickle.dumps(buffer))
        own.get_tensor_view(0)
        if mesh.get_rank() == 0:
            posted["buffer"] = pickle.dumps(buffer)
        mf.allreduce(buffer.view([mf.Partial("avg")]), 0)
        if mesh.get_rank() == 1:
            with pytest.raises(
                ValueError, match=r"made on rank 0, used on rank 1.*a DBuffer holds the elements of rank 0"
            ):
                use(pickle.loads(posted["buffer"]))

    mf.simulate(program, 2)


@pytest.mark.parametrize("check", [False, True])
def test_owners_of_another_rank_are_refused_and_mended(check: bool) -> None:
    owners = mf.GroupOwnerLayout(mf.Mesh(2, rank=0), LAYOUT, {0: 1})

    def program(mesh: mf.Mesh, mend: bool) -> Any:
        mine = owners.with_rank(mesh.get_rank()) if mend else owners
        spec = mf.BufferSpec(mesh, [ROWS], LAYOUT)
        shards = mf.DBuffer(spec, torch.arange(float(spec.local_numel))).tensor_views()
        with mf.agreement_check(check):
            return mf.gather(shards, owner_layout=mine, dtype=torch.float32)[0]

    def refused(mesh: mf.Mesh) -> None:
        if check or mesh.get_rank() == 1:  # with the check on, on all ranks
            with pytest.raises(ValueError, match=r"gather.*: made on rank 0, used on rank 1.*with_rank\(1\)"):
                program(mesh, False)

    mf.simulate(refused, 2)
    results = mf.simulate(lambda mesh: program(mesh, True), 2).results
    assert [[*result] for result in results.values()] == [[], [0]]


class Odd:
    def __index__(self) -> int:
        raise TypeError("no")


@pytest.mark.parametrize("given", [True, 1.0, 0.5, "0", None, (1,), Odd(), torch.tensor(True), torch.tensor(1.5)])
def test_what_is_no_integer_is_refused(given: object) -> None:
    with pytest.raises(TypeError, match="size must be an int"):
        as_int("size", given)
    with pytest.raises(TypeError, match=r"sizes\[1\] must be an int"):
        as_ints("sizes", [0, given])


def test_what_stands_for_an_integer_is_taken() -> None:
    assert as_ints("sizes", iter([3, torch.tensor(4)])) == (3, 4)
    with pytest.raises(TypeError, match="sizes must be integers, got 3"):
        as_ints("sizes", 3)  # pyright: ignore[reportArgumentType]


MESH = mf.Mesh((2, 2))
TAKERS: dict[str, Callable[[Any], object]] = {
    "Mesh shape": lambda i: mf.Mesh((i, 2)),
    "Mesh of one axis": lambda i: mf.Mesh(i),
    "Mesh ranks": lambda i: mf.Mesh(2, ranks=(0, i)),
    "Mesh rank": lambda i: mf.Mesh(2, rank=i),
    "Mesh axis": lambda i: MESH.axis_index(i),
    "Range": lambda i: mf.Range(i, 1),
    "Range numel": lambda i: mf.Range(0, i),
    "BlockAtomic": lambda i: mf.BlockAtomic(i),
    "Placements": lambda i: mf.Placements([i], ROWS, ROWS, ROWS),
    "layout shape": lambda i: mf.GlobalLayout([(4, i)], [0], 8, [0]),
    "layout offset": lambda i: mf.GlobalLayout([(4, 2)], [i], 9, [0]),
    "layout size": lambda i: mf.GlobalLayout([], [], i, [0]),
    "layout rank": lambda i: mf.GlobalLayout([(4, 2)], [0], 8, [0, i]),
    "builder shape": lambda i: mf.build_for_row_atomic([(4, i)], 2),
    "builder ranks": lambda i: mf.build_for_row_atomic_unpadding([(4, 2)], i),
    "builder block": lambda i: mf.build_for_row_atomic_balanced([(4, 2)], 2, block_size=i),
    "tensor owner": lambda i: mf.build_for_tensor_atomic([(4, 2)], 2, tensor_owners=(i,)),
    "owned tensor": lambda i: mf.GroupOwnerLayout(mf.Mesh(2), LAYOUT, {i: 1}),
    "owner": lambda i: mf.GroupOwnerLayout(mf.Mesh(2), LAYOUT, {0: i}),
    "assigned": lambda i: mf.assign_owner_work(LAYOUT, mf.Mesh(2), [i]),
    "balanced": lambda i: mf.balance_owner_work([(LAYOUT, mf.Mesh(2), [i])]),
    "steps": lambda i: mf.ns_cost_fn(i),
}


@pytest.mark.parametrize("given", [True, 1.0, 0.7, None], ids=repr)
@pytest.mark.parametrize("taker", TAKERS, ids=str)
def test_every_value_takes_integers_alone(taker: str, given: object) -> None:
    if taker == "Mesh rank" and given is None:
        return  # the mesh of nobody
    TAKERS[taker](1)
    with pytest.raises(TypeError, match="must be an int"):
        TAKERS[taker](given)


@pytest.mark.parametrize("axis", [(0, 1), 0.0, True, None], ids=repr)
def test_an_axis_is_a_name_or_an_integer(axis: Any) -> None:
    def program(mesh: mf.Mesh) -> None:
        spec = mf.BufferSpec(mesh, [ROWS], LAYOUT)
        with pytest.raises(TypeError, match="a mesh axis that is no name must be an int"):
            mf.allgather(mf.DBuffer(spec, torch.zeros(spec.local_numel)), axis)

    mf.simulate(program, 2)


@pytest.mark.parametrize("make", [mf.BufferSpec, lambda m, p, layout: mf.GroupOwnerLayout(m, layout, {}, p)])
class TestBrokenPlacements:
    def test_a_split_tensor(self, make: Callable[..., PlacedValue]) -> None:
        layout = mf.build_for_row_atomic([(6, 4), (2, 4)], 2)
        make(mf.Mesh(2), [ROWS], layout)
        with pytest.raises(ValueError, match=r"TensorAtomic\(\) .* cuts tensor 0 \(6, 4\) after 16 of its 24 elements"):
            make(mf.Mesh(2), [mf.TensorAtomic()], layout)
        make(mf.Mesh(2), [mf.TensorAtomic()], mf.build_for_tensor_atomic([(6, 4), (2, 4)], 2, tensor_owners=[1, 0]))

    def test_a_split_block(self, make: Callable[..., PlacedValue]) -> None:
        layout = mf.GlobalLayout([(6, 4)], [0], 24, [0, 12])
        make(mf.Mesh(2), [mf.BlockAtomic(3)], layout)
        with pytest.raises(ValueError, match=r"BlockAtomic\(4\) .* after 12 of its 24 elements; .*block_size=4"):
            make(mf.Mesh(2), [mf.BlockAtomic(4)], layout)

    def test_cuts_count_for_the_axis_that_makes_them(self, make: Callable[..., PlacedValue]) -> None:
        # The inner axis cuts between tensors 0 and 1, the outer one inside both.
        layout = mf.GlobalLayout([(4, 2), (4, 2)], [0, 8], 16, [0, 4, 8, 12])
        make(MESH, [ROWS, mf.TensorAtomic()], layout)
        make(MESH, [mf.Replicate(), mf.TensorAtomic()], layout)
        with pytest.raises(ValueError, match=r"TensorAtomic"):
            make(MESH, [mf.TensorAtomic(), ROWS], layout)


@pytest.mark.parametrize(
    "surplus", [[torch.ones(6, 4), torch.ones(3, 2), torch.ones(1)], {0: torch.ones(6, 4), 1: torch.ones(3, 2), 2: 0}]
)
def test_surplus_tensors_are_refused(surplus: Any) -> None:
    with pytest.raises(ValueError, match=r"2 is no tensor of the layout, which has 2 \(3 given\)"):
        mf.DBuffer.distribute_tensors(surplus, mf.Mesh(2, rank=0), [ROWS], LAYOUT)


@pytest.mark.parametrize("operation", ["gather", "scatter"])
def test_what_has_a_gradient_is_not_moved_in_place(operation: str) -> None:
    def program(mesh: mf.Mesh) -> None:
        owners = mf.GroupOwnerLayout(
            mesh, mf.GlobalLayout([(2, 2)], [0], 4, [0, 4]), {0: 0 if operation == "scatter" else 1}
        )
        mine = mesh.get_rank() == 0
        source = {0: torch.ones(4, requires_grad=True)} if mine else {}
        target = {} if mine else {0: torch.zeros(4)}
        move = getattr(mf.inplace, operation)
        if mine:
            with pytest.raises(RuntimeError, match=rf"use mfsdp_func\.{operation}, which is differentiable"):
                move(source, target, owner_layout=owners)
        if operation == "gather":
            with torch.no_grad():
                move(source, target, owner_layout=owners)
            assert mine or target[0].sum() == 4

    mf.simulate(program, 2)
