"""How many bytes live at most: distinct storages of tensors, counted at every operation of a run."""

import weakref
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts while it is active; memory that was there before counts once an operation reads it.

    Attributes:
        peaks: phase -> the most bytes that lived at once in it.
        at_peak: phase -> what they were: (operation that made them, bytes of each) -> how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self.at_peak: dict[str, Counter[tuple[str, int]]] = {}
        self._phase: str | None = None
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    @contextmanager
    def phase(self, name: str) -> Generator[None, None, None]:
        """Peaks inside are of this phase; outside of phases nothing is compared."""
        self._phase, before = name, self._phase
        try:
            yield
        finally:
            self._phase = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves((args, kwargs, out)):
            if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
                self._see(tensor.untyped_storage(), str(func))
        if self._phase is not None:
            self._compare(self._phase)
        return out

    def _see(self, storage: torch.UntypedStorage, made_by: str) -> None:
        key = storage._cdata
        if key not in self._live:
            self._live[key] = weakref.ref(storage), made_by
            weakref.finalize(storage, self._live.pop, key, None).atexit = False

    def _compare(self, phase: str) -> None:
        living = [(made_by, storage.nbytes()) for ref, made_by in self._live.values() if (storage := ref()) is not None]
        total = sum(nbytes for _, nbytes in living)
        if total > self.peaks.get(phase, -1):
            self.peaks[phase], self.at_peak[phase] = total, Counter(living)
