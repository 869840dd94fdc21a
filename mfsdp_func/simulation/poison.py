"""Results in flight that must not be read: filled with NaN, and watched while they are."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mfsdp_func.simulation.errors import SimulationError


class PoisonMode(TorchDispatchMode):
    """Raises when an operator reads a tensor that an operation still has to fill."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._held: dict[int, tuple[str, torch.UntypedStorage]] = {}
        self._pending: list[str] = []

    def hold(self, label: str, outputs: Sequence[torch.Tensor]) -> None:
        """Watch the storages of `outputs` until `release`."""
        self._pending.append(label)
        for output in outputs:
            storage = output.untyped_storage()
            if storage.nbytes():
                self._held[storage.data_ptr()] = (label, storage)

    def release(self, label: str, outputs: Sequence[torch.Tensor]) -> None:
        """Their token is waited for: they may be read from now on."""
        self._pending.remove(label)
        for output in outputs:
            self._held.pop(output.untyped_storage().data_ptr(), None)

    def pending(self) -> list[str]:
        """Labels of the operations that nobody has waited for."""
        return sorted(set(self._pending))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._held and not _only_looks(func):
            for value in tree_iter((args, kwargs or {})):
                if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                    held = self._held.get(value.untyped_storage().data_ptr())
                    if held is not None:
                        raise SimulationError(
                            f"rank {self._rank}: {func} uses a result of {held[0]} before its token was waited for; call"
                            " token.wait() first"
                        )
        return func(*args, **(kwargs or {}))


def _only_looks(func: Any) -> bool:
    """Views and metadata read no element."""
    return getattr(func, "is_view", False) or func is torch.ops.aten.detach.default


def fill_with_poison(part: torch.Tensor) -> None:
    """NaN, or the smallest integer."""
    if part.is_floating_point() or part.is_complex():
        if part.dtype.itemsize == 1:
            part.view(torch.uint8).fill_(0xFF)  # NaN in the fp8 formats
        else:
            part.fill_(float("nan"))
    elif part.dtype == torch.bool:
        part.fill_(True)
    else:
        part.fill_(torch.iinfo(part.dtype).min)
