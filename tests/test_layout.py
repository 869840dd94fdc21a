import copy
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import BlockAtomic, Partial, Placement, Replicate, RowAtomic, TensorAtomic
from mfsdp_func.values.ranges import Range
from tests.strategies import handmade_layouts, layouts, meshes
from tests.test_mesh import stand_in

ROOT = Path(__file__).parent.parent

any_layouts = st.integers(1, 6).flatmap(layouts)
axis_placements = st.sampled_from(
    [Replicate(), Partial("sum"), RowAtomic(), RowAtomic(), BlockAtomic(2), TensorAtomic()]
)

LAYOUT = GlobalLayout([(5, 4), (2, 6), (3,), (0, 7)], [0, 24, 20, 36], 48, [0, 24])


def elements(part: Range, base: int = 0) -> set[int]:
    return set(range(base + part.start, base + part.end))


@st.composite
def sharded(draw: st.DrawFn) -> tuple[GlobalLayout, Mesh, tuple[Placement, ...]]:
    """A layout with one to three segments per shard."""
    mesh = draw(meshes())
    placements = tuple(draw(axis_placements) for _ in range(mesh.ndim))
    count = 1
    for size, placement in zip(mesh.shape, placements, strict=True):
        count *= size if placement.is_shard() else 1
    return draw(layouts(count * draw(st.integers(1, 3)))), mesh, placements


class TestConstruction:
    def test_any_iterables_are_stored_as_tuples(self) -> None:
        layout = GlobalLayout(iter([[5, 4], torch.Size([2, 6])]), (n for n in (0, 20)), 48, range(0, 48, 24))
        assert layout.tensor_shapes == ((5, 4), (2, 6))
        assert all(type(shape) is torch.Size for shape in layout.tensor_shapes)
        assert layout.tensor_to_offset == (0, 20)
        assert layout.rank_to_offset == (0, 24)
        assert layout.size == 48

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (([(2,)], [0], -1, [0]), "size must not be negative"),
            (([(2,)], [-1], 4, [0]), "tensor 0 .* at -1 .*outside the buffer"),
            (([(-2, 3)], [0], 4, [0]), "negative dim"),
            (([(-2, -3)], [0], 8, [0]), "negative dim"),
            (([(2,)], [0, 2], 4, [0]), "1 shapes but 2 offsets"),
            (([(2,), (1,)], [0], 4, [0]), "2 shapes but 1 offsets"),
            (([(2,), (3,)], [0, 2], 4, [0]), "tensor 1 .* ends at 5, outside the buffer of 4"),
            (([(0, 3)], [5], 4, [0]), "tensor 0 .*outside the buffer"),
            (([(3,), (3,)], [0, 2], 9, [0]), "tensors 0 and 1 overlap"),
            (([(3,), (9,), (3,)], [4, 0, 13], 16, [0]), "tensors 1 and 0 overlap"),
            (([(3,), (3,)], [2, 2], 9, [0]), "overlap"),
            (([(2,)], [0], 4, []), "must start at 0"),
            (([(2,)], [0], 4, [1, 2]), "must start at 0"),
            (([(2,)], [0], 4, [0, 3, 2]), "must not decrease"),
            (([(2,)], [0], 4, [0, 5]), "pass the size 4"),
        ],
    )
    def test_contradictions_are_refused(self, args: tuple, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            GlobalLayout(*args)

    def test_legal_corners(self) -> None:
        assert GlobalLayout([], [], 0, [0]).dp_size == 1
        assert GlobalLayout([], [], 4, [0, 0, 4, 4]).rank_size(1) == 4
        inside = GlobalLayout([(4,), (0, 3), (0, 2)], [0, 2, 4], 4, [0])
        assert inside.tensors_in(Range(0, 4)) == [(0, Range(0, 4))]
        assert GlobalLayout([()], [3], 4, [0]).get_tensor_range(0) == Range(3, 1)


class TestValue:
    @given(any_layouts)
    def test_equality_hash_copies(self, layout: GlobalLayout) -> None:
        *given, storage = fields(layout)
        same = GlobalLayout(*(list(x) if isinstance(x, tuple) else x for x in given), stores_equal_segments=storage)
        assert same == layout
        assert hash(same) == hash(layout)
        assert same.digest == layout.digest
        layout.tensors_in(Range(0, layout.size))  # fills a cache
        for other in (pickle.loads(pickle.dumps(layout)), copy.deepcopy(layout), copy.copy(layout)):
            assert other == layout
            assert hash(other) == hash(layout)
            assert fields(other) == fields(layout)
        if layout.dp_size + len(layout.tensor_shapes) <= 32:
            assert eval(repr(layout)) == layout

    @pytest.mark.parametrize(
        "other",
        [
            GlobalLayout([(4, 5), (2, 6), (3,), (0, 7)], [0, 24, 20, 36], 48, [0, 24]),
            GlobalLayout([(5, 4), (2, 6), (3,), (0, 7)], [0, 25, 20, 36], 48, [0, 24]),
            GlobalLayout([(5, 4), (2, 6), (3,), (0, 7)], [0, 24, 20, 36], 50, [0, 24]),
            GlobalLayout([(5, 4), (2, 6), (3,), (0, 7)], [0, 24, 20, 36], 48, [0, 25]),
            GlobalLayout([(5, 4), (2, 6), (3,), (0, 7)], [0, 24, 20, 37], 48, [0, 24]),
            GlobalLayout([(5, 4), (2, 6), (3,), (0, 7)], [0, 24, 20, 36], 48, [0, 24], stores_equal_segments=True),
        ],
    )
    def test_each_field_counts(self, other: GlobalLayout) -> None:
        assert other != LAYOUT
        assert other.digest != LAYOUT.digest

    def test_immutable(self) -> None:
        with pytest.raises(FrozenInstanceError):
            LAYOUT.size = 3  # type: ignore[misc]

    def test_digest_is_the_same_in_another_process(self) -> None:
        code = f"from mfsdp_func.values.layout import GlobalLayout; print({LAYOUT!r}.digest)"
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
        )
        assert run.stdout.strip() == LAYOUT.digest

    def test_long_layouts_print_short(self) -> None:
        layout = GlobalLayout([(1,)] * 100, range(100), 100, [0, 50])
        assert repr(layout) == f"GlobalLayout(100 tensors, size=100, 2 ranks, digest={layout.digest[:12]})"


def fields(layout: GlobalLayout) -> tuple:
    return (
        layout.tensor_shapes,
        layout.tensor_to_offset,
        layout.size,
        layout.rank_to_offset,
        layout.stores_equal_segments,
    )


class TestSegments:
    @given(any_layouts)
    def test_segments_cover_the_buffer_in_order(self, layout: GlobalLayout) -> None:
        cursor = 0
        for k in range(layout.dp_size):
            segment = layout.get_segment(k, layout.dp_size)
            assert segment.start == cursor == layout.rank_to_offset[k]
            assert layout.rank_size(k) == segment.numel
            cursor = segment.end
        assert cursor == layout.size
        sizes = {layout.rank_size(k) for k in range(layout.dp_size)}
        assert layout.has_equal_shard_sizes == (len(sizes) == 1)

    def test_equal_sizes(self) -> None:
        assert LAYOUT.has_equal_shard_sizes
        assert not GlobalLayout([], [], 5, [0, 2]).has_equal_shard_sizes
        assert not GlobalLayout([], [], 6, [0, 2, 3]).has_equal_shard_sizes

    @pytest.mark.parametrize("index", [-1, 2])
    def test_no_such_segment(self, index: int) -> None:
        with pytest.raises(IndexError, match="2 shards"):
            LAYOUT.rank_size(index)

    @pytest.mark.parametrize("index", [-1, 4])
    def test_no_such_tensor(self, index: int) -> None:
        with pytest.raises(IndexError, match="4 tensors"):
            LAYOUT.get_tensor_range(index)

    def test_tensor_ranges(self) -> None:
        assert [LAYOUT.get_tensor_range(i) for i in range(4)] == [
            Range(0, 20),
            Range(24, 12),
            Range(20, 3),
            Range(36, 0),
        ]
        assert [LAYOUT.row_numel(i) for i in range(4)] == [4, 6, 1, 7]


class TestRankRange:
    @given(sharded())
    def test_each_axis_from_the_innermost_splits_further(
        self, case: tuple[GlobalLayout, Mesh, tuple[Placement, ...]]
    ) -> None:
        layout, mesh, placements = case
        ends = [*layout.rank_to_offset[1:], layout.size]
        for rank in mesh.ranks:
            segments = list(range(layout.dp_size))
            for axis in reversed(range(mesh.ndim)):
                if placements[axis].is_shard():
                    share = len(segments) // mesh.size(axis)
                    here = mesh.coordinate(rank)[axis]
                    segments = segments[here * share : (here + 1) * share]
            start = layout.rank_to_offset[segments[0]]
            expected = Range(start, ends[segments[-1]] - start)
            assert layout.get_rank_range(mesh, placements, rank) == expected
            assert layout.get_local_range(mesh.with_rank(rank), placements) == expected

    @given(sharded())
    def test_a_shard_group_covers_the_buffer(self, case: tuple[GlobalLayout, Mesh, tuple[Placement, ...]]) -> None:
        layout, mesh, placements = case
        axes = layout.check_placements(mesh, placements)
        cursor = 0
        for rank in mesh.shard_ranks(axes):
            part = layout.get_rank_range(mesh, placements, rank)
            assert part.start == cursor
            cursor = part.end
        assert cursor == layout.size

    def test_buffer_order_of_the_square_mesh(self) -> None:
        layout = GlobalLayout([(8, 4)], [0], 32, [0, 8, 16, 24])
        mesh, both = Mesh((2, 2), ranks=(3, 1, 0, 2)), (RowAtomic(), RowAtomic())
        ranges = {rank: layout.get_rank_range(mesh, both, rank) for rank in mesh.ranks}
        assert sorted(ranges, key=ranges.__getitem__) == [3, 0, 1, 2]
        assert ranges == {3: Range(0, 8), 0: Range(8, 8), 1: Range(16, 8), 2: Range(24, 8)}
        inner = (Replicate(), RowAtomic())
        assert [layout.get_rank_range(mesh, inner, rank) for rank in (3, 1, 0, 2)] == [
            Range(0, 16),
            Range(16, 16),
            Range(0, 16),
            Range(16, 16),
        ]
        assert layout.get_rank_range(mesh, (Replicate(), Partial("sum")), 2) == Range(0, 32)

    def test_stand_in_for_the_mesh(self) -> None:
        mesh = stand_in([[3, 1], [0, 2]], rank=1)
        layout = GlobalLayout([(8, 4)], [0], 32, [0, 8, 16, 24])
        assert layout.get_local_range(mesh, (RowAtomic(), RowAtomic())) == Range(16, 8)
        assert layout.get_rank_range(mesh, (RowAtomic(), RowAtomic()), 2) == Range(24, 8)

    @pytest.mark.parametrize(
        ("placements", "rank", "message"),
        [
            ([RowAtomic()], 5, "rank 5 is not in"),
            ([Replicate()], 5, "rank 5 is not in"),
            ([RowAtomic()] * 2, 0, "needs 1 placements"),
            ([], 0, "needs 1 placements"),
        ],
    )
    def test_contradictions_are_refused(self, placements: Sequence[Placement], rank: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            LAYOUT.get_rank_range(Mesh(2, rank=0), placements, rank)

    def test_dp_size_must_be_a_multiple_of_the_shards(self) -> None:
        layout = GlobalLayout([(6,)], [0], 6, range(6))
        assert layout.get_rank_range(Mesh(3), [RowAtomic()], 1) == Range(2, 2)
        with pytest.raises(ValueError, match="6 segments cannot be cut into 4 shards"):
            layout.get_rank_range(Mesh(4), [RowAtomic()], 0)
        with pytest.raises(ValueError, match="6 segments cannot be cut into 12 shards"):
            layout.get_rank_range(Mesh(12), [RowAtomic()], 0)
        assert layout.get_rank_range(Mesh((4, 3)), [Replicate(), RowAtomic()], 11) == Range(4, 2)


class TestSearch:
    @given(any_layouts, st.data())
    def test_tensors_in_against_brute_force(self, layout: GlobalLayout, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, layout.size))
        segment = Range(start, data.draw(st.integers(0, layout.size - start)))
        expected = {}
        for i in range(len(layout.tensor_shapes)):
            offset = layout.tensor_to_offset[i]
            if met := elements(layout.get_tensor_range(i)) & elements(segment):
                expected[i] = {element - offset for element in met}
        found = layout.tensors_in(segment)
        assert {i: elements(part) for i, part in found} == expected
        assert len(found) == len(expected)
        assert [i for i, _ in found] == sorted(expected, key=layout.tensor_to_offset.__getitem__)

    @given(st.integers(1, 4), st.integers(1, 3), st.data())
    def test_shards_of_against_brute_force(self, count: int, per_shard: int, data: st.DataObject) -> None:
        layout = data.draw(layouts(count * per_shard))
        for i, numel in enumerate(layout.tensor_numels):
            start = data.draw(st.integers(0, numel))
            part = Range(start, data.draw(st.integers(0, numel - start)))
            offset = layout.tensor_to_offset[i]
            expected = []
            for k in range(count):
                segment = set()
                for piece in range(k * per_shard, (k + 1) * per_shard):
                    segment |= elements(layout.get_segment(piece, layout.dp_size))
                if met := {element - offset for element in segment & elements(part, offset)}:
                    expected.append((k, met))
            assert [(k, elements(met)) for k, met in layout.shards_of(i, part, count)] == expected

    @given(st.integers(1, 4), st.integers(1, 3), st.data())
    def test_holders_of_against_brute_force(self, count: int, per_shard: int, data: st.DataObject) -> None:
        some = st.one_of(
            layouts(count * per_shard), handmade_layouts(count * per_shard)
        )  # the latter with empty segments
        layout = data.draw(some)
        for i in range(len(layout.tensor_shapes)):
            whole = elements(layout.get_tensor_range(i))
            held = [
                any(elements(layout.get_segment(k * per_shard + n, layout.dp_size)) & whole for n in range(per_shard))
                for k in range(count)
            ]
            assert layout.holders_of(i, count) == [k for k in range(count) if held[k]]

    def test_an_empty_shard_inside_a_tensor_holds_nothing(self) -> None:
        layout = GlobalLayout([(4, 2)], [1], 10, [0, 3, 3, 3, 5, 10, 10])
        assert layout.shards_of(0, Range(0, 8), 7) == [(0, Range(0, 2)), (3, Range(2, 2)), (4, Range(4, 4))]
        assert layout.shards_of(0, Range(2, 1), 7) == [(3, Range(2, 1))]
        assert layout.holders_of(0, 7) == [0, 3, 4]

    @given(st.integers(1, 5).flatmap(handmade_layouts))
    def test_keeps_rows(self, layout: GlobalLayout) -> None:
        for i, shape in enumerate(layout.tensor_shapes):
            inside = [cut - layout.tensor_to_offset[i] for cut in layout.rank_to_offset]
            split = any(0 < cut < shape.numel() and cut % shape[1:].numel() for cut in inside)
            assert layout.keeps_rows(i, layout.dp_size) == (not split)
            assert layout.keeps_rows(i, 1)
