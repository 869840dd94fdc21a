import math
import time
import warnings
from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mfsdp_func as mf
from mfsdp_func.values.padding import finer_view, padding_report
from mfsdp_func.values.placement import ShardLayout
from tests.strategies import block_sizes, shape_lists

COPRIME = [(8, 769), (8, 1021), (8, 2039)]
EXPERTS = [(8, 4096, 7168), (8, 7168, 2048)]

grouped = block_sizes.flatmap(lambda block: st.tuples(shape_lists(block_size=block), st.just(block)))
small = block_sizes.flatmap(lambda block: st.tuples(shape_lists(block_size=block, max_tensors=3), st.just(block)))
Grouped = tuple[list[tuple[int, ...]], int]


def warning_of(call: Callable[[], Any]) -> str:
    """The one padding warning of a call; empty where there is none."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(warning.category is mf.PaddingWarning for warning in caught)
    assert len(caught) <= 1
    return str(caught[0].message) if caught else ""


# The balanced layout: guarantees, against brute force.


def units(shapes: list[tuple[int, ...]], block_size: int) -> list[int]:
    return [block_size * math.prod(shape[1:]) for shape in shapes if shape[0]]


def cut_points(shapes: list[tuple[int, ...]], block_size: int) -> list[int]:
    """Where a segment may start: at every block of rows."""
    points, size = {0}, 0
    for shape in shapes:
        points |= set(range(size, size + math.prod(shape) + 1, block_size * math.prod(shape[1:])))
        size += math.prod(shape)
    return sorted(points)


@given(small, st.integers(1, 4))
def test_largest_segment_is_the_least_possible(group: Grouped, dp_size: int) -> None:
    shapes, block_size = group
    points, size = cut_points(shapes, block_size), sum(map(math.prod, shapes))
    best = min(
        max(b - a for a, b in zip((0, *cuts), (*cuts, size), strict=True))
        for cuts in combinations_with_replacement(points, dp_size - 1)
    )
    layout = mf.build_for_row_atomic_balanced(shapes, dp_size, block_size=block_size)
    assert max(layout.rank_size(k) for k in range(dp_size)) == best


@given(grouped, st.integers(1, 9))
def test_balanced_guarantees(group: Grouped, dp_size: int) -> None:
    shapes, block_size = group
    layout = mf.build_for_row_atomic_balanced(shapes, dp_size, block_size=block_size)
    size = sum(map(math.prod, shapes))
    assert layout.stores_equal_segments
    assert layout.dp_size == dp_size
    assert layout.size == size
    assert layout.tensor_to_offset == tuple(sum(map(math.prod, shapes[:i])) for i in range(len(shapes)))
    assert set(layout.rank_to_offset) <= set(cut_points(shapes, block_size))
    largest = max(layout.rank_size(k) for k in range(dp_size))
    assert largest <= size / dp_size + max(units(shapes, block_size), default=0)
    report = padding_report(layout, block_size=block_size)
    assert report.bound <= report.stored == largest * dp_size
    unpadded = mf.build_for_row_atomic_unpadding(shapes, dp_size, block_size=block_size)
    assert largest <= max(unpadded.rank_size(k) for k in range(dp_size))


def test_balanced_is_fast_for_many_ranks_and_tensors() -> None:
    shapes = [(64 + i % 97, 128 + i % 31) for i in range(5000)]
    start = time.process_time()
    layout = mf.build_for_row_atomic_balanced(shapes, 2048)
    assert time.process_time() - start < 5
    assert padding_report(layout).times < 1.01


# The figures.


def test_report() -> None:
    report = padding_report(mf.build_for_row_atomic(COPRIME, 2))
    assert (report.ranks, report.needed, report.largest_row, report.largest_tensor) == (2, 8 * 3829, 2039, 2)
    assert report.stored == 2 * math.lcm(769, 1021, 2039)
    assert report.fullest * 2 == report.stored
    assert round(report.times) == round(report.fullest_times) == 104_526
    assert report.bound == report.needed
    assert report.wasteful
    assert not report.hopeless
    assert "(104,525.91 times)" in str(report)

    experts = padding_report(mf.build_for_row_atomic_balanced(EXPERTS, 512))
    assert experts.largest_row == 4096 * 7168
    assert experts.hopeless
    assert experts.bound_times == experts.times == pytest.approx(42.67, abs=0.01)
    finer = [finer_view(shape) for shape in EXPERTS]
    assert finer == [(8 * 4096, 7168), (8 * 7168, 2048)]
    assert padding_report(mf.build_for_row_atomic_balanced(finer, 512)).times == 1

    unequal = padding_report(mf.GlobalLayout([(4, 2)], [0], 8, [0, 2]))
    assert (unequal.stored, unequal.fullest, unequal.fullest_times) == (8, 6, 1.5)
    blocks = padding_report(mf.build_for_row_atomic_balanced([(8, 3)], 4, block_size=4), block_size=4)
    assert (blocks.largest_row, blocks.bound, blocks.stored) == (12, 48, 48)
    nothing = padding_report(mf.build_for_row_atomic([(0, 5)], 3))
    assert (nothing.needed, nothing.largest_tensor, nothing.times, nothing.bound) == (0, None, 1, 0)
    assert not nothing.wasteful


@given(grouped, st.integers(1, 9))
def test_bound_holds_for_every_equal_layout(group: Grouped, dp_size: int) -> None:
    shapes, block_size = group
    for build in (mf.build_for_row_atomic, mf.build_for_row_atomic_balanced):
        report = padding_report(build(shapes, dp_size, block_size=block_size), block_size=block_size)
        assert report.needed <= report.bound <= report.stored == report.fullest * dp_size


@given(shape_lists())
def test_finer_view_is_a_view(shapes: list[tuple[int, ...]]) -> None:
    for shape in shapes:
        assert finer_view(shape).numel() == math.prod(shape)
        assert finer_view(shape)[-1] == shape[-1]
        assert len(finer_view(shape)) == min(len(shape), 2)


# The warning.


def test_padded_warns_with_figures_and_remedy() -> None:
    message = warning_of(lambda: mf.build_row_atomic_layout(COPRIME, 2))
    assert "ShardLayout.PADDED" in message
    assert "for 30,632 on 2 ranks (104,525.91 times)" in message
    assert "ShardLayout.BALANCED stores 32,624 (1.07 times)" in message
    assert "ShardLayout.UNPADDED has no padding" in message
    assert "cannot help" not in message


@pytest.mark.parametrize("shard_layout", [ShardLayout.PADDED, ShardLayout.BALANCED])
def test_few_and_huge_rows_are_named_with_the_finer_view(shard_layout: ShardLayout) -> None:
    message = warning_of(lambda: mf.build_row_atomic_layout(EXPERTS, 512, shard_layout=shard_layout))
    assert f"{shard_layout} stores much padding: 15,032,385,536 elements stored for 352,321,536" in message
    assert "(42.67 times); equal segments store at least 15,032,385,536 (42.67 times)" in message
    assert "Equal segments cannot help: tensor 0 (8, 4096, 7168) has few and huge rows (29,360,128 elements)" in message
    assert "by a finer logical view, its last dim as the row: (32768, 7168)" in message
    assert ("ShardLayout.UNPADDED has no padding" in message) == (shard_layout is ShardLayout.PADDED)


@pytest.mark.parametrize(
    ("shapes", "dp_size", "shard_layout"),
    [
        (COPRIME, 2, ShardLayout.UNPADDED),
        (COPRIME, 2, ShardLayout.BALANCED),
        (EXPERTS, 512, ShardLayout.UNPADDED),
        ([(8, 100)], 512, ShardLayout.BALANCED),  # few rows, but no finer view to name
        ([(10, 10)], 11, ShardLayout.PADDED),  # 110 for 100: not more than a tenth
        ([(64, 32), (64, 16)], 8, ShardLayout.PADDED),
        ([(0, 7)], 8, ShardLayout.PADDED),
        ([], 8, ShardLayout.PADDED),
    ],
)
def test_no_warning(shapes: list[tuple[int, ...]], dp_size: int, shard_layout: ShardLayout) -> None:
    assert not warning_of(lambda: mf.build_row_atomic_layout(shapes, dp_size, shard_layout=shard_layout))


def test_warning_points_at_the_caller() -> None:
    with pytest.warns(mf.PaddingWarning) as caught:
        mf.build_row_atomic_layout([(10, 10)], 12)
    assert caught[0].filename == __file__
