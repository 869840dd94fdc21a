"""Where every logical tensor and every rank's segment lies in one flat buffer."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.values.placement import BlockAtomic, Placement, TensorAtomic, shard_axes
from mfsdp_func.values.ranges import Range, intersect_ranges
from mfsdp_func.values.value import Value, as_int, as_ints, as_shape


@dataclass(frozen=True, init=False, eq=False, repr=False)
class GlobalLayout(Value):
    """An immutable map of one flat buffer. All offsets and sizes are in elements.

    Args:
        tensor_shapes: the logical shape of each tensor.
        tensor_to_offset: where each tensor starts.
        size: number of elements of the whole buffer, padding included.
        rank_to_offset: where the segment of each shard index starts; a segment ends where the next one starts.
        stores_equal_segments: every rank stores as many elements as the largest segment has, the rest being padding
            behind its own segment that is no part of the buffer's offsets.

    Raises:
        ValueError: on a negative size, offset or dim, unequal lengths, a tensor past the end, overlapping tensors, or
            segments that are empty as a list, do not start at 0, decrease, or start past the end.
        TypeError: on sizes, offsets or dims that are no integers.

    >>> layout = GlobalLayout([(5, 4), (3,)], [0, 20], 24, [0, 12])
    >>> layout.get_tensor_range(1), layout.rank_size(1)
    (Range(start=20, numel=3), 12)
    """

    tensor_shapes: tuple[torch.Size, ...]
    tensor_to_offset: tuple[int, ...]
    size: int
    rank_to_offset: tuple[int, ...]
    stores_equal_segments: bool

    def __init__(
        self,
        tensor_shapes: Iterable[Iterable[int]],
        tensor_to_offset: Iterable[int],
        size: int,
        rank_to_offset: Iterable[int],
        *,
        stores_equal_segments: bool = False,
    ) -> None:
        shapes = tuple(as_shape(f"GlobalLayout: shape of tensor {i}", shape) for i, shape in enumerate(tensor_shapes))
        object.__setattr__(self, "tensor_shapes", shapes)
        object.__setattr__(self, "tensor_to_offset", as_ints("GlobalLayout: tensor_to_offset", tensor_to_offset))
        object.__setattr__(self, "size", as_int("GlobalLayout: size", size))
        object.__setattr__(self, "rank_to_offset", as_ints("GlobalLayout: rank_to_offset", rank_to_offset))
        object.__setattr__(self, "stores_equal_segments", stores_equal_segments)
        self._validate()

    def _validate(self) -> None:
        if self.size < 0:
            raise ValueError(f"GlobalLayout: size must not be negative, got {self.size}")
        if len(self.tensor_shapes) != len(self.tensor_to_offset):
            raise ValueError(
                f"GlobalLayout: {len(self.tensor_shapes)} shapes but {len(self.tensor_to_offset)} offsets;"
                " give one each"
            )
        for i, (offset, numel) in enumerate(zip(self.tensor_to_offset, self.tensor_numels, strict=True)):
            if min(self.tensor_shapes[i], default=0) < 0:
                raise ValueError(
                    f"GlobalLayout: tensor {i} has a negative dim in its shape {tuple(self.tensor_shapes[i])}"
                )
            if offset < 0 or offset + numel > self.size:
                raise ValueError(
                    f"GlobalLayout: tensor {i} {tuple(self.tensor_shapes[i])} at {offset} ends at {offset + numel},"
                    f" outside the buffer of {self.size} elements"
                )
        for before, after in pairwise(self._order):
            if self.tensor_to_offset[before] + self.tensor_numels[before] > self.tensor_to_offset[after]:
                raise ValueError(f"GlobalLayout: tensors {before} and {after} overlap")
        starts = self.rank_to_offset
        if not starts or starts[0] != 0:
            raise ValueError(f"GlobalLayout: rank_to_offset must start at 0, got {starts[:4]}")
        if list(starts) != sorted(starts) or starts[-1] > self.size:
            raise ValueError(
                f"GlobalLayout: rank_to_offset must not decrease nor pass the size {self.size}, got {starts}"
            )

    def __repr__(self) -> str:
        if len(self.tensor_shapes) + self.dp_size > 32:
            count = len(self.tensor_shapes)
            return f"GlobalLayout({count} tensors, size={self.size}, {self.dp_size} ranks, digest={self.digest[:12]})"
        shapes = [tuple(shape) for shape in self.tensor_shapes]
        flag = ", stores_equal_segments=True" if self.stores_equal_segments else ""
        return f"GlobalLayout({shapes}, {list(self.tensor_to_offset)}, {self.size}, {list(self.rank_to_offset)}{flag})"

    @cached_property
    def tensor_numels(self) -> tuple[int, ...]:
        """Number of elements of each tensor."""
        return tuple(shape.numel() for shape in self.tensor_shapes)

    @cached_property
    def _order(self) -> tuple[int, ...]:
        """The tensors that have elements, in buffer order."""
        return tuple(sorted((i for i, n in enumerate(self.tensor_numels) if n), key=self.tensor_to_offset.__getitem__))

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        return tuple(self.tensor_to_offset[i] for i in self._order)

    @cached_property
    def _rows_kept(self) -> dict[tuple[int, int, int], bool]:
        """What `keeps_rows` has found."""
        return {}

    @property
    def dp_size(self) -> int:
        """Number of segments."""
        return len(self.rank_to_offset)

    def rank_size(self, shard_index: int) -> int:
        """Number of elements of one segment.

        Raises:
            IndexError: if there is no such segment.
        """
        return self.get_segment(shard_index, self.dp_size).numel

    @cached_property
    def has_equal_shard_sizes(self) -> bool:
        """Whether all segments have the same size, so that native collectives can move them."""
        return all(start * self.dp_size == k * self.size for k, start in enumerate(self.rank_to_offset))

    def get_tensor_range(self, tensor_index: int) -> Range:
        """The elements of the buffer that a tensor takes.

        Raises:
            IndexError: if there is no such tensor.
        """
        if not 0 <= tensor_index < len(self.tensor_shapes):
            raise IndexError(f"tensor {tensor_index} is not one of the layout's {len(self.tensor_shapes)} tensors")
        return Range(self.tensor_to_offset[tensor_index], self.tensor_numels[tensor_index])

    def row_numel(self, tensor_index: int) -> int:
        """Number of elements of one row (an index of dim 0) of a tensor."""
        return self.tensor_shapes[tensor_index][1:].numel()

    def get_rank_range(self, mesh: Mesh | MeshLike, placements: Sequence[Placement], rank: int) -> Range:
        """The elements of the buffer that `rank`, a global rank, holds under `placements`.

        The innermost `Shard` axis is the most significant digit of the shard index; axes of other placements do
        not count. The whole buffer where no axis shards.

        Raises:
            ValueError: if `rank` is not in the mesh, there is not one placement per axis, or `dp_size` is no multiple
                of the number of shards.
        """
        value = as_mesh(mesh)
        axes = self.check_placements(value, placements)
        return self.get_segment(value.shard_index(axes, rank), value.shard_count(axes))

    def get_local_range(self, mesh: Mesh | MeshLike, placements: Sequence[Placement]) -> Range:
        """The elements of the buffer that this process holds; see `get_rank_range`."""
        return self.get_rank_range(mesh, placements, mesh.get_rank())

    def check_placements(self, mesh: Mesh, placements: Sequence[Placement]) -> tuple[int, ...]:
        """The mesh axes that cut this buffer, once `placements` are known to fit it.

        Raises:
            ValueError: see `get_rank_range`.
        """
        if len(placements) != mesh.ndim:
            raise ValueError(f"{mesh} needs {mesh.ndim} placements, one per axis, got {tuple(placements)}")
        axes = shard_axes(placements)
        if self.dp_size % (count := mesh.shard_count(axes)):
            raise ValueError(
                f"a layout of {self.dp_size} segments cannot be cut into {count} shards ({tuple(placements)} on {mesh})"
                "; build it with dp_size equal to the number of shards, or a multiple of it"
            )
        return axes

    def check_unbroken(self, mesh: Mesh, placements: Sequence[Placement]) -> None:
        """Check that no cut along an axis splits what the axis's placement keeps whole: a tensor, or a block of rows.

        Raises:
            ValueError: naming the tensor; and see `get_rank_range`.
        """
        axes = self.check_placements(mesh, placements)
        if not any(isinstance(placements[axis], (TensorAtomic, BlockAtomic)) for axis in axes):
            return
        count, digit = mesh.shard_count(axes), 1
        for axis in axes:  # the outermost axis is the least significant digit of the shard index
            placement, digit = placements[axis], digit * mesh.size(axis)
            step = digit // mesh.size(axis)
            cuts = [k for k in range(step, count, step) if k % digit]
            if isinstance(placement, (TensorAtomic, BlockAtomic)):
                self._check_cuts(placement, [self.get_segment(k, count).start for k in cuts])

    def _check_cuts(self, placement: TensorAtomic | BlockAtomic, cuts: Sequence[int]) -> None:
        for cut in cuts:
            n = bisect_left(self._starts, cut) - 1
            i = self._order[n] if n >= 0 else -1
            inside = cut - self.tensor_to_offset[i] if n >= 0 else 0
            if n < 0 or inside >= self.tensor_numels[i]:
                continue
            if isinstance(placement, TensorAtomic) or inside % (placement.block_size * self.row_numel(i)):
                remedy = (
                    "build the layout with build_for_tensor_atomic"
                    if isinstance(placement, TensorAtomic)
                    else f"build the layout with block_size={placement.block_size}"
                )
                raise ValueError(
                    f"{placement!r} does not fit the layout, which cuts tensor {i} {tuple(self.tensor_shapes[i])} after"
                    f" {inside} of its {self.tensor_numels[i]} elements; {remedy}, or use RowAtomic()"
                )

    def get_segment(self, shard_index: int, shard_count: int) -> Range:
        """Shard `shard_index` of `shard_count`: that many of the layout's segments side by side."""
        if not 0 <= shard_index < shard_count:
            raise IndexError(f"shard index {shard_index} is not below the {shard_count} shards")
        step = self.dp_size // shard_count
        end = (shard_index + 1) * step
        start = self.rank_to_offset[shard_index * step]
        return Range(start, (self.rank_to_offset[end] if end < self.dp_size else self.size) - start)

    def tensors_in(self, segment: Range) -> list[tuple[int, Range]]:
        """The tensors that meet a piece of the buffer, in buffer order, each with the elements *of the tensor* met."""
        if not segment.numel:
            return []
        found: list[tuple[int, Range]] = []
        first = max(0, bisect_right(self._starts, segment.start) - 1)
        for i in self._order[first : bisect_left(self._starts, segment.end)]:
            start = self.tensor_to_offset[i]
            met = intersect_ranges(Range(start, self.tensor_numels[i]), segment)
            if met.numel:
                found.append((i, Range(met.start - start, met.numel)))
        return found

    def shards_of(self, tensor_index: int, part: Range, shard_count: int) -> list[tuple[int, Range]]:
        """The shards that hold elements `part` of a tensor, in buffer order, each with the elements of the tensor."""
        base = self.tensor_to_offset[tensor_index]
        wanted = Range(base + part.start, part.numel)
        found: list[tuple[int, Range]] = []
        for k in self._shards_that_meet(wanted, shard_count):
            met = intersect_ranges(self.get_segment(k, shard_count), wanted)
            found.append((k, Range(met.start - base, met.numel)))
        return found

    def holders_of(self, tensor_index: int, shard_count: int) -> list[int]:
        """The shards that hold an element of a tensor, in buffer order."""
        return self._shards_that_meet(self.get_tensor_range(tensor_index), shard_count)

    def _shards_that_meet(self, piece: Range, shard_count: int) -> list[int]:
        if not piece.numel:
            return []
        starts, step = self.rank_to_offset, self.dp_size // shard_count
        first = (bisect_right(starts, piece.start) - 1) // step
        last = (bisect_left(starts, piece.end) - 1) // step
        if first == last:
            return [first]
        return [first, *(k for k in range(first + 1, last) if starts[k * step] < starts[(k + 1) * step]), last]

    def part_shape(
        self, tensor_index: int, numel: int, shard_count: int, shape: torch.Size | None = None
    ) -> tuple[int, ...]:
        """The shape of a part of a tensor: whole rows where no shard splits a row, else flat, alike for all its parts.

        Args:
            tensor_index: which tensor.
            numel: of the part.
            shard_count: number of shards.
            shape: the tensor's logical shape; by default the one that the layout has.
        """
        logical = self.tensor_shapes[tensor_index] if shape is None else shape
        row = logical[1:].numel()
        if numel == logical.numel():
            return tuple(logical)
        return (numel // row, *logical[1:]) if self.keeps_rows(tensor_index, shard_count, row) else (numel,)

    def keeps_rows(self, tensor_index: int, shard_count: int, row_numel: int | None = None) -> bool:
        """Whether no boundary of `shard_count` shards splits a row of a tensor, of `row_numel` elements or its own."""
        row = row_numel or self.row_numel(tensor_index)
        asked = tensor_index, shard_count, row
        if asked not in self._rows_kept:  # every rank of a simulation asks the same
            whole, starts, step = self.get_tensor_range(tensor_index), self.rank_to_offset, self.dp_size // shard_count
            first, last = bisect_right(starts, whole.start), bisect_left(starts, whole.end)  # boundaries inside it
            inside = range(-(-first // step) * step, last, step)
            self._rows_kept[asked] = all((starts[k] - whole.start) % row == 0 for k in inside)
        return self._rows_kept[asked]
