"""Running a module again as it ran before: the same random states, autocast, modes and buffers; and without its own
parameters."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack



def is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a compiler looks on: no value is known, and what happens now is not what will run."""
    return any(isinstance(tensor, FakeTensor) for tensor in tensors) or any(
        getattr(mode, "_mode_key", None) is not None for mode in _get_current_dispatch_mode_stack()
    )


@dataclass(frozen=True)
class Ambient:
    """What a computation depends on besides its arguments.

    Attributes:
        device: of the tensors.
        random: random states of CPU and, for tensors on CUDA, of their device; none where a compiler traces.
        autocast: dtype of `torch.autocast`; None where it is off.
    """

    device: torch.device
    random: tuple[torch.Tensor, ...]
    autocast: torch.dtype | None

    @classmethod
    def current(cls, tensors: Sequence[torch.Tensor]) -> "Ambient":
        """As it is now, for a computation on `tensors`."""
        device = next((tensor.device for tensor in tensors), torch.device("cpu"))
        random: tuple[torch.Tensor, ...] = ()
        if not is_traced(tensors):
            random = (torch.get_rng_state(),)
            if device.type == "cuda":
                random += (torch.cuda.get_rng_state(device),)
        enabled = torch.is_autocast_enabled(device.type)
        return cls(device, random, torch.get_autocast_dtype(device.type) if enabled else None)

    @contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Compute under it; what is there now comes back."""
        with ExitStack() as stack:
            if self.random:
                devices = [self.device] if len(self.random) > 1 else []
                stack.enter_context(torch.random.fork_rng(devices))
                torch.set_rng_state(self.random[0])
                if devices:
                    torch.cuda.set_rng_state(self.random[1], self.device)
            enabled = self.autocast is not None
            if enabled or torch.is_autocast_enabled(self.device.type):
                stack.enter_context(torch.autocast(self.device.type, self.autocast, enabled))
            yield


class Modes:
    """Which of a module's submodules were in training mode."""

    def __init__(self, module: nn.Module) -> None:
        self._modes = [(sub, sub.training) for sub in module.modules()]

    @contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Run the module in these modes."""
        changed = [(sub, sub.training) for sub, training in self._modes if sub.training != training]
        for sub, training in changed:
            sub.training = not training
        try:
            yield
        finally:
            for sub, training in changed:
                sub.training = training


@contextmanager
def swapped(module: nn.Module, params: Mapping[str, torch.Tensor]) -> Generator[None, None, None]:
    """Put tensors in the place of a module's parameters, by qualified name."""
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in params]
    before = [owner._parameters[leaf] for owner, leaf in places]
    try:
        for (owner, leaf), tensor in zip(places, params.values(), strict=True):
            _put(owner, leaf, tensor)
        yield
    finally:
        for (owner, leaf), tensor in zip(places, before, strict=True):
            _put(owner, leaf, tensor)


def _put(owner: nn.Module, leaf: str, tensor: Any) -> None:
    owner._parameters[leaf] = tensor
    if isinstance(owner, nn.RNNBase):  # which keeps a list of its parameters besides
        owner._flat_weights[owner._flat_weights_names.index(leaf)] = tensor


@contextmanager
def buffers_put_back(module: nn.Module) -> Generator[None, None, None]:
    """Undo what a computation does to module buffers: a second run must not count twice (running statistics)."""
    kept = [(sub, dict(sub._buffers)) for sub in module.modules() if sub._buffers]
    try:
        for sub, buffers in kept:
            sub._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
        yield
    finally:
        for sub, buffers in kept:
            sub._buffers.update(buffers)


def tensor_leaves(tree: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors of a pytree, and what puts others in their places."""
    leaves, spec = pytree.tree_flatten(tree)
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]  # a template keeps no tensor alive

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        filled = list(others)
        for n, tensor in zip(at, tensors, strict=True):
            filled[n] = tensor
        return pytree.tree_unflatten(filled, spec)

    return [leaves[n] for n in at], rebuild
