"""The ways to lay tensors into one flat buffer so that its segments respect rows, blocks or whole tensors."""

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.padding import PaddingReport, PaddingWarning, finer_view, padding_report
from mfsdp_func.values.placement import ShardLayout, check_shard_layout
from mfsdp_func.values.value import as_int, as_ints, as_shape


def build_row_atomic_layout(
    shapes: Iterable[Iterable[int]],
    dp_size: int,
    *,
    block_size: int = 1,
    shard_layout: ShardLayout = ShardLayout.PADDED,
    max_padding: float = math.inf,
) -> GlobalLayout:
    """A layout whose segment boundaries never split `block_size` consecutive rows, cut as `shard_layout` says.

    Args:
        shapes: see `build_for_row_atomic`.
        dp_size: see there.
        block_size: see there.
        shard_layout: how rows are cut into segments.
        max_padding: how many times the elements that equal segments must store at least (`PaddingReport.bound`) the
            layout may store.

    Warns:
        PaddingWarning: with figures and the remedy, if `PADDED` stores more than a tenth beyond the tensors' elements,
            or if any equal segments must and the largest rows have a finer view (see `finer_view`).

    Raises:
        ValueError: above `max_padding`, with figures and the remedy; and see `build_for_row_atomic`.
        TypeError: if `shard_layout` is not a `ShardLayout`.
    """
    check_shard_layout("build_row_atomic_layout", shard_layout)
    layout = _ROW_BUILDERS[shard_layout](shapes, dp_size, block_size=block_size)
    if shard_layout is not ShardLayout.UNPADDED:
        report = padding_report(layout, block_size=block_size)
        words = _about_padding(layout, report, shard_layout, block_size)
        if report.stored > max_padding * report.bound:
            raise ValueError(
                f"{words} That is beyond max_padding={max_padding}: choose another ShardLayout, or raise it."
            )
        if words:
            warnings.warn(words, PaddingWarning, stacklevel=2)
    return layout


def _about_padding(layout: GlobalLayout, report: PaddingReport, shard_layout: ShardLayout, block_size: int) -> str:
    """Why a layout stores much padding and what to do; nothing where it does not, or nothing can be done."""
    if not report.wasteful or report.largest_tensor is None:
        return ""
    shape = layout.tensor_shapes[report.largest_tensor]
    finer = finer_view(shape)
    words = [f"build_row_atomic_layout: {shard_layout} stores much padding: {report}."]
    if shard_layout is ShardLayout.PADDED:
        shapes = layout.tensor_shapes
        balanced = padding_report(build_for_row_atomic_balanced(shapes, report.ranks, block_size=block_size))
        words.append(
            "Every segment boundary is a multiple of every row size, so padding grows with their least common multiple."
        )
        if balanced.stored < report.stored:
            words.append(f"ShardLayout.BALANCED stores {balanced.stored:,} ({balanced.times:,.2f} times);")
        words.append("ShardLayout.UNPADDED has no padding, but unequal segments.")
    elif not report.hopeless or finer == shape:
        return ""
    if report.hopeless:
        words.append(
            f"Equal segments cannot help: tensor {report.largest_tensor} {tuple(shape)} has few and huge rows"
            f" ({report.largest_row:,} elements)."
        )
        if finer != shape:
            words.append(f"Lay it out by a finer logical view, its last dim as the row: {tuple(finer)}.")
    return " ".join(words)


def build_for_row_atomic(shapes: Iterable[Iterable[int]], dp_size: int, *, block_size: int = 1) -> GlobalLayout:
    """Equal segments: every boundary is a multiple of `chunk`, the LCM of all ``block_size * row size``.

    Tensors of at least a chunk are laid first, in order. Where one ends inside a chunk, the rest of that chunk goes to
    the next such tensor whose remainder (its size modulo the chunk) is above zero and fits, laid so that the remainder
    ends with the chunk; then to tensors smaller than a chunk, the largest first. Small ones left over follow at the
    end. Every tensor starts at a multiple of its own ``block_size * row size``.

    Args:
        shapes: logical shapes, of one or more dims; dim 0 may be zero and must divide by `block_size`.
        dp_size: number of segments.
        block_size: number of consecutive rows that no boundary may split.

    Raises:
        ValueError: on a 0-D shape, a zero trailing dim, a dim 0 that is no multiple of `block_size`, or a
            `dp_size` or `block_size` that is not positive.
        TypeError: on a dim, `dp_size` or `block_size` that is no integer.

    >>> build_for_row_atomic([(5, 4), (2, 6), (3,)], 2)
    GlobalLayout([(5, 4), (2, 6), (3,)], [0, 24, 20], 48, [0, 24])
    """
    sizes, units = _check(shapes, dp_size, block_size)
    numels = [size.numel() for size in sizes]
    chunk = math.lcm(*units)
    offsets = [0] * len(sizes)
    large = [i for i, numel in enumerate(numels) if numel >= chunk]
    small = sorted((i for i, numel in enumerate(numels) if numel < chunk), key=lambda i: -numels[i])
    cursor = 0
    while large:
        first = large.pop(0)
        offsets[first] = cursor
        cursor += numels[first]
        gap_end = _align(cursor, chunk)
        rest = gap_end - cursor
        tail = next((i for i in large if 0 < numels[i] % chunk <= rest), None) if rest else None
        if tail is not None:
            large.remove(tail)
            offsets[tail] = gap_end - numels[tail] % chunk
            _fill(small, cursor, offsets[tail], numels, units, offsets)
            cursor = offsets[tail] + numels[tail]
        else:
            _fill(small, cursor, gap_end, numels, units, offsets)
            cursor = gap_end
    end = _fill(small, cursor, None, numels, units, offsets)
    size = _align(end, chunk * dp_size)
    return GlobalLayout(sizes, offsets, size, (k * size // dp_size for k in range(dp_size)))


def _fill(
    small: list[int], start: int, end: int | None, numels: Sequence[int], units: Sequence[int], offsets: list[int]
) -> int:
    """Lay what fits of `small` into ``start..end``, each aligned to its unit; return where the last one ends."""
    cursor = start
    for i in list(small):
        at = _align(cursor, units[i])
        if end is None or at + numels[i] <= end:
            offsets[i], cursor = at, at + numels[i]
            small.remove(i)
    return cursor


def build_for_row_atomic_unpadding(
    shapes: Iterable[Iterable[int]], dp_size: int, *, block_size: int = 1
) -> GlobalLayout:
    """No padding: tensors back to back in order, segments cut at the row (block) boundary nearest to an even split.

    Segments are in general unequal and may be empty. A tie goes to the lower boundary.

    Args and errors as in `build_for_row_atomic`.

    >>> build_for_row_atomic_unpadding([(3, 4), (2, 5)], 2)
    GlobalLayout([(3, 4), (2, 5)], [0, 12], 22, [0, 12])
    """
    sizes, units = _check(shapes, dp_size, block_size)
    ends = list(accumulate((size.numel() for size in sizes), initial=0))
    size = ends[-1]

    def nearest(k: int) -> int:
        target = k * size // dp_size
        i = min(bisect_right(ends, target), len(sizes)) - 1
        lower = ends[i] + (target - ends[i]) // units[i] * units[i] if sizes else 0
        if lower * dp_size == k * size:
            return lower
        upper = lower + units[i]
        return lower if 2 * k * size <= dp_size * (lower + upper) else upper

    return GlobalLayout(sizes, ends[:-1], size, [nearest(k) for k in range(dp_size)])


def build_for_row_atomic_balanced(
    shapes: Iterable[Iterable[int]], dp_size: int, *, block_size: int = 1
) -> GlobalLayout:
    """Equal *stored* segments: tensors back to back, cut at row (block) boundaries into the most even segments.

    The largest segment is the least possible; every rank stores that many elements, padding only behind its own.
    Guarantee: the largest segment has at most ``size / dp_size`` plus the largest row (block) elements, whatever the
    row sizes are to one another. Cost: joining segments to a whole buffer copies them once more, to leave the padding
    out. Source: the linear partition problem, by bisection over the largest segment with a greedy cut.

    Args and errors as in `build_for_row_atomic`.

    >>> build_for_row_atomic_balanced([(3, 4), (2, 5)], 2)
    GlobalLayout([(3, 4), (2, 5)], [0, 12], 22, [0, 12], stores_equal_segments=True)
    """
    sizes, units = _check(shapes, dp_size, block_size)
    ends = list(accumulate((size.numel() for size in sizes), initial=0))
    size = ends[-1]

    def cuts(limit: int) -> list[int] | None:
        """Where segments of at most `limit` elements start, each as long as it can be; None if they do not suffice."""
        starts = [0]
        while starts[-1] + limit < size:
            reach = starts[-1] + limit
            i = bisect_right(ends, reach) - 1
            starts.append(ends[i] + (reach - ends[i]) // units[i] * units[i])
            if starts[-1] == starts[-2] or len(starts) > dp_size:
                return None
        return starts

    low, high = -(-size // dp_size), -(-size // dp_size) + max(units, default=0)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if cuts(middle) else (middle + 1, high)
    starts = cuts(low) or [0]
    starts += [size] * (dp_size - len(starts))
    return GlobalLayout(sizes, ends[:-1], size, starts, stores_equal_segments=True)


def build_for_tensor_atomic(
    shapes: Iterable[Iterable[int]], dp_size: int, *, tensor_owners: Iterable[int]
) -> GlobalLayout:
    """No padding: segment k is exactly the tensors of owner k, in tensor order.

    Args:
        shapes: logical shapes, of one or more dims; dim 0 may be zero.
        dp_size: number of segments.
        tensor_owners: the shard index that owns each tensor.

    Raises:
        ValueError: if there is not one owner per shape, an owner is not below `dp_size`, or a shape is refused (see
            `build_for_row_atomic`).
        TypeError: if an owner is no integer; and see there.

    >>> build_for_tensor_atomic([(2, 3), (4,), (5,)], 3, tensor_owners=[2, 0, 2])
    GlobalLayout([(2, 3), (4,), (5,)], [4, 0, 10], 15, [0, 4, 4])
    """
    sizes, _ = _check(shapes, dp_size, 1)
    owners = as_ints("build_for_tensor_atomic: tensor_owners", tensor_owners)
    if len(owners) != len(sizes):
        raise ValueError(f"build_for_tensor_atomic: {len(sizes)} shapes but {len(owners)} owners; give one each")
    held = [0] * dp_size
    for i, (owner, size) in enumerate(zip(owners, sizes, strict=True)):
        if not 0 <= owner < dp_size:
            raise ValueError(
                f"build_for_tensor_atomic: tensor {i} is given to shard index {owner}, expected 0..{dp_size - 1}"
            )
        held[owner] += size.numel()
    starts = list(accumulate(held, initial=0))
    cursor = starts[:-1].copy()
    offsets: list[int] = []
    for owner, size in zip(owners, sizes, strict=True):
        offsets.append(cursor[owner])
        cursor[owner] += size.numel()
    return GlobalLayout(sizes, offsets, starts[-1], starts[:-1])


def _check(shapes: Iterable[Iterable[int]], dp_size: int, block_size: int) -> tuple[list[torch.Size], list[int]]:
    """The shapes, and for each the number of elements that no boundary may split (``block_size`` rows)."""
    for name, value in (("dp_size", dp_size), ("block_size", block_size)):
        if as_int(f"layout: {name}", value) < 1:
            raise ValueError(f"layout: {name} must be positive, got {value}")
    sizes = [as_shape(f"layout: shape of tensor {i}", shape) for i, shape in enumerate(shapes)]
    for i, size in enumerate(sizes):
        if not size:
            raise ValueError(f"layout: tensor {i} is 0-D and has no rows; give it the shape (1,)")
        if size[1:].numel() == 0 or min(size) < 0:
            raise ValueError(f"layout: tensor {i} has shape {tuple(size)}; only dim 0 may be zero")
        if size[0] % block_size:
            raise ValueError(
                f"layout: tensor {i} has {size[0]} rows, no multiple of block_size {block_size};"
                " put it into a group with a block size that divides its rows"
            )
    return sizes, [block_size * size[1:].numel() for size in sizes]


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


_ROW_BUILDERS: dict[ShardLayout, Callable[..., GlobalLayout]] = {
    ShardLayout.PADDED: build_for_row_atomic,
    ShardLayout.UNPADDED: build_for_row_atomic_unpadding,
    ShardLayout.BALANCED: build_for_row_atomic_balanced,
}
