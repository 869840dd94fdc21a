"""One call of an operation, from its tensors to results and a token: checks, tokens, streams, faults."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.fx.node import has_side_effect

from mfsdp_func.effects.agreement import checking, report_fault
from mfsdp_func.effects.here import carrier_of, check_place, this_rank
from mfsdp_func.effects.launch import Options, in_flight
from mfsdp_func.effects.move import move
from mfsdp_func.effects.move_operator import remembered
from mfsdp_func.effects.origin import Origin, origin_here
from mfsdp_func.effects.streams import SIMULATED_STREAMS, AnyStream, Queued, mark_used, streams_of
from mfsdp_func.effects.token import After, Pending, Token, as_tokens, begin
from mfsdp_func.plans.linear_map import LinearMap


@contextmanager
def faults_reported(linear: LinearMap) -> Generator[None, None, None]:
    """Check that the map is this rank's; while the agreement check is on, let faults seen here be raised on all ranks.

    Raises:
        ValueError: if the map is as another rank sees it.
    """
    try:
        check_place(linear.mesh, linear.label)
        yield
    except Exception as error:
        tell_fault(linear, error)
        raise


def tell_fault(linear: LinearMap, error: Exception) -> None:
    """While the agreement check is on, let a fault seen here be raised on all ranks."""
    mesh = linear.mesh
    if checking() and (here := this_rank()) in mesh:
        report_fault(carrier_of(mesh), mesh.with_rank(here), linear.label, error)


class Wanted(NamedTuple):
    """What a caller says of the elements that move; what is None is left to the map, and to the tensors given.

    Attributes:
        dtype: of the elements.
        device: of the results.
        dtype_origin: how a message tells where `dtype` comes from.
    """

    dtype: torch.dtype | None = None
    device: torch.device | str | None = None
    dtype_origin: str = "dtype={} was asserted"


class Order(NamedTuple):
    """When a call runs: after which tokens, on which CUDA stream, and whether it may still be in flight on return."""

    after: After = ()
    stream: AnyStream | None = None
    async_op: bool = False


def check_tensors(
    linear: LinearMap,
    tensors: Sequence[torch.Tensor],
    wanted: Wanted,
    tokens: Sequence[Token],
    of: str = "",
    groups: Sequence[Any] = (),
) -> Options:
    """Check this rank's inputs against the map, and settle the dtype and device of its outputs.

    Args:
        linear: the map.
        tensors: what this rank gives.
        wanted: see `Wanted`.
        tokens: of the operations before; they know the dtype where this rank gives no tensor.
        of: the name of what moves, where the map's label does not say it.
        groups: the caller's groups; equal ones of those without a name are told apart by the order of their first use.

    Raises:
        TypeError: on something that is no plain tensor, on mixed dtypes, on another dtype than the one wanted, or where
            the dtype cannot be known.
        ValueError: on a wrong number of elements, or on mixed devices.
    """
    dtype, dtype_origin = (
        (linear.dtype, "the group is of {}") if wanted.dtype is None else (wanted.dtype, wanted.dtype_origin)
    )
    device = None if wanted.device is None else torch.device(wanted.device)
    checked, origin = checking(), None
    if checked or carrier_of(linear.mesh).compares:
        origin = origin_here(of, [group for group in groups if not group.name])
    first = tensors[0] if tensors else None
    every = () if are_alike(tensors, linear.input_numels) else zip(tensors, linear.input_numels, strict=True)
    for n, (tensor, numel) in enumerate(every):
        name = linear.input_name(n)
        if not isinstance(tensor, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"{linear.label}: tensor {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if type(tensor) is not torch.Tensor and hasattr(tensor, "to_local"):
            raise TypeError(f"{linear.label}: tensor {name} is a {type(tensor).__name__}; pass its local shard")
        if tensor.layout != torch.strided:
            raise TypeError(f"{linear.label}: tensor {name} has layout {tensor.layout}; only strided tensors can move")
        if tensor.numel() != numel:
            part = (
                "the full tensor"
                if linear.label.startswith("scatter")
                else "exactly this rank's part, as the layout cuts it"
            )
            raise ValueError(
                f"{linear.label}: tensor {name} has {tensor.numel()} elements {tuple(tensor.shape)} on rank"
                f" {linear.mesh.rank}, expected {numel} {linear.input_shape(n)}; give {part}"
            )
        if tensor.dtype != first.dtype:  # pyright: ignore[reportOptionalMemberAccess]
            raise TypeError(
                f"{linear.label}: tensor {name} is {tensor.dtype} but tensor {linear.input_name(0)} is {first.dtype};"  # pyright: ignore[reportOptionalMemberAccess]
                " one call moves one dtype: convert, or make one group per dtype"
            )
        if tensor.device != first.device:  # pyright: ignore[reportOptionalMemberAccess]
            raise ValueError(
                f"{linear.label}: tensor {name} is on {tensor.device} but tensor {linear.input_name(0)} on {first.device};"  # pyright: ignore[reportOptionalMemberAccess]
                " bring all of them to one device"
            )
    if first is None:
        return replace(_options_without_tensor(linear, dtype, device, tokens, origin), checked=checked)
    if dtype not in (None, first.dtype):
        raise TypeError(
            f"{linear.label}: {dtype_origin.format(dtype)}, but tensor {linear.input_name(0)} is {first.dtype}; convert it"
        )
    if device is not None and (device.type != first.device.type or device.index not in (None, first.device.index)):
        raise ValueError(
            f"{linear.label}: device={device} was asserted, but tensor {linear.input_name(0)} is on {first.device}"
        )
    return Options(first.dtype, first.device, origin=origin, checked=checked)


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_DTYPE, _DEVICE, _LAYOUT = attrgetter("dtype"), attrgetter("device"), attrgetter("layout")


def are_alike(tensors: Sequence[torch.Tensor], numels: tuple[int, ...]) -> bool:
    """Whether all are plain strided tensors of one dtype, one device and these sizes: thousands of checks at once."""
    return (
        {*map(type, tensors)} <= _PLAIN
        and len({*map(_DTYPE, tensors)}) == len({*map(_DEVICE, tensors)}) == 1
        and {*map(_LAYOUT, tensors)} == {torch.strided}
        and tuple(map(torch.Tensor.numel, tensors)) == numels
    )


def _options_without_tensor(
    linear: LinearMap,
    dtype: torch.dtype | None,
    device: torch.device | None,
    tokens: Sequence[Token],
    origin: Origin | None,
) -> Options:
    known = dtype or next((token.dtype for token in tokens if token.dtype), None)
    if known is None and linear.output_numels:
        raise TypeError(
            f"{linear.label}: rank {linear.mesh.rank} gives no tensor, so it cannot know the dtype of its results;"
            " pass dtype=, or the token of the operation before with after=, or make the GroupOwnerLayout with dtype="
        )
    where = device or (tokens[0].link.device if tokens else carrier_of(linear.mesh).device(linear.mesh))
    return Options(known, where, origin=origin)


def run(
    linear: LinearMap, options: Options, inputs: Sequence[torch.Tensor], tokens: Sequence[Token], order: Order
) -> tuple[tuple[torch.Tensor, ...], Token]:
    """Run a map on checked inputs, after `tokens`, which are those of `order`.

    Raises:
        ValueError: if a stream is given for tensors that are not on CUDA.
    """
    if options.device.type == "cuda" or SIMULATED_STREAMS.get() is not None:
        return _run_on_streams(linear, options, inputs, tokens, order)
    if order.stream is not None:
        raise ValueError(
            f"{linear.label}: stream= is for CUDA tensors, these are on {options.device}; use async_op=True"
        )
    for token in tokens:
        token.wait()
    if not order.async_op:
        link, outputs = move(linear, options, joined_link(tokens) if tokens else None, inputs)
        return outputs, Token(link, (), outputs[0].dtype if outputs else options.dtype)
    with in_flight() as flight:
        link, outputs = move(linear, options, joined_link(tokens) if tokens else None, inputs)
    work = begin(Pending(linear.label, flight.finish, flight.keep, outputs))
    return outputs, Token(link, work, _dtype(options, outputs))


def _run_on_streams(
    linear: LinearMap, options: Options, inputs: Sequence[torch.Tensor], tokens: Sequence[Token], order: Order
) -> tuple[tuple[torch.Tensor, ...], Token]:
    """`run` where streams order work: it is queued, after what it needs, and an event tells its end."""
    streams = streams_of(options.device)
    current = streams.current_stream(options.device)
    chosen = order.stream or (streams.side_stream(options.device) if order.async_op else current)
    if order.stream is None and order.async_op:
        chosen.wait_stream(current)
    with streams.on_stream(chosen):
        for token in tokens:
            token.wait(chosen)
        link, outputs = move(linear, options, joined_link(tokens), inputs)
        if chosen == current:
            return outputs, Token(link, (), _dtype(options, outputs))
        for tensor in inputs:
            mark_used(tensor, chosen)
        work = begin(Queued(linear.label, chosen.record_event(), (*outputs, link), options.device))
    return outputs, Token(link, work, _dtype(options, outputs))


def run_traced(
    key: str, inputs: Sequence[torch.Tensor], wanted: Wanted, group_dtype: torch.dtype | None, after: After
) -> tuple[list[torch.Tensor], Token]:
    """`run` as `torch.compile` traces it: a remembered map on tensors that are checked while tracing.

    Args:
        key: of the map, see `remember`.
        inputs: of any shape.
        wanted: see `Wanted`.
        group_dtype: what the map says where `wanted` says nothing.
        after: tokens without work in flight.

    Returns:
        The outputs and a token.

    Raises:
        RuntimeError: if a token has work in flight.
        TypeError, ValueError: see `check_tensors`.
    """
    tokens = as_tokens(after)
    for token in tokens:
        token.wait()
    known: torch.dtype | None = None
    for token in tokens:
        known = known or token.dtype
    dtype, device, origin = wanted
    link, *outputs = _in_graph(key, dtype, device, origin, known, joined_link(tokens), *inputs)
    return outputs, Token(link, (), getattr(inputs[0], "dtype", None) if inputs else dtype or group_dtype or known)


@torch.compiler.allow_in_graph
def _in_graph(
    key: str,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    dtype_origin: str,
    known: torch.dtype | None,
    link: torch.Tensor | None,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    linear = remembered(key)
    tokens = () if link is None else (Token(link, (), known),)
    options = replace(
        check_tensors(linear, tensors, Wanted(dtype, device, dtype_origin), tokens), origin=None, checked=None
    )
    link, outputs = move(linear, options, link, tensors)
    return (link, *outputs)


# Dynamo would drop a call whose results nobody reads.
has_side_effect(_in_graph)


def joined_link(tokens: Sequence[Token]) -> torch.Tensor | None:
    """The sum of the tokens' links: a zero that depends on all of them."""
    link: torch.Tensor | None = None
    for token in tokens:
        link = token.link if link is None else link + token.link
    return link


def _dtype(options: Options, outputs: Sequence[torch.Tensor]) -> torch.dtype | None:
    return outputs[0].dtype if outputs else options.dtype
