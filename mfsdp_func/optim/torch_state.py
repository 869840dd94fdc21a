"""What `TorchOptimizer` does with tensors: one step in place, compiled or not, and state as checkpoints expect it."""

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mfsdp_func.optim.torch_groups import (
    Make,
    local_of,
)
from mfsdp_func.optim.transformation import apply_updates


def _advance(
    makes: tuple[Make, ...],
    rates: tuple[torch.Tensor, ...],
    settings: tuple[dict[str, Any], ...],
    params: list[dict[Hashable, torch.Tensor]],
    grads: list[dict[Hashable, torch.Tensor]],
    states: tuple[Any, ...],
    skip: torch.Tensor | None,
) -> None:
    """One step of every group; writes into `params` and `states`, what was there where `skip` holds."""
    for make, rate, given, param, grad, state in zip(makes, rates, settings, params, grads, states, strict=True):
        updates, new_state = make(rate, **given).update(grad, state, param)
        new = pytree.tree_leaves((apply_updates(param, updates), new_state))
        for old, value in zip(pytree.tree_leaves((param, state)), new, strict=True):
            old.copy_(value if skip is None else torch.where(skip.to(old.device), old, value))


def compiled_step(compile: bool | str) -> Callable[..., None]:
    """The function that takes one step of every group, compiled if asked for."""
    if not compile:
        return _advance
    # Compiled code is kept per code object, at most a few variants of it: each optimizer has a code object of its own.
    own = FunctionType(_advance.__code__.replace(), _advance.__globals__, _advance.__name__)
    backend = compile if isinstance(compile, str) else "inductor"
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend)


def unwrapped(value: Any, own: torch.Tensor) -> Any:
    """What `state_dict` wrapped, in the shape of this rank's part."""
    local = getattr(value, "local", None)
    if local is None or local.numel() != own.numel():
        return value
    return local.view(own.shape)


def wrapped(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """State as checkpoints of DTensors expect it."""
    if not isinstance(param, DTensor) or tensor.shape != local_of(param).shape:
        return tensor
    return DTensor.from_local(
        tensor, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
