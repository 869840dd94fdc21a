"""The one place where communication begins: a map, run on plain tensors."""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from operator import attrgetter
from time import monotonic

import torch

from mfsdp_func.effects.agreement import agree, checking, report_fault
from mfsdp_func.effects.blocks import Memory, locate
from mfsdp_func.effects.carrier import Call, Carrier
from mfsdp_func.effects.collectives import start_collective
from mfsdp_func.effects.exchange import empty_outputs, start_exchange
from mfsdp_func.effects.here import carrier_of
from mfsdp_func.effects.origin import Origin
from mfsdp_func.effects.waiting import BEGAN
from mfsdp_func.plans.collective import Collective
from mfsdp_func.plans.linear_map import LinearMap
from mfsdp_func.plans.plan import Plan

_REQUIRES_GRAD = attrgetter("requires_grad")


def allocate(
    linear: LinearMap, dtype: torch.dtype, device: torch.device, batch: Sequence[int] | None, one_storage: bool
) -> tuple[torch.Tensor, ...]:
    """New outputs of a map: of ``(numel, *batch)``, or (None) `output_shapes`; each group's in one storage, or each alone."""
    if isinstance(linear, Plan):
        return empty_outputs(linear.local, dtype, device, batch, one_storage=one_storage)
    make = torch.empty if isinstance(linear, Collective) and linear.stored is None else torch.zeros
    return tuple([make((numel, *(batch or ())), dtype=dtype, device=device) for numel in linear.output_numels])


@dataclass(frozen=True)
class Options:
    """How a call runs: the dtype and device of outputs, and what is known of the call on this rank; see `Call`."""

    dtype: torch.dtype | None
    device: torch.device
    differentiated: bool = False
    forward: bool = True
    origin: Origin | None = None
    checked: bool | None = None
    """Whether the agreement check was on when the call was made; None where nobody has looked."""


@dataclass
class Flight:
    """What a call has in flight, where the caller asked to keep it so."""

    finishes: list[Callable[[], None]] = field(default_factory=list)
    keep: list[torch.Tensor] = field(default_factory=list)

    def finish(self) -> None:
        """Wait for everything, in the order in which it was started."""
        outer, BEGAN.at = BEGAN.at, BEGAN.at or monotonic()
        try:
            while self.finishes:
                self.finishes.pop(0)()
        finally:
            BEGAN.at = outer


_FLIGHT: ContextVar[Flight | None] = ContextVar("mfsdp_func_flight", default=None)


@contextmanager
def in_flight() -> Generator[Flight, None, None]:
    """Calls inside do not wait for their ends, but leave them to the `Flight` given."""
    flight = Flight()
    before = _FLIGHT.set(flight)
    try:
        yield flight
    finally:
        _FLIGHT.reset(before)


_WATCHERS: list[Callable[[LinearMap, Sequence[torch.Tensor]], None]] = []


@contextmanager
def launches_watched(watcher: Callable[[LinearMap, Sequence[torch.Tensor]], None]) -> Generator[None, None, None]:
    """Inside, `watcher(map, outputs)` is called by every launch of this process, once its outputs are allocated.

    On a simulated mesh it sees the launches of all ranks, and ``map.mesh.get_rank()`` says whose it is. What it does
    must be quick, and may not communicate.
    """
    _WATCHERS.append(watcher)
    try:
        yield
    finally:
        _WATCHERS.remove(watcher)


def launch(
    linear: LinearMap,
    options: Options,
    batch: Sequence[int] | None,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Run a map on plain tensors, the one place where communication begins.

    Args:
        linear: the map.
        options: see `Options`.
        batch: the trailing batch dims, of tensors of shape ``(numel, *batch)``; None where each has a shape of its own.
        inputs: one tensor per input of the map; of a collective, flat but for the batch dims.
        outputs: contiguous tensors to write into; new ones by default.

    Returns:
        The outputs; filled, unless inside `in_flight`.

    Raises:
        RuntimeError: before any communication, if the storage of a tensor has been freed, or another thread of this rank
            is inside a call over the same mesh.
    """
    carrier = carrier_of(linear.mesh)
    mine = threading.get_ident(), linear
    holder = carrier.inside.setdefault(linear.mesh.digest, mine)
    if holder[0] != mine[0]:
        raise RuntimeError(_two_threads(linear, holder[1]))
    outer, BEGAN.at = BEGAN.at, BEGAN.at or monotonic()
    try:
        return _launch(carrier, linear, options, batch, inputs, outputs)
    finally:
        BEGAN.at = outer
        if holder is mine:
            del carrier.inside[linear.mesh.digest]


def _two_threads(linear: LinearMap, other: LinearMap) -> str:
    return (
        f"{linear.label}: on rank {linear.mesh.rank}, thread {threading.current_thread().name!r} began this call while"
        f" another thread is inside {other.label} over the same mesh. Calls over a mesh come one after the other, in one"
        " order on all ranks: make them from one thread, or wait for the other; or give each thread a mesh of its own"
    )


def _launch(
    carrier: Carrier,
    linear: LinearMap,
    options: Options,
    batch: Sequence[int] | None,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor] | None,
) -> tuple[torch.Tensor, ...]:
    flight = _FLIGHT.get()
    inputs = _plain(inputs)
    sources = _located(linear, options, inputs)
    targets = None if outputs is None else _located(linear, options, _written(outputs, flight))
    differentiated = options.differentiated if linear.takes_part else None
    dtype = inputs[0].dtype if inputs else options.dtype
    kind = dtype, tuple(batch or ()), differentiated, options.forward
    call = linear.memo.get(kind) or call_of(linear, *kind)
    origin, known = options.origin, True
    if origin is not None:
        call = call.of(
            origin.name, origin.facts(carrier.ledger(linear.mesh)) if options.forward else origin.facts_behind()
        )
    if options.forward and (batch or (checking() if options.checked is None else options.checked)):
        known = agree(carrier, call)
    if origin is not None and options.forward:
        origin.begin(carrier.ledger(linear.mesh), known)
    if outputs is None:
        outputs = allocate(linear, dtype or torch.float32, options.device, batch, True)
    for watcher in _WATCHERS:
        watcher(linear, outputs)
    at_once = flight is not None
    if isinstance(linear, Collective):
        finish = start_collective(linear, carrier, call, inputs[0], _written(outputs, flight)[0], at_once=at_once)
    elif isinstance(linear, Plan):
        targets = targets or locate(outputs if flight is None else _written(outputs, flight))
        finish = start_exchange(linear.local, carrier, call, sources, targets, at_once=at_once)
    else:
        raise TypeError(f"{linear.label}: nothing runs a {type(linear).__name__}")
    if flight is None:
        finish()
    else:
        flight.finishes += [carrier.watch(call, outputs), finish]
        flight.keep += inputs
    return tuple(outputs)


def _written(outputs: Sequence[torch.Tensor], flight: Flight | None) -> Sequence[torch.Tensor]:
    """The outputs as they are written to.

    What is in flight is written after autograd has seen the outputs, and must not look like a change to them.
    """
    return outputs if flight is None else [output.data for output in outputs]


def _located(linear: LinearMap, options: Options, tensors: Sequence[torch.Tensor]) -> Memory:
    """Where tensors lie; one whose memory is gone is a fault of this rank, told before anything moves."""
    try:
        return locate(tensors)
    except RuntimeError as error:
        fault = RuntimeError(f"{linear.label}: on rank {linear.mesh.rank}, {error}")
        if options.forward and checking():
            report_fault(carrier_of(linear.mesh), linear.mesh, linear.label, fault)
        raise fault from None


def call_of(
    linear: LinearMap, dtype: torch.dtype | None, batch: tuple[int, ...], differentiated: bool | None, forward: bool
) -> Call:
    """See `Call`; made once, and kept with the map."""
    kind = dtype, batch, differentiated, forward
    return linear.memo.setdefault(kind, Call(linear.label, linear.digest, linear.mesh, *kind, linear=linear))


def _plain(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors' memory as it will travel: contiguous, without lazy conjugation or negation."""
    as_it_is = all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(_REQUIRES_GRAD, tensors))
    if as_it_is and not any(map(torch.Tensor.is_neg, tensors)) and not any(map(torch.Tensor.is_conj, tensors)):
        return tensors
    return [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]
