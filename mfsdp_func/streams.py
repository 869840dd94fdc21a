"""Streams for programs that run on CUDA and, on CPU, inside ``simulate(..., streams=True)`` alike.

On CUDA these are torch's own. In the simulation they are simulated ones, which order the work on CPU tensors: a wait that is
missing, or memory given away too early, is found there on every run.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch

from mfsdp_func.effects.streams import SIMULATED_STREAMS, AnyStream, streams_of

__all__ = ["current_stream", "new_stream", "on_stream"]


def current_stream(device: torch.device | str | None = None) -> AnyStream:
    """The stream on which work is queued now; by default on the simulated device, or the current CUDA device."""
    return streams_of(_there(device)).current_stream(_there(device))


def new_stream(device: torch.device | str | None = None) -> AnyStream:
    """A new stream; see `current_stream`."""
    return streams_of(_there(device)).new_stream(_there(device))


def on_stream(stream: AnyStream) -> AbstractContextManager[Any]:
    """Queue the work inside on a stream."""
    return streams_of(stream.device).on_stream(stream)


def _there(device: torch.device | str | None) -> torch.device:
    if device is not None:
        return torch.device(device)
    return torch.device("cuda" if SIMULATED_STREAMS.get() is None else "cpu")
