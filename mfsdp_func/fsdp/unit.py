"""One unit's forward and backward: full parameters exist only inside, and are gathered again for the backward pass.

Two autograd Functions (a backward that regathers inline would be kept alive by `torch.func.grad`, which builds a graph
of the backward itself): `_Forward` saves shards and inputs; its backward calls `_Backward`, whose own forward gathers
again, differentiates the module with `torch.func.vjp`, and leaves only shards behind. Derivatives beyond, and `vmap`,
go through the same computation written with differentiable operations.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from mfsdp_func.effects.move import is_untransformed
from mfsdp_func.fsdp.bound import Bound, GatherCache, with_gradient_to
from mfsdp_func.fsdp.compiled import unit_boundary
from mfsdp_func.fsdp.draws import Recorded, Refused, Replayed
from mfsdp_func.fsdp.escape import changed_in_place, run_watched
from mfsdp_func.fsdp.replay import Ambient, is_traced
from mfsdp_func.operations.dbuffer import DBuffer

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Compute: TypeAlias = Callable[[list[list[torch.Tensor]], list[torch.Tensor]], list[torch.Tensor]]
"""``outputs = compute(parameters of each group, tensor inputs)``"""


class Parts(NamedTuple):
    """The tensors of a call of a unit, by what they are."""

    shards: Tensors
    accumulators: Tensors
    sources: Tensors
    following: Tensors
    preceding: Tensors
    inputs: Tensors


@dataclass(eq=False)
class UnitCall:
    """One call of a unit: everything but its tensors, which come in the order of `Parts`.

    Attributes:
        label: the unit's name.
        run: the computation; see `Compute`.
        bound: the groups.
        accumulate: whether gradients go, unreduced, to accumulators instead of shards.
        apart: whether parameters are gathered from other tensors than the shards of the main weights.
        following: groups of the unit that comes next, whose sources come along so that their gather can start early.
        preceding: groups of the unit that came before, likewise for the backward pass.
        cache: gathers in flight, shared by all calls of a module; None to start none.
        watched: whether to look for tensors that enter or leave unseen; see `run_watched`.
    """

    label: str
    run: Compute
    bound: tuple[Bound, ...]
    accumulate: bool
    apart: bool
    following: tuple[Bound, ...]
    preceding: tuple[Bound, ...]
    cache: GatherCache | None
    watched: bool
    was_watched: bool = False
    """Whether that was done."""
    ambient: Ambient | None = None
    """Of the forward pass, for the same dropout masks in the backward one; known once it has run."""
    outputs: tuple[bool, ...] = ()
    """Of each tensor output, likewise: whether it has gradients."""
    draws: int = 0
    """Number of random tensors that follow the outputs, likewise: in compiled code, which has no random state."""
    drawn: Sequence[str] = ()
    """The operators that drew them."""

    def split(self, tensors: Sequence[torch.Tensor]) -> Parts:
        """See `Parts`."""
        given, groups = iter(tensors), len(self.bound)
        shards = tuple(islice(given, groups))
        accumulators = tuple(islice(given, groups if self.accumulate else 0))
        sources = tuple(islice(given, groups)) if self.apart else shards
        following, preceding = tuple(islice(given, len(self.following))), tuple(islice(given, len(self.preceding)))
        return Parts(shards, accumulators, sources, following, preceding, tuple(given))

    def gather(self, parts: Parts) -> list[list[torch.Tensor]]:
        """The parameters of all groups, from where they rest."""
        take = Bound.gather if self.cache is None else self.cache.take
        return [b.params(take(b, source)) for b, source in zip(self.bound, parts.sources, strict=True)]

    def gather_tracked(self, parts: Parts) -> list[list[torch.Tensor]]:
        """The parameters of all groups, differentiable with respect to shards of main weights, or accumulators."""
        wholes = [b.gather_averaging(shard) for b, shard in zip(self.bound, parts.shards, strict=True)]
        if self.accumulate:
            pairs = zip(wholes, parts.accumulators, strict=True)
            wholes = [DBuffer(w.spec, with_gradient_to(w.local_buffer, accumulator)) for w, accumulator in pairs]
        return [b.params(whole) for b, whole in zip(self.bound, wholes, strict=True)]

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The unit's outputs, with the next unit's gather in flight."""
        parts = self.split(tensors)
        return self.run(self._gather_in_order(parts), list(parts.inputs))

    def forward_to_repeat(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """The same, as something that will run again in the backward pass; and what it has drawn."""
        parts, traced = self.split(tensors), is_traced(tensors)
        full = self._gather_in_order(parts)
        self.ambient = Ambient.current(tensors)
        versions = [tensor._version for tensor in parts.inputs]
        if self.watched and _functorch.peek_interpreter_stack() is None and get_proxy_mode() is None:
            outputs = run_watched(self.label, self.run, full, parts.inputs)
            self.was_watched = True
        else:
            outputs = [] if traced else self.run(full, list(parts.inputs))
        draws: list[torch.Tensor] = []
        if traced:
            with Recorded() as recorded:
                outputs, _ = self._vjp(full, parts.inputs)  # as in the backward pass, so that operators are the same
            draws, self.drawn = recorded.draws, recorded.operators
        if versions != [tensor._version for tensor in parts.inputs]:
            raise changed_in_place(self.label)
        self.outputs, self.draws = tuple(map(is_differentiable, outputs)), len(draws)
        if traced:
            return (*unit_boundary(outputs), *draws)
        # An output may be an input, or a view of a parameter: Functions return new tensors.
        return tuple(output.clone() if _aliases(output, tensors) else output for output in outputs)

    def compute(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """The unit's outputs by differentiable operations, with full parameters kept as autograd likes.

        Args:
            tensors: ``(*tensors of the call, *draws)``.
        """
        count = len(tensors) - self.draws
        parts = self.split(tensors[:count])
        full = self.gather_tracked(parts)
        if self.ambient is None:  # the forward pass itself, under `vmap`
            self.ambient = Ambient.current(tensors)
            mode = Refused() if is_traced(tensors) else nullcontext()
        else:
            mode = self._again(tensors[count:])
        with mode:
            outputs = tuple(self.run(full, list(parts.inputs)))
        self.outputs = tuple(map(is_differentiable, outputs))
        return outputs

    def differentiate(
        self, tensors: Sequence[torch.Tensor], gather: Callable[[Parts], list[list[torch.Tensor]]]
    ) -> Tensors:
        """Gradients of trainable shards (or accumulators) and floating-point inputs.

        Args:
            tensors: ``(*tensors of the call, *cotangents of the outputs that have gradients, *draws)``.
            gather: gives the parameters of all groups.
        """
        count, end = self._count(tensors), len(tensors) - self.draws
        parts, cotangents, draws = self.split(tensors[:count]), tensors[count:end], tensors[end:]
        full = gather(parts)
        plain = _functorch.peek_interpreter_stack() is None and not is_traced(tensors)
        with self._again(draws):
            _, pull = self._vjp_by_autograd(full, parts.inputs) if plain else self._vjp(full, parts.inputs)
        d_params, d_inputs = pull(tuple(cotangents))
        trainable = [bound for bound in self.bound if bound.trainable]
        flat = [bound.flat(gradients) for bound, gradients in zip(trainable, d_params, strict=True)]
        full.clear()
        del d_params, pull
        if self.accumulate:
            return (*flat, *d_inputs)
        return (*(bound.reduce(gradient) for bound, gradient in zip(trainable, flat, strict=True)), *d_inputs)

    def _gather_in_order(self, parts: Parts) -> list[list[torch.Tensor]]:
        full = self.gather(parts)
        if self.cache is not None:
            self.cache.start(self.following, parts.following)
        return full

    def _count(self, tensors: Sequence[torch.Tensor]) -> int:
        """Number of tensors of the call, which cotangents and draws follow."""
        return len(tensors) - sum(self.outputs) - self.draws

    @contextmanager
    def _again(self, draws: Sequence[torch.Tensor]) -> Generator[None, None, None]:
        """Run as the forward pass ran."""
        with (
            self.ambient.restored() if self.ambient else nullcontext(),
            Replayed(draws, self.drawn) if draws else nullcontext(),
        ):
            yield

    def _vjp_by_autograd(
        self, full: list[list[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Callable[..., Any]]:
        """Like `_vjp`, where no transform is active: for what modules do that `torch.func` does not allow inside."""
        params = [[p.detach().requires_grad_(b.trainable) for p in g] for b, g in zip(self.bound, full, strict=True)]
        values = [i.detach().requires_grad_(is_differentiable(i)) for i in inputs]
        with torch.enable_grad():
            outputs = self.run(params, values)
        wanted = [*(p for b, group in zip(self.bound, params, strict=True) if b.trainable for p in group)]
        wanted += [value for value in values if value.requires_grad]

        def pull(cotangents: Tensors) -> tuple[list[list[torch.Tensor]], list[torch.Tensor]]:
            pairs = zip(_divided(outputs)[0], cotangents, strict=True)
            used = [(output, cotangent) for output, cotangent in pairs if output.requires_grad]
            found = torch.autograd.grad(
                [output for output, _ in used],
                wanted,
                [cotangent for _, cotangent in used],
                materialize_grads=True,
            )
            each = iter(found)
            of_params = [[next(each) for _ in g] for b, g in zip(self.bound, params, strict=True) if b.trainable]
            return of_params, list(each)

        return outputs, pull

    def _vjp(
        self, full: list[list[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], Callable[..., Any]]:
        """Outputs, and what gives the gradients of all trainable parameters and floating-point inputs."""

        def run(trainable: list[list[torch.Tensor]], floats: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
            params, values = iter(trainable), iter(floats)
            outputs = self.run(
                [next(params) if b.trainable else kept for b, kept in zip(self.bound, full, strict=True)],
                [next(values) if is_differentiable(i) else i for i in inputs],
            )
            self.outputs = tuple(map(is_differentiable, outputs))
            return _divided(outputs)

        floats, pull, others = torch.func.vjp(  # pyright: ignore[reportAssignmentType]
            run,
            [params for bound, params in zip(self.bound, full, strict=True) if bound.trainable],
            [tensor for tensor in inputs if is_differentiable(tensor)],
            has_aux=True,
        )
        parts = iter(floats), iter(others)
        return [next(parts[0] if has_gradient else parts[1]) for has_gradient in self.outputs], pull


class _Forward(torch.autograd.Function):
    """``(call, *tensors) -> (*outputs, *draws)``."""

    @staticmethod
    def forward(call: UnitCall, *tensors: torch.Tensor) -> Tensors:
        return call.forward_to_repeat(tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *tensors = inputs
        draws = output[len(output) - ctx.call.draws :]
        ctx.save_for_backward(*tensors, *draws)
        ctx.save_for_forward(*tensors, *draws)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        call: UnitCall = ctx.call
        count = len(ctx.saved_tensors) - call.draws
        tensors, draws = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        parts = call.split(tensors)
        used = [c for c, has_gradient in zip(cotangents, call.outputs, strict=False) if has_gradient]
        gradients = iter(_Backward.apply(call, *tensors, *used, *draws))
        of_groups = [next(gradients) if bound.trainable else None for bound in call.bound]
        nothing = [None] * len(call.bound)
        of_weights = [*nothing, *of_groups] if call.accumulate else of_groups
        of_others = [None] * (count - len(of_weights) - len(parts.inputs))
        of_inputs = [next(gradients) if is_differentiable(tensor) else None for tensor in parts.inputs]
        return (None, *of_weights, *of_others, *of_inputs)

    @staticmethod
    def jvp(ctx: Any, _call: None, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: UnitCall = ctx.call
        draws = ctx.saved_tensors[len(tangents) :]

        def floats(tensors: Sequence[torch.Tensor]) -> Tensors:
            return _divided(call.compute(tensors))[0]

        moved = iter(_pushforward(floats, ctx.saved_tensors, (*tangents, *[None] * len(draws))))
        known = [next(moved) if has_gradient else None for has_gradient in call.outputs]
        return (*known, *(torch.zeros_like(d) if is_differentiable(d) else None for d in draws))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: UnitCall, *tensors: torch.Tensor) -> Any:
        return _vmapped(call.compute, info, in_dims[1:], tensors)


class _Backward(torch.autograd.Function):
    """``(call, *tensors, *cotangents, *draws) -> gradients``, of trainable groups and floating-point inputs."""

    @staticmethod
    def forward(call: UnitCall, *tensors: torch.Tensor) -> Tensors:
        if call.cache is not None:
            parts = call.split(tensors[: call._count(tensors)])
            call.cache.start(call.bound, parts.sources)
            call.cache.start(call.preceding, parts.preceding)
        gradients = call.differentiate(tensors, call.gather)
        return unit_boundary(gradients) if is_traced(tensors) else gradients

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[Any, ...]:
        function, floats = _of_floats(_differentiate_again(ctx.call), ctx.saved_tensors)
        _, pull = torch.func.vjp(function, *floats)  # pyright: ignore[reportAssignmentType]
        gradients = iter(pull(tuple(cotangents)))
        return (None, *(next(gradients) if is_differentiable(tensor) else None for tensor in ctx.saved_tensors))

    @staticmethod
    def jvp(ctx: Any, _call: None, *tangents: torch.Tensor | None) -> Tensors:
        return _pushforward(_differentiate_again(ctx.call), ctx.saved_tensors, tangents)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: UnitCall, *tensors: torch.Tensor) -> Any:
        return _vmapped(_differentiate_again(call), info, in_dims[1:], tensors)


def call_unit(call: UnitCall, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Run a unit; see `UnitCall`."""
    tracked = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    if not tracked and is_untransformed():
        return call.forward(tensors)
    return _Forward.apply(call, *tensors)[: len(call.outputs)]


def _differentiate_again(call: UnitCall) -> Callable[[Sequence[torch.Tensor]], Tensors]:
    return lambda tensors: call.differentiate(tensors, call.gather_tracked)


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


def _divided(tensors: Sequence[torch.Tensor]) -> tuple[Tensors, Tensors]:
    """Those that have gradients, and the others."""
    return tuple(t for t in tensors if is_differentiable(t)), tuple(t for t in tensors if not is_differentiable(t))


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()


def _aliases(output: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any(output is tensor for tensor in tensors) or output._is_view()
