"""What no choice of owners can beat: the least work of the busiest rank."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice
from math import ceil

_ROUNDING = 1 + 1e-9
_THRESHOLDS = 64
"""Of so many different costs, the largest that two of can share a rank, it is tried whether they fit."""


def load_lower_bound(costs: Iterable[float], ranks: int) -> float:
    """The busiest of `ranks` ranks has at least this work, however tensors of these costs are shared out.

    The largest of: the mean; the largest cost; for every k, the k + 1 smallest of the ``k * ranks + 1`` largest costs
    together, for one rank gets k + 1 of those (pigeonhole); and, to a millionth, what work no rank may stay below by
    the bound L2 of bin packing (Martello and Toth, 1990).

    >>> load_lower_bound([5, 5, 5], 2)
    10
    >>> round(load_lower_bound([40, 40, 40, 15, 15, 15, 15], 4), 3)  # the mean is 45
    55.0
    """
    ordered = sorted(costs, reverse=True)
    bound = max(sum(ordered) / ranks, max(ordered, default=0.0))
    for k in range(1, (len(ordered) - 1) // ranks + 1):
        bound = max(bound, sum(ordered[k * ranks - k : k * ranks + 1]))
    low, high = bound, 2 * bound  # longest processing time first needs no more than twice the mean or the largest cost
    overfull = _Overfull(ordered, ranks)
    while high > low * (1 + 1e-6) and (low > bound or overfull.at(low * (1 + 1e-6))):
        middle = (low + high) / 2
        low, high = (middle, high) if overfull.at(middle) else (low, middle)
    return low


class _Overfull:
    """Proves that work does not fit: items of at least some cost, with what is too large to stand beside any of them."""

    def __init__(self, ordered: Sequence[float], ranks: int) -> None:
        self._ranks = ranks
        self._rising = ordered[::-1]
        self._sums = [0.0, *accumulate(ordered)]
        self._distinct = sorted(set(ordered), reverse=True)

    def _above(self, cost: float) -> int:
        return len(self._rising) - bisect_right(self._rising, cost)

    def at(self, capacity: float) -> bool:
        """Whether `ranks` ranks that do at most `capacity` each cannot do it all."""
        halves = self._above(capacity / 2)
        for least in islice((cost for cost in self._distinct if cost <= capacity / 2), _THRESHOLDS):
            alone = self._above((capacity - least) * _ROUNDING)
            fitting = len(self._rising) - bisect_left(self._rising, least)
            room = (halves - alone) * capacity - (self._sums[halves] - self._sums[alone])
            beyond = (self._sums[fitting] - self._sums[halves] - room) / capacity
            if halves + max(0, ceil(beyond - 1e-9)) > self._ranks:
                return True
        return halves > self._ranks
