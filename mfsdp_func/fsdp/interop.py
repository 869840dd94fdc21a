"""Parameters as DTensors, and DTensors as parameters: what an FSDP2 model holds, by at most one exchange per tensor."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mfsdp_func.fsdp.arrangement import Arrangement
from mfsdp_func.fsdp.param_group import ParamGroup
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.dtensor import chunk_plan, device_mesh_of, from_dtensor
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import Partial, shard_axes


def to_dtensors(
    arrangement: Arrangement, buffers: Mapping[str, DBuffer], device_mesh: DeviceMesh | None
) -> dict[str, DTensor]:
    """All parameters by every name. Communicates."""
    found = {
        key: _group_to_dtensors(group, buffers[key], device_mesh) for key, group in arrangement.param_groups.items()
    }
    return {name: found[key][i] for name, (key, i) in arrangement.places.items()}


def from_dtensors(arrangement: Arrangement, tensors: Mapping[str, torch.Tensor]) -> dict[str, DBuffer]:
    """The inverse: buffers of all groups. Communicates.

    Raises:
        TypeError: on something that is no DTensor, or of another dtype.
        ValueError: on names that are unknown or missing, or another shape, mesh or placement.
    """
    given = _by_group(arrangement, tensors)
    names = {place: name for name, place in reversed(arrangement.places.items())}
    return {
        key: _group_from_dtensors(group, [names[key, i] for i in range(len(group.shapes))], given[key])
        for key, group in arrangement.param_groups.items()
    }


def _group_to_dtensors(group: ParamGroup, buffer: DBuffer, device_mesh: DeviceMesh | None) -> list[DTensor]:
    """The tensors of one group in their logical shapes, cut by DTensor's rule; 0-D ones replicated."""
    found: list[DTensor] = []
    for i, shape in enumerate(group.shapes):
        tensor = buffer.get_dtensor(i) if shape else _scalar_to_dtensor(buffer, i)
        if device_mesh is not None:
            tensor = DTensor.from_local(
                tensor.to_local(),
                device_mesh,
                tensor.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
        found.append(tensor)
    return found


def _group_from_dtensors(group: ParamGroup, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> DBuffer:
    """The inverse."""
    mesh, layout, axes = group.spec.mesh, group.spec.layout, shard_axes(group.spec.placements)
    for name, tensor, shape in zip(names, tensors, group.shapes, strict=True):
        _check(name, tensor, shape, group)
    local = torch.zeros(group.spec.local_numel, dtype=group.main_dtype, device=tensors[0].device)
    buffer = DBuffer(group.spec, local)
    for i, (tensor, shape) in enumerate(zip(tensors, group.shapes, strict=True)):
        given = cast(DTensor, tensor.detach())
        if not shape:
            part = given.to_local().reshape(1)[: buffer.get_local_part(i).numel]
        elif axes:
            part = from_dtensor(given, chunk_plan(mesh, axes, layout, i).transpose)
        else:
            part = given.to_local()
        buffer.get_tensor_view(i).copy_(part.view_as(buffer.get_tensor_view(i)))
    return buffer


def _scalar_to_dtensor(buffer: DBuffer, tensor_index: int) -> DTensor:
    """A tensor of one element, replicated: it is the sum of what the ranks of one copy of the buffer hold."""
    mesh, axes = buffer.mesh, shard_axes(buffer.placements)
    one = GlobalLayout([(1,)], [0], 1, [0])
    part = buffer.get_tensor_view(tensor_index)
    local = part.reshape(1) if part.numel() else part.new_zeros(1)
    terms = [Partial("sum") if axis in axes else Replicate() for axis in range(mesh.ndim)]
    value = DBuffer.from_local(local, mesh, terms, one).redistribute([Replicate()] * mesh.ndim)
    placements = [Replicate()] * mesh.ndim
    return DTensor.from_local(
        value.local_buffer.reshape(()), device_mesh_of(mesh, local.device), placements, run_check=False
    )


def _expected(mesh: Mesh, axes: Sequence[int], shape: torch.Size) -> tuple[Placement, ...]:
    return tuple(Shard(0) if axis in axes and shape else Replicate() for axis in range(mesh.ndim))


def _check(name: str, tensor: torch.Tensor, shape: torch.Size, group: ParamGroup) -> None:
    where, mesh = f"from_dtensors: parameter {name!r}", group.spec.mesh
    if not isinstance(tensor, DTensor):
        raise TypeError(f"{where} is a {type(tensor).__name__}, expected a DTensor; see distribute_tensor")
    if tensor.shape != shape:
        raise ValueError(f"{where} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if tensor.dtype != group.main_dtype:
        raise TypeError(f"{where} is {tensor.dtype}, expected {group.main_dtype}; convert it")
    grid = tensor.device_mesh.mesh
    if tuple(grid.shape) != mesh.shape or tuple(grid.flatten().tolist()) != mesh.ranks:
        raise ValueError(f"{where} lies on {tensor.device_mesh}, expected the ranks of {mesh}")
    expected = _expected(mesh, shard_axes(group.spec.placements), shape)
    if tensor.placements != expected:
        raise ValueError(f"{where} is placed as {tensor.placements}, expected {expected}; call its redistribute first")


def _by_group(arrangement: Arrangement, given: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    """Tensors in the order of their groups, given by any of their names."""
    places = arrangement.places
    if unknown := [name for name in given if name not in places]:
        raise ValueError(f"from_dtensors: {unknown[0]!r} is no parameter of the module ({len(unknown)} unknown in all)")
    found = {places[name]: tensor for name, tensor in given.items()}
    missing = [name for name, place in places.items() if place not in found]
    if missing:
        raise ValueError(f"from_dtensors: no tensor for parameter {missing[0]!r} ({len(missing)} names missing in all)")
    return {key: [found[key, i] for i in range(len(b.shapes))] for key, b in arrangement.param_groups.items()}
