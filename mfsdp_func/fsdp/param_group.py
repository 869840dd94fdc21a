"""One group of parameters as units use it: how it is gathered, how its gradients are averaged, what is in flight."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch

from mfsdp_func.effects.token import Token
from mfsdp_func.effects.torch_internals import outside_transforms
from mfsdp_func.fsdp.torch_internals import version_of
from mfsdp_func.operations.dbuffer import DBuffer, redistribute
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.placement import Partial, Placement, Replicate, Shard, shard_axes


@dataclass(frozen=True)
class ParamGroup:
    """A group of parameters on a mesh.

    Attributes:
        key: the group's.
        spec: of the main weights, and of their gradients.
        resting: of what units gather from: the main weights, or a copy that is less sharded and kept for a whole pass.
        main_dtype: of the main weights, and of their gradients.
        param_dtype: in which they are gathered.
        reduce_dtype: in which gradients are averaged.
        names: of the parameters, the first of each.
        shapes: logical shapes of the parameters, which the layout may lay out otherwise.
        gradient: how accumulated gradients lie: sharded axes are reduced in each pass, the others once, at the end.
        trainable: whether gradients are taken.
        deterministic: see `FsdpContext`.
    """

    key: str
    spec: BufferSpec
    resting: BufferSpec
    main_dtype: torch.dtype
    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    gradient: tuple[Placement, ...]
    trainable: bool
    deterministic: bool

    @cached_property
    def whole(self) -> BufferSpec:
        """The spec of the gathered buffer."""
        return BufferSpec(self.spec.mesh, (Replicate(),) * self.spec.mesh.ndim, self.spec.layout, self.key)

    @cached_property
    def average(self) -> BufferSpec:
        """The spec of a whole buffer of gradients that are still to be averaged."""
        return BufferSpec(self.spec.mesh, (Partial("avg"),) * self.spec.mesh.ndim, self.spec.layout, self.key)

    @cached_property
    def accumulator(self) -> BufferSpec:
        """The spec of accumulated gradients."""
        placements: list[Placement] = []
        for axis in reversed(range(self.spec.mesh.ndim)):
            # Shards are the last placements, so an axis is reduced only where all inner ones are.
            inner = all(isinstance(placement, Shard) for placement in placements)
            sharded = isinstance(self.gradient[axis], Shard) and inner
            placements.insert(0, self.spec.placements[axis] if sharded else Partial("avg"))
        return BufferSpec(self.spec.mesh, placements, self.spec.layout)

    @cached_property
    def rests_apart(self) -> bool:
        """Whether units gather from something else than the main weights."""
        return self.resting != self.spec

    @cached_property
    def rests_whole(self) -> bool:
        """Whether all of the group stays gathered between its first use in a pass and its last."""
        return self.rests_apart and not self.resting.is_sharded

    def rest(self, shard: torch.Tensor) -> torch.Tensor:
        """What units gather from, made of the main weights, in `param_dtype`. Communicates."""
        resting = DBuffer(self.spec, shard).cast(self.param_dtype).redistribute(self.resting.placements)
        return resting.local_buffer

    def gather(self, source: torch.Tensor) -> DBuffer:
        """The whole buffer, on every rank, from what rests. Communicates."""
        return self._source(source).redistribute(self.whole.placements)

    def start_gather(self, source: torch.Tensor) -> tuple[DBuffer, Token]:
        """The same, in flight."""
        return redistribute(self._source(source), self.whole.placements, async_op=True)

    def _source(self, source: torch.Tensor) -> DBuffer:
        return DBuffer(self.resting, source if source.dtype == self.param_dtype else source.to(self.param_dtype))

    def gather_averaging(self, shard: torch.Tensor) -> DBuffer:
        """The whole buffer from the main weights. Differentiable, with the mean over ranks as its gradient."""
        averaged = _AverageGradient.apply(shard, self, 0)
        return DBuffer(self.spec, averaged).cast(self.param_dtype).redistribute(self.whole.placements)

    @cached_property
    def _replicas(self) -> BufferSpec:
        """The spec of a shard that other axes are still to average."""
        placements = tuple(p if isinstance(p, Shard) else Partial("avg") for p in self.spec.placements)
        return BufferSpec(self.spec.mesh, placements, self.spec.layout, self.key)

    def average_shard(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the shard, summed over the axes that cut the buffer, as the average over all axes."""
        placements = self.spec.placements
        mean = DBuffer(self._replicas, gradient).redistribute(placements)
        return mean.local_buffer / math.prod(self.spec.mesh.size(axis) for axis in shard_axes(placements))

    def params(self, full: DBuffer) -> list[torch.Tensor]:
        """The parameters as views of the whole buffer, in their logical shapes."""
        flat = full.local_buffer
        return [flat[offset : offset + shape.numel()].view(shape) for offset, shape in self._views]

    @cached_property
    def _views(self) -> tuple[tuple[int, torch.Size], ...]:
        """Where each parameter lies in the whole buffer."""
        return tuple(zip(self.spec.layout.tensor_to_offset, self.shapes, strict=True))

    def flat(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Gradients of all parameters as one flat buffer in `reduce_dtype`; padding is zero."""
        shapes = self.spec.layout.tensor_shapes
        shaped = [g.to(self.reduce_dtype).reshape(s) for g, s in zip(gradients, shapes, strict=True)]
        return DBuffer.distribute(shaped, self.whole).local_buffer

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """The average over all ranks of flat gradients, as the main weights are sharded. Communicates."""
        return self._averaged(self.average, flat, self.spec).to(self.main_dtype)

    def accumulated(self, flat: torch.Tensor) -> torch.Tensor:
        """Flat gradients as accumulators take them. Communicates where these are sharded."""
        return self._averaged(self.average, flat, self.accumulator)

    def reduce_accumulated(self, gradient: torch.Tensor) -> torch.Tensor:
        """The average over all ranks of what `accumulated` gave, as the main weights are sharded. Communicates."""
        return self._averaged(self.accumulator, gradient, self.spec).to(self.main_dtype)

    def _averaged(self, source: BufferSpec, gradient: torch.Tensor, target: BufferSpec) -> torch.Tensor:
        mean = DBuffer(source, gradient).redistribute(target.placements, deterministic=self.deterministic)
        return mean.local_buffer

    def spread(self, accumulator: torch.Tensor) -> torch.Tensor:
        """A whole buffer that depends on an accumulator as its gradient says: `accumulated` is the transpose."""
        axes = shard_axes(self.accumulator.placements)
        relabelled = tuple(p if isinstance(p, Shard) else Replicate() for p in self.accumulator.placements)
        scaled = accumulator / math.prod(self.spec.mesh.size(axis) for axis in axes) if axes else accumulator
        buffer = DBuffer(BufferSpec(self.spec.mesh, relabelled, self.spec.layout), scaled.to(self.param_dtype))
        return buffer.redistribute(self.whole.placements).local_buffer


class _AverageGradient(torch.autograd.Function):
    """A shard as it is; its gradient, the sum over the ranks that share the buffer, becomes the mean over all ranks.

    ``(shard, group, number of leading batch dims) -> shard``
    """

    @staticmethod
    def forward(shard: torch.Tensor, group: ParamGroup, batch_ndim: int) -> torch.Tensor:
        return shard.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, ctx.group, ctx.batch_ndim = inputs

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        average = ctx.group.average_shard
        for _ in range(ctx.batch_ndim):
            average = torch.func.vmap(average)
        return average(gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: torch.Tensor, _bound: None, _batch_ndim: None) -> torch.Tensor:
        return tangent.clone()

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int, None, None], shard: torch.Tensor, group: ParamGroup, batch_ndim: int
    ) -> tuple[torch.Tensor, int]:
        return _AverageGradient.apply(shard.movedim(in_dims[0], 0), group, batch_ndim + 1), 0


class Kept(torch.autograd.Function):
    """``(group, shard, accumulator or None) -> whole buffer`` of parameters that stay gathered for a pass.

    Linear, so it saves nothing. The gradient goes to the shard, averaged, or to the accumulator as it is.
    """

    @staticmethod
    def forward(group: ParamGroup, shard: torch.Tensor, accumulator: torch.Tensor | None) -> torch.Tensor:
        full = DBuffer(group.spec, shard).cast(group.param_dtype).redistribute(group.whole.placements).local_buffer
        return full.clone() if full is shard else full

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.group, _, accumulator = inputs
        ctx.accumulates, ctx.device = accumulator is not None, output.device

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        flat = gradient.to(ctx.group.reduce_dtype)
        return (None, None, ctx.group.accumulated(flat)) if ctx.accumulates else (None, ctx.group.reduce(flat), None)

    @staticmethod
    def jvp(ctx: Any, _bound: None, of_shard: torch.Tensor | None, of_accumulator: torch.Tensor | None) -> torch.Tensor:
        if not ctx.accumulates and of_shard is not None:
            return ctx.group.gather_averaging(of_shard).local_buffer
        if of_accumulator is not None:
            return ctx.group.spread(of_accumulator)
        return torch.zeros(ctx.group.whole.local_numel, dtype=ctx.group.param_dtype, device=ctx.device)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        group: ParamGroup,
        shard: torch.Tensor,
        accumulator: torch.Tensor | None,
    ) -> tuple[torch.Tensor, int]:
        def run(shard: torch.Tensor, *accumulator: torch.Tensor) -> torch.Tensor:
            full = group.gather_averaging(shard).local_buffer
            return with_gradient_to(group, full, accumulator[0]) if accumulator else full

        given = (shard,) if accumulator is None else (shard, accumulator)
        return torch.func.vmap(run, in_dims[1 : 1 + len(given)])(*given), 0


def with_gradient_to(group: ParamGroup, full: torch.Tensor, accumulator: torch.Tensor) -> torch.Tensor:
    """The values of a whole buffer, whose gradient goes to an accumulator: that acts as zeros added to a constant."""
    return full.detach() + group.spread(accumulator - accumulator.detach())


class GatherCache:
    """Gathers in flight, by the group and the tensor that they read."""

    def __init__(self) -> None:
        # The source is kept with its gather: a new one at the same address must not be taken for it.
        self._entries: dict[_Identity, tuple[DBuffer, Token, torch.Tensor]] = {}

    def start(self, pairs: Iterable[tuple[ParamGroup, torch.Tensor]]) -> None:
        """Start gathering; nothing where it is under way already."""
        for group, source in pairs:
            if (identity := _identity(group, source)) not in self._entries:
                self._entries[identity] = (*group.start_gather(source), source)

    def take(self, group: ParamGroup, source: torch.Tensor) -> DBuffer:
        """The whole buffer of a source, waited for."""
        if (entry := self._entries.pop(_identity(group, source), None)) is None:
            return group.gather(source)
        entry[1].wait()
        return entry[0]

    @property
    def in_flight(self) -> int:
        """Number of gathers that nobody has waited for."""
        return sum(not all(work.done for work in token.pending) for _, token, _ in self._entries.values())

    def drop(self) -> None:
        """Wait for gathers that nobody took (the order of units has changed), and forget them."""
        entries, self._entries = self._entries, {}
        if not entries:
            return
        with outside_transforms():  # they were started outside of the transform that may be active now
            for _, token, _ in entries.values():
                token.wait()


_Identity: TypeAlias = tuple[str, int, int]


def _identity(group: ParamGroup, source: torch.Tensor) -> _Identity:
    # All ranks must find the same, so what differs on one alone does not count: empty sources all have one address.
    return group.key, source.data_ptr(), version_of(source)
