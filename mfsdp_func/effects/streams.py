"""Streams and events, which order work on a device: those of CUDA, or those of a simulated rank.

One protocol, so that one code runs on both. What the library does with streams goes through here, but for what moves
between a device and the host's memory.
"""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch

from mfsdp_func.effects.torch_internals import outside_transforms, unwrapped

AnyStream: TypeAlias = torch.Stream | torch.cuda.Stream
"""A stream has `wait_stream`, `wait_event` and `record_event`."""


class Streams(Protocol):
    """The streams of a device."""

    def current_stream(self, device: torch.device) -> Any:
        """The one on which work is queued now."""
        ...

    def new_stream(self, device: torch.device) -> Any:
        """One more."""
        ...

    def side_stream(self, device: torch.device) -> Any:
        """The one of calls that shall not wait for what is queued later; always the same."""
        ...

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue the work inside on a stream."""
        ...

    def mark_used(self, tensor: torch.Tensor, stream: Any) -> None:
        """Tell the allocator that a stream uses a tensor, which no transform has wrapped."""
        ...


class CudaStreams:
    """See `Streams`."""

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def new_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.Stream(device)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        return _side_stream(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def mark_used(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


_CUDA = CudaStreams()

SIMULATED_STREAMS: ContextVar[Streams | None] = ContextVar("mfsdp_func_simulated_streams", default=None)
"""Those of this simulated rank, which order what it does on CPU."""


def streams_of(device: torch.device) -> Streams:
    """The streams that order work on a device."""
    simulated = SIMULATED_STREAMS.get()
    return _CUDA if device.type == "cuda" or simulated is None else simulated


def are_ordered(device: torch.device) -> bool:
    """Whether streams order the work on a device; else it is done when a call returns."""
    return device.type == "cuda" or SIMULATED_STREAMS.get() is not None


def mark_used(tensor: torch.Tensor, stream: AnyStream) -> None:
    """Tell the allocator that a stream uses a tensor; inside `torch.func` transforms too."""
    streams_of(tensor.device).mark_used(unwrapped(tensor), stream)


class Queued:
    """Work queued on a stream, of one operation: an event tells its end, and the allocator knows of all that it reads.

    Its results are not kept: each stream that waits is told to the allocator for those that are still there.
    """

    def __init__(self, label: str, event: Any, results: Iterable[torch.Tensor], device: torch.device) -> None:
        storages = {storage._cdata: storage for storage in (unwrapped(t).untyped_storage() for t in results)}
        self.label, self.done = label, False
        self._event, self._device = event, device
        self._storages = [weakref.ref(storage) for storage in storages.values()]

    def wait(self, stream: AnyStream | None = None) -> None:
        """Let a stream, by default the current one, wait for it."""
        self.done = True
        streams = streams_of(self._device)
        waiting: Any = stream or streams.current_stream(self._device)
        waiting.wait_event(self._event)
        with outside_transforms():
            for ref in self._storages:
                if (storage := ref()) is not None:
                    whole = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)  # pyright: ignore[reportArgumentType]
                    streams.mark_used(whole, waiting)
