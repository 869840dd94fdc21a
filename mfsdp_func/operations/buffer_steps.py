"""The steps by which a buffer changes its placements, on its spec and this rank's elements."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mfsdp_func.effects.call import Order, Wanted, check_tensors, joined_link, run, run_traced, tell_fault
from mfsdp_func.effects.here import check_place
from mfsdp_func.effects.token import Token, as_tokens
from mfsdp_func.operations.spec_facts import fact_of, spec_of
from mfsdp_func.plans.redistribution import Step
from mfsdp_func.values.buffer_spec import BufferSpec, averages, local_numel, named
from mfsdp_func.values.placement import Partial

# Of others torch has no sum, or one that is no sum.
_FLOATS = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
)
_ADDED = frozenset((*_FLOATS, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8))


def local_of(tensors: Sequence[torch.Tensor] | Mapping[int, torch.Tensor], spec: BufferSpec) -> torch.Tensor:
    """This rank's range of a buffer that holds full tensors. Errors as of `DBuffer.distribute_tensors`."""
    layout = spec.layout
    if any(isinstance(placement, Partial) for placement in spec.placements):
        raise ValueError(f"DBuffer.distribute_tensors: {spec.placements} holds a Partial; distribute, then relabel")
    given = tensors if isinstance(tensors, Mapping) else dict(enumerate(tensors))
    if surplus := [i for i in given if i not in range(len(layout.tensor_shapes))]:
        raise ValueError(
            f"DBuffer.distribute_tensors: {surplus[0]!r} is no tensor of the layout, which has"
            f" {len(layout.tensor_shapes)} ({len(given)} given); leave it out"
        )
    pieces: list[torch.Tensor] = []
    cursor, example = spec.local_range.start, next(iter(given.values()), torch.empty(0))
    for i, part in spec.held:
        if i not in given or given[i].shape != layout.tensor_shapes[i]:
            got = tuple(given[i].shape) if i in given else "nothing"
            raise ValueError(
                f"DBuffer.distribute_tensors: tensor {i} must have its full shape {tuple(layout.tensor_shapes[i])},"
                f" got {got}"
            )
        if given[i].dtype != example.dtype:
            raise TypeError(
                f"DBuffer.distribute_tensors: tensor {i} is {given[i].dtype}, others are {example.dtype};"
                " one buffer has one dtype"
            )
        start = layout.tensor_to_offset[i] + part.start
        pieces += [example.new_zeros(start - cursor), given[i].reshape(-1)[part.start : part.end]]
        cursor = start + part.numel
    pieces.append(example.new_zeros(spec.local_range.start + spec.local_numel - cursor))
    return torch.cat(pieces)


def check_dtype(spec: BufferSpec, dtype: torch.dtype) -> None:
    """Refuse integers that were to be averaged.

    Raises:
        TypeError: if a placement is ``Partial("avg")`` and the dtype has no quotients.
    """
    if not (dtype.is_floating_point or dtype.is_complex) and fact_of(averages, spec):
        raise TypeError(f'{dtype} buffers cannot be averaged: one axis is Partial("avg"); use Partial("sum")')


def check_flat(what: str, local: torch.Tensor) -> None:
    """Refuse what is no flat storage. Not done where a `DBuffer` is made: transforms put placeholders of all kinds there.

    Raises:
        ValueError: if the local buffer has not one dim.
    """
    if local.dim() != 1:
        raise ValueError(
            f"{what}: the DBuffer's local_buffer has shape {tuple(local.shape)}, expected one dim; make buffers with"
            " DBuffer.from_local, and use a batch of them inside torch.func.vmap"
        )


def viewed(spec: BufferSpec, local: torch.Tensor, step: Step) -> tuple[BufferSpec, torch.Tensor]:
    """The step without communication: this rank's part of what it holds, as a view where no padding is added."""
    _, target, _, part = step
    new = spec_of(target)
    check_flat("view", local)
    check_dtype(new, local.dtype)
    if part.numel != local.shape[0]:
        local = local[part.start : part.start + part.numel]
    numel = fact_of(local_numel, new)
    if numel != part.numel:
        local = torch.cat([local, local.new_zeros(numel - part.numel)])  # (`pad` has no zero of some dtypes)
    if not torch.compiler.is_compiling():  # compiled code does not guard on names
        new = named(new, spec.name)
    return new, local


def communicate(
    spec: BufferSpec, local: torch.Tensor, step: Step, order: Order
) -> tuple[BufferSpec, torch.Tensor, Token]:
    """The step that is one collective. Every rank of the mesh calls.

    Raises:
        TypeError: if elements of this dtype cannot be added.
    """
    kind, target = step[:2]
    collective: Any = step[2]  # where this is traced, its key
    check_flat(kind, local)
    if kind != "allgather" and local.dtype not in _ADDED:
        raise TypeError(f"{kind}: {local.dtype} cannot be added; cast the buffer first")
    if torch.compiler.is_compiling():
        (output,), token = run_traced(collective, [local], Wanted(), None, order.after)
        return spec_of(target), output, token
    try:
        check_place(collective.mesh, collective.label)
        tokens = as_tokens(order.after)
        options = check_tensors(collective, (local,), Wanted(), tokens, of=spec.name)
    except Exception as error:
        tell_fault(collective, error)
        raise
    (output,), token = run(collective, options, (local,), tokens, order)
    return named(target, spec.name), output, token


def take_steps(
    spec: BufferSpec, local: torch.Tensor, change: tuple[BufferSpec, Sequence[Step]], order: Order
) -> tuple[BufferSpec, torch.Tensor, Token]:
    """All steps of a change of placements; the last collective may stay in flight."""
    target, steps = change
    check_dtype(spec_of(target), local.dtype)
    tokens, dtype = as_tokens(order.after), local.dtype
    link = joined_link(tokens) if tokens else None
    token = Token(torch.zeros((), device=local.device) if link is None else link, dtype=dtype)
    for n, step in enumerate(steps):
        if step[0] == "view":
            _wait(tokens)
            spec, local = viewed(spec, local, step)
        else:
            last = order.async_op and n == len(steps) - 1
            spec, local, token = communicate(spec, local, step, Order(tokens, order.stream, last))
            tokens = (token,)
    if not steps:
        _wait(tokens)
    return spec, local, token


def _wait(tokens: Sequence[Token]) -> None:
    for token in tokens:
        token.wait()
