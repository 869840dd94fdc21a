"""The boundary to `torch.distributed.tensor`: tensors of a buffer as DTensors, and DTensors as rows of a buffer."""

from functools import lru_cache

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mfsdp_func.effects.call import Order, Wanted, check_tensors, run
from mfsdp_func.effects.groups import axis_groups
from mfsdp_func.effects.token import Token
from mfsdp_func.plans.plan import GroupPlan, Plan
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import shard_axes


def to_dtensor(spec: BufferSpec, tensor_index: int, local: torch.Tensor) -> DTensor:
    """A tensor of a buffer as a `DTensor` of its logical shape, with `Shard(0)` where the buffer is sharded.

    DTensor reads shards by its own chunk rule (equal numbers of rows, the last ones fewer or none). Where this rank's
    rows, or those of others, are not cut so, one exchange moves them; every rank of the mesh calls.

    Args:
        spec: what the buffer is.
        tensor_index: which of its tensors.
        local: this rank's part of it.

    Raises:
        NotImplementedError: where two or more axes shard the buffer (gather all but one first), or the mesh does not
            list the ranks of each line in ascending order.
        RuntimeError: if the mesh has no process groups (a simulated one).
    """
    axes = shard_axes(spec.placements)
    if len(axes) > 1:
        raise NotImplementedError(
            f"get_dtensor: {spec.placements} shards {len(axes)} axes, in another order than DTensor's; allgather all"
            " but one first"
        )
    lines = [spec.mesh.axis_ranks(axis) for axis in range(spec.mesh.ndim)]
    if any(list(line) != sorted(line) for line in lines):
        raise NotImplementedError(
            f"get_dtensor: {spec.mesh} lists ranks in descending order, but DTensor's collectives follow process"
            " groups, which sort them: its full_tensor() would be wrong. Use a mesh in ascending order"
        )
    shape = spec.layout.tensor_shapes[tensor_index]
    placements = [Shard(0) if axis in axes else placement for axis, placement in enumerate(spec.placements)]
    if axes:
        plan = chunk_plan(spec.mesh, axes, spec.layout, tensor_index)
        if plan.groups[0].source.rank_to_offset != plan.groups[0].target.rank_to_offset:
            local = _moved(plan, local.reshape(-1))
        local = local.reshape(local.numel() // spec.layout.row_numel(tensor_index), *shape[1:])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, device_mesh_of(spec.mesh, local.device), placements, run_check=False, shape=shape, stride=stride
    )


def from_dtensor(tensor: DTensor, plan: Plan) -> torch.Tensor:
    """The elements of a chunked `DTensor` that the target of a transposed `chunk_plan` gives to this rank, flat."""
    return _moved(plan, tensor.to_local().reshape(-1))


def _moved(plan: Plan, local: torch.Tensor) -> torch.Tensor:
    inputs = [local] if plan.input_numels else []
    # Links, so that a rank which gives or gets nothing runs the backward pass that its peers wait for.
    tokens = (Token.linked_to(local),) if local.is_floating_point() else ()
    options = check_tensors(plan, inputs, Wanted(local.dtype, local.device), tokens)
    outputs, token = run(plan, options, inputs, tokens, Order())
    return outputs[0].reshape(-1) if outputs else local[:0] + token.link.to(local.dtype)


@lru_cache(maxsize=4096)
def chunk_plan(mesh: Mesh, axes: tuple[int, ...], layout: GlobalLayout, tensor_index: int) -> Plan:
    """From a layout's rows of one tensor to DTensor's, both as layouts of that tensor alone."""
    shape, count = layout.tensor_shapes[tensor_index], mesh.size(axes[0])
    whole, row = layout.get_tensor_range(tensor_index), layout.row_numel(tensor_index)
    ours = [min(max(layout.get_segment(k, count).start - whole.start, 0), whole.numel) for k in range(count)]
    chunk = -(-shape[0] // count)
    theirs = [min(k * chunk, shape[0]) * row for k in range(count)]
    source, target = (GlobalLayout([shape], [0], whole.numel, starts) for starts in (ours, theirs))
    group = GroupPlan(f"tensor {tensor_index}", axes, (shape,), source, target, (0,))
    return Plan("get_dtensor", mesh, (group,))


def device_mesh_of(mesh: Mesh, device: torch.device) -> DeviceMesh:
    """A `DeviceMesh` over the process groups of a mesh; no group is created.

    Raises:
        RuntimeError: if the mesh has none.
    """
    groups = axis_groups(mesh)
    if not groups:
        raise RuntimeError(f"{mesh} has no process groups; DTensors live on a mesh made from a torch DeviceMesh")
    if mesh.ndim == 1:
        return DeviceMesh.from_group(groups[0], device.type, mesh_dim_names=mesh.axis_names)
    grid = torch.tensor(mesh.ranks).view(mesh.shape)
    return DeviceMesh.from_group(list(groups), device.type, grid, mesh_dim_names=mesh.axis_names)
