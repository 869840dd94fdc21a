"""`gather` and `scatter` into the caller's own tensors: the one place where this library writes into an argument."""

from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_func.gather_scatter import given_tensors, plan_of, wiring_of
from mfsdp_func.layout import GlobalLayout
from mfsdp_func.mesh import Mesh, as_mesh
from mfsdp_func.movement import is_untransformed, launch
from mfsdp_func.operation import check_tensors, faults_reported
from mfsdp_func.owner_planning import GroupOwnerLayout
from mfsdp_func.placement import RowAtomic
from mfsdp_func.plan import Plan
from mfsdp_func.ranges import Range


def gather(
    source: Mapping[int, torch.Tensor], destination: Mapping[int, torch.Tensor], *, owner_layout: GroupOwnerLayout
) -> None:
    """Fill `destination` with the full tensors that this rank owns. Every rank of the mesh calls.

    Args:
        source: this rank's shards; see `mfsdp_func.gather`.
        destination: tensor index -> a tensor of the right number of elements, in any shape, for every tensor that this
            rank owns; a contiguous one is received into directly. Other entries are not touched. May not share memory
            with `source`.
        owner_layout: who owns what.

    Raises:
        KeyError, ValueError, TypeError: before any communication; see `mfsdp_func.gather`.
        RuntimeError: under a `torch.func` transform or in a compiled region, which take the pure form.
    """
    _move_into("gather", owner_layout, source, destination)


def scatter(
    source: Mapping[int, torch.Tensor], destination: Mapping[int, torch.Tensor], *, owner_layout: GroupOwnerLayout
) -> None:
    """Fill `destination` with this rank's parts of the tensors that other ranks own. Every rank of the mesh calls.

    Args:
        source: the full results that this rank owns; see `mfsdp_func.scatter`.
        destination: tensor index -> a tensor of the right number of elements, in any shape, for every participating
            tensor of which this rank holds elements but which another rank owns (the owner keeps its own part). Other
            entries are not touched. May not share memory with `source`.
        owner_layout: who owns what.

    Raises:
        As `gather`.
    """
    _move_into("scatter", owner_layout, source, destination)


def _get_rank_ranges(  # pyright: ignore[reportUnusedFunction]
    layout: GlobalLayout, mesh: DeviceMesh | Mesh
) -> dict[int, Range]:
    """The buffer range of every global rank when all mesh axes cut the buffer, in buffer order."""
    value = as_mesh(mesh)
    placements = (RowAtomic(),) * value.ndim
    axes = layout.check_placements(value, placements)
    return {rank: layout.get_rank_range(value, placements, rank) for rank in value.shard_ranks(axes)}


@torch.no_grad()
def _move_into(
    operation: str,
    owners: GroupOwnerLayout,
    source: Mapping[int, torch.Tensor],
    destination: Mapping[int, torch.Tensor],
) -> None:
    if torch.compiler.is_compiling() or not is_untransformed():
        raise RuntimeError(
            f"inplace.{operation} cannot run under a torch.func transform or in a compiled region; use"
            f" mfsdp_func.{operation}, which returns new tensors"
        )
    plan = plan_of(operation, owners, include_own=operation == "gather")
    with faults_reported(plan):
        wiring = wiring_of(plan, owners)
        inputs = given_tensors(plan, wiring, source)
        targets = _destinations(plan, destination, [i for i, _ in wiring.outputs])
        first = targets[0] if targets else None
        dtype, device = (None, None) if first is None else (first.dtype, first.device)
        options = check_tensors(plan, wiring.inputs, inputs, dtype, device, ())
    direct = [target.view(-1) if target.is_contiguous() else target.new_empty(target.numel()) for target in targets]
    launch(plan, options, (), [tensor.reshape(-1) for tensor in inputs], direct)
    for target, received in zip(targets, direct, strict=True):
        if not target.is_contiguous():
            target.copy_(received.view(target.shape))


def _destinations(plan: Plan, destination: Mapping[int, torch.Tensor], needed: Sequence[int]) -> list[torch.Tensor]:
    missing = [i for i in needed if i not in destination]
    if missing:
        raise KeyError(
            f"{plan.label}: destination has no entry for tensor {missing[0]} ({len(missing)} missing in all); rank"
            f" {plan.mesh.rank} receives tensors {list(needed)[:8]}"
        )
    targets = [destination[i] for i in needed]
    for i, target, numel in zip(needed, targets, plan.output_numels, strict=True):
        if target.numel() != numel:
            raise ValueError(
                f"{plan.label}: destination of tensor {i} has {target.numel()} elements {tuple(target.shape)} on rank"
                f" {plan.mesh.rank}, expected {numel}"
            )
        if (target.dtype, target.device) != (targets[0].dtype, targets[0].device):
            raise TypeError(
                f"{plan.label}: destination of tensor {i} is {target.dtype} on {target.device}, that of tensor {needed[0]}"
                f" {targets[0].dtype} on {targets[0].device}; one call moves one dtype on one device"
            )
    return targets
