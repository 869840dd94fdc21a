import copy
import pickle
from dataclasses import FrozenInstanceError

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_func.values.ranges import Range, intersect_ranges

ranges = st.builds(Range, st.integers(0, 30), st.integers(0, 30))


def elements(part: Range) -> set[int]:
    return set(range(part.start, part.end))


def test_end() -> None:
    assert Range(4, 3).end == 7
    assert Range(5, 0).end == 5


@pytest.mark.parametrize("values", [(-1, 3), (0, -1)])
def test_negative_values_are_refused(values: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Range(*values)


@given(ranges, ranges)
def test_intersection_is_the_common_elements(a: Range, b: Range) -> None:
    met = intersect_ranges(a, b)
    assert elements(met) == elements(a) & elements(b)
    assert met.numel == len(elements(a) & elements(b))
    assert met == intersect_ranges(b, a)


@pytest.mark.parametrize(
    ("a", "b", "numel"),
    [
        (Range(0, 4), Range(4, 4), 0),
        (Range(0, 4), Range(9, 4), 0),
        (Range(0, 9), Range(2, 3), 3),
        (Range(2, 0), Range(0, 9), 0),
    ],
)
def test_touching_apart_within_empty(a: Range, b: Range, numel: int) -> None:
    assert intersect_ranges(a, b).numel == numel


def test_value_semantics() -> None:
    value = Range(2, 3)
    assert value == Range(2, 3)
    assert hash(value) == hash(Range(2, 3))
    assert value != Range(2, 4)
    assert value != (2, 3)
    assert sorted([Range(3, 1), Range(2, 9), Range(2, 3)]) == [Range(2, 3), Range(2, 9), Range(3, 1)]
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == value
    assert eval(repr(value)) == value
    with pytest.raises(FrozenInstanceError):
        value.start = 5  # type: ignore[misc]
