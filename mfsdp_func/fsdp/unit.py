"""One unit's forward and backward: full parameters exist only while it computes, and its forward runs once.

Two autograd Functions (a backward that gathers inline would be kept alive by `torch.func.grad`, which builds a graph of
the backward itself): `_Forward` runs the unit and keeps its graph without the parameters; its backward calls
`_Backward`, whose own forward gathers them again and differentiates that graph; see `UnitGraph`. Where a graph does not
serve, the unit runs again: for derivatives beyond the first, forward mode, `vmap`, and where that was asked for.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import compress, islice
from operator import attrgetter
from typing import Any

import torch

from mfsdp_func.effects.torch_internals import is_untransformed
from mfsdp_func.fsdp.draws import DrawsRefused
from mfsdp_func.fsdp.graph import UnitGraph
from mfsdp_func.fsdp.operators import unit_boundary
from mfsdp_func.fsdp.param_group import GatherCache, ParamGroup, with_gradient_to
from mfsdp_func.fsdp.replay import Ambient, is_traced, nothing_drawn
from mfsdp_func.fsdp.torch_internals import keeps_graph, version_of, versions_of
from mfsdp_func.fsdp.unit_facts import (
    Asked,
    Learned,
    Params,
    Parts,
    Tensors,
    Wanted,
    differentiable,
    floats_of,
    is_differentiable,
)
from mfsdp_func.fsdp.watch import changed_in_place, written
from mfsdp_func.operations.dbuffer import DBuffer

_NAMES = attrgetter("names")


@dataclass(eq=False)
class UnitCall:
    """One call of a unit: everything but its tensors, which come in the order of `Parts`.

    Attributes:
        label: the unit's name.
        run: ``outputs = run(parameters of each group, tensor inputs)``.
        placed: puts parameters, and what the tensor inputs have of them, into the module.
        around: tensors besides that the unit may save for its backward pass.
        param_groups: the groups.
        accumulate: whether gradients go, unreduced, to accumulators instead of shards.
        apart: whether parameters are gathered from other tensors than the shards of the main weights.
        following: groups of the unit that comes next and what they are gathered from, so that their gather can start
            early. Beside the tensors of the call, as they are no part of what it computes.
        preceding: those of the unit that came before, likewise for the backward pass.
        cache: gathers in flight, shared by all calls of a module; None to start none.
        recompute: whether to run again in the backward pass, instead of keeping activations.
        watched: whether what the unit does can be watched as it does it; not where it is compiled.
        origin: the pass that this is part of.
    """

    label: str
    run: Callable[[Params, Sequence[torch.Tensor]], list[torch.Tensor]]
    placed: Callable[[Params, Sequence[torch.Tensor]], AbstractContextManager[None]]
    around: Sequence[torch.Tensor]
    param_groups: tuple[ParamGroup, ...]
    accumulate: bool
    apart: bool
    following: tuple[tuple[ParamGroup, torch.Tensor], ...]
    preceding: tuple[tuple[ParamGroup, torch.Tensor], ...]
    cache: GatherCache | None
    recompute: bool
    watched: bool
    origin: object
    learned: Learned | None = None
    """Known once it has run: the one thing that changes."""

    def split(self, tensors: Sequence[torch.Tensor]) -> Parts:
        """See `Parts`."""
        given, groups = iter(tensors), len(self.param_groups)
        shards = tuple(islice(given, groups))
        accumulators = tuple(islice(given, groups if self.accumulate else 0))
        sources = tuple(islice(given, groups)) if self.apart else shards
        return Parts(shards, accumulators, sources, tuple(given))

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The unit's outputs where nothing is differentiated."""
        parts = self.split(tensors)
        full = [_counted(params) for params in self._params(self._unshard_in_order(parts))]
        if is_traced(tensors):
            with nothing_drawn(f"unit {self.label!r}"):
                return self.run(full, list(parts.inputs))
        outputs = self.run(full, list(parts.inputs))
        self._check_unwritten(full)
        return outputs

    def forward_keeping(self, tensors: Sequence[torch.Tensor], wanted: Wanted) -> Tensors:
        """The unit's outputs; its graph stays here."""
        parts, traced = self.split(tensors), is_traced(tensors)
        ambient = Ambient.current(tensors)
        with nothing_drawn(f"unit {self.label!r}") if traced else nullcontext():
            graph, outputs = self._build(self._unshard_in_order(parts), parts, wanted, traced=traced)
        graph.empty()
        floats = differentiable(outputs)
        sums = tuple(map(_fingerprint, outputs)) if self.recompute and not traced else ()
        kept = graph if any(graph.carries) and not self.recompute else None
        self.learned = Learned(ambient, floats, graph.carries, sums, kept, checked=not traced)
        return unit_boundary(outputs) if traced else tuple(outputs)

    def backward(self, tensors: Sequence[torch.Tensor], asked: Asked) -> Tensors:
        """Gradients of what is asked for: groups' shards (or accumulators) first, then inputs.

        Args:
            tensors: ``(*tensors of the call, *cotangents of the outputs that have one)``.
            asked: what for.
        """
        count, traced = len(tensors) - sum(asked.outputs), is_traced(tensors)
        parts, given = self.split(tensors[:count]), iter(tensors[count:])
        cotangents = [next(given) if used else None for used in asked.outputs]
        if self.cache is not None:
            self.cache.start(zip(self.param_groups, parts.sources, strict=True))
            self.cache.start(self.preceding)
        learned, wholes = learned_of(self), self._unshard(parts)
        graph = learned.graph
        # Under `torch.func`, whose backward passes all say that they keep their graph, it serves once.
        keep = graph is not None and not asked.wanted.transformed and keeps_graph()
        if not keep:
            self.learned = learned = learned._replace(graph=None)
        if graph is None:
            with self._again(traced=traced):
                graph, outputs = self._build(wholes, parts, asked.wanted, traced=traced)
            self._check_alike(outputs)
        else:
            graph.fill(wholes, self._params(wholes), parts.inputs)
        try:
            of_groups, of_inputs = graph.differentiate(
                cotangents, asked.groups, asked.inputs, keep=keep, placed=self.placed
            )
        finally:
            graph.empty()
        del wholes
        groups = [*compress(self.param_groups, asked.groups)]
        flat = [group.flat(of_groups.pop(0)) for group in groups]  # which frees them one by one
        for n, group in enumerate(groups):
            flat[n] = group.accumulated(flat[n]) if self.accumulate else group.reduce(flat[n])
        found = (*flat, *of_inputs)
        return unit_boundary(found) if traced else found

    def compute(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        """The unit's outputs by differentiable operations, with full parameters kept as autograd likes."""
        parts = self.split(tensors)
        full = self._unshard_tracked(parts)
        if self.learned is None:  # the forward pass itself, under `vmap`
            ambient = Ambient.current(tensors)
            with DrawsRefused() if is_traced(tensors) else nullcontext():
                outputs = tuple(self.run(full, list(parts.inputs)))
            floats = tuple(map(is_differentiable, outputs))
            self.learned = Learned(ambient, floats, floats)
            return outputs
        with self._again(traced=is_traced(tensors)):
            return tuple(self.run(full, list(parts.inputs)))

    def differentiate_again(self, tensors: Sequence[torch.Tensor], asked: Asked) -> Tensors:
        """As `backward`, by differentiable operations."""
        count = len(tensors) - sum(asked.outputs)
        parts, given = self.split(tensors[:count]), iter(tensors[count:])
        with self._again(traced=is_traced(tensors)):
            outputs, pull = self._vjp(self._unshard_tracked(parts), parts.inputs)
        used = [
            next(given) if is_used else torch.zeros_like(o) for o, is_used in zip(outputs, asked.outputs, strict=True)
        ]
        d_params, d_inputs = pull(floats_of(used))
        trainable = iter(d_params)
        found: list[torch.Tensor] = []
        for group, needed in zip(self.param_groups, asked.groups, strict=True):
            gradients = next(trainable) if group.trainable else []
            if needed:
                flat = group.flat(gradients)
                found.append(group.accumulated(flat) if self.accumulate else group.reduce(flat))
        floats = iter(d_inputs)
        for tensor, needed in zip(parts.inputs, asked.inputs, strict=True):
            gradient = next(floats) if is_differentiable(tensor) else None
            if needed and gradient is not None:
                found.append(gradient)
        return tuple(found)

    def _build(
        self, wholes: Sequence[DBuffer], parts: Parts, wanted: Wanted, *, traced: bool
    ) -> tuple[UnitGraph, list[torch.Tensor]]:
        graph = UnitGraph(
            self.label,
            [*map(_NAMES, self.param_groups)],
            wholes,
            self._params(wholes),
            wanted.groups,
            parts.inputs,
            wanted.inputs,
            traced=traced,
        )
        versions = versions_of(parts.inputs)
        outputs = graph.run(self.run, self.around, watched=self.watched)
        if versions != versions_of(parts.inputs):
            raise changed_in_place(self.label)
        return graph, outputs

    def _params(self, wholes: Sequence[DBuffer]) -> list[list[torch.Tensor]]:
        return [*map(ParamGroup.params, self.param_groups, wholes)]

    def _unshard(self, parts: Parts) -> list[DBuffer]:
        """The whole buffers of all groups, from where they rest."""
        take = ParamGroup.gather if self.cache is None else self.cache.take
        return [*map(take, self.param_groups, parts.sources)]

    def _unshard_in_order(self, parts: Parts) -> list[DBuffer]:
        """The same, with the next unit's gather in flight then."""
        wholes = self._unshard(parts)
        if self.cache is not None:
            self.cache.start(self.following)
        return wholes

    def _unshard_tracked(self, parts: Parts) -> list[list[torch.Tensor]]:
        """The parameters of all groups, differentiable with respect to shards of main weights, or accumulators."""
        wholes = [b.gather_averaging(shard) for b, shard in zip(self.param_groups, parts.shards, strict=True)]
        if self.accumulate:
            pairs = zip(self.param_groups, wholes, parts.accumulators, strict=True)
            wholes = [DBuffer(w.spec, with_gradient_to(b, w.local_buffer, a)) for b, w, a in pairs]
        return [b.params(whole) for b, whole in zip(self.param_groups, wholes, strict=True)]

    @contextmanager
    def _again(self, *, traced: bool) -> Generator[None, None, None]:
        """Run as the forward pass ran; what could not draw the same again as compiled code may not draw at all."""
        ambient = nullcontext() if self.learned is None else self.learned.ambient.restored()
        other = traced or (not self.watched and not is_untransformed())
        with ambient, DrawsRefused() if other else nullcontext():
            yield

    def _check_unwritten(self, params: Params) -> None:
        touched = [
            name
            for group, full in zip(self.param_groups, params, strict=True)
            for name, param in zip(group.names, full, strict=True)
            if version_of(param)
        ]
        if touched:
            raise written(self.label, touched)

    def _check_alike(self, outputs: Sequence[torch.Tensor]) -> None:
        before = self.learned.sums if self.learned else ()
        for n, (output, sums) in enumerate(zip(outputs, before, strict=False)):
            eps = torch.finfo(output.dtype).eps if is_differentiable(output) else 0.0
            now = _fingerprint(output)
            if not torch.allclose(now[:1], sums[:1], rtol=0, atol=float(sums[1]) * eps * 16, equal_nan=True):
                raise RuntimeError(
                    f"unit {self.label!r} runs again in its backward pass (recompute), and its output {n} differs from the"
                    " first: something there draws from a generator of its own, counts, or reads what has changed since;"
                    " leave the unit out of FsdpContext(recompute=...)"
                )

    def _vjp(self, full: Params, inputs: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Callable[..., Any]]:
        """Outputs, and what gives the gradients of all trainable parameters and floating-point inputs."""
        flags: list[bool] = []

        def run(trainable: list[list[torch.Tensor]], floats: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
            params, values = iter(trainable), iter(floats)
            outputs = self.run(
                [next(params) if b.trainable else kept for b, kept in zip(self.param_groups, full, strict=True)],
                [next(values) if is_differentiable(i) else i for i in inputs],
            )
            flags[:] = map(is_differentiable, outputs)
            return floats_of(outputs), tuple(output for output in outputs if not is_differentiable(output))

        floats, pull, others = torch.func.vjp(  # pyright: ignore[reportAssignmentType]
            run,
            [list(params) for group, params in zip(self.param_groups, full, strict=True) if group.trainable],
            [tensor for tensor in inputs if is_differentiable(tensor)],
            has_aux=True,
        )
        parts = iter(floats), iter(others)
        return [next(parts[0] if has_gradient else parts[1]) for has_gradient in flags], pull


def learned_of(call: UnitCall) -> Learned:
    """What a call has learned; it must have run."""
    if call.learned is None:
        raise RuntimeError(f"unit {call.label!r} is differentiated before it has run")
    return call.learned


def _counted(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The same tensors, each of which counts the writes into itself alone."""
    return [param.detach() if is_traced([param]) or param.is_inference() else param.data for param in params]


def _fingerprint(output: torch.Tensor) -> torch.Tensor:
    values = output.detach()
    values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    return torch.stack([values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)])
