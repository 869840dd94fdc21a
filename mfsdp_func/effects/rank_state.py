"""State that belongs to a process, but which simulated ranks must each have for themselves."""

import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch._functorch import eager_transforms, predispatch
from torch.autograd import forward_ad


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
        yield
