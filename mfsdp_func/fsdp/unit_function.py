"""One call of a unit as an autograd function: its derivatives of any order, forward mode and batches."""

from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import and_, attrgetter, is_not, not_
from typing import Any

import torch

from mfsdp_func.effects.torch_internals import is_untransformed
from mfsdp_func.fsdp.torch_internals import hooks_allowed, inner_of, is_wrapped
from mfsdp_func.fsdp.unit import UnitCall, learned_of
from mfsdp_func.fsdp.unit_facts import Asked, Tensors, Wanted, differentiable, floats_of, is_differentiable


class _Forward(torch.autograd.Function):
    """``(call, wanted, *tensors) -> outputs``."""

    @staticmethod
    def forward(call: UnitCall, wanted: Wanted, *tensors: torch.Tensor) -> Tensors:
        return call.forward_keeping(tensors, wanted)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, ctx.wanted, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)
        learned = ctx.call.learned
        if learned is not None and not ctx.wanted.transformed:
            ctx.mark_non_differentiable(*compress(output, map(not_, learned.carries)))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> tuple[Any, ...]:
        call: UnitCall = ctx.call
        wanted: Wanted = ctx.wanted
        with hooks_allowed():  # activation checkpointing around the unit may run it again now
            tensors = ctx.saved_tensors
        parts = call.split(tensors)
        needed: tuple[bool, ...] = ctx.needs_input_grad[2:]
        first = len(call.param_groups) if call.accumulate else 0  # of what gradients of groups go to
        groups = needed[first : first + len(call.param_groups)]
        inputs = needed[len(needed) - len(parts.inputs) :]
        outputs = (*map(and_, map(is_not, cotangents, repeat(None)), learned_of(call).outputs),)
        asked = Asked((*map(and_, groups, wanted.groups),), (*map(and_, inputs, wanted.inputs),), outputs, wanted)
        gradients = iter(_Backward.apply(call, asked, *tensors, *compress(cotangents, outputs)))
        found: list[Any] = [None] * len(needed)
        for n, is_asked in enumerate(asked.groups):
            found[first + n] = next(gradients) if is_asked else None
        for n, is_asked in enumerate(asked.inputs):
            found[len(needed) - len(parts.inputs) + n] = next(gradients) if is_asked else None
        return (None, None, *found)

    @staticmethod
    def jvp(ctx: Any, _call: None, _wanted: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: UnitCall = ctx.call
        moved = iter(_pushforward(lambda tensors: floats_of(call.compute(tensors)), ctx.saved_tensors, tangents))
        return tuple(next(moved) if has_gradient else None for has_gradient in learned_of(call).outputs)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: UnitCall, wanted: Wanted, *tensors: torch.Tensor) -> Any:
        return _vmapped(call.compute, info, in_dims[2:], tensors)


class _Backward(torch.autograd.Function):
    """``(call, asked, *tensors, *cotangents) -> gradients``."""

    @staticmethod
    def forward(call: UnitCall, asked: Asked, *tensors: torch.Tensor) -> Tensors:
        return call.backward(tensors, asked)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, ctx.asked, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        function, floats = _of_floats(_differentiated(ctx.call, ctx.asked), ctx.saved_tensors)
        _, pull = torch.func.vjp(function, *floats)  # pyright: ignore[reportAssignmentType]
        gradients = iter(pull(tuple(cotangents)))
        return (None, None, *(next(gradients) if is_differentiable(tensor) else None for tensor in ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, _call: None, _asked: None, *tangents: torch.Tensor | None) -> Tensors:
        return _pushforward(_differentiated(ctx.call, ctx.asked), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: UnitCall, asked: Asked, *tensors: torch.Tensor) -> Any:
        return _vmapped(_differentiated(call, asked), info, in_dims[2:], tensors)


_REQUIRES_GRAD, _TRAINABLE = attrgetter("requires_grad"), attrgetter("trainable")


def call_unit(call: UnitCall, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a unit; see `UnitCall`."""
    plain = is_untransformed()
    tracked = torch.is_grad_enabled() and any(map(_REQUIRES_GRAD, tensors))
    if not tracked and plain:
        return call.forward(tensors)
    parts = call.split(tensors)
    takers = parts.accumulators if call.accumulate else parts.shards
    of_groups = map(and_, map(_TRAINABLE, call.param_groups), map(_is_differentiated, takers))
    of_inputs = map(and_, differentiable(parts.inputs), map(_is_differentiated, parts.inputs))
    return _Forward.apply(call, Wanted((*of_groups,), (*of_inputs,), not plain), *tensors)


def call_of_node(node: Any) -> UnitCall | None:
    """The call behind a node of autograd's graph, where there is one."""
    call = getattr(node, "call", None)
    return call if isinstance(call, UnitCall) else None


def _is_differentiated(tensor: torch.Tensor) -> bool:
    """Whether a tensor requires a gradient, at whatever level of transforms."""
    while True:
        if tensor.requires_grad:
            return True
        if not is_wrapped(tensor):
            return False
        tensor = inner_of(tensor)


def _differentiated(call: UnitCall, asked: Asked) -> Callable[[Sequence[torch.Tensor]], Tensors]:
    return lambda tensors: call.differentiate_again(tensors, asked)


def _pushforward(
    function: Callable[[Sequence[torch.Tensor]], Tensors],
    primals: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor | None],
) -> Tensors:
    known = tuple(
        torch.zeros_like(primal) if tangent is None else tangent
        for primal, tangent in zip(primals, tangents, strict=True)
        if is_differentiable(primal)
    )
    of_floats, floats = _of_floats(function, primals)
    return torch.func.jvp(of_floats, floats, known)[1]


def _of_floats(
    function: Callable[[Sequence[torch.Tensor]], Tensors], tensors: Sequence[torch.Tensor]
) -> tuple[Callable[..., Tensors], Tensors]:
    """The function of those tensors alone that can be differentiated, and those tensors."""

    def of_floats(*floats: torch.Tensor) -> Tensors:
        values = iter(floats)
        return function([next(values) if is_differentiable(tensor) else tensor for tensor in tensors])

    return of_floats, tuple(tensor for tensor in tensors if is_differentiable(tensor))


def _vmapped(
    function: Callable[[Sequence[torch.Tensor]], Tensors],
    info: Any,
    in_dims: Sequence[int | None],
    tensors: Sequence[torch.Tensor],
) -> tuple[Tensors, tuple[int, ...]]:
    mapped = torch.func.vmap(lambda *args: function(args), tuple(in_dims), randomness=info.randomness)  # pyright: ignore[reportArgumentType]
    outputs = mapped(*tensors)
    return outputs, (0,) * len(outputs)
