"""`gather` and `scatter` into the caller's own tensors: the one place where this library writes into an argument."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_func.effects.blocks import find_overlap
from mfsdp_func.effects.call import Wanted, are_alike, check_tensors, faults_reported
from mfsdp_func.effects.launch import launch
from mfsdp_func.effects.torch_internals import is_untransformed
from mfsdp_func.fsdp.sharded_module import ShardedModule
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.gather_scatter import given_tensors, plan_of_groups
from mfsdp_func.plans.plan import Plan
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh, as_mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import RowAtomic
from mfsdp_func.values.ranges import Range


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
        RuntimeError: under a `torch.func` transform, in a compiled region, or where a source requires grad while gradients
            are recorded: these take the pure form; or on a destination made in inference mode, outside of it.
    """
    _move_into("gather", (owner_layout,), (source,), (destination,))


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
    _move_into("scatter", (owner_layout,), (source,), (destination,))


def gather_coalesced(
    sources: Sequence[Mapping[int, torch.Tensor]],
    destinations: Sequence[Mapping[int, torch.Tensor]],
    *,
    owner_layouts: Sequence[GroupOwnerLayout],
) -> None:
    """`gather` of several groups of one mesh in one exchange; see `mfsdp_func.gather_coalesced`. Errors: as `gather`'s."""
    _move_into("gather", owner_layouts, sources, destinations)


def scatter_coalesced(
    sources: Sequence[Mapping[int, torch.Tensor]],
    destinations: Sequence[Mapping[int, torch.Tensor]],
    *,
    owner_layouts: Sequence[GroupOwnerLayout],
) -> None:
    """`scatter` of several groups of one mesh in one exchange; see `mfsdp_func.scatter_coalesced`. Errors: as `gather`'s."""
    _move_into("scatter", owner_layouts, sources, destinations)


def accumulate(
    loss: Callable[[Any], torch.Tensor],
    apply: ShardedModule,
    params: Mapping[str, DBuffer],
    accumulator: Mapping[str, DBuffer],
    *args: Any,
) -> torch.Tensor:
    """Add one micro-batch's gradients to an accumulator, unit by unit as the backward pass makes them.

        accumulator = apply.init_accumulator(params)
        for batch in batches:
            value = mf.inplace.accumulate(lambda output: loss(output) / len(batches), apply, params, accumulator, batch)
        gradients = apply.reduce(accumulator)

    The pure form, `ShardedModule.accumulate`, holds a second accumulator.

    Args:
        loss: a scalar of the module's results.
        apply: see `fully_shard`.
        params: the sharded parameters.
        accumulator: what `apply.init_accumulator` made; it is written into.
        *args: of the module's forward.

    Returns:
        The loss, detached.

    Raises:
        RuntimeError: under a `torch.func` transform or in a compiled region, which take the pure form.
        ValueError, TypeError: see `ShardedModule`.
    """
    if torch.compiler.is_compiling() or not is_untransformed():
        raise RuntimeError(
            "inplace.accumulate cannot run under a torch.func transform or in a compiled region; use apply.accumulate, which"
            " gives the gradients back"
        )
    leaves: dict[str, DBuffer] = {}
    for key, buffer in accumulator.items():
        # Its values do not count, only where its gradient is added: into the accumulator itself.
        leaf = buffer.local_buffer.data.requires_grad_()
        leaf.grad = buffer.local_buffer.detach()
        leaves[key] = DBuffer(buffer.spec, leaf)
    with torch.enable_grad():
        value = loss(apply.accumulate({key: _detached(value) for key, value in params.items()}, leaves, *args))
        value.backward()
    increment_version([buffer.local_buffer for buffer in accumulator.values()])
    for key, buffer in accumulator.items():
        added = leaves[key].local_buffer.grad
        if added is not None and added.data_ptr() != buffer.local_buffer.data_ptr():
            buffer.local_buffer.copy_(added)
    return value.detach()


def _detached(value: Any) -> Any:
    # What is not sharded (`apply.ignored_params`) keeps its gradient with it.
    return DBuffer(value.spec, value.local_buffer.detach()) if isinstance(value, DBuffer) else value


def _get_rank_ranges(  # pyright: ignore[reportUnusedFunction]
    layout: GlobalLayout, mesh: DeviceMesh | Mesh
) -> dict[int, Range]:
    """The buffer range of every global rank when all mesh axes cut the buffer, in buffer order."""
    value = as_mesh(mesh)
    placements = (RowAtomic(),) * value.ndim
    axes = layout.check_placements(value, placements)
    return {rank: layout.get_rank_range(value, placements, rank) for rank in value.shard_ranks(axes)}


def _move_into(
    operation: str,
    owners: Sequence[GroupOwnerLayout],
    sources: Sequence[Mapping[int, torch.Tensor]],
    destinations: Sequence[Mapping[int, torch.Tensor]],
) -> None:
    if torch.compiler.is_compiling() or not is_untransformed():
        raise RuntimeError(
            f"inplace.{operation} cannot run under a torch.func transform or in a compiled region; use"
            f" mfsdp_func.{operation}, which returns new tensors"
        )
    plan = plan_of_groups(operation, owners, include_own=operation == "gather")
    with faults_reported(plan):
        inputs = given_tensors(plan, sources)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            raise RuntimeError(
                f"inplace.{operation}: a source requires grad, but what is received in place has no gradient; use"
                f" mfsdp_func.{operation}, which is differentiable, or call this under torch.no_grad()"
            )
        targets = _destinations(plan, destinations)
        wanted = Wanted()
        if targets:
            wanted = Wanted(targets[0].dtype, targets[0].device, "the destinations are {}")
            if plan.dtype not in (None, wanted.dtype):
                raise TypeError(
                    f"{plan.label}: the destinations are {wanted.dtype}, but the group is of {plan.dtype}; convert them"
                )
        options = check_tensors(plan, inputs, wanted, (), groups=owners)
    rooms = [target.detach() if target.requires_grad else target for target in targets]
    direct = [room if _is_plain(room) else room.new_empty(room.shape) for room in rooms]
    launch(plan, options, None, inputs, direct)
    increment_version(targets)  # what is received in place is a change that autograd must see
    for room, received in zip(rooms, direct, strict=True):
        if received is not room:
            room.copy_(received)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether elements can be received straight into a tensor's memory."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _destinations(plan: Plan, destinations: Sequence[Mapping[int, torch.Tensor]]) -> list[torch.Tensor]:
    """The tensors that this rank receives into, in the order of the plan, checked."""
    needed = plan.local.output_tensors
    if len(destinations) != len(needed):
        raise ValueError(
            f"{plan.operation}: {len(destinations)} destinations for {len(needed)} groups; give one per group"
        )
    targets: list[torch.Tensor] = []
    for k, (tensors, destination) in enumerate(zip(needed, destinations, strict=True)):
        if missing := [i for i in tensors if i not in destination]:
            raise KeyError(
                f"{plan.label_of(k)}: destination has no entry for tensor {missing[0]} ({len(missing)} missing in all);"
                f" rank {plan.mesh.rank} receives tensors {list(tensors)[:8]}"
            )
        targets += [destination[i] for i in tensors]
    places = [(k, i) for k, tensors in enumerate(needed) for i in tensors]
    if not are_alike(targets, plan.output_numels) or any(map(torch.Tensor.is_inference, targets)):
        for (k, i), target, numel in zip(places, targets, plan.output_numels, strict=True):
            _check_destination(plan.label_of(k), plan.mesh.rank, i, target, numel, targets[0])
    if found := find_overlap(targets):
        one, other = (f"{places[n][1]} of {plan.label_of(places[n][0])}" for n in found)
        raise ValueError(
            f"{plan.operation}: the destination of tensor {one} holds two elements in one place, as an expanded tensor"
            " does; give one with memory for each"
            if one == other
            else f"{plan.operation}: the destinations of tensors {one} and {other} share memory; give each its own"
        )
    return targets


def _check_destination(
    label: str, rank: int | None, i: int, target: torch.Tensor, numel: int, first: torch.Tensor
) -> None:
    strided = isinstance(target, torch.Tensor) and target.layout == torch.strided
    if not strided or (type(target) is not torch.Tensor and hasattr(target, "to_local")):
        kind = f"{target.layout} tensor" if type(target) is torch.Tensor else type(target).__name__
        raise TypeError(f"{label}: destination of tensor {i} must be a strided torch.Tensor, got a {kind}")
    if target.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{label}: destination of tensor {i} was made in inference mode and may not be written to outside of it"
        )
    if target.numel() != numel:
        raise ValueError(
            f"{label}: destination of tensor {i} has {target.numel()} elements {tuple(target.shape)} on rank"
            f" {rank}, expected {numel}"
        )
    if target.dtype != first.dtype or target.device != first.device:
        raise TypeError(
            f"{label}: destination of tensor {i} is {target.dtype} on {target.device}, the first one {first.dtype} on"
            f" {first.device}; one call moves one dtype on one device"
        )
