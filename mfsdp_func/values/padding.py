"""What a layout stores against what its tensors need, and the bound that no layout of equal segments can beat."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mfsdp_func.values.layout import GlobalLayout


class PaddingWarning(UserWarning):
    """A layout stores more than a tenth beyond what its tensors need."""


@dataclass(frozen=True)
class PaddingReport:
    """What the ranks store of one buffer, and why. All numbers are of elements.

    Attributes:
        ranks: number of segments.
        needed: of all tensors.
        stored: of all ranks together, padding included.
        fullest: of the rank that stores most.
        largest_row: of the largest row (of `block_size` rows where blocks are kept whole); 0 where there is none.
        largest_tensor: the index of the tensor that has it.

    >>> report = padding_report(GlobalLayout([(3, 4), (1, 8)], [0, 16], 32, [0, 16]))
    >>> print(report)
    32 elements stored for 20 on 2 ranks (1.60 times); equal segments store at least 20 (1.00 times)
    """

    ranks: int
    needed: int
    stored: int
    fullest: int
    largest_row: int
    largest_tensor: int | None

    @property
    def times(self) -> float:
        """Elements stored per element needed."""
        return self.stored / self.needed if self.needed else 1.0

    @property
    def fullest_times(self) -> float:
        """What the fullest rank stores, in even shares of what is needed: its peak memory."""
        return self.fullest * self.ranks / self.needed if self.needed else 1.0

    @property
    def bound(self) -> int:
        """The least that equal segments store, all ranks together, if no row is split."""
        return max(-(-self.needed // self.ranks), self.largest_row) * self.ranks

    @property
    def bound_times(self) -> float:
        """`bound` per element needed."""
        return self.bound / self.needed if self.needed else 1.0

    @property
    def wasteful(self) -> bool:
        """Whether more than a tenth is stored beyond what is needed."""
        return 10 * self.stored > 11 * self.needed

    @property
    def hopeless(self) -> bool:
        """Whether that holds for any layout of equal segments: rows are few and huge."""
        return 10 * self.bound > 11 * self.needed

    def __str__(self) -> str:
        return (
            f"{self.stored:,} elements stored for {self.needed:,} on {self.ranks} ranks ({self.times:,.2f} times);"
            f" equal segments store at least {self.bound:,} ({self.bound_times:,.2f} times)"
        )


def padding_report(layout: GlobalLayout, *, block_size: int = 1) -> PaddingReport:
    """The figures of a layout whose segments keep `block_size` rows together."""
    sizes = [layout.rank_size(k) for k in range(layout.dp_size)]
    fullest = max(sizes)
    held = [i for i, numel in enumerate(layout.tensor_numels) if numel]
    largest = max(held, key=layout.row_numel, default=None)
    return PaddingReport(
        ranks=layout.dp_size,
        needed=sum(layout.tensor_numels),
        stored=fullest * layout.dp_size if layout.stores_equal_segments else layout.size,
        fullest=fullest,
        largest_row=0 if largest is None else layout.row_numel(largest) * block_size,
        largest_tensor=largest,
    )


def finer_view(shape: Sequence[int]) -> torch.Size:
    """A logical shape with the same elements in the same order whose rows are the last dim; free, as a view.

    >>> finer_view((8, 4096, 7168))
    torch.Size([32768, 7168])
    """
    sizes = torch.Size(shape)
    return sizes if len(sizes) < 3 else torch.Size((sizes[:-1].numel(), sizes[-1]))
