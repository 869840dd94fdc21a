"""Running a module as it ran before (random states, autocast, modes, buffers), and on parameters not its own."""

import random
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import nn

from mfsdp_func.effects import torch_internals
from mfsdp_func.fsdp.torch_internals import is_any_fake, version_of

_TRAINING = attrgetter("training")


def is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a compiler looks on: no value is known, and what happens now is not what will run."""
    return is_any_fake(tensors) or torch_internals.is_traced()


def random_states() -> tuple[Any, Any]:
    """Those of Python and of NumPy; None where that is not loaded."""
    numpy = sys.modules.get("numpy.random")
    return random.getstate(), None if numpy is None else numpy.get_state()


def set_random_states(states: tuple[Any, Any]) -> None:
    """Go on from what `random_states` gave."""
    random.setstate(states[0])
    if states[1] is not None:
        sys.modules["numpy.random"].set_state(states[1])


def are_same_states(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether nothing was drawn between two `random_states`."""
    of_numpy = [None if states[1] is None else (states[1][1].tobytes(), *states[1][2:]) for states in (one, other)]
    return one[0] == other[0] and (of_numpy[0] == of_numpy[1] or one[1] is None)


@contextmanager
def nothing_drawn(what: str) -> Generator[None, None, None]:
    """Refuse draws that a trace would take for constants; torch's own are traced.

    Raises:
        RuntimeError: naming `what`, if it draws from Python's or NumPy's generator.
    """
    before = random_states()
    yield
    if not are_same_states(before, random_states()):
        raise RuntimeError(
            f"apply in a compiled region: {what} draws from Python's or NumPy's generator, and the number would be the"
            " same in every call; draw with torch, pass the number as an argument, or call apply eagerly"
        )


@dataclass(frozen=True)
class Ambient:
    """What a computation depends on besides its arguments.

    Attributes:
        device: of the tensors.
        random: random states of the CPU and, for tensors on CUDA, of their device; None where a compiler traces.
        others: those of Python and, where it is loaded, of NumPy; likewise.
        autocast: dtype of `torch.autocast`; None where it is off.
    """

    device: torch.device
    random: tuple[torch.Tensor, torch.Tensor | None] | None
    others: tuple[Any, Any] | None
    autocast: torch.dtype | None

    @classmethod
    def current(cls, tensors: Sequence[torch.Tensor]) -> "Ambient":
        """As it is now, for a computation on `tensors`."""
        device = tensors[0].device if tensors else torch.device("cpu")
        torch_states = others = None
        if not is_traced(tensors):
            others = random_states()
            torch_states = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        enabled = torch.is_autocast_enabled(device.type)
        return cls(device, torch_states, others, torch.get_autocast_dtype(device.type) if enabled else None)

    @contextmanager
    def restored(self) -> Generator[None, None, None]:
        """Compute under it; what is there now comes back."""
        with ExitStack() as stack:
            if self.random is not None:
                cpu, cuda = self.random
                stack.enter_context(torch.random.fork_rng([] if cuda is None else [self.device]))
                torch.set_rng_state(cpu)
                if cuda is not None:
                    torch.cuda.set_rng_state(cuda, self.device)
            if self.others is not None:
                stack.callback(set_random_states, random_states())
                set_random_states(self.others)
            enabled = self.autocast is not None
            if enabled or torch.is_autocast_enabled(self.device.type):
                stack.enter_context(torch.autocast(self.device.type, self.autocast, enabled))
            yield


class Start:
    """How a module was before it ran: which submodules were in training mode, and the values of module buffers.

    Args:
        module: which.
        changing: names of the buffers that it writes into, as far as is known; None if nothing is. Values are copied
            of these (of all, at first), the others are taken to stay as they are.
    """

    def __init__(self, module: nn.Module, changing: frozenset[str] | None) -> None:
        modules = [*module.modules()]
        self._modes = [*zip(modules, map(_TRAINING, modules), strict=True)]
        self._buffers: list[tuple[dict[str, torch.Tensor | None], str, str, torch.Tensor, int]] = []
        self._values: dict[str, torch.Tensor] = {}
        self._changed = frozenset[str]()
        for prefix, sub in module.named_modules():
            for leaf, buffer in sub._buffers.items():
                name = f"{prefix}.{leaf}"
                if buffer is not None:
                    self._buffers.append((sub._buffers, leaf, name, buffer, version_of(buffer)))
                    copied = changing is None or name in changing
                    self._values[name] = buffer.clone() if copied else buffer

    def changed(self) -> frozenset[str]:
        """Names of the buffers that have been written into or replaced since; forgets the copies of others."""
        names = [
            name
            for buffers, leaf, name, buffer, version in self._buffers
            if buffers.get(leaf) is not buffer or version_of(buffer) != version
        ]
        for _, _, name, buffer, _ in self._buffers:
            if name not in names:
                self._values[name] = buffer
        self._changed = frozenset(names)
        return self._changed

    @contextmanager
    def again(self) -> Generator[None, None, None]:
        """Run the module as then, without a trace: running statistics must not count twice."""
        modes = [(sub, sub.training) for sub, training in self._modes if sub.training != training]
        before = [(buffers, leaf, buffers.get(leaf)) for buffers, leaf, *_ in self._buffers]
        try:
            for sub, training in modes:
                sub.training = not training
            for buffers, leaf, name, *_ in self._buffers:
                value = self._values[name]
                # batch_norm writes without a trace, but only into floating-point numbers.
                written = name in self._changed or value.is_floating_point()
                buffers[leaf] = value.clone() if written else value
            yield
        finally:
            for sub, training in modes:
                sub.training = training
            for buffers, leaf, buffer in before:
                buffers[leaf] = buffer


@contextmanager
def swapped(module: nn.Module, params: Mapping[str, torch.Tensor]) -> Generator[None, None, None]:
    """Put tensors in the place of a module's parameters, by qualified name."""
    with exchanged(places_of(module, params), list(params.values())):
        yield


Place: TypeAlias = tuple[nn.Module, str]
"""What owns a parameter, and the name that it has there."""


def places_of(module: nn.Module, names: Iterable[str]) -> list[Place]:
    """Where a module holds each of its parameters."""
    parts = [name.rpartition(".") for name in names]
    return [(module.get_submodule(path), leaf) for path, _, leaf in parts]


@contextmanager
def exchanged(places: Sequence[Place], values: Sequence[Any]) -> Generator[None, None, None]:
    """Put values in the places of others."""
    before = [owner._parameters[leaf] for owner, leaf in places]
    try:
        _put(places, values)
        yield
    finally:
        _put(places, before)


def _put(places: Sequence[Place], values: Sequence[Any]) -> None:
    for (owner, leaf), value in zip(places, values, strict=True):
        owner._parameters[leaf] = value
        if isinstance(owner, nn.RNNBase):  # which keeps a list of its parameters besides, and makes it anew
            owner._flat_weights[owner._flat_weights_names.index(leaf)] = value


@contextmanager
def buffers_written(modules: Sequence[nn.Module]) -> Generator[None, None, None]:
    """Let modules write into their own buffers under a `torch.func` transform, which does not let them.

    Raises:
        RuntimeError: if `vmap` would write several values into one buffer.
    """
    if not torch_internals.is_transformed():
        yield
        return
    before = [(sub._buffers, leaf, buffer) for sub in modules for leaf, buffer in sub._buffers.items()]
    copies = [None if buffer is None else buffer.clone() for _, _, buffer in before]
    try:
        for (buffers, leaf, _), copied in zip(before, copies, strict=True):
            buffers[leaf] = copied
        yield
        found = [buffers[leaf] for buffers, leaf, _ in before]
    finally:
        for buffers, leaf, buffer in before:
            buffers[leaf] = buffer
    with torch_internals.outside_transforms():
        for (buffers, leaf, buffer), copied, now in zip(before, copies, found, strict=True):
            value = _unwrapped(now)
            if value is None or buffer is None or now is not copied:
                buffers[leaf] = value
            elif value.shape != buffer.shape:
                raise RuntimeError(f"vmap would write several values into the module buffer {leaf!r}")
            else:  # whether it has changed is not known: batch_norm does not tell, so neither does this
                (buffer if is_traced([value]) else buffer.data).copy_(value)


def _unwrapped(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else torch_internals.unwrapped(tensor).detach()
