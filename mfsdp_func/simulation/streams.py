"""Streams of a simulated rank: what CUDA's order, they order for tensors on CPU, and every operator is recorded.

Work is done at once, in the order of the program; what is checked is whether the streams, the events and the allocator
would have kept that order. So a wait that is missing is found on every run, whatever the timing.
"""

import re
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mfsdp_func.effects.streams import SIMULATED_STREAMS
from mfsdp_func.effects.torch_internals import RECORDERS
from mfsdp_func.simulation.clocks import Clocks, Moment, later
from mfsdp_func.simulation.device import Device, Work, lines_here


class SimulatedEvent:
    """A moment of a stream."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment

    def wait(self, stream: "SimulatedStream") -> None:
        """Let what is queued on a stream from now on begin after it."""
        stream.wait_event(self)


class SimulatedStream(torch.Stream):
    """A queue of work that runs in order, beside other streams."""

    _clocks: Clocks
    _name: str

    def __new__(cls, number: int, name: str, clocks: Clocks) -> "SimulatedStream":
        self = super().__new__(cls, stream_id=number, device_index=0, device_type=0)  # pyright: ignore[reportCallIssue]
        self._clocks, self._name = clocks, name
        return self

    def record_event(self, event: Any = None) -> Any:
        """An event after all that is queued now."""
        event = event or SimulatedEvent({})
        event.moment = self._clocks.moment(self.stream_id)
        return event

    def wait_event(self, event: Any) -> None:
        """Let what is queued from now on begin after an event."""
        self._clocks.wait(self.stream_id, event.moment)

    def wait_stream(self, stream: Any) -> None:
        """Let what is queued from now on begin after what is queued on another stream now."""
        self.wait_event(stream.record_event())

    def __repr__(self) -> str:
        return f"<{self._name}>"


class RankStreams:
    """The streams of one rank; see `mfsdp_func.effects.streams.Streams`."""

    def __init__(self, device: Device, rank: int) -> None:
        self.device, self._rank = device, rank
        self._streams: list[SimulatedStream] = []
        self._done: Moment = {}
        """What the host knows to be done."""
        self._current = self._new("the default stream")

    def current_stream(self, device: torch.device) -> SimulatedStream:
        return self.current

    @property
    def current(self) -> SimulatedStream:
        """The one on which work is queued now."""
        return self._current

    def new_stream(self, device: torch.device) -> SimulatedStream:
        return self._new(f"stream {len(self._streams)}")

    def side_stream(self, device: torch.device) -> SimulatedStream:
        return self._side

    @cached_property
    def _side(self) -> SimulatedStream:
        return self._new("the library's side stream")

    @contextmanager
    def on_stream(self, stream: Any) -> Generator[SimulatedStream, None, None]:
        before, self._current = self._current, stream
        try:
            yield stream
        finally:
            self._current = before

    def mark_used(self, tensor: torch.Tensor, stream: Any) -> None:
        self.device.tell(tensor, stream.stream_id)

    def queue(self, operator: str) -> Work:
        """Queue a piece of work on the current stream."""
        stream = self._current.stream_id
        return Work(stream, self.device.clocks.queue(stream), operator, lines_here())

    def host_waits(self) -> None:
        """The host waits for the current stream: all that it queues from now on comes after."""
        self._done = later(self._done, self._current.record_event().moment)
        for stream in self._streams:
            self.device.clocks.wait(stream.stream_id, self._done)

    def _new(self, name: str) -> SimulatedStream:
        number = self.device.begin_stream(name, self._rank, self._done)
        stream = SimulatedStream(number, self.device.names[number], self.device.clocks)
        self._streams.append(stream)
        return stream


_ATEN = torch.ops.aten
_HOST_WAITS = {
    _ATEN._local_scalar_dense.default,
    _ATEN.equal.default,
    _ATEN.nonzero.default,
    _ATEN.masked_select.default,
}
"""Operators whose results the host needs."""


class Recorder(TorchDispatchMode):
    """Records every operator of a rank's thread as a piece of work on the rank's current stream."""

    def __init__(self, streams: RankStreams) -> None:
        super().__init__()
        self._streams, self._device = streams, streams.device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, torch._ops.OpOverload) or not {*types} <= {torch.Tensor, torch.nn.Parameter}:
            return NotImplemented  # first what it is made of
        given: dict[str, Any] = kwargs or {}
        if func is _ATEN.record_stream.default:
            self._streams.mark_used(args[0], args[1])
            return None
        if func is not _ATEN.lift_fresh.default:  # whose argument was made just now, by no operator
            self._device.meet(_dense((args, given)))
        results = func(*args, **given)
        work = self._streams.queue(func._schema.name)
        uses = list(zip(_uses(func), args, strict=False))
        uses += [(use, given[use.name]) for use in _uses(func) if use.name in given]
        self._device.touch(work, _dense([value for use, value in uses if use.reads]), writes=False)
        made = self._device.allocate(work, _dense(results))
        written = [value for use, value in uses if use.writes]
        self._device.touch(work, [*_dense(written), *made], writes=True)
        if func in _HOST_WAITS:
            self._streams.host_waits()
        return results


class HostReads(TorchFunctionMode):
    """Records what reads a tensor's memory without an operator: the host, which waits for the current stream first."""

    def __init__(self, streams: RankStreams) -> None:
        super().__init__()
        self._streams = streams

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ_BY_HOST and type(args[0]) in (torch.Tensor, torch.nn.Parameter):
            device, tensors = self._streams.device, _dense(args[0])
            device.meet(tensors)
            device.touch(self._streams.queue(f"Tensor.{func.__name__}"), tensors, writes=False)
            self._streams.host_waits()
        return func(*args, **(kwargs or {}))


_READ_BY_HOST = {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__}


def record_on_streams(streams: RankStreams, stack: ExitStack) -> None:
    """Let this thread, a rank's, work on its streams."""
    stack.enter_context(Recorder(streams))
    stack.enter_context(HostReads(streams))
    SIMULATED_STREAMS.set(streams)
    RECORDERS.set(RECORDERS.get() + 1)


class _Use(NamedTuple):
    """What an operator does with an argument."""

    name: str
    reads: bool
    writes: bool


@cache
def _uses(func: torch._ops.OpOverload) -> tuple[_Use, ...]:
    """Of all arguments: views, factories and what changes the storage look at no element."""
    name, arguments = func._schema.name, func._schema.arguments
    factory = re.fullmatch(r"aten::(new_.*|.*_like|set_)", name) is not None
    aliases = [(a.name, a.alias_info) for a in arguments]
    return tuple(
        _Use(n, alias is None and not factory, alias is not None and alias.is_write and not factory)
        for n, alias in aliases
    )


def _dense(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree that have memory of the usual kind."""
    return [
        x
        for x in tree_iter(tree)
        if isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type == "cpu"
    ]
