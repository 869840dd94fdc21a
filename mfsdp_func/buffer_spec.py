"""What a flat buffer is, apart from its elements: a layout, cut over a mesh by placements."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple
from weakref import WeakValueDictionary

import torch

from mfsdp_func.collective import Collective, Kind
from mfsdp_func.layout import GlobalLayout
from mfsdp_func.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.placement import Partial, Placement, Replicate, Shard, changed_mesh_axis, is_flat_shard
from mfsdp_func.ranges import Range, intersect_ranges


@dataclass(frozen=True, init=False, eq=False, repr=False)
class BufferSpec:
    """A mesh, one placement per axis, and a layout: where this rank's local buffer lies.

    Raises:
        ValueError: if the placements do not fit the mesh or the layout, a shard stands before another placement, or a
            shard is not one of a flat buffer (`RowAtomic`, `BlockAtomic`, `TensorAtomic`).
        NotImplementedError: on a `Partial` of another reduction than "sum" or "avg".
    """

    mesh: Mesh
    placements: tuple[Placement, ...]
    layout: GlobalLayout
    key: str = field(init=False)
    """The value as a string: what compiled code guards on."""

    def __init__(self, mesh: Mesh | MeshLike, placements: Sequence[Placement], layout: GlobalLayout) -> None:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                "BufferSpec: made inside a compiled region, which could not tell it from equal ones; make it (or a buffer"
                " with it) before, and DBuffer(spec, tensor) inside"
            )
        value, chosen = as_mesh(mesh), tuple(placements)
        layout.check_placements(value, chosen)
        for axis, placement in enumerate(chosen):
            _check_placement(value, chosen, axis, placement)
        object.__setattr__(self, "mesh", value)
        object.__setattr__(self, "placements", chosen)
        object.__setattr__(self, "layout", layout)
        words = f"{value.digest} {value.rank} {chosen} {layout.digest}"
        object.__setattr__(self, "key", hashlib.sha256(words.encode()).hexdigest())
        object.__setattr__(self, "_canonical", _BY_KEY.setdefault(self.key, self))

    @staticmethod
    def from_key(key: str) -> "BufferSpec":
        """The living value with a given `key`."""
        return _BY_KEY[key]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, BufferSpec) and self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"BufferSpec({self.mesh}, {list(self.placements)}, {self.layout})"

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return BufferSpec, (self.mesh, self.placements, self.layout)

    @cached_property
    def local_range(self) -> Range:
        """The elements of the buffer that this rank holds."""
        return self.layout.get_local_range(self.mesh, self.placements)

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
        count = len(self.mesh.shard_ranks(axes, self.mesh.get_rank()))
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
        """The same buffer with another placement on one axis."""
        return BufferSpec(self.mesh, (*self.placements[:axis], placement, *self.placements[axis + 1 :]), self.layout)


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


@lru_cache(maxsize=4096)
def collective_of(spec: BufferSpec, kind: Kind, axis: int, average: bool, deterministic: bool) -> Collective:
    """The collective along an axis between the ranges of the line through this rank.

    For "allgather" and "reduce_scatter", `spec` is the buffer as the axis cuts it; for "allreduce", as it is.
    """
    line = spec.mesh.axis_ranks(axis)
    group = f"{spec.placements} {spec.layout.digest}"
    if kind == "allreduce":
        sizes = (spec.local_numel, *[0] * (len(line) - 1))
        return Collective(kind, spec.mesh, axis, sizes, None, average, deterministic, group)
    sizes = tuple(spec.layout.get_rank_range(spec.mesh, spec.placements, rank).numel for rank in line)
    stored = (spec.local_numel, spec.replace(axis, Replicate()).local_numel) if spec.stored_numel else None
    return Collective(kind, spec.mesh, axis, sizes, stored, average, deterministic, group)


class Step(NamedTuple):
    """A change of placements: what the buffer is after it, and how elements get there.

    Attributes:
        kind: the operation of the table.
        target: the buffer after it.
        collective: the communication; None for "view".
        part: for "view", the elements of the local buffer that are kept.
    """

    kind: Kind | Literal["view"]
    target: BufferSpec
    collective: Collective | None
    part: Range


@lru_cache(maxsize=4096)
def collective_step(
    spec: BufferSpec, kind: Kind, axis: str | int, placement: Placement | None, deterministic: bool
) -> Step:
    """One operation that communicates.

    Args:
        spec: the buffer before.
        kind: the operation.
        axis: the mesh axis that changes.
        placement: its new placement, for "reduce_scatter".
        deterministic: see `Collective`.

    Raises:
        ValueError: if the axis is not placed as the operation needs it.
    """
    index = spec.mesh.axis_index(axis)
    before = spec.placements[index]
    if kind == "allgather":
        if not isinstance(before, Shard):
            raise ValueError(f"allgather: axis {axis!r} is {before!r}, expected a shard; see redistribute")
        if index and isinstance(spec.placements[index - 1], Shard):
            raise ValueError(
                f"allgather: axis {index - 1} of {spec.placements} is sharded too and must be gathered first"
            )
    elif not isinstance(before, Partial):
        raise ValueError(
            f"{kind}: axis {spec.mesh.axis_names[index]!r} is {before!r}, expected a Partial;"
            ' a Replicate buffer can be viewed as Partial("avg")'
        )
    elif kind == "reduce_scatter" and not isinstance(placement, Shard):
        raise ValueError(f"reduce_scatter: the new placement must be a shard, got {placement!r}")
    target = spec.replace(index, placement if kind == "reduce_scatter" and placement else Replicate())
    cut = target if kind == "reduce_scatter" else spec
    average = before == Partial("avg")
    return Step(kind, target, collective_of(cut, kind, index, average, deterministic), Range(0, 0))


@lru_cache(maxsize=4096)
def view_step(spec: BufferSpec, placements: tuple[Placement, ...]) -> Step:
    """A change of one axis without communication.

    Raises:
        ValueError: if anything but one axis changes from `Replicate` to a shard or ``Partial("avg")``.
        NotImplementedError: if more than one axis changes.
    """
    axis = changed_mesh_axis(spec.placements, placements)
    if axis is None:
        return Step("view", spec, None, Range(0, spec.local_numel))
    before, after = spec.placements[axis], placements[axis]
    if not isinstance(before, Replicate) or (isinstance(after, Partial) and after.reduce_op != "avg"):
        remedy = (
            "it would multiply the value by the number of ranks; use Partial('avg')"
            if isinstance(before, Replicate)
            else "only Replicate can be viewed otherwise; use redistribute"
        )
        raise ValueError(
            f"view: cannot change {before!r} to {after!r} on axis {spec.mesh.axis_names[axis]!r}: {remedy}"
        )
    target = spec.replace(axis, after)
    if isinstance(after, Partial):
        return Step("view", target, None, Range(0, spec.local_numel))
    start = target.local_range.start - spec.local_range.start
    return Step("view", target, None, Range(start, target.local_range.numel))


def local_part(spec: BufferSpec, tensor_index: int) -> Range:
    """Which elements of a tensor this rank holds; empty where it holds none.

    Raises:
        IndexError: if there is no such tensor.
    """
    whole = spec.layout.get_tensor_range(tensor_index)
    met = intersect_ranges(whole, spec.local_range)
    return Range(met.start - whole.start, met.numel) if met.numel else Range(0, 0)


@lru_cache(maxsize=65536)
def local_view(spec: BufferSpec, tensor_index: int) -> tuple[Range, tuple[int, ...]]:
    """Where this rank's part of a tensor lies in the local buffer, and its shape: rows, or flat where rows are split.

    Raises:
        IndexError: if there is no such tensor.
    """
    part, layout = local_part(spec, tensor_index), spec.layout
    shape = layout.tensor_shapes[tensor_index]
    offset = layout.tensor_to_offset[tensor_index] - spec.local_range.start
    place = Range(offset + part.start if part.numel else 0, part.numel)
    if part.numel == shape.numel():
        return place, tuple(shape)
    axes = layout.check_placements(spec.mesh, spec.placements)
    if layout.keeps_rows(tensor_index, len(spec.mesh.shard_ranks(axes))):
        return place, (part.numel // layout.row_numel(tensor_index), *shape[1:])
    return place, (part.numel,)


def local_numel(spec: BufferSpec) -> int:
    """Number of elements that this rank stores, padding included."""
    return spec.local_numel


def averages(spec: BufferSpec) -> bool:
    """Whether an axis is ``Partial("avg")``."""
    return Partial("avg") in spec.placements


def held_tensors(spec: BufferSpec) -> tuple[int, ...]:
    """The tensors of which this rank holds an element, ascending."""
    return tuple(sorted(i for i, _ in spec.layout.tensors_in(spec.local_range)))


def redistribution_steps(
    old: Sequence[Placement], new: Sequence[Placement]
) -> list[tuple[Kind | Literal["view"], int, Placement]]:
    """Operation, axis and placement of each step of `redistribute`, in an order in which each is legal.

    Raises:
        ValueError: if anything but itself should become ``Partial("sum")``.
    """
    now = list(old)
    steps: list[tuple[Kind | Literal["view"], int, Placement]] = []

    def step(kind: Kind | Literal["view"], axis: int, placement: Placement) -> None:
        steps.append((kind, axis, placement))
        now[axis] = placement

    for axis in reversed(range(len(now))):
        if isinstance(now[axis], Partial) and now[axis] != new[axis]:
            direct = isinstance(new[axis], Shard) and all(now[k] == new[k] for k in range(axis + 1, len(now)))
            step("reduce_scatter", axis, new[axis]) if direct else step("allreduce", axis, Replicate())
    for axis in range(len(now)):
        if isinstance(now[axis], Shard) and any(
            now[k] != new[k] for k in range(axis, len(now)) if isinstance(now[k], Shard)
        ):
            step("allgather", axis, Replicate())
    for axis in reversed(range(len(now))):
        if now[axis] != new[axis]:
            if new[axis] == Partial("sum"):
                raise ValueError(
                    f'redistribute: cannot change {old[axis]!r} to Partial("sum") on axis {axis} of {tuple(old)}: it'
                    " would multiply the value by the number of ranks; use Partial('avg')"
                )
            step("view", axis, new[axis])
    return steps


@lru_cache(maxsize=4096)
def redistribution(
    spec: BufferSpec, placements: tuple[Placement, ...], deterministic: bool
) -> tuple[BufferSpec, tuple[Step, ...]]:
    """What the buffer is in the end, and the steps there.

    Raises:
        ValueError: see `BufferSpec` and `redistribution_steps`.
    """
    target, now = BufferSpec(spec.mesh, placements, spec.layout), spec
    steps: list[Step] = []
    for kind, axis, placement in redistribution_steps(spec.placements, placements):
        if kind == "view":
            then = (*now.placements[:axis], placement, *now.placements[axis + 1 :])
            steps.append(view_step(now, then))
        else:
            steps.append(collective_step(now, kind, axis, placement, deterministic))
        now = steps[-1].target
    return target, tuple(steps)


# Equal values share one canonical object, which each of them keeps alive, so that a key can be resolved.
_BY_KEY: WeakValueDictionary[str, BufferSpec] = WeakValueDictionary()
