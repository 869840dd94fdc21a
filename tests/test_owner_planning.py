import copy
import math
import pickle
from collections.abc import Callable
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import build_for_row_atomic, build_for_tensor_atomic
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import (
    GroupOwnerLayout,
    assign_owner_work,
    has_matrix_dims,
    ns_cost_fn,
    tensor_costs,
)
from mfsdp_func.values.placement import BlockAtomic, Partial, Placement, Replicate, RowAtomic, TensorAtomic
from tests.strategies import layouts, meshes, owner_layouts
from tests.test_mesh import stand_in

COSTS: list[Callable[[torch.Size], float] | None] = [
    None,
    lambda shape: 1,
    lambda shape: shape.numel() % 3,
    lambda shape: 0,
]


def segments(size: int, count: int) -> list[int]:
    return [k * size // count for k in range(count)]


def holders(layout: GlobalLayout, mesh: Mesh, placements: tuple[Placement, ...], i: int, ranks: list[int]) -> list[int]:
    """Of `ranks`, those that hold an element of tensor `i`, by looking at every element, in buffer order."""
    wanted = set(range(layout.tensor_to_offset[i], layout.get_tensor_range(i).end))
    found = []
    for rank in ranks:
        part = layout.get_rank_range(mesh, placements, rank)
        if wanted & set(range(part.start, part.end)):
            found.append((part.start, rank))
    return [rank for _, rank in sorted(found)]


@st.composite
def planned(draw: st.DrawFn) -> tuple[GlobalLayout, Mesh, tuple[Placement, ...], list[int]]:
    """A layout on a mesh whose first axes may replicate, and some of its tensors that have elements, in any order."""
    mesh = draw(meshes())
    prefix = draw(st.integers(0, mesh.ndim))
    layout = draw(layouts(math.prod(mesh.shape[prefix:]) * draw(st.integers(1, 2))))
    indices = [i for i, numel in enumerate(layout.tensor_numels) if numel]
    chosen = draw(st.permutations(indices))[: draw(st.integers(0, len(indices)))]
    return layout, mesh, (Replicate(),) * prefix + (RowAtomic(),) * (mesh.ndim - prefix), chosen


class TestCost:
    @pytest.mark.parametrize(
        ("shape", "steps", "cost"),
        [
            ((2, 3), 1, 4 * 4 * 3 + 2 * 8 + 3 * 4 + 2 * 6),
            ((3, 2), 1, 88),
            ((3, 2), 5, 440),
            ((2, 3, 1, 1), 1, 88),
            ((3, 1, 2), 2, 176),
            ((4,), 1, 4 * 4 + 2 + 3 + 2 * 4),
            ((4, 4), 0, 0),
            ((0, 4), 3, 0),
        ],
    )
    def test_known_answers(self, shape: tuple[int, ...], steps: int, cost: int) -> None:
        assert ns_cost_fn(steps)(torch.Size(shape)) == cost

    def test_five_steps_by_default(self) -> None:
        assert ns_cost_fn()(torch.Size([8, 6])) == ns_cost_fn(5)(torch.Size([8, 6]))

    def test_steps_must_not_be_negative(self) -> None:
        with pytest.raises(ValueError, match="num_ns_steps"):
            ns_cost_fn(-1)

    def test_each_shape_is_asked_once(self) -> None:
        asked: list[torch.Size] = []
        layout = build_for_row_atomic([(2, 2), (3, 2), (2, 2)], 2)
        assert tensor_costs(layout, [2, 1, 0], lambda shape: asked.append(shape) or len(asked)) == {2: 1, 1: 2, 0: 1}
        assert asked == [(2, 2), (3, 2)]

    @pytest.mark.parametrize("cost", [-1, math.inf, math.nan])
    def test_a_cost_is_finite_and_not_negative(self, cost: float) -> None:
        layout = build_for_row_atomic([(2, 2)], 2)
        with pytest.raises(ValueError, match=r"tensor 0 \(2, 2\)"):
            assign_owner_work(layout, Mesh(2), [0], lambda shape: cost)


class TestAssign:
    @pytest.mark.parametrize(
        ("shapes", "offsets", "size", "ranks", "owners"),
        [
            ([(6, 4), (6, 4)], [0, 24], 48, [0, 1, 2], {0: 0, 1: 1}),
            ([(6, 4)], [20], 64, [0, 1, 2, 3], {0: 1}),
            ([(6, 2), (6, 4), (2, 2)], [12, 24, 0], 64, [0, 1, 2, 3], {0: 0, 1: 1, 2: 0}),
            ([(4, 2)], [8], 16, [1, 3], {0: 3}),
            ([(2, 2), (8, 8)], [0, 8], 80, [1, 3], {0: 1, 1: 3}),
        ],
    )
    def test_known_answers(
        self, shapes: list[tuple[int, ...]], offsets: list[int], size: int, ranks: list[int], owners: dict[int, int]
    ) -> None:
        layout = GlobalLayout(shapes, offsets, size, segments(size, len(ranks)))
        for mesh in (Mesh(len(ranks), ranks=ranks), stand_in(ranks)):
            found = assign_owner_work(layout, mesh, range(len(shapes)))
            assert found == owners
            assert list(found) == sorted(found)

    @given(planned(), st.sampled_from(COSTS))
    def test_against_a_reference(
        self,
        case: tuple[GlobalLayout, Mesh, tuple[Placement, ...], list[int]],
        cost_fn: Callable[[torch.Size], float] | None,
    ) -> None:
        layout, mesh, placements, indices = case
        cut = [axis for axis in range(mesh.ndim) if placements[axis].is_shard()]
        grid = np.array(mesh.ranks).reshape(mesh.shape)
        group = grid[tuple(slice(None) if axis in cut else 0 for axis in range(mesh.ndim))].reshape(-1).tolist()
        cost = {i: (cost_fn or ns_cost_fn(5))(layout.tensor_shapes[i]) for i in indices}
        held = {i: holders(layout, mesh, placements, i, group) for i in indices}
        load = dict.fromkeys(group, 0.0)
        expected = {}
        rounds = [
            [i for i in indices if len(held[i]) == 1],
            sorted((i for i in indices if len(held[i]) > 1), key=lambda i: (-cost[i], layout.tensor_to_offset[i])),
        ]
        for i in [*rounds[0], *rounds[1]]:
            least = min(load[rank] for rank in held[i])
            expected[i] = next(rank for rank in held[i] if load[rank] == least)
            load[expected[i]] += cost[i]
        owners = assign_owner_work(layout, mesh, indices, cost_fn, placements=placements)
        assert owners == expected
        assert list(owners) == sorted(indices)
        assert all(owner in held[i] for i, owner in owners.items())

    @given(planned(), st.data())
    def test_alike_on_all_ranks_and_in_any_order(
        self, case: tuple[GlobalLayout, Mesh, tuple[Placement, ...], list[int]], data: st.DataObject
    ) -> None:
        layout, mesh, placements, indices = case
        owners = assign_owner_work(layout, mesh, indices, placements=placements)
        shuffled = data.draw(st.permutations(indices))
        for rank in (None, *mesh.ranks):
            assert assign_owner_work(layout, mesh.with_rank(rank), shuffled, placements=placements) == owners

    def test_equal_costs_go_by_buffer_order(self) -> None:
        layout = GlobalLayout([(6, 4), (6, 4), (1, 1)], [25, 1, 0], 49, [0, 16, 32])
        for indices in ([0, 1, 2], [1, 0, 2]):  # tensor 0 first would give {0: 1, 1: 0, 2: 0}
            assert assign_owner_work(layout, Mesh(3), indices) == {0: 2, 1: 1, 2: 0}

    def test_held_by_nobody(self) -> None:
        layout = build_for_row_atomic([(2, 2), (0, 2)], 2)
        with pytest.raises(ValueError, match=r"nobody holds tensor 1 \(0, 2\)"):
            assign_owner_work(layout, Mesh(2), [0, 1])

    def test_indices_are_checked(self) -> None:
        layout = build_for_row_atomic([(2, 2), (2, 2)], 2)
        for index in (2, -1):
            with pytest.raises(IndexError, match=f"tensor {index}"):
                assign_owner_work(layout, Mesh(2), [index])
        with pytest.raises(ValueError, match="more than once"):
            assign_owner_work(layout, Mesh(2), [0, 0])

    def test_the_layout_must_fit_the_mesh(self) -> None:
        layout = build_for_row_atomic([(2, 2)], 2)
        with pytest.raises(ValueError, match="2 segments cannot be cut into 3 shards"):
            assign_owner_work(layout, Mesh(3), [0])


class TestGroupOwnerLayout:
    mesh = Mesh((2, 2), ranks=(3, 1, 0, 2), rank=1)
    layout = build_for_row_atomic([(8, 4), (2, 2), (0, 3)], 4)

    def test_defaults(self) -> None:
        group = GroupOwnerLayout(self.mesh, self.layout, {1: 0, 0: 3})
        assert group.placements == (RowAtomic(), RowAtomic())
        assert group.name == ""
        assert list(group.tensor_to_owner.items()) == [(0, 3), (1, 0)]

    def test_a_stand_in_becomes_a_mesh(self) -> None:
        assert GroupOwnerLayout(stand_in([[3, 1], [0, 2]]), self.layout, {}).mesh == self.mesh

    def test_owners_need_not_hold(self) -> None:
        assert self.layout.get_rank_range(self.mesh, [RowAtomic()] * 2, 2).start > 16
        assert GroupOwnerLayout(self.mesh, self.layout, {1: 3, 2: 2}).tensor_to_owner == {1: 3, 2: 2}

    @given(owner_layouts())
    def test_value_semantics(self, group: GroupOwnerLayout) -> None:
        pairs = list(reversed(group.tensor_to_owner.items()))
        same = GroupOwnerLayout(group.mesh, group.layout, dict(pairs), list(group.placements), "another name")
        assert same == group
        assert hash(same) == hash(group)
        assert same.digest == group.digest
        for other in (pickle.loads(pickle.dumps(group)), copy.deepcopy(group)):
            assert other == group
            assert hash(other) == hash(group)
            assert other.name == group.name
            assert other.digest == group.digest

    def test_each_field_counts(self) -> None:
        group = GroupOwnerLayout(self.mesh, self.layout, {0: 3}, [Replicate(), BlockAtomic(2)])
        others = [
            GroupOwnerLayout(Mesh((2, 2), rank=1), self.layout, {0: 3}, group.placements),
            GroupOwnerLayout(self.mesh, build_for_row_atomic([(8, 4), (2, 2)], 4), {0: 3}, group.placements),
            GroupOwnerLayout(self.mesh, self.layout, {0: 1}, group.placements),
            GroupOwnerLayout(self.mesh, self.layout, {0: 3, 1: 3}, group.placements),
            GroupOwnerLayout(self.mesh, self.layout, {0: 3}, [RowAtomic(), BlockAtomic(2)]),
            GroupOwnerLayout(self.mesh, self.layout, {0: 3}, [Replicate(), BlockAtomic(3)]),
        ]
        for other in others:
            assert other != group
            assert other.digest != group.digest
        assert group != "group"

    def test_this_rank_is_in_equality_and_not_in_the_digest(self) -> None:
        group, other = (GroupOwnerLayout(self.mesh.with_rank(rank), self.layout, {0: 3}) for rank in (1, 2))
        assert group != other
        assert group.digest == other.digest

    def test_immutable(self) -> None:
        owners = {0: 3}
        group = GroupOwnerLayout(self.mesh, self.layout, owners)
        owners[1] = 0
        assert group.tensor_to_owner == {0: 3}
        with pytest.raises(FrozenInstanceError):
            group.name = "x"  # type: ignore[misc]
        with pytest.raises(TypeError):
            group.tensor_to_owner[0] = 1  # type: ignore[index]

    def test_integers_of_other_libraries(self) -> None:
        group = GroupOwnerLayout(self.mesh, self.layout, {np.int64(0): np.int32(3)})
        assert group.digest == GroupOwnerLayout(self.mesh, self.layout, {0: 3}).digest

    def test_printable(self) -> None:
        group = GroupOwnerLayout(Mesh(2), build_for_row_atomic([(4, 2)], 2), {0: 1}, name="attention")
        assert repr(group) == (
            "GroupOwnerLayout({0: 1}, placements=(RowAtomic(),), mesh=Mesh(axis0=2, ranks=(0, 1), rank=None),"
            " name='attention')"
        )
        layout = build_for_row_atomic([(2, 2)] * 40, 2)
        assert "GroupOwnerLayout(40 tensors," in repr(GroupOwnerLayout(Mesh(2), layout, dict.fromkeys(range(40), 0)))

    @pytest.mark.parametrize(
        ("owners", "placements", "message"),
        [
            ({0: 4}, None, "'group': tensor 0 is given owner 4, which is not in"),
            ({0: -1}, None, "owner -1"),
            ({3: 0}, None, r"tensor index 3 .* tensors 0\.\.2"),
            ({-1: 0}, None, "tensor index -1"),
            ({}, [RowAtomic()], "needs 2 placements"),
            ({}, [Replicate(), Partial("sum")], r"must be Replicate\(\) or a shard"),
        ],
    )
    def test_contradictions_are_refused(
        self, owners: dict[int, int], placements: list[Placement] | None, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            GroupOwnerLayout(self.mesh, self.layout, owners, placements, "group")

    def test_the_layout_must_fit_the_shards(self) -> None:
        layout = build_for_row_atomic([(2, 2)], 2)
        with pytest.raises(ValueError, match="2 segments cannot be cut into 4 shards"):
            GroupOwnerLayout(self.mesh, layout, {})
        assert GroupOwnerLayout(self.mesh, layout, {}, [Replicate(), RowAtomic()]).layout is layout


class TestFromParams:
    shapes = ((4, 4), (6,), (0, 4), (2, 2, 2))
    layout = build_for_row_atomic(shapes, 2)

    def test_two_or_more_dims_with_rows(self) -> None:
        group = GroupOwnerLayout.from_params(Mesh(2), self.layout, name="block")
        assert set(group.tensor_to_owner) == {0, 3}
        assert group.tensor_to_owner == assign_owner_work(self.layout, Mesh(2), [0, 3])
        assert group.name == "block"
        params = [torch.empty(shape) for shape in self.shapes]
        assert GroupOwnerLayout.from_params(Mesh(2), self.layout, params) == group
        assert GroupOwnerLayout.from_params(Mesh(2), self.layout, dict(zip("abcd", params, strict=True))) == group

    def test_predicate_and_cost(self) -> None:
        def only_vectors(param: torch.Tensor) -> bool:
            return param.ndim == 1

        group = GroupOwnerLayout.from_params(Mesh(2), self.layout, predicate=only_vectors)
        assert set(group.tensor_to_owner) == {1}
        layout = GlobalLayout([(6, 4), (8, 3)], [0, 24], 48, segments(48, 3))
        by_rows = GroupOwnerLayout.from_params(Mesh(3), layout, cost_fn=lambda shape: shape[0])
        by_columns = GroupOwnerLayout.from_params(Mesh(3), layout, cost_fn=lambda shape: shape[1])
        assert by_rows.tensor_to_owner == {0: 0, 1: 1}
        assert by_columns.tensor_to_owner == {0: 0, 1: 1}
        uneven = GlobalLayout([(6, 4), (8, 3), (1, 1)], [1, 25, 0], 49, [0, 16, 32])
        assert GroupOwnerLayout.from_params(Mesh(3), uneven, cost_fn=lambda shape: 1).tensor_to_owner == {
            0: 1,
            1: 2,
            2: 0,
        }
        assert GroupOwnerLayout.from_params(Mesh(3), uneven, cost_fn=lambda shape: 0).tensor_to_owner == {
            0: 0,
            1: 1,
            2: 0,
        }

    def test_default_predicate(self) -> None:
        assert [has_matrix_dims(torch.empty(shape)) for shape in ((), (3,), (3, 1), (1, 2, 3))] == [
            False,
            False,
            True,
            True,
        ]

    def test_replicated_axes(self) -> None:
        mesh = Mesh((2, 2), ranks=(3, 1, 0, 2))
        placements = (Replicate(), TensorAtomic())
        layout = build_for_tensor_atomic([(4, 4), (2, 2), (2, 4)], 2, tensor_owners=[1, 0, 1])
        groups = [
            GroupOwnerLayout.from_params(mesh.with_rank(rank), layout, placements=placements)
            for rank in (None, *mesh.ranks)
        ]
        assert all(group.tensor_to_owner == {0: 1, 1: 3, 2: 1} for group in groups)
        assert all(group.placements == placements for group in groups)
        assert len({group.digest for group in groups}) == 1

    @pytest.mark.parametrize("shapes", [((4, 4), (6,), (0, 4)), ((4, 4), (6,), (0, 4), (2, 4))])
    def test_shapes_must_be_the_layouts(self, shapes: tuple[tuple[int, ...], ...]) -> None:
        with pytest.raises(ValueError, match="params have shapes"):
            GroupOwnerLayout.from_params(Mesh(2), self.layout, [torch.empty(shape) for shape in shapes])


def test_a_dtype_is_part_of_the_value() -> None:
    layout = build_for_row_atomic([(4, 2)], 2)
    group, single, double = (
        GroupOwnerLayout(Mesh(2), layout, {0: 1}, dtype=d) for d in (None, torch.float32, torch.float64)
    )
    assert single == GroupOwnerLayout(Mesh(2), layout, {0: 1}, dtype=torch.float32)
    assert len({group, single, double}) == len({g.digest for g in (group, single, double)}) == 3
    assert pickle.loads(pickle.dumps(single)) == single
    assert "dtype=torch.float32" in repr(single)
    assert "dtype" not in repr(group)
    assert GroupOwnerLayout.from_params(Mesh(2), layout, dtype=torch.float16).dtype == torch.float16
    with pytest.raises(TypeError, match=r"dtype must be a torch.dtype or None, got 'float32'"):
        GroupOwnerLayout(Mesh(2), layout, {0: 1}, dtype="float32")
