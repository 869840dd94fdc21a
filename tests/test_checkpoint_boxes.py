"""Boxes: a flat range is few of them, and they cover it."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_func.checkpoint.boxes import Box, boxes_of, find_fault, find_overlap, split_boxes
from mfsdp_func.values.ranges import Range

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=5).map(tuple)


@st.composite
def parts(draw: st.DrawFn) -> tuple[tuple[int, ...], Range]:
    shape = draw(shapes)
    numel = torch.Size(shape).numel()
    start = draw(st.integers(0, numel))
    return shape, Range(start, draw(st.integers(0, numel - start)))


@given(parts(), st.integers(1, 7))
def test_boxes_cover_a_range_once_and_are_few(case: tuple[tuple[int, ...], Range], most: int) -> None:
    shape, part = case
    boxes = boxes_of(shape, part)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for found, limit in ((boxes, None), (split_boxes(boxes, most), most)):
        whole, at = torch.arange(torch.Size(shape).numel()).view(shape), part.start
        for box, covered in found:
            assert limit is None or box.numel <= limit
            elements = whole[tuple(slice(o, o + size) for o, size in zip(*box, strict=True))]
            assert covered == Range(at, box.numel)
            assert elements.reshape(-1).tolist() == list(range(covered.start, covered.end))
            at = covered.end
        assert at == part.end


@given(st.data())
def test_faults_are_those_of_counting(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 3), min_size=0, max_size=3).map(tuple))

    def box() -> Box:
        pairs = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in pairs), tuple(b - a for a, b in pairs))

    boxes = [box() for _ in range(data.draw(st.integers(0, 4)))]
    count = torch.zeros(shape, dtype=torch.int64)
    for one in boxes:
        count[tuple(slice(o, o + size) for o, size in zip(*one, strict=True))] += 1
    assert (find_fault(shape, boxes) is None) == bool((count == 1).all())
    assert (find_overlap([one for one in boxes if one.numel]) is not None) == bool((count > 1).any())


def test_boxes_outside_are_faults() -> None:
    assert "outside" in str(find_fault((2,), [Box((1,), (2,))]))
    assert "number of dims" in str(find_fault((2,), [Box((0, 0), (2, 1))]))
