"""Linear maps over ranks that compose: one autograd Function and one operator for every movement of data.

`move` computes the same numbers eagerly, under autograd, `torch.func` and `torch.compile`, because its backward, jvp
and vmap rules are the map's transpose, the map itself, and the map on elements with trailing batch dims. Every call
also takes and returns a *link*, a differentiable zero: the one input that a rank has where it holds no tensor.
"""

import inspect
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch.autograd import functional as autograd_functional

from mfsdp_func.effects.agreement import agree, checking, report_fault
from mfsdp_func.effects.blocks import Memory, locate
from mfsdp_func.effects.carrier import Call, Carrier
from mfsdp_func.effects.collectives import start_collective
from mfsdp_func.effects.exchange import empty_outputs, start_exchange
from mfsdp_func.effects.here import carrier_of, check_place
from mfsdp_func.effects.move_operator import LIBRARY, call_operator, remembered
from mfsdp_func.effects.origin import Origin
from mfsdp_func.effects.torch_internals import (
    active_transforms,
    batched_zero,
    forward_mode_allowed,
    is_alone,
    is_watched,
    traced_stack,
)
from mfsdp_func.plans.collective import Collective
from mfsdp_func.plans.linear_map import LinearMap
from mfsdp_func.plans.plan import Plan


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
        while self.finishes:
            self.finishes.pop(0)()


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
    try:
        return _launch(carrier, linear, options, batch, inputs, outputs)
    finally:
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


_REQUIRES_GRAD = attrgetter("requires_grad")


def _plain(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The tensors' memory as it will travel: contiguous, without lazy conjugation or negation."""
    as_it_is = all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(_REQUIRES_GRAD, tensors))
    if as_it_is and not any(map(torch.Tensor.is_neg, tensors)) and not any(map(torch.Tensor.is_conj, tensors)):
        return tensors
    return [tensor.detach().resolve_conj().resolve_neg().contiguous() for tensor in tensors]


def _move_impl(
    inputs: list[torch.Tensor],
    link: torch.Tensor,
    after: torch.Tensor | None,
    key: str,
    dtype: torch.dtype | None,
    forward: bool,
    differentiated: bool,
) -> list[torch.Tensor]:
    linear, options = remembered(key), Options(dtype, link.device, differentiated, forward)
    check_place(linear.mesh, linear.label)
    # An operator's results may not share a storage: compilers reuse the memory of each on its own.
    outputs = allocate(linear, dtype or torch.float32, link.device, link.shape, False)
    return [torch.zeros_like(link), *launch(linear, options, link.shape, inputs, outputs)]


LIBRARY.impl("move", _move_impl, "CompositeExplicitAutograd")


class _Move(torch.autograd.Function):
    """`(link, map, options, *inputs) -> (link, *outputs)`, every tensor with the link's shape as trailing dims."""

    @staticmethod
    def forward(link: torch.Tensor, linear: LinearMap, options: Options, *inputs: torch.Tensor) -> tuple[Any, ...]:
        if _is_traced(link):
            return tuple(call_operator(linear, inputs, link, options.dtype, options.forward, options.differentiated))
        return (torch.zeros_like(link), *launch(linear, options, link.shape, inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        link, ctx.linear, ctx.options = inputs[:3]
        ctx.batch = link.shape
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        link, *rest = cotangents
        dtype = ctx.options.dtype
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            return (link, *[None] * (2 + len(ctx.linear.input_numels)))
        options = replace(ctx.options, forward=False, differentiated=False)
        # The forward link makes this call depend on the forward inputs: a second derivative must come through here
        # on every rank, also on one whose cotangents are constants.
        (forward_link,) = ctx.saved_tensors
        link, *gradients = _Move.apply(_batched(link + forward_link), ctx.linear.transpose, options, *rest)
        return (link, None, None, *gradients)

    @staticmethod
    def jvp(ctx: Any, link: torch.Tensor | None, _map: None, _options: None, *tangents: torch.Tensor | None) -> Any:
        def zeros(*shape: int, dtype: torch.dtype | None) -> torch.Tensor:
            return torch.zeros((*shape, *ctx.batch), dtype=dtype, device=ctx.options.device)

        known = [
            zeros(numel, dtype=ctx.options.dtype) if tangent is None else tangent
            for numel, tangent in zip(ctx.linear.input_numels, tangents, strict=True)
        ]
        # The forward link makes this call depend on the forward inputs, see `backward`; of it itself no derivative counts.
        (forward_link,) = ctx.saved_tensors
        # (Inside a jvp rule torch disables forward mode for plain operators, and the sum would lose outer tangents.)
        with forward_mode_allowed():
            link = forward_link if link is None else link + forward_link
        return _Move.apply(link, ctx.linear, replace(ctx.options, forward=False), *known)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], link: torch.Tensor, linear: Any, options: Any, *inputs: Any) -> Any:
        def last(tensor: torch.Tensor, dim: int | None) -> torch.Tensor:
            if dim is None:
                return tensor.unsqueeze(-1).expand(*tensor.shape, info.batch_size)
            return tensor.movedim(dim, -1)

        batched = [last(tensor, dim) for tensor, dim in zip(inputs, in_dims[3:], strict=True)]
        outputs = _Move.apply(last(link, in_dims[0]), linear, options, *batched)
        return outputs, tuple(output.dim() - 1 for output in outputs)


def _is_traced(link: torch.Tensor) -> bool:
    """Whether a compiler or another dispatch mode must see an operator instead of the effect itself."""
    return type(link) is not torch.Tensor or is_watched()


def _batched(link: torch.Tensor) -> torch.Tensor:
    """The link with a batch dim on every active vmap level, so that all ranks exchange equally many elements.

    Inside `vmap` one rank may see a batched tensor where another, that holds nothing, sees none.
    """
    zero = batched_zero(link.device)
    return link if zero is None else link + zero


def is_eager(link: torch.Tensor | None, tracked: bool) -> bool:
    """Whether nothing follows this call: no autograd, no transform, no tracing; its effect can run right here."""
    return not tracked and (link is None or not (link.requires_grad and torch.is_grad_enabled())) and is_alone()


def move(
    linear: LinearMap, options: Options, link: torch.Tensor | None, inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Run a map on inputs of any shapes (a collective: flat); returns the new link, and outputs of its `output_shapes`.

    Raises:
        RuntimeError: inside a `torch.func` gradient on a rank that others wait for, but which has no input that could
            make it run the backward pass; and inside `jacrev` and `jacfwd`.
    """
    tracked = torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, inputs))
    if is_eager(link, tracked):
        if not inputs and torch.is_grad_enabled():  # where others differentiate, this rank may be asked to as well
            _refuse_jacobians(linear)
        outputs = launch(linear, options, None, inputs)
        return torch.zeros((), device=options.device) if link is None else link, outputs
    _refuse_unlinked(linear, link, inputs)
    _refuse_jacobians(linear)
    if link is None:
        link = torch.zeros((), device=options.device)
    options = replace(options, differentiated=tracked or link.requires_grad)
    flat = [tensor.reshape(-1) for tensor in inputs]
    results: Any = _Move.apply(_batched(link), linear, options, *flat)
    return results[0], tuple([out.view(shape) for out, shape in zip(results[1:], linear.output_shapes, strict=True)])


def _refuse_unlinked(linear: LinearMap, link: torch.Tensor | None, inputs: Sequence[torch.Tensor]) -> None:
    transforms = {"Grad", "Jvp"}.intersection(active_transforms())
    if transforms and link is None and not inputs and linear.takes_part:
        error = RuntimeError(
            f"{linear.label}: differentiated on rank {linear.mesh.rank}, which has no tensor to give: its gradients would"
            " silently be zero while its peers wait. Thread the token of the operation before with after=, or link the"
            " call to this rank's own differentiated tensors with after=Token.linked_to(tensor)"
        )
        if checking():
            report_fault(carrier_of(linear.mesh), linear.mesh, linear.label, error)
        raise error


def _refuse_jacobians(linear: LinearMap) -> None:
    if found := _jacobian_around():
        raise RuntimeError(
            f"{linear.label}: {found} goes through the elements of this rank one by one, or as a batch, so that an exchange"
            " would mix the rows of different ranks; take vjp or jvp of one direction at a time, alike on all ranks"
        )


def _jacobian_around() -> str | None:
    """The innermost caller that takes a whole Jacobian."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    files = _jacobian_lines()
    while frame is not None:
        for name, span in files.get(frame.f_code.co_filename, {}).items():
            if frame.f_lineno in span:
                return name
        frame = frame.f_back
    # Dynamo runs no frames of the functions that it traces, but keeps a stack of its own.
    for traced in reversed(traced_stack()):
        for name, span in files.get(traced.filename, {}).items():
            if (traced.lineno or 0) in span:
                return name
    return None


@cache
def _jacobian_lines() -> dict[str, dict[str, range]]:
    """File -> name and lines of each function in it that takes whole Jacobians."""
    spans: dict[str, dict[str, range]] = {}
    for home, function in (
        ("torch.func", torch.func.jacrev),
        ("torch.func", torch.func.jacfwd),
        ("torch.autograd.functional", autograd_functional.jacobian),
        ("torch.autograd.functional", autograd_functional.hessian),
    ):
        source, start = inspect.getsourcelines(function)
        file = inspect.getfile(inspect.unwrap(function))
        spans.setdefault(file, {})[f"{home}.{function.__name__}"] = range(start, start + len(source))
    return spans
