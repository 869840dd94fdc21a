"""Half-open intervals of elements: the only arithmetic that plans are made of."""

from dataclasses import dataclass

from mfsdp_func.values.value import as_int


@dataclass(frozen=True, order=True, slots=True)
class Range:
    """The elements ``start, start + 1, ..., start + numel - 1``.

    Raises:
        ValueError: if `start` or `numel` is negative.
        TypeError: if one is no integer.

    >>> Range(4, 3).end
    7
    """

    start: int
    numel: int

    def __post_init__(self) -> None:
        if not type(self.start) is type(self.numel) is int:
            object.__setattr__(self, "start", as_int("Range: start", self.start))
            object.__setattr__(self, "numel", as_int("Range: numel", self.numel))
        if self.start < 0 or self.numel < 0:
            raise ValueError(f"Range: start and numel must not be negative, got {self.start} and {self.numel}")

    @property
    def end(self) -> int:
        """One past the last element."""
        return self.start + self.numel


def intersect_ranges(a: Range, b: Range) -> Range:
    """The elements that `a` and `b` share; ``numel == 0`` where there are none.

    >>> intersect_ranges(Range(0, 6), Range(4, 10))
    Range(start=4, numel=2)
    """
    start = max(a.start, b.start)
    return Range(start, max(0, min(a.end, b.end) - start))
