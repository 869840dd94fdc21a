"""One unit's forward and backward: full parameters exist only inside, and are gathered again for the backward pass.

Two autograd Functions (a backward that regathers inline would be kept alive by `torch.func.grad`, which builds a graph
of the backward itself): `_Forward` saves shards and inputs; its backward calls `_Backward`, whose own forward gathers
again, differentiates the module with `torch.func.vjp`, and leaves only shards behind. Derivatives beyond, and `vmap`,
go through the same computation written with differentiable operations.
"""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mfsdp_func.buffer_spec import BufferSpec
from mfsdp_func.dbuffer import DBuffer, redistribute
from mfsdp_func.placement import Partial, Replicate, Shard, shard_axes
from mfsdp_func.tokens import Token

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Bound:
    """One group as a unit uses it: its buffer's spec, dtypes, and which of its tensors the unit takes.

    Attributes:
        spec: of the main weights.
        main_dtype: of the main weights, and of their gradients.
        param_dtype: in which they are gathered.
        reduce_dtype: in which gradients are averaged.
        shapes: logical shapes of the parameters, which the layout may lay out otherwise.
        trainable: whether gradients are taken.
        deterministic: see `FsdpContext`.
    """

    spec: BufferSpec
    main_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    shapes: tuple[torch.Size, ...]
    trainable: bool
    deterministic: bool

    @property
    def replicated(self) -> tuple[Replicate, ...]:
        """Placements of the gathered parameters."""
        return (Replicate(),) * self.spec.mesh.ndim

    @cached_property
    def whole(self) -> BufferSpec:
        """The spec of the gathered buffer."""
        return BufferSpec(self.spec.mesh, self.replicated, self.spec.layout)

    @cached_property
    def average(self) -> BufferSpec:
        """The spec of a whole buffer of gradients that are still to be averaged."""
        return BufferSpec(self.spec.mesh, (Partial("avg"),) * self.spec.mesh.ndim, self.spec.layout)

    def gather(self, shard: torch.Tensor) -> DBuffer:
        """The whole buffer, on every rank. Differentiable; communicates."""
        return DBuffer(self.spec, shard).cast(self.param_dtype).redistribute(self.replicated)

    def gather_averaging(self, shard: torch.Tensor) -> DBuffer:
        """The same, with the mean over ranks of their gradients as its gradient."""
        return self.gather(_AverageGradient.apply(shard, self))

    def average_shard(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the shard, summed over the axes that cut the buffer, as the average over all axes."""
        placements = self.spec.placements
        replicas = tuple(p if isinstance(p, Shard) else Partial("avg") for p in placements)
        mean = DBuffer(BufferSpec(self.spec.mesh, replicas, self.spec.layout), gradient).redistribute(placements)
        return mean.local_buffer / math.prod(self.spec.mesh.size(axis) for axis in shard_axes(placements))

    def start_gather(self, shard: torch.Tensor) -> tuple[DBuffer, Token]:
        """The same, in flight."""
        return redistribute(DBuffer(self.spec, shard).cast(self.param_dtype), self.replicated, async_op=True)

    def params(self, full: DBuffer) -> list[torch.Tensor]:
        """The parameters as views of the whole buffer, in their logical shapes."""
        return [full.get_tensor_view(i).view(shape) for i, shape in enumerate(self.shapes)]

    def flat(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of all parameters as one flat buffer in `reduce_dtype`; padding is zero."""
        shaped = [g.to(self.reduce_dtype).reshape(s) for g, s in zip(gradients, self.spec.layout.tensor_shapes, strict=True)]
        return DBuffer.distribute_tensors(shaped, self.spec.mesh, self.replicated, self.spec.layout).local_buffer

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """The average over all ranks of flat gradients, as the main weights are sharded. Communicates."""
        mean = DBuffer(self.average, flat).redistribute(self.spec.placements, deterministic=self.deterministic)
        return mean.local_buffer.to(self.main_dtype)


@dataclass(eq=False)
class UnitCall:
    """One call of a unit: everything but its tensors, which come as ``(*shards, *accumulators, *following, *inputs)``.

    Attributes:
        label: the unit's name.
        run: computes ``outputs = run(params, inputs)`` from the parameters of all groups and the tensor inputs.
        bound: the groups.
        accumulate: whether gradients go, unreduced, to accumulators instead of shards.
        following: groups of the unit that comes next, whose shards come along so that their gather can start early.
        cache: gathers in flight, shared by all calls of a module; None to start none.
        random: random states at the start of the forward pass, for the same dropout masks in the backward one.
    """

    label: str
    run: Callable[[list[list[torch.Tensor]], list[torch.Tensor]], list[torch.Tensor]]
    bound: tuple[Bound, ...]
    accumulate: bool
    following: tuple[Bound, ...]
    preceding: tuple[Bound, ...]
    cache: "GatherCache | None"
    random: list[torch.Tensor] = field(default_factory=list)

    def split(self, tensors: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors, Tensors, Tensors, Tensors]:
        """Shards, accumulators, shards of the unit after and of the one before, inputs."""
        counts = (
            *(len(self.bound), len(self.bound) if self.accumulate else 0),
            *(len(self.following), len(self.preceding)),
        )
        parts, start = [], 0
        for count in counts:
            parts.append(tuple(tensors[start : start + count]))
            start += count
        return (*parts, tuple(tensors[start:]))  # pyright: ignore[reportReturnType]

    def compute(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """The unit's outputs by differentiable operations, with full parameters kept as autograd likes."""
        shards, accumulators, _, _, inputs = self.split(tensors)
        full = [b.params(b.gather_averaging(shard)) for b, shard in zip(self.bound, shards, strict=True)]
        for n, (bound, accumulator) in enumerate(zip(self.bound, accumulators, strict=False)):
            # Only accumulators are to be differentiated: they act as zeros added to constant parameters.
            zeros = bound.params(DBuffer(bound.whole, accumulator - accumulator.detach()))
            full[n] = [p.detach() + zero.to(p.dtype) for p, zero in zip(full[n], zeros, strict=True)]
        with replayed(self.random):
            outputs = tuple(self.run(full, list(inputs)))
        self.outputs = len(outputs)
        return outputs

    def differentiate(self, tensors: Sequence[torch.Tensor], gather: Callable[[Bound, torch.Tensor], DBuffer]) -> Tensors:
        """Gradients of trainable shards (or accumulators) and floating-point inputs.

        Args:
            tensors: ``(*tensors of the call, *cotangents of the outputs)``.
            gather: gives the whole buffer of a shard.
        """
        count = len(tensors) - self.outputs
        shards, _, _, _, inputs = self.split(tensors[:count])
        full = [bound.params(gather(bound, shard)) for bound, shard in zip(self.bound, shards, strict=True)]

        def run(trainable: list[list[torch.Tensor]], floats: list[torch.Tensor]) -> Tensors:
            params, values = iter(trainable), iter(floats)
            return tuple(
                self.run(
                    [next(params) if b.trainable else kept for b, kept in zip(self.bound, full, strict=True)],
                    [next(values) if is_differentiable(i) else i for i in inputs],
                )
            )

        with replayed(self.random):
            _, pull = torch.func.vjp(
                run,
                [params for bound, params in zip(self.bound, full, strict=True) if bound.trainable],
                [tensor for tensor in inputs if is_differentiable(tensor)],
            )
        d_params, d_inputs = pull(tuple(tensors[count:]))
        trainable = [bound for bound in self.bound if bound.trainable]
        flat = [bound.flat(gradients) for bound, gradients in zip(trainable, d_params, strict=True)]
        full.clear()
        del d_params, pull
        if self.accumulate:
            return (*flat, *d_inputs)
        return (*(bound.reduce(gradient) for bound, gradient in zip(trainable, flat, strict=True)), *d_inputs)

    outputs: int = 0
    """Number of tensor outputs, known once the forward pass has run."""


class GatherCache:
    """Gathers in flight, by the shard that they read."""

    def __init__(self) -> None:
        # The shard is kept with its gather: a new one at the same address must not be taken for it.
        self._entries: dict[tuple[int, int, int], tuple[DBuffer, Token, torch.Tensor]] = {}

    def start(self, bound: Sequence[Bound], shards: Sequence[torch.Tensor]) -> None:
        """Start gathering; nothing where it is under way already."""
        for group, shard in zip(bound, shards, strict=True):
            if _identity(shard) not in self._entries:
                self._entries[_identity(shard)] = (*group.start_gather(shard), shard)

    def take(self, bound: Bound, shard: torch.Tensor) -> DBuffer:
        """The whole buffer of a shard, waited for."""
        if (entry := self._entries.pop(_identity(shard), None)) is None:
            return bound.gather(shard)
        entry[1].wait()
        return entry[0]

    def drop(self) -> None:
        """Wait for gathers that nobody took (the order of units has changed), and forget them."""
        for _, token, _ in self._entries.values():
            token.wait()
        self._entries.clear()


def _identity(shard: torch.Tensor) -> tuple[int, int, int]:
    return shard.data_ptr(), shard.numel(), shard._version


def _take(call: UnitCall) -> Callable[[Bound, torch.Tensor], DBuffer]:
    return call.cache.take if call.cache is not None else Bound.gather


class _AverageGradient(torch.autograd.Function):
    """A shard as it is; its gradient, the sum over the ranks that share the buffer, becomes the mean over all ranks."""

    @staticmethod
    def forward(shard: torch.Tensor, bound: Bound) -> torch.Tensor:
        return shard.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.bound.average_shard(gradient), None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _bound: None) -> torch.Tensor:
        return tangent.clone()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], shard: torch.Tensor, bound: Bound) -> tuple[torch.Tensor, int]:
        return _AverageGradient.apply(shard, bound), in_dims[0]


class _Forward(torch.autograd.Function):
    """``(call, *tensors) -> outputs``"""

    @staticmethod
    def forward(call: UnitCall, *tensors: torch.Tensor) -> Tensors:
        shards, _, following, _, inputs = call.split(tensors)
        gather = _take(call)
        full = [bound.params(gather(bound, shard)) for bound, shard in zip(call.bound, shards, strict=True)]
        if call.cache is not None:
            call.cache.start(call.following, following)
        call.random[:] = current_random(tensors)
        outputs = call.run(full, list(inputs))
        call.outputs = len(outputs)
        # An output may be an input, or (for a held unit) a parameter itself: Functions return new tensors.
        return tuple(output.clone() if _aliases(output, tensors) else output for output in outputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        call: UnitCall = ctx.call
        gradients = iter(_Backward.apply(call, *ctx.saved_tensors, *cotangents))
        of_groups = [next(gradients) if bound.trainable else None for bound in call.bound]
        of_shards = [None] * len(call.bound) if call.accumulate else []
        of_others = [None] * (len(call.following) + len(call.preceding))
        inputs = call.split(ctx.saved_tensors)[-1]
        of_inputs = [next(gradients) if is_differentiable(tensor) else None for tensor in inputs]
        return (None, *of_shards, *of_groups, *of_others, *of_inputs)

    @staticmethod
    def jvp(ctx: Any, _call: None, *tangents: torch.Tensor | None) -> Tensors:
        return _pushforward(ctx.call.compute, ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: UnitCall, *tensors: torch.Tensor) -> Any:
        return _vmapped(call.compute, info, in_dims[1:], tensors)


class _Backward(torch.autograd.Function):
    """``(call, *tensors, *cotangents) -> gradients`` of trainable groups (shards or accumulators) and inputs"""

    @staticmethod
    def forward(call: UnitCall, *tensors: torch.Tensor) -> Tensors:
        count = len(tensors) - call.outputs
        if call.cache is not None:
            shards, _, _, preceding, _ = call.split(tensors[:count])
            call.cache.start(call.bound, shards)
            call.cache.start(call.preceding, preceding)
        return call.differentiate(tensors, _take(call))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        function, floats = _of_floats(lambda args: ctx.call.differentiate(args, Bound.gather_averaging), ctx.saved_tensors)
        _, pull = torch.func.vjp(function, *floats)
        gradients = iter(pull(tuple(cotangents)))
        return (None, *(next(gradients) if is_differentiable(tensor) else None for tensor in ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, _call: None, *tangents: torch.Tensor | None) -> Tensors:
        return _pushforward(lambda tensors: ctx.call.differentiate(tensors, Bound.gather_averaging), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: UnitCall, *tensors: torch.Tensor) -> Any:
        return _vmapped(lambda args: call.differentiate(args, Bound.gather_averaging), info, in_dims[1:], tensors)


def call_unit(call: UnitCall, tensors: Sequence[torch.Tensor]) -> Tensors:
    """Run a unit; see `UnitCall`."""
    return _Forward.apply(call, *tensors)


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
    mapped = torch.func.vmap(lambda *args: function(args), tuple(in_dims), randomness=info.randomness)
    outputs = mapped(*tensors)
    return outputs, (0,) * len(outputs)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _aliases(output: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any(output is tensor for tensor in tensors) or output._is_view()


def current_random(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The random states that a computation on `tensors` may use: CPU, and CUDA where they are there."""
    states = [torch.get_rng_state()]
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    return states if device is None else [*states, torch.cuda.get_rng_state(device)]


@contextmanager
def replayed(states: Sequence[torch.Tensor]) -> Generator[None, None, None]:
    """Compute under given random states, and put the present ones back; nothing where none are given."""
    if not states:
        yield
        return
    devices = [torch.cuda.current_device()] if len(states) > 1 else []
    with torch.random.fork_rng(devices):
        torch.set_rng_state(states[0])
        if devices:
            torch.cuda.set_rng_state(states[1])
        yield


@contextmanager
def swapped(module: nn.Module, params: dict[str, torch.Tensor], *, fresh_buffers: bool = False) -> Generator[None, None, None]:
    """Put tensors in the place of a module's parameters, by qualified name.

    With `fresh_buffers`, changes that the computation makes to module buffers are undone: a second run of the same
    forward pass must not count twice (running statistics).
    """
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in params]
    before = [owner._parameters[leaf] for owner, leaf in places]
    kept: list[tuple[nn.Module, dict[str, torch.Tensor | None]]] = []
    if fresh_buffers:
        kept = [(sub, dict(sub._buffers)) for sub in module.modules() if sub._buffers]
        for sub, buffers in kept:
            sub._buffers.update({name: None if b is None else b.clone() for name, b in buffers.items()})
    try:
        for (owner, leaf), tensor in zip(places, params.values(), strict=True):
            owner._parameters[leaf] = tensor  # pyright: ignore[reportArgumentType]
        yield
    finally:
        for (owner, leaf), tensor in zip(places, before, strict=True):
            owner._parameters[leaf] = tensor
        for sub, buffers in kept:
            sub._buffers.update(buffers)


def tensor_leaves(tree: Any) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors of a pytree, and what puts others in their places."""
    leaves, spec = pytree.tree_flatten(tree)
    at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]  # a template keeps no tensor alive

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        filled = list(others)
        for n, tensor in zip(at, tensors, strict=True):
            filled[n] = tensor
        return pytree.tree_unflatten(filled, spec)

    return [leaves[n] for n in at], rebuild
