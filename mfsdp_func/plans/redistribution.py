"""From one set of placements to another: the collective, or the view, of each step."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from mfsdp_func.plans.collective import Collective, Kind
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.placement import Partial, Placement, Replicate, Shard, changed_mesh_axis
from mfsdp_func.values.ranges import Range


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
