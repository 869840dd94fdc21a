"""State dicts of plain tensors: into sharded parameters, and whole out of them on one rank, tensor by tensor."""

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.tensor import DTensor

from mfsdp_func.fsdp.bound import Bound
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.gather_scatter import gather
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import Replicate, Shard


def check_loaded(
    state_dict: Mapping[str, torch.Tensor],
    places: Mapping[str, tuple[str, int]],
    bound: Mapping[str, Bound],
    others: Mapping[str, torch.Tensor],
    *,
    cast: bool,
) -> None:
    """Look at everything before anything is changed.

    Raises:
        ValueError: on a name that is unknown, or another shape.
        TypeError: on another dtype, unless `cast` allows it, or on what is no tensor.
    """
    for name, tensor in state_dict.items():
        where = f"apply.load: {name!r}"
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{where} is a {type(tensor).__name__}, expected a torch.Tensor")
        if name in places:
            key, i = places[name]
            shape, dtype = bound[key].shapes[i], bound[key].main_dtype
        elif name in others:
            shape, dtype = others[name].shape, others[name].dtype
        else:
            raise ValueError(f"{where} is no parameter and no buffer of the module; leave it out, or rename it")
        if tensor.shape != shape:
            raise ValueError(f"{where} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if tensor.dtype != dtype and not cast:
            raise TypeError(f"{where} is {tensor.dtype}, expected {dtype}; convert it, or pass cast=True")


def with_loaded(bound: Bound, buffer: DBuffer, tensors: Mapping[int, torch.Tensor]) -> DBuffer:
    """A buffer in which some tensors have other values; this rank reads its own parts alone."""
    local = DBuffer(buffer.spec, buffer.local_buffer.detach().clone())
    for i, tensor in tensors.items():
        view, part = local.get_tensor_view(i), local.get_local_part(i)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        given = whole.detach().reshape(-1)[part.start : part.start + part.numel]
        view.copy_(given.view_as(view))
    return local


def whole_tensors(bound: Bound, buffer: DBuffer, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Index and full value of each tensor of a group, one at a time, on one rank alone. Every rank iterates."""
    mesh, layout = buffer.mesh, buffer.layout
    sharded = [isinstance(placement, Shard) for placement in buffer.placements]
    for i, shape in enumerate(bound.shapes):
        if not any(sharded) or not shape.numel():
            if mesh.get_rank() == rank:
                yield i, buffer.get_tensor_view(i).detach().clone().view(shape)
            continue
        placements = [p if is_shard else Replicate() for p, is_shard in zip(buffer.placements, sharded, strict=True)]
        owners = GroupOwnerLayout(mesh, layout, {i: rank}, placements, name=f"state dict: {bound.names[i]}")
        held = {n: view.detach() for n, view in buffer.tensor_views().items() if n == i}
        found, token = gather(held, owner_layout=owners, dtype=bound.main_dtype, device=buffer.local_buffer.device)
        token.wait()
        if mesh.get_rank() == rank:
            yield i, found[i].view(shape)
