"""One call of an operation, from its tensors to results and a token: checks, tokens, streams, faults."""

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from operator import attrgetter

import torch
from torch.fx.node import has_side_effect

from mfsdp_func.effects.agreement import checking, report_fault
from mfsdp_func.effects.here import carrier_of, check_place, this_rank
from mfsdp_func.effects.move import LinearMap, Options, in_flight, move
from mfsdp_func.effects.move_operator import remembered
from mfsdp_func.effects.token import After, AnyStream, Pending, Token, as_tokens, mark_used


@contextmanager
def faults_reported(linear: LinearMap) -> Generator[None, None, None]:
    """Check that the map is this rank's; while the agreement check is on, let faults seen here be raised on all ranks.

    Raises:
        ValueError: if the map is as another rank sees it.
    """
    mesh = linear.mesh
    try:
        check_place(mesh, linear.label)
        yield
    except Exception as error:
        if checking() and (here := this_rank()) in mesh:
            report_fault(carrier_of(mesh), mesh.with_rank(here), linear.label, error)
        raise


def check_tensors(
    linear: LinearMap,
    names: Sequence[object],
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None,
    device: torch.device | None,
    tokens: Sequence[Token],
    says: str = "dtype={} was asserted",
) -> Options:
    """Check this rank's inputs against the map, and settle the dtype and device of its outputs.

    Args:
        linear: the map.
        names: of the tensors, for messages.
        tensors: what this rank gives.
        dtype: what they must be in; None where nobody says it.
        device: likewise.
        tokens: of the operations before; they know the dtype where this rank gives no tensor.
        says: how a message tells where `dtype` comes from.

    Raises:
        TypeError: on something that is no plain tensor, on mixed dtypes, on another dtype than `dtype`, or where the
            dtype cannot be known.
        ValueError: on a wrong number of elements, or on mixed devices.
    """
    first = tensors[0] if tensors else None
    every = () if are_alike(tensors, linear.input_numels) else zip(names, tensors, linear.input_numels, strict=True)
    for name, tensor, numel in every:
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
                f" {linear.mesh.rank}, expected {numel}; give {part}"
            )
        if tensor.dtype != first.dtype:  # pyright: ignore[reportOptionalMemberAccess]
            raise TypeError(
                f"{linear.label}: tensor {name} is {tensor.dtype} but tensor {names[0]} is {first.dtype};"  # pyright: ignore[reportOptionalMemberAccess]
                " one call moves one dtype: convert, or make one group per dtype"
            )
        if tensor.device != first.device:  # pyright: ignore[reportOptionalMemberAccess]
            raise ValueError(
                f"{linear.label}: tensor {name} is on {tensor.device} but tensor {names[0]} on {first.device};"  # pyright: ignore[reportOptionalMemberAccess]
                " bring all of them to one device"
            )
    if first is None:
        return _options_without_tensor(linear, dtype, device, tokens)
    if dtype not in (None, first.dtype):
        raise TypeError(f"{linear.label}: {says.format(dtype)}, but tensor {names[0]} is {first.dtype}; convert it")
    if device is not None and (device.type != first.device.type or device.index not in (None, first.device.index)):
        raise ValueError(f"{linear.label}: device={device} was asserted, but tensor {names[0]} is on {first.device}")
    return Options(first.dtype, first.device)


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
    linear: LinearMap, dtype: torch.dtype | None, device: torch.device | None, tokens: Sequence[Token]
) -> Options:
    known = dtype or next((token.dtype for token in tokens if token.dtype), None)
    if known is None and linear.output_numels:
        raise TypeError(
            f"{linear.label}: rank {linear.mesh.rank} gives no tensor, so it cannot know the dtype it will receive;"
            " pass dtype=, or the token of the operation before with after=, or make the GroupOwnerLayout with dtype="
        )
    where = device or (tokens[0].link.device if tokens else carrier_of(linear.mesh).device(linear.mesh))
    return Options(known, where)


def run(
    linear: LinearMap,
    options: Options,
    inputs: Sequence[torch.Tensor],
    tokens: Sequence[Token],
    stream: AnyStream | None,
    async_op: bool,
) -> tuple[tuple[torch.Tensor, ...], Token]:
    """Run a map on checked inputs, after `tokens`; see `gather` for `stream` and `async_op`.

    Raises:
        ValueError: if a stream is given for tensors that are not on CUDA.
    """
    if options.device.type == "cuda":
        return _run_on_cuda(linear, options, inputs, tokens, stream, async_op)
    if stream is not None:
        raise ValueError(
            f"{linear.label}: stream= is for CUDA tensors, these are on {options.device}; use async_op=True"
        )
    for token in tokens:
        token.wait()
    if not async_op:
        link, outputs = move(linear, options, joined_link(tokens), inputs)
        return outputs, Token(link, (), _dtype(options, outputs))
    with in_flight() as flight:
        link, outputs = move(linear, options, joined_link(tokens), inputs)
    work = Pending(linear.label, flight.finish, flight.keep, outputs)
    return outputs, Token(link, (work,), _dtype(options, outputs))


def _run_on_cuda(
    linear: LinearMap,
    options: Options,
    inputs: Sequence[torch.Tensor],
    tokens: Sequence[Token],
    stream: AnyStream | None,
    async_op: bool,
) -> tuple[tuple[torch.Tensor, ...], Token]:
    current = torch.cuda.current_stream(options.device)
    chosen = stream or (_side_stream(options.device) if async_op else current)
    if stream is None and async_op:
        chosen.wait_stream(current)
    with torch.cuda.stream(chosen):  # pyright: ignore[reportArgumentType]
        for token in tokens:
            token.wait(chosen)
        link, outputs = move(linear, options, joined_link(tokens), inputs)
        if chosen == current:
            return outputs, Token(link, (), _dtype(options, outputs))
        for tensor in inputs:
            mark_used(tensor, chosen)
        event = torch.cuda.Event()
        event.record(chosen)  # pyright: ignore[reportArgumentType]
    work = Pending(linear.label, _nothing, (), (*outputs, link), event)
    return outputs, Token(link, (work,), _dtype(options, outputs))


def run_traced(
    key: str,
    names: Sequence[object],
    inputs: Sequence[torch.Tensor],
    said: tuple[torch.dtype | None, torch.device | str | None, str],
    after: After,
) -> tuple[list[torch.Tensor], Token]:
    """`run` as `torch.compile` traces it: a remembered map on tensors that are checked while tracing.

    Args:
        key: of the map, see `remember`.
        names: of the inputs, for messages.
        inputs: of any shape.
        said: the dtype and device that the caller or the group says, and how a message tells where the dtype is from.
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
    link, *outputs = _in_graph(key, tuple(names), *said, known, joined_link(tokens), *inputs)
    return outputs, Token(link, (), getattr(inputs[0], "dtype", None) if inputs else said[0] or known)


@torch.compiler.allow_in_graph
def _in_graph(
    key: str,
    names: tuple[object, ...],
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    says: str,
    known: torch.dtype | None,
    link: torch.Tensor | None,
    *tensors: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    linear = remembered(key)
    where = torch.device(device) if device is not None else None
    tokens = () if link is None else (Token(link, (), known),)
    options = check_tensors(linear, names, tensors, dtype, where, tokens, says)
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


@cache
def _side_stream(device: torch.device) -> "torch.cuda.Stream":
    return torch.cuda.Stream(device)


def _nothing() -> None:
    pass
