import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh, group_names
from tests.spawn import RankPool
from tests.strategies import meshes

SQUARE = Mesh((2, 2), ("outer", "inner"), ranks=(3, 1, 0, 2), rank=0)


def stand_in(grid: object, rank: int = 1) -> SimpleNamespace:
    shape = np.shape(grid.tolist() if hasattr(grid, "tolist") else grid)
    return SimpleNamespace(
        mesh=grid,
        ndim=len(shape),
        size=lambda dim=None: int(np.prod(shape)) if dim is None else shape[dim],
        get_rank=lambda: rank,
    )


def grid_of(mesh: Mesh) -> np.ndarray:
    return np.array(mesh.ranks).reshape(mesh.shape)


def test_known_answers() -> None:
    assert SQUARE.mesh == ((3, 1), (0, 2))
    assert (SQUARE.ndim, SQUARE.size(), SQUARE.size(0), SQUARE.get_rank()) == (2, 4, 2, 0)
    assert [SQUARE.coordinate(rank) for rank in (3, 1, 0, 2)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert SQUARE.coordinate() == (1, 0)
    assert (SQUARE.axis_ranks("outer"), SQUARE.axis_ranks(1), SQUARE.axis_ranks(-1, rank=1)) == ((3, 0), (0, 2), (3, 1))
    assert SQUARE.shard_ranks((0, 1)) == (3, 0, 1, 2)
    assert [SQUARE.shard_index((0, 1), rank) for rank in (3, 0, 1, 2)] == [0, 1, 2, 3]
    assert SQUARE.shard_ranks((1,)) == (0, 2)
    assert SQUARE.shard_ranks((0,), rank=2) == (1, 2)
    assert SQUARE.shard_ranks(()) == (0,)


def test_defaults() -> None:
    mesh = Mesh(3)
    assert (mesh.shape, mesh.axis_names, mesh.ranks, mesh.rank) == ((3,), ("axis0",), (0, 1, 2), None)
    assert mesh.mesh == (0, 1, 2)
    assert Mesh((2, 1, 2)).mesh == (((0, 1),), ((2, 3),))


@given(meshes())
def test_grid_against_numpy(mesh: Mesh) -> None:
    grid = grid_of(mesh)
    assert np.array_equal(np.array(mesh.mesh), grid)
    assert mesh.size() == grid.size
    for rank in mesh.ranks:
        where = tuple(int(i) for i in np.argwhere(grid == rank)[0])
        assert mesh.coordinate(rank) == where
        assert mesh.rank_at(where) == rank
        for axis in range(mesh.ndim):
            line = grid[(*where[:axis], slice(None), *where[axis + 1 :])]
            assert mesh.axis_ranks(axis, rank) == tuple(line.tolist())
            assert mesh.axis_ranks(axis - mesh.ndim, rank) == mesh.axis_ranks(mesh.axis_names[axis], rank)


@given(meshes(), st.data())
def test_buffer_order_sorts_by_the_innermost_axis_first(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.lists(st.sampled_from(range(mesh.ndim)), unique=True))
    others = [axis for axis in range(mesh.ndim) if axis not in axes]
    for rank in mesh.ranks:
        here = mesh.coordinate(rank)
        group = [r for r in mesh.ranks if all(mesh.coordinate(r)[axis] == here[axis] for axis in others)]
        group.sort(key=lambda r: [mesh.coordinate(r)[axis] for axis in sorted(axes, reverse=True)])
        assert mesh.shard_ranks(axes, rank) == tuple(group)
        assert group[mesh.shard_index(axes, rank)] == rank
    assert mesh.shard_ranks(axes) == mesh.shard_ranks(axes, mesh.rank)


@given(meshes(nobody=True))
def test_nobody_can_plan(mesh: Mesh) -> None:
    axes = tuple(range(mesh.ndim))
    assert sorted(mesh.shard_ranks(axes)) == sorted(mesh.ranks)
    with pytest.raises(ValueError, match="nobody's"):
        mesh.get_rank()
    with pytest.raises(ValueError, match="nobody's"):
        mesh.coordinate()
    with pytest.raises(ValueError, match="nobody's"):
        mesh.shard_ranks(axes[:-1])


@given(meshes())
def test_value_semantics(mesh: Mesh) -> None:
    same = Mesh(list(mesh.shape), list(mesh.axis_names), list(mesh.ranks), mesh.rank)
    mesh.coordinate()  # fills a cache
    assert same == mesh
    assert hash(same) == hash(mesh)
    for other in (pickle.loads(pickle.dumps(mesh)), copy.deepcopy(mesh), copy.copy(mesh), eval_of(mesh)):
        assert other == mesh
        assert hash(other) == hash(mesh)
        assert other.coordinate() == mesh.coordinate()


def eval_of(mesh: Mesh) -> Mesh:
    return Mesh(mesh.shape, mesh.axis_names, mesh.ranks).with_rank(mesh.rank)


def test_who_am_i_is_in_equality_and_not_in_the_digest() -> None:
    other = SQUARE.with_rank(3)
    assert other.get_rank() == 3
    assert other != SQUARE
    assert other.with_rank(0) == SQUARE
    assert other.digest == SQUARE.digest
    for changed in (
        Mesh((2, 2), ("outer", "inner"), (3, 1, 2, 0), 0),
        Mesh((2, 2), ("a", "b"), (3, 1, 0, 2), 0),
        Mesh((4, 1), ("outer", "inner"), (3, 1, 0, 2), 0),
    ):
        assert changed != SQUARE
        assert changed.digest != SQUARE.digest


def test_immutable_and_printable() -> None:
    assert repr(SQUARE) == "Mesh(outer=2, inner=2, ranks=(3, 1, 0, 2), rank=0)"
    with pytest.raises(FrozenInstanceError):
        SQUARE.rank = 1  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        del SQUARE.ranks


def test_contains() -> None:
    assert [rank in Mesh(3, ranks=(4, 1, 7)) for rank in (4, 1, 7, 0, None)] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (((),), "positive sizes"),
        (((2, 0),), "positive sizes"),
        ((2, ("a", "b")), "1 different axis names"),
        (((2, 1), ("a", "a")), "2 different axis names"),
        ((2, None, (0,)), "2 different ranks"),
        ((2, None, (0, 0)), "2 different ranks"),
        ((2, None, (0, -1)), "2 different ranks >= 0"),
    ],
)
def test_contradictions_are_refused(args: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mesh(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("axis", ["dp", 2, -3])
def test_unknown_axis(axis: str | int) -> None:
    with pytest.raises(ValueError, match=r"has no axis .*'outer', 'inner'"):
        SQUARE.axis_index(axis)


def test_rank_outside() -> None:
    with pytest.raises(ValueError, match="rank 9 is not in"):
        SQUARE.coordinate(9)
    with pytest.raises(ValueError, match="rank 9 is not in"):
        SQUARE.with_rank(9).shard_ranks((0,))


class TestAsMesh:
    def test_a_mesh_is_itself(self) -> None:
        assert as_mesh(SQUARE) is SQUARE

    @pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
    def test_stand_ins(self, kind: Callable[[object], object]) -> None:
        grid = [[3, 1], [0, 2]]
        value = as_mesh(stand_in(tuple(map(tuple, grid)) if kind is tuple else kind(grid)))
        assert value == Mesh((2, 2), ranks=(3, 1, 0, 2), rank=1)
        assert all(type(rank) is int for rank in value.ranks)
        assert as_mesh(stand_in(kind([4, 1, 7]))) == Mesh(3, ranks=(4, 1, 7), rank=1)

    def test_names_of_a_stand_in(self) -> None:
        mesh = stand_in([[0], [1]])
        mesh.mesh_dim_names = ("a", "b")
        assert as_mesh(mesh).axis_names == ("a", "b")

    def test_mesh_is_mesh_like(self) -> None:
        assert isinstance(SQUARE, MeshLike)
        assert isinstance(stand_in([0]), MeshLike)
        assert as_mesh(stand_in(SQUARE.mesh, rank=0)).ranks == SQUARE.ranks

    @pytest.mark.parametrize("missing", ["mesh", "ndim", "size", "get_rank"])
    def test_what_is_missing_is_named(self, missing: str) -> None:
        mesh = stand_in([0, 1])
        delattr(mesh, missing)
        with pytest.raises(TypeError, match=f"without {missing}"):
            as_mesh(mesh)

    @pytest.mark.parametrize(("name", "value"), [("ndim", 2), ("size", lambda: 3), ("mesh", []), ("mesh", [[0], [1]])])
    def test_contradictions(self, name: str, value: object) -> None:
        mesh = stand_in([0, 1])
        setattr(mesh, name, value)
        with pytest.raises(ValueError, match="contradicts"):
            as_mesh(mesh)


def convert_device_meshes(rank: int) -> list[Mesh]:
    square = DeviceMesh("cpu", [[3, 1], [0, 2]])
    named = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    values = [as_mesh(mesh) for mesh in (square, named, named["inner"], DeviceMesh("cpu", [1, 3]))]
    for value, mesh in zip(values[:2], (square, named), strict=True):
        for axis, name in enumerate(group_names(value)):
            ranks = torch.distributed.get_process_group_ranks(mesh.get_group(axis))
            assert name == mesh.get_group(axis).group_name
            assert sorted(value.axis_ranks(axis)) == sorted(ranks)
        assert value.coordinate() == tuple(mesh.get_coordinate())
    return values


@pytest.mark.distributed
def test_device_meshes(ranks4: RankPool) -> None:
    for rank, (square, named, inner, part) in enumerate(ranks4.run(convert_device_meshes)):
        assert square == Mesh((2, 2), ranks=(3, 1, 0, 2), rank=rank)
        assert named == Mesh((2, 2), ("outer", "inner"), rank=rank)
        assert inner == Mesh(2, ("inner",), ((0, 1), (2, 3))[rank // 2], rank)
        assert part == Mesh(2, ranks=(1, 3), rank=rank)


def test_every_coordinate_once() -> None:
    mesh = Mesh((2, 3, 2), ranks=reversed(range(12)))
    assert [mesh.coordinate(rank) for rank in mesh.ranks] == list(product(range(2), range(3), range(2)))
