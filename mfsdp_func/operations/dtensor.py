"""The boundary to `torch.distributed.tensor`: tensors of a buffer as DTensors, and DTensors as rows of a buffer."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

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

    DTensor reads shards by its own chunk rule (equal numbers of rows, the last ones fewer or none; chunks of chunks where
    several axes shard, the first axis outside). Where this rank's rows, or those of others, are not cut so, one exchange
    moves them; every rank of the mesh calls.

    Args:
        spec: what the buffer is.
        tensor_index: which of its tensors.
        local: this rank's part of it.

    Raises:
        NotImplementedError: where the mesh does not list the ranks of each line in ascending order.
        RuntimeError: if the mesh has no process groups (a simulated one).
    """
    axes = shard_axes(spec.placements)
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
        if plan.groups[0].source != plan.groups[0].target:
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
    inputs = list(local.split(plan.input_numels))
    # Links, so that a rank which gives or gets nothing runs the backward pass that its peers wait for.
    tokens = (Token.linked_to(local),) if local.is_floating_point() else ()
    options = check_tensors(plan, inputs, Wanted(local.dtype, local.device), tokens)
    outputs, token = run(plan, options, inputs, tokens, Order())
    if not outputs:
        return local[:0] + token.link.to(local.dtype)
    return outputs[0].reshape(-1) if len(outputs) == 1 else torch.cat([output.reshape(-1) for output in outputs])


@lru_cache(maxsize=4096)
def chunk_plan(mesh: Mesh, axes: tuple[int, ...], layout: GlobalLayout, tensor_index: int) -> Plan:
    """From a layout's rows of one tensor to DTensor's, both as layouts of DTensor's chunks alone.

    A buffer's shards count along the last axis first, DTensor's chunks along the first: where several axes shard, the
    chunks lie in another order in the target.
    """
    whole, count = layout.get_tensor_range(tensor_index), mesh.shard_count(axes)
    ours = [min(max(layout.get_segment(k, count).start - whole.start, 0), whole.numel) for k in range(count)]
    sizes, row = [mesh.size(axis) for axis in axes], layout.tensor_shapes[tensor_index][1:]
    bounds = [*_chunk_starts(0, layout.tensor_shapes[tensor_index][0], sizes), layout.tensor_shapes[tensor_index][0]]
    shapes = tuple(torch.Size([end - start, *row]) for start, end in pairwise(bounds))
    numels = [shape.numel() for shape in shapes]
    # The chunk of each shard: the same coordinates, read the other way round.
    order = [int(n) for n in torch.arange(count).view(sizes).permute(*reversed(range(len(sizes)))).flatten()]
    starts = list(accumulate((numels[n] for n in order), initial=0))
    places = dict(zip(order, starts, strict=False))
    source = GlobalLayout(shapes, [start * row.numel() for start in bounds[:-1]], whole.numel, ours)
    target = GlobalLayout(shapes, [places[n] for n in range(count)], whole.numel, starts[:-1])
    group = GroupPlan(f"tensor {tensor_index}", axes, shapes, source, target, tuple(range(count)))
    return Plan("get_dtensor", mesh, (group,))


def _chunk_starts(start: int, rows: int, sizes: Sequence[int]) -> list[int]:
    """Where DTensor's chunks of chunks start, in order, if an axis of each size cuts what the axes before it left."""
    if not sizes:
        return [start]
    size = -(-rows // sizes[0])
    starts = [min(k * size, rows) for k in range(sizes[0])]
    found: list[int] = []
    for begin, end in pairwise([*starts, rows]):
        found += _chunk_starts(start + begin, end - begin, sizes[1:])
    return found


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
