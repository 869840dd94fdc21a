"""Collectives along one mesh axis as linear maps: all-gather, reduce-scatter, all-reduce. Integers only."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from mfsdp_func.plans.linear_map import LinearMap
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.value import THIS_RANK_ONLY

Kind = Literal["allgather", "reduce_scatter", "allreduce"]

_TRANSPOSED: dict[Kind, Kind] = {
    "allgather": "reduce_scatter",
    "reduce_scatter": "allgather",
    "allreduce": "allreduce",
}


@dataclass(frozen=True, eq=False)
class Collective(LinearMap):
    """One collective on each line of ranks along a mesh axis. Reductions are sums.

    Attributes:
        kind: "allgather" joins the segments of a line, "reduce_scatter" adds whole ranges and leaves each rank its
            segment of the sum, "allreduce" adds whole ranges. The first two are each other's transpose, the third its
            own: for the objective that is the sum over ranks of their losses.
        mesh: the ranks.
        axis: the mesh axis.
        sizes: number of elements of the segment of each rank on this rank's line, in buffer order.
        stored: where layouts store equal segments of unequal content: number of elements that a rank stores for its
            segment, and for the whole range of the line; the rest is padding.
        average: divide results by the number of ranks of the line.
        deterministic: add in the order of the line, not as the backend likes.
        group: what the ranks must agree on: a digest of the layout.
        backward: whether autograd made it, as the transpose of what the program called.
    """

    kind: Kind
    mesh: Mesh
    axis: int
    sizes: tuple[int, ...] = field(metadata=THIS_RANK_ONLY)  # they differ between lines
    stored: tuple[int, int] | None
    average: bool
    deterministic: bool
    group: str
    backward: bool = False

    @cached_property
    def label(self) -> str:
        """How errors and traces call this collective."""
        kind = f"transpose of {_TRANSPOSED[self.kind]}" if self.backward else self.kind
        return f"{kind} over {self.mesh.axis_names[self.axis]!r}"

    @cached_property
    def transpose(self) -> "Collective":
        """The map back."""
        return replace(self, kind=_TRANSPOSED[self.kind], backward=not self.backward)

    @cached_property
    def line(self) -> tuple[int, ...]:
        """The ranks on this rank's line, in buffer order."""
        return self.mesh.axis_ranks(self.axis)

    @cached_property
    def position(self) -> int:
        """The place of this rank on its line."""
        return self.line.index(self.mesh.get_rank())

    @cached_property
    def total(self) -> int:
        """Number of elements of all segments of the line."""
        return sum(self.sizes)

    @cached_property
    def segment(self) -> int:
        """Number of elements that this rank stores of its segment."""
        return self.sizes[self.position] if self.stored is None else self.stored[0]

    @cached_property
    def whole(self) -> int:
        """Number of elements that this rank stores of the range of the whole line."""
        return self.total if self.stored is None else self.stored[1]

    @cached_property
    def equal(self) -> bool:
        """Whether all ranks store equally many elements, as native collectives want it."""
        return self.stored is not None or len(set(self.sizes)) == 1

    @cached_property
    def input_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor that this process gives."""
        return (self.segment,) if self.kind == "allgather" else (self.whole,)

    @cached_property
    def output_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor that this process gets."""
        return (self.segment,) if self.kind == "reduce_scatter" else (self.whole,)

    @cached_property
    def output_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shape of each tensor that this process gets: flat."""
        return ((self.output_numels[0],),)

    @cached_property
    def takes_part(self) -> bool:
        """Whether this process exchanges anything with others."""
        return len(self.line) > 1 and self.total > 0

    def input_name(self, n: int) -> str:
        """How errors call the one tensor that this process gives."""
        return "local_buffer"
