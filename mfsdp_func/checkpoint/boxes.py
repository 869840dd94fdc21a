"""A flat range of a tensor as boxes, the pieces that `torch.distributed.checkpoint` stores: integers only."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from mfsdp_func.values.ranges import Range


class Box(NamedTuple):
    """A part of a tensor that is an interval along each dim."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.sizes).numel()


def boxes_of(shape: Sequence[int], part: Range) -> list[tuple[Box, Range]]:
    """The elements `part` of a tensor, counted in row-major order, as at most ``2 * ndim - 1`` boxes.

    Each box is a contiguous run of elements: it comes with the range of the tensor that it covers. Boxes are in order
    and cover `part` once. (A range of a matrix is the end of a row, whole rows, and the beginning of a row.)

    >>> [box for box, _ in boxes_of((4, 3), Range(2, 7))]
    [Box(offsets=(0, 2), sizes=(1, 1)), Box(offsets=(1, 0), sizes=(2, 3))]
    """
    found: list[tuple[Box, Range]] = []
    for box in _boxes(tuple(shape), part.start, part.end) if part.numel else ():
        start = part.start if not found else found[-1][1].end
        found.append((box, Range(start, box.numel)))
    return found


def _boxes(shape: tuple[int, ...], start: int, end: int) -> Iterator[Box]:
    if not shape:
        yield Box((), ())
        return
    row = torch.Size(shape[1:]).numel()
    (first, skipped), (last, rest) = divmod(start, row), divmod(end, row)
    if first == last:
        yield from _in_row(first, _boxes(shape[1:], skipped, rest))
        return
    if skipped:
        yield from _in_row(first, _boxes(shape[1:], skipped, row))
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if rest:
        yield from _in_row(last, _boxes(shape[1:], 0, rest))


def _in_row(index: int, boxes: Iterator[Box]) -> Iterator[Box]:
    for box in boxes:
        yield Box((index, *box.offsets), (1, *box.sizes))


def split_boxes(boxes: Sequence[tuple[Box, Range]], most: int) -> list[tuple[Box, Range]]:
    """The same elements in boxes of at most `most` elements (at least one), still contiguous runs in order."""
    found: list[tuple[Box, Range]] = []
    for box, covered in boxes:
        if box.numel <= most:
            found.append((box, covered))
            continue
        dim = next(dim for dim, size in enumerate(box.sizes) if size > 1)
        slab = torch.Size(box.sizes[dim + 1 :]).numel()
        count, start = max(1, most // slab), covered.start
        for at in range(0, box.sizes[dim], count):
            size = min(count, box.sizes[dim] - at)
            offsets = (*box.offsets[:dim], box.offsets[dim] + at, *box.offsets[dim + 1 :])
            sizes = (*box.sizes[:dim], size, *box.sizes[dim + 1 :])
            found += split_boxes([(Box(offsets, sizes), Range(start, size * slab))], most)
            start += size * slab
    return found


def find_fault(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Why boxes do not cover a tensor exactly once; None where they do.

    >>> find_fault((4,), [Box((0,), (2,)), Box((3,), (1,))])
    'has a hole: its boxes hold 3 of 4 elements'
    """
    for box in boxes:
        ends = [offset + size for offset, size in zip(box.offsets, box.sizes, strict=False)]
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            return f"has a box {box} of another number of dims than its shape {tuple(shape)}"
        if min((*box.offsets, *box.sizes), default=0) < 0 or any(e > n for e, n in zip(ends, shape, strict=True)):
            return f"has a box {box} outside of its shape {tuple(shape)}"
    if pair := find_overlap([box for box in boxes if box.numel]):
        return f"is stored twice: {pair[0]} and {pair[1]} overlap"
    if (held := sum(box.numel for box in boxes)) != (whole := torch.Size(shape).numel()):
        return f"has a hole: its boxes hold {held} of {whole} elements"
    return None


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, if there are any. None of them may be empty."""
    if len(boxes) < 2:
        return None
    dims = range(len(boxes[0].offsets))
    if not dims:
        return boxes[0], boxes[1]
    # Sweep along the dim with the most different starts, so that few boxes are open at once.
    dim = max(dims, key=lambda dim: len({box.offsets[dim] for box in boxes}))
    opened: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offsets[dim]):
        opened = [other for other in opened if other.offsets[dim] + other.sizes[dim] > box.offsets[dim]]
        for other in opened:
            if all(
                max(box.offsets[d], other.offsets[d])
                < min(box.offsets[d] + box.sizes[d], other.offsets[d] + other.sizes[d])
                for d in dims
            ):
                return other, box
        opened.append(box)
    return None
