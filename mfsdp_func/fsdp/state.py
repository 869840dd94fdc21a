"""State dicts of plain tensors: into sharded parameters, and whole out of them on one rank, tensor by tensor."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_func.fsdp.arrangement import Arrangement
from mfsdp_func.fsdp.param_group import ParamGroup
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.gather_scatter import gather
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import Replicate, Shard


def loaded(
    arrangement: Arrangement,
    buffers: Mapping[str, DBuffer],
    others: Mapping[str, torch.Tensor],
    state_dict: Mapping[str, torch.Tensor],
    *,
    cast: bool,
) -> dict[str, DBuffer]:
    """Buffers with the values of a state dict, of which this rank reads its own parts; writes into `others`.

    Args:
        arrangement: of the parameters.
        buffers: of all groups.
        others: module buffers, and parameters that are not sharded, by name.
        state_dict: see `ShardedModule.load`.
        cast: likewise.
    """
    _check(arrangement, others, state_dict, cast=cast)
    given: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in state_dict.items():
        if name in arrangement.places:
            key, i = arrangement.places[name]
            given.setdefault(key, {})[i] = tensor
    made = {key: _with_loaded(buffers[key], tensors) for key, tensors in given.items()}
    with torch.no_grad():
        for name in state_dict.keys() - arrangement.places.keys():
            others[name].copy_(state_dict[name])
    return {**buffers, **made}


def _check(
    arrangement: Arrangement,
    others: Mapping[str, torch.Tensor],
    state_dict: Mapping[str, torch.Tensor],
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
        if name in arrangement.places:
            key, i = arrangement.places[name]
            shape, dtype = arrangement.param_groups[key].shapes[i], arrangement.param_groups[key].main_dtype
        elif name in others:
            shape, dtype = others[name].shape, others[name].dtype
        else:
            raise ValueError(f"{where} is no parameter and no buffer of the module; leave it out, or rename it")
        if tensor.shape != shape:
            raise ValueError(f"{where} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
        if tensor.dtype != dtype and not cast:
            raise TypeError(f"{where} is {tensor.dtype}, expected {dtype}; convert it, or pass cast=True")


def _with_loaded(buffer: DBuffer, tensors: Mapping[int, torch.Tensor]) -> DBuffer:
    """A buffer in which some tensors have other values; this rank reads its own parts alone."""
    local = DBuffer(buffer.spec, buffer.local_buffer.detach().clone())
    for i, tensor in tensors.items():
        view, part = local.get_tensor_view(i), local.get_local_part(i)
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        given = whole.detach().reshape(-1)[part.start : part.start + part.numel]
        view.copy_(given.view_as(view))
    return local


def renamed_by_hooks(module: nn.Module, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict as the hooks leave it that modules run before they load one, such as those that know old names.

    Raises:
        ValueError: if a hook reports an error.
    """
    found, errors = dict(state_dict), list[str]()
    metadata: Mapping[str, Any] = getattr(state_dict, "_metadata", {})
    for name, sub in module.named_modules():
        for hook in sub._load_state_dict_pre_hooks.values():
            hook(found, f"{name}." if name else "", metadata.get(name, {}), False, [], [], errors)
    if errors:
        raise ValueError(f"apply.load: {'; '.join(errors)}")
    return found


def tell_loaded(module: nn.Module) -> None:
    """Run the hooks that modules run after they have loaded a state dict."""
    for sub in reversed([*module.modules()]):
        for hook in sub._load_state_dict_post_hooks.values():
            hook(sub, SimpleNamespace(missing_keys=[], unexpected_keys=[]))


def tell_asked(module: nn.Module) -> None:
    """Run the hooks that modules run before they give a state dict."""
    for name, sub in module.named_modules():
        for hook in sub._state_dict_pre_hooks.values():
            hook(sub, f"{name}." if name else "", False)


def changed_by_hooks(module: nn.Module, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A state dict as the hooks leave it that modules run on the one they give."""
    for name, sub in reversed([*module.named_modules()]):
        for hook in sub._state_dict_hooks.values():
            made = hook(sub, state_dict, f"{name}." if name else "", {})
            state_dict = state_dict if made is None else made
    return state_dict


def full_parameters(arrangement: Arrangement, buffers: Mapping[str, DBuffer]) -> dict[str, torch.Tensor]:
    """All parameters in full, by every name, on every rank. Communicates."""
    groups = arrangement.param_groups
    full = {key: group.params(buffers[key].redistribute(group.whole.placements)) for key, group in groups.items()}
    return {name: full[key][i] for name, (key, i) in arrangement.places.items()}


def whole_parameters(arrangement: Arrangement, buffers: Mapping[str, DBuffer]) -> dict[str, torch.Tensor]:
    """The same, on the first rank of the mesh alone, one at a time. Communicates."""
    first = next(iter(arrangement.param_groups.values())).spec.mesh.ranks[0]
    found: dict[tuple[str, int], torch.Tensor] = {}
    for key, group in arrangement.param_groups.items():
        found |= {(key, i): tensor for i, tensor in _whole_tensors(group, buffers[key], first)}
    return {name: found[place] for name, place in arrangement.places.items()} if found else {}


def persistent_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the module buffers that are part of its state, by every name."""
    found: dict[str, torch.Tensor] = {}
    for prefix, sub in module.named_modules(remove_duplicate=False):
        for leaf, buffer in sub._buffers.items():
            if buffer is not None and leaf not in sub._non_persistent_buffers_set:
                found[f"{prefix}.{leaf}".lstrip(".")] = buffer.detach().clone()
    return found


def _whole_tensors(group: ParamGroup, buffer: DBuffer, rank: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Index and full value of each tensor of a group, one at a time, on one rank alone. Every rank iterates."""
    mesh, layout = buffer.mesh, buffer.layout
    sharded = [isinstance(placement, Shard) for placement in buffer.placements]
    for i, shape in enumerate(group.shapes):
        if not any(sharded) or not shape.numel():
            if mesh.get_rank() == rank:
                yield i, buffer.get_tensor_view(i).detach().clone().view(shape)
            continue
        placements = [p if is_shard else Replicate() for p, is_shard in zip(buffer.placements, sharded, strict=True)]
        owners = GroupOwnerLayout(mesh, layout, {i: rank}, placements, name=f"state dict: {group.names[i]}")
        held = {n: view.detach() for n, view in buffer.tensor_views().items() if n == i}
        found, token = gather(held, owner_layout=owners, dtype=group.main_dtype, device=buffer.local_buffer.device)
        token.wait()
        if mesh.get_rank() == rank:
            yield i, found[i].view(shape)
