"""Full values of a module's parameters and buffers, one owning module at a time, on the meta device too."""

import hashlib
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_func.fsdp.context import FsdpContext
from mfsdp_func.fsdp.grouping import Entry


class Values:
    """Makes full values on demand.

    What is on the meta device is initialised in `skeleton`, the module that will run: whatever else its
    `reset_parameters` sets is there afterwards. Each of its modules is initialised once.
    """

    def __init__(self, module: nn.Module, skeleton: nn.Module, device: torch.device, context: FsdpContext) -> None:
        self._module, self._skeleton, self._device, self._context = module, skeleton, device, context
        self._made: dict[str, torch.Tensor] = {}
        self._initialised = set[str]()
        self._is_meta = any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))

    def parameter(self, entry: Entry) -> torch.Tensor:
        """The value of one parameter, handed out once. Communicates where that is a DTensor."""
        param = self._module.get_parameter(entry.name)
        if isinstance(param, DTensor):
            return param.full_tensor().detach().to(self._device)
        if not param.is_meta:
            return param.detach().to(self._device)
        if entry.name not in self._made:
            self._initialise(entry.name.rpartition(".")[0])
        return self._made.pop(entry.name)

    def finish(self, ignored: Collection[str]) -> None:
        """Initialise the modules that own no parameters on the meta device, too, and put ignored parameters in place."""
        for name in ignored:
            if self._module.get_parameter(name).is_meta:
                if name not in self._made:
                    self._initialise(name.rpartition(".")[0])
                self._put(self._skeleton.get_parameter(name), self._made.pop(name))
        for name, sub in self._skeleton.named_modules() if self._is_meta else ():
            owns = any(True for _ in sub.parameters(recurse=False))
            has_meta = any(buffer.is_meta for buffer in sub.buffers(recurse=False))
            can = self._context.init is not None or hasattr(sub, "reset_parameters")
            if name not in self._initialised and (has_meta or (can and not owns)):
                self._initialise(name)

    def _initialise(self, name: str) -> None:
        """Run a module's initialisation, with what it owns directly on a real device."""
        self._initialised.add(name)
        owner, sub = self._module.get_submodule(name), self._skeleton.get_submodule(name)
        init, reset = self._context.init, getattr(sub, "reset_parameters", None)
        if init is None and reset is None:
            raise ValueError(
                f"fully_shard: module {name!r} ({type(owner).__name__}) owns parameters or buffers on the meta device"
                " and has no reset_parameters; pass FsdpContext(init=...), or build it on a real device"
            )
        absent, given = dict(sub._parameters), {leaf: p for leaf, p in owner._parameters.items() if p is not None}
        for leaf, param in given.items():
            # Those that have values already are not initialised again: it works on a copy of them.
            value = self._empty(param) if param.is_meta else param.detach().to(self._device, copy=True)
            sub._parameters[leaf] = nn.Parameter(value, param.requires_grad)
        meta = [leaf for leaf, buffer in sub._buffers.items() if buffer is not None and buffer.is_meta]
        for leaf in meta:
            sub._buffers[leaf] = self._empty(sub.get_buffer(leaf))
        # The same values on every rank, whatever was drawn before.
        seed = self._context.seed + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices), torch.no_grad(), self._device:
                torch.manual_seed(seed)
                init(name, sub) if init is not None else reset()  # pyright: ignore[reportOptionalCall]
            for leaf, param in given.items():
                if param.is_meta:
                    full = f"{name}.{leaf}".lstrip(".")
                    self._made[full] = _filled(f"parameter {full!r}", sub.get_parameter(leaf).detach())
        finally:
            for leaf in given:
                sub._parameters[leaf] = absent[leaf]
        for leaf in meta:
            _filled(f"buffer {f'{name}.{leaf}'.lstrip('.')!r}", sub.get_buffer(leaf))

    def _put(self, old: nn.Parameter, value: torch.Tensor) -> None:
        new = nn.Parameter(value, old.requires_grad)
        for sub in self._skeleton.modules():
            for leaf, param in sub._parameters.items():
                if param is old:
                    sub._parameters[leaf] = new

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        """Like a tensor on the meta device, full of NaN, so that what is not initialised can be told."""
        if like.is_floating_point():
            return torch.full_like(like, torch.nan, device=self._device, requires_grad=False)
        return torch.zeros_like(like, device=self._device, requires_grad=False)


def _filled(what: str, value: torch.Tensor) -> torch.Tensor:
    if value.is_floating_point() and value.isnan().any():
        raise ValueError(f"fully_shard: initialisation left NaN in {what}; it must fill all that its module owns")
    return value
