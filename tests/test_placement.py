import copy
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from itertools import combinations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from mfsdp_func.values.placement import (
    BlockAtomic,
    Placements,
    RowAtomic,
    ShardLayout,
    TensorAtomic,
    changed_mesh_axis,
    is_flat_shard,
    shard_axes,
)

MAKERS: list[Callable[[], Shard]] = [
    RowAtomic,
    lambda: BlockAtomic(1),
    lambda: BlockAtomic(2),
    lambda: BlockAtomic(3),
    TensorAtomic,
]
FLAT_SHARDS = [make() for make in MAKERS]
OTHERS = [Shard(0), Shard(1), Replicate(), Partial("sum"), Partial("avg"), _StridedShard(0, split_factor=1), None, 0]


@pytest.mark.parametrize("make", MAKERS)
def test_equal_to_the_same_value_only(make: Callable[[], Shard]) -> None:
    value, same = make(), make()
    assert value is not same
    assert value == same
    assert not value != same  # noqa: SIM202
    assert hash(value) == hash(same)
    for other in OTHERS:
        assert value != other
        assert other != value
        assert not value == other  # noqa: SIM201
        assert not other == value  # noqa: SIM201


@pytest.mark.parametrize(("a", "b"), list(combinations(FLAT_SHARDS, 2)), ids=repr)
def test_never_equal_to_one_another(a: Shard, b: Shard) -> None:
    assert a != b
    assert not a == b  # noqa: SIM201
    assert len({a, b}) == 2


def test_distinct_from_plain_shard_as_keys() -> None:
    assert len({Shard(0), *FLAT_SHARDS, *(make() for make in MAKERS)}) == 1 + len(FLAT_SHARDS)


@pytest.mark.parametrize("value", FLAT_SHARDS, ids=repr)
def test_is_a_shard_of_dim_0(value: Shard) -> None:
    assert isinstance(value, Shard)
    assert value.dim == 0
    assert value.is_shard(0)
    assert not value.is_replicate()
    assert is_flat_shard(value)


@pytest.mark.parametrize("value", OTHERS[:5], ids=repr)
def test_torch_placements_are_not_flat_shards(value: Placement) -> None:
    assert not is_flat_shard(value)


@pytest.mark.parametrize("value", FLAT_SHARDS, ids=repr)
def test_copies_keep_class_and_block_size(value: Shard) -> None:
    copies = [copy.copy(value), copy.deepcopy(value), copy.deepcopy([value])[0], eval(repr(value)), eval(str(value))]
    copies += [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in copies:
        assert type(other) is type(value)
        assert other == value
        assert hash(other) == hash(value)
        assert other.dim == 0
        assert getattr(other, "block_size", None) == getattr(value, "block_size", None)


@pytest.mark.parametrize("value", FLAT_SHARDS, ids=repr)
@pytest.mark.parametrize("name", ["dim", "block_size", "anything"])
def test_immutable(value: Shard, name: str) -> None:
    before = getattr(value, name, None)
    with pytest.raises(AttributeError):
        setattr(value, name, 7)
    with pytest.raises(AttributeError):
        delattr(value, name)
    assert getattr(value, name, None) == before


def test_reprs() -> None:
    assert [repr(value) for value in FLAT_SHARDS] == [
        "RowAtomic()",
        "BlockAtomic(1)",
        "BlockAtomic(2)",
        "BlockAtomic(3)",
        "TensorAtomic()",
    ]


@pytest.mark.parametrize("block_size", [0, -2])
def test_block_size_must_be_positive(block_size: int) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        BlockAtomic(block_size)


@pytest.mark.parametrize("block_size", [2.0, "2", None, True])
def test_block_size_must_be_an_int(block_size: object) -> None:
    with pytest.raises(TypeError, match="must be an int"):
        BlockAtomic(block_size)  # type: ignore[arg-type]


def test_shard_layout_values() -> None:
    assert ShardLayout.PADDED.value == "padded"
    assert ShardLayout.UNPADDED.value == "unpadded"
    assert ShardLayout.BALANCED.value == "balanced"
    assert len(ShardLayout) == 3


class TestChangedMeshAxis:
    @pytest.mark.parametrize(
        ("old", "new", "axis"),
        [
            ([Replicate(), RowAtomic()], [Replicate(), RowAtomic()], None),
            ([Replicate(), RowAtomic()], [Replicate(), Replicate()], 1),
            ([Partial("sum"), RowAtomic()], [RowAtomic(), RowAtomic()], 0),
            ([Partial("sum")], [Partial("avg")], 0),
            ([BlockAtomic(2)], [BlockAtomic(4)], 0),
            ([BlockAtomic(2)], [BlockAtomic(2)], None),
            ([RowAtomic()], [TensorAtomic()], 0),
            ([RowAtomic()], [Shard(0)], 0),
            ([], [], None),
        ],
    )
    def test_axis(self, old: list[Placement], new: list[Placement], axis: int | None) -> None:
        assert changed_mesh_axis(old, new) == axis
        assert changed_mesh_axis(iter(new), iter(old)) == axis

    def test_two_changed_axes_are_named(self) -> None:
        old = [Replicate(), RowAtomic(), Partial("sum")]
        with pytest.raises(NotImplementedError, match=r"axis 0 .*axis 2") as caught:
            changed_mesh_axis(old, [RowAtomic(), RowAtomic(), Replicate()])
        assert "axis 1" not in str(caught.value)

    def test_lengths_must_match(self) -> None:
        with pytest.raises(ValueError, match=r"1 placements .* against 2"):
            changed_mesh_axis([Replicate()], [Replicate(), Replicate()])


def test_shard_axes() -> None:
    assert shard_axes([Replicate(), RowAtomic(), Partial("sum"), BlockAtomic(2), Shard(0)]) == (1, 3, 4)
    assert shard_axes([]) == ()


class TestPlacements:
    value = Placements(
        ("outer", 1), [Replicate(), RowAtomic()], (RowAtomic(),) * 2, iter([RowAtomic(), BlockAtomic(2)])
    )

    def test_stored_as_tuples(self) -> None:
        assert self.value.dp_axes == ("outer", 1)
        assert self.value.parameter == (Replicate(), RowAtomic())
        assert self.value.gradient == (RowAtomic(), RowAtomic())
        assert self.value.optimizer == (RowAtomic(), BlockAtomic(2))

    def test_one_axis_may_stand_alone(self) -> None:
        for axis in ("dp", 0):
            assert Placements(axis, [RowAtomic()], [RowAtomic()], [RowAtomic()]).dp_axes == (axis,)

    def test_value_semantics(self) -> None:
        same = Placements(
            ["outer", 1], *([list(role) for role in (self.value.parameter, self.value.gradient)]), self.value.optimizer
        )
        assert same == self.value
        assert hash(same) == hash(self.value)
        assert pickle.loads(pickle.dumps(same)) == copy.deepcopy(same) == same
        other = Placements(("outer", 1), same.parameter, same.gradient, [RowAtomic(), BlockAtomic(4)])
        assert other != self.value
        assert eval(repr(same)) == same
        with pytest.raises(FrozenInstanceError):
            same.parameter = ()  # type: ignore[misc]

    @pytest.mark.parametrize("role", ["parameter", "gradient", "optimizer"])
    def test_each_role_has_one_placement_per_axis(self, role: str) -> None:
        roles = {key: [RowAtomic()] for key in ("parameter", "gradient", "optimizer")}
        with pytest.raises(ValueError, match=f"{role} has 2 placements"):
            Placements("dp", **{**roles, role: [RowAtomic()] * 2})
        with pytest.raises(TypeError, match=f"{role} must hold placements"):
            Placements("dp", **{**roles, role: ["shard"]})

    @pytest.mark.parametrize("axes", [(), ("a", "a")])
    def test_axes_must_be_named_once(self, axes: tuple[str, ...]) -> None:
        given = [RowAtomic()] * len(axes)
        with pytest.raises(ValueError, match="dp_axes"):
            Placements(axes, given, given, given)


def test_a_class_in_place_of_an_instance_is_named() -> None:
    rows = RowAtomic()
    for given in (RowAtomic, [RowAtomic]):
        with pytest.raises(TypeError, match=r"parameter holds the class RowAtomic; give an instance: RowAtomic\(\)"):
            Placements([0], given, [rows], [rows])
    with pytest.raises(TypeError, match=r"optimizer holds the class BlockAtomic; give .* BlockAtomic\(block_size\)"):
        Placements([0], rows, rows, [BlockAtomic])
