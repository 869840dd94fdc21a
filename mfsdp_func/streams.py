"""Streams for programs that run on CUDA and, on CPU, inside ``simulate(..., streams=True)`` alike.

On CUDA these are torch's own. In the simulation they are simulated ones, which order the work on CPU tensors: a wait that is
missing, or memory given away too early, is found there on every run.

>>> import torch
>>> import mfsdp_func as mf
>>> def doubled(mesh, *, waits):
...     side, values = mf.streams.new_stream(), torch.ones(3)
...     if waits:
...         side.wait_stream(mf.streams.current_stream())
...     with mf.streams.on_stream(side):
...         twice = values * 2
...     mf.streams.current_stream().wait_stream(side)
...     return twice.tolist()
>>> mf.simulate(lambda mesh: doubled(mesh, waits=True), 1, streams=True).results
{0: [2.0, 2.0, 2.0]}
>>> try:
...     mf.simulate(lambda mesh: doubled(mesh, waits=False), 1, streams=True)
... except mf.SimulationError as error:
...     print(str(error)[:58])
missing wait: aten::mul on stream 1 of rank 0 (at <doctest
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
