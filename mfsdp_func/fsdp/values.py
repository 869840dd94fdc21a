"""Full values of a module's parameters and buffers, one owning module at a time, on the meta device too."""

import copy
import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_func.fsdp.context import FsdpContext
from mfsdp_func.fsdp.grouping import Entry


class Values:
    """Makes full values on demand; holds those of one module."""

    def __init__(self, module: nn.Module, device: torch.device, context: FsdpContext) -> None:
        self._module, self._device, self._context = module, device, context
        self._owner: str | None = None
        self._made: nn.Module | None = None

    def parameter(self, entry: Entry) -> torch.Tensor:
        """The value of one parameter. Communicates where that is a DTensor."""
        param = self._module.get_parameter(entry.name)
        if isinstance(param, DTensor):
            return param.full_tensor().detach().to(self._device)
        if not param.is_meta:
            return param.detach().to(self._device)
        owner, _, leaf = entry.name.rpartition(".")
        return self._filled(f"parameter {entry.name!r}", self._initialised(owner).get_parameter(leaf).detach())

    def fill_buffers(self, skeleton: nn.Module) -> None:
        """Give a copy of the module values for the buffers that are on the meta device."""
        for name, buffer in self._module.named_buffers(remove_duplicate=False):
            if buffer.is_meta:
                owner, _, leaf = name.rpartition(".")
                value = self._filled(f"buffer {name!r}", self._initialised(owner).get_buffer(leaf))
                skeleton.get_submodule(owner)._buffers[leaf] = value

    def _filled(self, what: str, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point() and value.isnan().any():
            raise ValueError(f"fully_shard: initialisation left NaN in {what}; it must fill all that its module owns")
        return value

    def _initialised(self, name: str) -> nn.Module:
        """A copy of one module in which what it owns directly is on a real device and initialised."""
        if self._made is not None and name == self._owner:
            return self._made
        owner = self._module.get_submodule(name)
        made = self._empty_copy(owner)
        init, reset = self._context.init, getattr(made, "reset_parameters", None)
        if init is None and reset is None:
            raise ValueError(
                f"fully_shard: module {name!r} ({type(owner).__name__}) owns parameters or buffers on the meta device"
                " and has no reset_parameters; pass FsdpContext(init=...), or build it on a real device"
            )
        # The same values on every rank, whatever was drawn before.
        seed = self._context.seed + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            init(name, made) if init is not None else reset()  # pyright: ignore[reportOptionalCall]
        self._owner, self._made = name, made
        return made

    def _empty_copy(self, owner: nn.Module) -> nn.Module:
        memo: dict[int, Any] = {}
        for tensor in (*owner.parameters(), *owner.buffers()):
            memo[id(tensor)] = tensor  # of modules inside: not copied
        for param in owner.parameters(recurse=False):
            memo[id(param)] = nn.Parameter(self._empty(param), param.requires_grad)
        for buffer in owner.buffers(recurse=False):
            memo[id(buffer)] = self._empty(buffer) if buffer.is_meta else buffer.clone()
        return copy.deepcopy(owner, memo)

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        """Like a tensor on the meta device, full of NaN, so that what is not initialised can be told."""
        if like.is_floating_point():
            return torch.full_like(like, torch.nan, device=self._device)
        return torch.zeros_like(like, device=self._device)
