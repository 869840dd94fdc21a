import math
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_balanced,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
    build_row_atomic_layout,
)
from mfsdp_func.values.padding import PaddingWarning
from mfsdp_func.values.placement import ShardLayout
from tests.strategies import block_sizes, shape_lists

dp_sizes = st.integers(1, 8)
grouped = block_sizes.flatmap(lambda block: st.tuples(shape_lists(block_size=block), st.just(block)))
Grouped = tuple[list[tuple[int, ...]], int]


def units(shapes: list[tuple[int, ...]], block_size: int) -> list[int]:
    return [block_size * math.prod(shape[1:]) for shape in shapes]


def check_buffer(layout: GlobalLayout, shapes: list[tuple[int, ...]], dp_size: int) -> None:
    """Every tensor keeps its shape and lies in the buffer, and no element is taken twice."""
    assert layout.tensor_shapes == tuple(shapes)
    assert layout.dp_size == dp_size
    taken: list[int] = []
    for i, shape in enumerate(shapes):
        assert layout.get_tensor_range(i).numel == math.prod(shape)
        taken += range(layout.tensor_to_offset[i], layout.get_tensor_range(i).end)
    assert len(set(taken)) == len(taken)
    assert all(0 <= element < layout.size for element in taken)


def check_blocks(layout: GlobalLayout, unit: list[int]) -> None:
    """No segment boundary lies inside `block_size` rows of any tensor."""
    for cut in layout.rank_to_offset:
        for i, offset in enumerate(layout.tensor_to_offset):
            if offset < cut < layout.get_tensor_range(i).end:
                assert (cut - offset) % unit[i] == 0


class TestRowAtomic:
    @pytest.mark.parametrize(
        ("shapes", "dp_size", "block_size", "offsets", "size"),
        [
            ([(5, 4), (2, 6), (3,)], 2, 1, (0, 24, 20), 48),
            ([(2, 6), (4, 4), (4, 4), (1, 2), (1, 6)], 5, 1, (0, 12, 32, 28, 48), 60),
            # The remainder (4) of the last tensor ends the chunk 12..24; three small ones follow, the largest first.
            ([(3, 6), (2, 4), (1, 4), (1, 6), (7, 4)], 2, 1, (0, 48, 68, 60, 20), 72),
            # No remainder above zero: the larger small tensor fills the gap 18..24.
            ([(3, 6), (1, 4), (1, 6), (2, 6)], 1, 1, (0, 36, 18, 24), 48),
            # A remainder above zero goes before a tensor of whole chunks that comes earlier.
            ([(3, 6), (2, 6), (4, 4)], 1, 1, (0, 36, 20), 48),
            # A remainder as large as the gap fits.
            ([(3, 6), (3, 6), (1, 4)], 1, 1, (0, 18, 36), 48),
            ([(4, 3), (2, 2)], 2, 2, (0, 12), 24),
            ([(0, 5), (2, 3)], 2, 1, (10, 0), 30),
            ([(6,)], 4, 1, (0,), 8),
            ([], 3, 1, (), 0),
        ],
    )
    def test_known_answers(
        self, shapes: list[tuple[int, ...]], dp_size: int, block_size: int, offsets: tuple[int, ...], size: int
    ) -> None:
        layout = build_for_row_atomic(shapes, dp_size, block_size=block_size)
        assert layout.tensor_to_offset == offsets
        assert layout.size == size
        assert layout.rank_to_offset == tuple(k * (size // dp_size) for k in range(dp_size))

    @given(grouped, dp_sizes)
    def test_laws(self, group: Grouped, dp_size: int) -> None:
        shapes, block_size = group
        layout, unit = build_for_row_atomic(shapes, dp_size, block_size=block_size), units(shapes, block_size)
        chunk = math.lcm(*unit)
        check_buffer(layout, shapes, dp_size)
        check_blocks(layout, unit)
        assert layout.has_equal_shard_sizes
        assert layout.size % (chunk * dp_size) == 0
        assert all(cut % chunk == 0 for cut in layout.rank_to_offset)
        assert all(offset % u == 0 for offset, u in zip(layout.tensor_to_offset, unit, strict=True))

    @given(grouped, dp_sizes)
    def test_size_bound(self, group: Grouped, dp_size: int) -> None:
        """A large tensor leaves less than a chunk behind it, a small one less than its unit before it."""
        shapes, block_size = group
        unit, numels = units(shapes, block_size), [math.prod(shape) for shape in shapes]
        chunk = math.lcm(*unit)
        large = sum(numel >= chunk for numel in numels)
        alignment = sum(u - 1 for u, numel in zip(unit, numels, strict=True) if 0 < numel < chunk)
        used = sum(numels) + large * (chunk - 1) + alignment
        layout = build_for_row_atomic(shapes, dp_size, block_size=block_size)
        assert sum(numels) <= layout.size < used + chunk * dp_size

    @given(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=6), dp_sizes)
    def test_one_row_size_needs_no_gaps(self, row: int, rows: list[int], dp_size: int) -> None:
        layout = build_for_row_atomic([(n, row) for n in rows], dp_size)
        assert layout.size == -(-sum(rows) // dp_size) * dp_size * row

    @given(grouped, dp_sizes)
    def test_large_tensors_come_first(self, group: Grouped, dp_size: int) -> None:
        shapes, block_size = group
        layout = build_for_row_atomic(shapes, dp_size, block_size=block_size)
        chunk = math.lcm(*units(shapes, block_size))
        large = [i for i, shape in enumerate(shapes) if math.prod(shape) >= chunk]
        if large:
            assert layout.tensor_to_offset[large[0]] == 0
            whole = [i for i in large if math.prod(shapes[i]) % chunk == 0]
            assert sorted(whole, key=layout.tensor_to_offset.__getitem__) == whole
            assert all(layout.tensor_to_offset[i] % chunk == 0 for i in whole)


class TestUnpadded:
    @given(grouped, dp_sizes)
    def test_against_brute_force(self, group: Grouped, dp_size: int) -> None:
        shapes, block_size = group
        layout, unit = build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size), units(shapes, block_size)
        offsets, boundaries, size = [], {0}, 0
        for shape, u in zip(shapes, unit, strict=True):
            offsets.append(size)
            boundaries |= set(range(size, size + math.prod(shape) + 1, u))
            size += math.prod(shape)
        assert layout.tensor_to_offset == tuple(offsets)
        assert layout.size == size
        nearest = [min(boundaries, key=lambda b: (abs(b * dp_size - k * size), b)) for k in range(dp_size)]
        assert layout.rank_to_offset == tuple(nearest)
        check_buffer(layout, shapes, dp_size)
        check_blocks(layout, unit)

    @pytest.mark.parametrize(
        ("shapes", "dp_size", "block_size", "cuts"),
        [
            ([(3, 4), (2, 5)], 2, 1, (0, 12)),
            ([(3, 2)], 2, 1, (0, 2)),  # 3 is as near to 2 as to 4
            ([(1, 9)], 3, 1, (0, 0, 9)),
            ([(0, 3), (2, 2), (0, 5)], 2, 1, (0, 2)),
            ([(0, 3)], 2, 1, (0, 0)),
            ([], 2, 1, (0, 0)),
            ([(4, 1), (4, 2)], 3, 2, (0, 4, 8)),
        ],
    )
    def test_known_answers(
        self, shapes: list[tuple[int, ...]], dp_size: int, block_size: int, cuts: tuple[int, ...]
    ) -> None:
        assert build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size).rank_to_offset == cuts

    def test_exact_where_floats_are_not(self) -> None:
        size = 2**60 + 2
        layout = build_for_row_atomic_unpadding([(size,)], 2)
        assert layout.rank_to_offset == (0, size // 2)


class TestBalanced:
    @given(
        block_sizes.flatmap(lambda block: st.tuples(shape_lists(block_size=block, max_rows=3), st.just(block))),
        dp_sizes,
    )
    def test_the_largest_segment_is_the_least_possible(self, group: Grouped, dp_size: int) -> None:
        shapes, block_size = group
        layout, unit = build_for_row_atomic_balanced(shapes, dp_size, block_size=block_size), units(shapes, block_size)
        boundaries, size = [0], 0
        for shape, u in zip(shapes, unit, strict=True):
            boundaries += range(size + u, size + math.prod(shape) + 1, u)
            size += math.prod(shape)
        assert layout.size == size
        assert layout.stores_equal_segments
        assert layout.tensor_to_offset == build_for_row_atomic_unpadding(shapes, 1).tensor_to_offset
        assert set(layout.rank_to_offset) <= set(boundaries)
        check_buffer(layout, shapes, dp_size)
        check_blocks(layout, unit)
        least = list(boundaries)  # the largest segment of the best cut of each prefix, for one segment, then for more
        for _ in range(dp_size - 1):
            least = [
                min(max(least[j], boundaries[i] - boundaries[j]) for j in range(i + 1)) for i in range(len(boundaries))
            ]
        largest = max(layout.rank_size(k) for k in range(dp_size))
        assert largest == least[-1]
        assert largest <= size / dp_size + max(unit, default=0)

    def test_known_answer(self) -> None:
        layout = build_for_row_atomic_balanced([(3, 4), (2, 5)], 2)
        assert layout == GlobalLayout([(3, 4), (2, 5)], [0, 12], 22, [0, 12], stores_equal_segments=True)


class TestTensorAtomic:
    @given(dp_sizes, shape_lists(), st.data())
    def test_segments_are_the_owners_tensors(
        self, dp_size: int, shapes: list[tuple[int, ...]], data: st.DataObject
    ) -> None:
        owners = data.draw(st.lists(st.integers(0, dp_size - 1), min_size=len(shapes), max_size=len(shapes)))
        layout = build_for_tensor_atomic(iter(shapes), dp_size, tensor_owners=iter(owners))
        check_buffer(layout, shapes, dp_size)
        assert layout.size == sum(map(math.prod, shapes))
        for k in range(dp_size):
            mine = [i for i, owner in enumerate(owners) if owner == k]
            cursor = layout.rank_to_offset[k]
            for i in mine:
                assert layout.tensor_to_offset[i] == cursor
                cursor = layout.get_tensor_range(i).end
            assert cursor - layout.rank_to_offset[k] == layout.rank_size(k)

    def test_known_answer(self) -> None:
        layout = build_for_tensor_atomic([(2, 3), (4,), (5,)], 3, tensor_owners=[2, 0, 2])
        assert layout == GlobalLayout([(2, 3), (4,), (5,)], [4, 0, 10], 15, [0, 4, 4])

    @pytest.mark.parametrize(
        ("owners", "message"), [([0], "2 shapes but 1 owners"), ([0, 2], "tensor 1 .* index 2"), ([-1, 0], "tensor 0")]
    )
    def test_owners_are_checked(self, owners: list[int], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            build_for_tensor_atomic([(1,), (1,)], 2, tensor_owners=owners)


BUILDERS: list[Callable[..., GlobalLayout]] = [
    build_for_row_atomic,
    build_for_row_atomic_balanced,
    build_for_row_atomic_unpadding,
    lambda shapes, dp_size, **kwargs: build_row_atomic_layout(
        shapes, dp_size, shard_layout=ShardLayout.UNPADDED, **kwargs
    ),
    lambda shapes, dp_size: build_for_tensor_atomic(shapes, dp_size, tensor_owners=[0] * len(shapes)),
]


@pytest.mark.parametrize("build", BUILDERS)
class TestRefused:
    @pytest.mark.parametrize(
        ("shape", "message"),
        [
            ((), "tensor 1 is 0-D"),
            ((3, 0), "only dim 0"),
            ((3, 2, 0), "only dim 0"),
            ((0, 0), "only dim 0"),
            ((-1, 2), "only dim 0"),
        ],
    )
    def test_shapes(self, build: Callable[..., GlobalLayout], shape: tuple[int, ...], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            build([(2, 2), shape], 2)

    @pytest.mark.parametrize("dp_size", [0, -1])
    def test_dp_size(self, build: Callable[..., GlobalLayout], dp_size: int) -> None:
        with pytest.raises(ValueError, match="dp_size must be positive"):
            build([(2, 2)], dp_size)


@pytest.mark.parametrize("build", BUILDERS[:-1])
def test_block_sizes_are_checked(build: Callable[..., GlobalLayout]) -> None:
    with pytest.raises(ValueError, match="tensor 1 has 6 rows, no multiple of block_size 4"):
        build([(8, 2), (6, 2)], 2, block_size=4)
    with pytest.raises(ValueError, match="block_size must be positive"):
        build([(8, 2)], 2, block_size=0)


@given(grouped, dp_sizes)
def test_shard_layout_picks_the_builder(group: Grouped, dp_size: int) -> None:
    shapes, block_size = group
    padded = build_for_row_atomic(shapes, dp_size, block_size=block_size)
    unpadded = build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size)
    balanced = build_for_row_atomic_balanced(shapes, dp_size, block_size=block_size)
    pairs = ((ShardLayout.PADDED, padded), (ShardLayout.UNPADDED, unpadded), (ShardLayout.BALANCED, balanced))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddingWarning)
        assert build_row_atomic_layout(shapes, dp_size, block_size=block_size) == padded
        for shard_layout, layout in pairs:
            assert build_row_atomic_layout(shapes, dp_size, block_size=block_size, shard_layout=shard_layout) == layout


def test_shard_layout_must_be_one() -> None:
    with pytest.raises(TypeError, match="must be a ShardLayout"):
        build_row_atomic_layout([(2, 2)], 2, shard_layout="padded")  # type: ignore[arg-type]


def test_shapes_may_be_any_iterables() -> None:
    expected = build_for_row_atomic([(5, 4), (2, 6)], 2)
    assert build_for_row_atomic(iter([torch.Size([5, 4]), [2, 6]]), 2) == expected
