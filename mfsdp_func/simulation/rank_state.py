"""State of a process or a thread which simulated ranks must have: each for itself, or as their caller has it."""

import random
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import overrides
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch import eager_transforms, predispatch
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.utils import _python_dispatch

from mfsdp_func.effects.torch_internals import outside_transforms

_AUTOCAST_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class ProcessState:
    """Random states, and how deep this process is in forward-mode differentiation."""

    torch_random: torch.Tensor
    python_random: Any
    dual_level: int
    jvp_nesting: int

    @classmethod
    def seeded(cls, seed: int) -> "ProcessState":
        """The state of a fresh process."""
        return cls(torch.Generator().manual_seed(seed).get_state(), random.Random(seed).getstate(), -1, 0)

    @classmethod
    def current(cls) -> "ProcessState":
        """The state now."""
        return cls(
            torch.get_rng_state(),
            random.getstate(),
            forward_ad._current_level,  # pyright: ignore[reportPrivateUsage]
            eager_transforms.JVP_NESTING,
        )

    def restore(self) -> None:
        """Make it the state of this process."""
        torch.set_rng_state(self.torch_random)
        random.setstate(self.python_random)
        forward_ad._current_level = self.dual_level  # pyright: ignore[reportPrivateUsage]
        eager_transforms.JVP_NESTING = self.jvp_nesting


@contextmanager
def shared_dual_level() -> Generator[None, None, None]:
    """Let several threads be inside `jvp` at once: torch has one dual level per process, which the last one closes."""
    # Where `torch.autograd.forward_ad` finds them: in torch 2.13, and before.
    home, suffix = (predispatch, "_impl") if hasattr(predispatch, "_enter_dual_level_impl") else (torch._C, "")
    names = f"_enter_dual_level{suffix}", f"_exit_dual_level{suffix}"
    enter: Callable[[], int] = getattr(home, names[0])
    leave: Callable[..., None] = getattr(home, names[1])
    inside = 0

    def shared_enter() -> int:
        nonlocal inside
        level = enter() if inside == 0 else 0
        inside += 1
        return level

    def shared_leave(*, level: int) -> None:
        nonlocal inside
        inside -= 1
        if inside == 0:
            leave(level=level)

    with mock.patch.object(home, names[0], shared_enter), mock.patch.object(home, names[1], shared_leave):
        try:
            yield
        finally:
            if inside:  # a rank did not come out of `jvp`
                leave(level=0)


def outlive_fake_devices() -> None:
    """Let fake tensors of ranks leave nothing behind that ends with their threads.

    A build for CUDA that finds no device replaces torch's device guard as the first fake tensor is made, by one that
    belongs to the thread: what comes after that thread's end reads freed memory (seen on 2.11).
    """
    if torch.version.cuda is not None and not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()  # pyright: ignore[reportPrivateUsage]


@dataclass(frozen=True)
class Modes:
    """Modes of a thread, in which others may run too."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, torch.dtype], ...]
    autocast_cache: bool
    functions: tuple[Any, ...]
    """Torch function modes, such as the one of ``with torch.device(...)``; the outermost first."""
    dispatch: tuple[Any, ...]
    """Torch dispatch modes; the outermost first."""

    @classmethod
    def current(cls) -> "Modes":
        """Those of this thread."""
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d)),
            torch.is_autocast_cache_enabled(),
            tuple(overrides._get_current_function_mode_stack()),  # pyright: ignore[reportPrivateUsage]
            tuple(_python_dispatch._get_current_dispatch_mode_stack()),  # pyright: ignore[reportPrivateUsage]
        )

    @contextmanager
    def entered(self) -> Generator[None, None, None]:
        """Make them this thread's own, which has none."""
        with ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype, cache_enabled=self.autocast_cache))
            # Not entered, which they have been: an entry may count, or change what belongs to the process.
            for home, modes in ((overrides, self.functions), (_python_dispatch, self.dispatch)):
                for mode in modes:
                    home._push_mode(mode)  # pyright: ignore[reportPrivateUsage]
                    stack.callback(home._pop_mode)  # pyright: ignore[reportPrivateUsage]
            yield


@contextmanager
def outside_modes() -> Generator[None, None, None]:
    """Run what is inside as if no `torch.func` transform and no dispatch mode of this thread were active."""
    with outside_transforms(), _python_dispatch._disable_current_modes(), torch.no_grad():  # pyright: ignore[reportPrivateUsage]
        yield


def refuse_inside_transforms(name: str) -> None:
    """Raise a `RuntimeError` where something follows the caller that cannot follow other threads."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()  # pyright: ignore[reportPrivateUsage]
    inside = {
        "a torch.func transform": _functorch.peek_interpreter_stack() is not None,
        "forward-mode differentiation": forward_ad._current_level >= 0,  # pyright: ignore[reportPrivateUsage]
        "a compiled region": torch.compiler.is_compiling(),
        "a tracer": is_fx_symbolic_tracing() or any(getattr(m, "_mode_key", None) is not None for m in modes),
    }
    if found := [what for what, true in inside.items() if true]:
        raise RuntimeError(
            f"{name}: called inside {found[0]}, which does not reach into the simulated ranks: derivatives would silently be"
            " zero. Put it into the program that the ranks run"
        )
