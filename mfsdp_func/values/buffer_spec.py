"""What a flat buffer is, apart from its elements: a layout, cut over a mesh by placements."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.values.placement import Partial, Placement, Replicate, Shard, is_flat_shard
from mfsdp_func.values.ranges import Range, intersect_ranges
from mfsdp_func.values.value import UNGUARDED_LABEL, KeyedValue


@dataclass(frozen=True, init=False, eq=False, repr=False)
class BufferSpec(KeyedValue):
    """A mesh, one placement per axis, and a layout: where this rank's local buffer lies.

    Args:
        mesh: the ranks.
        placements: one per axis.
        layout: of the whole buffer.
        name: for errors and the agreement check; no part of the value, nor of what compiled code guards on.

    Raises:
        ValueError: if the placements do not fit the mesh or the layout, a shard stands before another placement, or a
            shard is not one of a flat buffer (`RowAtomic`, `BlockAtomic`, `TensorAtomic`); or if the layout splits what
            `BlockAtomic` or `TensorAtomic` keep whole. (A layout may split rows: then the parts of that tensor are flat.)
        NotImplementedError: on a `Partial` of another reduction than "sum" or "avg".
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    layout: GlobalLayout
    name: str = field(default="", compare=False, metadata=UNGUARDED_LABEL)

    def __init__(
        self, mesh: Mesh | MeshLike, placements: Sequence[Placement], layout: GlobalLayout, name: str = ""
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "BufferSpec: made inside a compiled region, which could not tell it from equal ones; make it (or a buffer"
                " with it) before, and DBuffer(spec, tensor) inside"
            )
        value, chosen = as_mesh(mesh), tuple(placements)
        layout.check_placements(value, chosen)
        for axis, placement in enumerate(chosen):
            _check_placement(value, chosen, axis, placement)
        layout.check_unbroken(value, chosen)
        object.__setattr__(self, "mesh", value)
        object.__setattr__(self, "placements", chosen)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "name", name)
        self._register()

    def __repr__(self) -> str:
        return f"BufferSpec({self.mesh}, {list(self.placements)}, {self.layout})"

    @cached_property
    def local_range(self) -> Range:
        """The elements of the buffer that this rank holds."""
        return self.layout.get_local_range(self.mesh, self.placements)

    @cached_property
    def held(self) -> tuple[tuple[int, Range], ...]:
        """The tensors of which this rank holds elements, in buffer order, each with the elements of it."""
        return tuple(self.layout.tensors_in(self.local_range))

    @property
    def is_sharded(self) -> bool:
        """Whether any axis cuts the buffer."""
        return isinstance(self.placements[-1], Shard)

    @cached_property
    def local_numel(self) -> int:
        """Number of elements that this rank stores, padding included."""
        return self.stored_numel or self.local_range.numel

    @cached_property
    def stored_numel(self) -> int | None:
        """Number of elements that every rank stores, where the layout stores equal segments of unequal content."""
        if not (self.is_sharded and self.layout.stores_equal_segments):
            return None
        axes = self.layout.check_placements(self.mesh, self.placements)
        count = self.mesh.shard_count(axes)
        return max(self.layout.get_segment(k, count).numel for k in range(count))

    @cached_property
    def filled(self) -> tuple[Range, ...]:
        """The elements of the local buffer that belong to tensors, as few ranges as hold them: all but padding."""
        found: list[Range] = []
        for i, part in self.layout.tensors_in(self.local_range):
            start = self.layout.tensor_to_offset[i] + part.start - self.local_range.start
            if found and found[-1].end == start:
                found[-1] = Range(found[-1].start, found[-1].numel + part.numel)
            else:
                found.append(Range(start, part.numel))
        return tuple(found)

    def replace(self, axis: int, placement: Placement) -> "BufferSpec":
        """The same buffer with another placement on one axis, and without a name."""
        return BufferSpec(self.mesh, (*self.placements[:axis], placement, *self.placements[axis + 1 :]), self.layout)


def named(spec: BufferSpec, name: str) -> BufferSpec:
    """The same buffer under a name."""
    return spec if spec.name == name else _renamed(spec, name)


@lru_cache(maxsize=4096)
def _renamed(spec: BufferSpec, name: str) -> BufferSpec:
    return BufferSpec(spec.mesh, spec.placements, spec.layout, name)


def _check_placement(mesh: Mesh, placements: Sequence[Placement], axis: int, placement: Placement) -> None:
    where = f"buffer placements {tuple(placements)}, axis {mesh.axis_names[axis]!r}"
    if isinstance(placement, Partial):
        if placement.reduce_op not in ("sum", "avg"):
            raise NotImplementedError(f'{where}: only Partial("sum") and Partial("avg") can be reduced')
    elif isinstance(placement, Shard):
        if not is_flat_shard(placement):
            raise ValueError(f"{where}: {placement!r} does not cut a flat buffer; use RowAtomic() or its like")
    elif not isinstance(placement, Replicate):
        raise ValueError(f"{where}: expected Replicate(), Partial(...) or a shard, got {placement!r}")
    if axis and isinstance(placements[axis - 1], Shard) and not isinstance(placement, Shard):
        raise ValueError(
            f"{where}: a shard stands before {placement!r}; shards must be the last placements, so that a rank holds"
            " one contiguous range"
        )


def local_part(spec: BufferSpec, tensor_index: int) -> Range:
    """Which elements of a tensor this rank holds; empty where it holds none.

    Raises:
        IndexError: if there is no such tensor.
    """
    whole = spec.layout.get_tensor_range(tensor_index)
    met = intersect_ranges(whole, spec.local_range)
    return Range(met.start - whole.start, met.numel) if met.numel else Range(0, 0)


def local_view(spec: BufferSpec, tensor_index: int) -> tuple[Range, tuple[int, ...]]:
    """Where this rank's part of a tensor lies in the local buffer, and its shape: rows, or flat where rows are split.

    Raises:
        IndexError: if there is no such tensor.
    """
    part, layout = local_part(spec, tensor_index), spec.layout
    offset = layout.tensor_to_offset[tensor_index] - spec.local_range.start
    place = Range(offset + part.start if part.numel else 0, part.numel)
    count = spec.mesh.shard_count(layout.check_placements(spec.mesh, spec.placements))
    return place, layout.part_shape(tensor_index, part.numel, count)


def local_numel(spec: BufferSpec) -> int:
    """Number of elements that this rank stores, padding included."""
    return spec.local_numel


def averages(spec: BufferSpec) -> bool:
    """Whether an axis is ``Partial("avg")``."""
    return Partial("avg") in spec.placements


def has_partial(spec: BufferSpec) -> bool:
    """Whether an axis is `Partial`."""
    return any(isinstance(placement, Partial) for placement in spec.placements)


def held_tensors(spec: BufferSpec) -> tuple[int, ...]:
    """The tensors of which this rank holds an element, ascending."""
    return tuple(sorted(i for i, _ in spec.layout.tensors_in(spec.local_range)))


def filled_ranges(spec: BufferSpec) -> tuple[Range, ...]:
    """The elements of the local buffer that belong to tensors; see `BufferSpec.filled`."""
    return spec.filled


def stored_pieces(spec: BufferSpec) -> tuple[tuple[int, int], ...]:
    """What fills the local buffer, in order: ``(tensor index, number of elements)``, with index -1 for padding."""
    pieces: list[tuple[int, int]] = []
    cursor = spec.local_range.start
    for i, part in spec.layout.tensors_in(spec.local_range):
        start = spec.layout.tensor_to_offset[i] + part.start
        pieces += [(-1, start - cursor)] * (start > cursor)
        pieces.append((i, part.numel))
        cursor = start + part.numel
    rest = spec.local_range.start + spec.local_numel - cursor
    return (*pieces, *[(-1, rest)] * (rest > 0))


def logical_shapes(spec: BufferSpec) -> tuple[tuple[int, ...], ...]:
    """The full shapes of the layout's tensors."""
    return tuple(map(tuple, spec.layout.tensor_shapes))


def counts_once(spec: BufferSpec) -> bool:
    """Whether this rank speaks for its replicas: it is the first of those that hold the same elements."""
    return is_first_replica(spec.mesh, spec.placements)


def is_first_replica(mesh: Mesh, placements: Sequence[Placement]) -> bool:
    """Whether this rank is the first on every axis that replicates."""
    here = mesh.coordinate()
    return not any(here[axis] for axis, placement in enumerate(placements) if isinstance(placement, Replicate))
