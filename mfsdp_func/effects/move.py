"""Linear maps over ranks that compose: one autograd Function and one operator for every movement of data.

`move` computes the same numbers eagerly, under autograd, `torch.func` and `torch.compile`, because its backward, jvp
and vmap rules are the map's transpose, the map itself, and the map on elements with trailing batch dims. Every call
also takes and returns a *link*, a differentiable zero: the one input that a rank has where it holds no tensor.
"""

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch

from mfsdp_func.effects.agreement import checking, report_fault
from mfsdp_func.effects.here import carrier_of, check_place
from mfsdp_func.effects.jacobians import refuse_jacobians
from mfsdp_func.effects.launch import Options, allocate, launch
from mfsdp_func.effects.move_operator import LIBRARY, call_operator, remembered
from mfsdp_func.effects.torch_internals import (
    active_transforms,
    batched_zero,
    forward_mode_allowed,
    is_alone,
    is_watched,
)
from mfsdp_func.plans.linear_map import LinearMap

_REQUIRES_GRAD = attrgetter("requires_grad")


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
            refuse_jacobians(linear)
        outputs = launch(linear, options, None, inputs)
        return torch.zeros((), device=options.device) if link is None else link, outputs
    _refuse_unlinked(linear, link, inputs)
    refuse_jacobians(linear)
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
