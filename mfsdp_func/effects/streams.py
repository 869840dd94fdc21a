"""Streams and events, which order work on a device: those of CUDA, or those of a simulated rank.

One protocol, so that one code runs on both. What the library does with streams goes through here, but for what moves
between a device and the host's memory.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch

from mfsdp_func.effects.torch_internals import unwrapped

AnyStream: TypeAlias = torch.Stream | torch.cuda.Stream
"""A stream has `wait_stream`, `wait_event` and `record_event`."""


class Streams(Protocol):
    """The streams of a device."""

    def current_stream(self, device: torch.device) -> Any:
        """The one on which work is queued now."""
        ...

    def side_stream(self, device: torch.device) -> Any:
        """The one of calls that shall not wait for what is queued later; always the same."""
        ...

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue the work inside on a stream."""
        ...


class CudaStreams:
    """See `Streams`."""

    def current_stream(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def side_stream(self, device: torch.device) -> torch.cuda.Stream:
        return _side_stream(device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)


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


def mark_used(tensor: torch.Tensor, stream: AnyStream) -> None:
    """Tell the allocator that a stream uses a tensor; inside `torch.func` transforms too."""
    unwrapped(tensor).record_stream(stream)
