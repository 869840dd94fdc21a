"""The pure `apply` of `fully_shard`: the module's own forward, with each unit gathering its parameters while it runs."""

import functools
import uuid
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mfsdp_func.dbuffer import DBuffer
from mfsdp_func.fsdp.bound import Bound, GatherCache, Kept
from mfsdp_func.fsdp.compiled import call_in_graph, register
from mfsdp_func.fsdp.grouping import Group, Unit
from mfsdp_func.fsdp.replay import Modes, buffers_put_back, swapped, tensor_leaves
from mfsdp_func.fsdp.unit import UnitCall, call_unit

Params: TypeAlias = Mapping[str, DBuffer]


@dataclass
class _Run:
    """One call of `apply`: the buffers it works on, and what it has seen and gathered so far."""

    params: Params
    accumulator: Params | None
    watched: bool
    sequence: list[int] = field(default_factory=list)
    resting: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: dict[str, list[torch.Tensor]] = field(default_factory=dict)


class ShardedModule:
    """A module as a pure function of its sharded parameters: ``apply(sharded_params, *args, **kwargs)``.

    Args and results are those of the module's forward. Every rank of the mesh calls, each with its own batch; the
    gradient of `sharded_params` is that of the mean over ranks of their losses, sharded like the parameters.

    The one state is that of module buffers: running statistics change as they do in the module, on each rank by its
    own batch.

    Attributes:
        units: which modules gather their parameters while they run.
        groups: which parameters share a buffer.
        bound: how each group lies on the mesh, by its key.
        frozen_params: buffers of parameters that are not trained; constants of `apply`.
    """

    def __init__(
        self,
        skeleton: nn.Module,
        units: Sequence[Unit],
        groups: Mapping[str, Group],
        bound: Mapping[str, Bound],
        frozen_params: Params,
        *,
        prefetch: bool,
        cast_inputs: bool,
        output_dtype: torch.dtype | None,
    ) -> None:
        self.units, self.groups, self.frozen_params = tuple(units), dict(groups), dict(frozen_params)
        self.bound = dict(bound)
        self._skeleton = skeleton
        self._cast_inputs, self._output_dtype = cast_inputs, output_dtype
        self._cache = GatherCache() if prefetch else None
        self._order: tuple[int, ...] = ()
        self._watched: set[int] = set()
        self._key = uuid.uuid4().hex
        self._buffer_places = [(sub._buffers, leaf) for sub in skeleton.modules() for leaf in sub._buffers]
        register(self._key, self)
        self._current: ContextVar[_Run | None] = ContextVar("mfsdp_func_apply", default=None)
        for n, unit in enumerate(self.units):
            if not unit.held:
                sub = skeleton.get_submodule(unit.name)
                sub.forward = _UnitForward(self, n, sub)  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, sharded_params: Params, *args: Any, **kwargs: Any) -> Any:
        """The module's results.

        Raises:
            ValueError: if `sharded_params` are not the buffers that `fully_shard` returned, or others like them.
            TypeError: if one of them is no `DBuffer`, or of another dtype.
            Escape: where it is differentiated, if a tensor enters or leaves a unit other than as an argument or a
                result. Looked for in the first call of each kind (modes, hooks, and arguments that are no tensors).
            RuntimeError: if a parameter is used outside of its unit.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_in_graph("_apply", (sharded_params,), args, kwargs)
        return self._apply(sharded_params, *args, **kwargs)

    def train(self, mode: bool = True) -> "ShardedModule":
        """Set the training mode of all modules, as `nn.Module.train` does. Returns itself."""
        self._skeleton.train(mode)
        return self

    def eval(self) -> "ShardedModule":
        """``train(False)``"""
        return self.train(False)

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """The module's own buffers, such as running statistics: whole on every rank, by qualified name."""
        return dict(self._skeleton.named_buffers())

    def init_accumulator(self, sharded_params: Params) -> dict[str, DBuffer]:
        """Zeros to add unreduced gradients to: one whole buffer per group on every rank, in the reduce dtype."""
        self._check(sharded_params, "sharded_params")
        trainable = {key: bound for key, bound in self.bound.items() if bound.trainable}
        return {
            key: DBuffer(
                bound.average,
                sharded_params[key].local_buffer.new_zeros(bound.average.local_numel, dtype=bound.reduce_dtype),
            )
            for key, bound in trainable.items()
        }

    def accumulate(self, sharded_params: Params, accumulator: Params, *args: Any, **kwargs: Any) -> Any:
        """Like `apply`, but differentiable in `accumulator` alone: its gradient is this rank's own, without reduction.

        Add up the gradients of several micro-batches, then reduce them once:

            gradient = torch.func.grad(lambda a: loss(apply.accumulate(params, a, batch)))(apply.init_accumulator(params))
            gradients = apply.reduce(gradient)
        """
        if torch.compiler.is_dynamo_compiling():
            return self._call_in_graph("_accumulate", (sharded_params, accumulator), args, kwargs)
        return self._accumulate(sharded_params, accumulator, *args, **kwargs)

    def reduce(self, accumulator: Params) -> dict[str, DBuffer]:
        """The average over all ranks of accumulated gradients, sharded like the parameters. Communicates."""
        if torch.compiler.is_dynamo_compiling():
            reduced = self._call_in_graph("_reduce", (accumulator,), (), {})
        else:
            reduced = self._reduce(accumulator)
        return {key: DBuffer(self.bound[key].spec, shard) for key, shard in reduced.items()}

    def _reduce(self, accumulator: Params) -> dict[str, torch.Tensor]:
        self._check(accumulator, "accumulator", accumulates=True)
        return {key: self.bound[key].reduce(buffer.local_buffer) for key, buffer in accumulator.items()}

    def gather_parameters(self, sharded_params: Params) -> dict[str, torch.Tensor]:
        """All parameters in full, by every name (tied ones under each of theirs), on every rank. Communicates."""
        self._check(sharded_params, "sharded_params")
        both = {**sharded_params, **self.frozen_params}
        full = {k: b.params(both[k].redistribute(b.whole.placements)) for k, b in self.bound.items()}
        return {
            f"{unit.name}.{path}".lstrip("."): full[entry.group][entry.index]
            for unit in self.units
            for path, entry in unit.names
        }

    def _check(self, given: Params, what: str, *, accumulates: bool = False) -> None:
        expected = {key: bound for key, bound in self.bound.items() if bound.trainable}
        if set(given) != set(expected):
            raise ValueError(
                f"apply: {what} has buffers {sorted(given)}, expected {sorted(expected)}; pass what fully_shard returned,"
                " or buffers like them"
            )
        for key, bound in expected.items():
            buffer, spec = given[key], bound.average if accumulates else bound.spec
            dtype = bound.reduce_dtype if accumulates else bound.main_dtype
            if not isinstance(buffer, DBuffer):
                raise TypeError(f"apply: {what}[{key!r}] is a {type(buffer).__name__}, expected a DBuffer")
            if buffer.spec != spec:
                raise ValueError(f"apply: {what}[{key!r}] is {buffer.spec}, expected {spec}")
            if buffer.local_buffer.shape != (spec.local_numel,):
                shape = tuple(buffer.local_buffer.shape)
                raise ValueError(f"apply: {what}[{key!r}] stores a {shape}, expected ({spec.local_numel},) of {spec}")
            if buffer.dtype != dtype:
                raise TypeError(
                    f"apply: {what}[{key!r}] is {buffer.dtype}, expected {dtype}; give the module the dtype of the main"
                    " weights, and FsdpContext(param_dtype=...) the one to compute in"
                )

    def _call_in_graph(self, method: str, trees: Sequence[Params], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        buffers = [owner[leaf] for owner, leaf in self._buffer_places]
        return call_in_graph(method, self._key, buffers, trees, args, kwargs)

    @contextmanager
    def traced(self, buffers: Sequence[torch.Tensor]) -> Generator[None, None, None]:
        """Run as part of a graph, in which module buffers are inputs; no gather is in flight."""
        before = [owner[leaf] for owner, leaf in self._buffer_places]
        cache, self._cache = self._cache, None
        try:
            for (owner, leaf), buffer in zip(self._buffer_places, buffers, strict=True):
                owner[leaf] = buffer
            yield
            for (owner, leaf), buffer in zip(self._buffer_places, buffers, strict=True):
                if owner[leaf] is not buffer:
                    raise RuntimeError(
                        f"apply in a compiled region: the module assigns a new tensor to its buffer {leaf!r}; write into"
                        " the buffer (copy_), or call apply eagerly"
                    )
        finally:
            self._cache = cache
            for (owner, leaf), buffer in zip(self._buffer_places, before, strict=True):
                owner[leaf] = buffer

    def _apply(self, sharded_params: Params, *args: Any, **kwargs: Any) -> Any:
        return self._call(sharded_params, None, args, kwargs)

    def _accumulate(self, sharded_params: Params, accumulator: Params, *args: Any, **kwargs: Any) -> Any:
        return self._call(sharded_params, accumulator, args, kwargs)

    def _call(self, params: Params, accumulator: Params | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(params, "sharded_params")
        if accumulator is not None:
            self._check(accumulator, "accumulator", accumulates=True)
        kind = self._kind(args, kwargs)
        run = _Run(params, accumulator, kind not in self._watched)
        if self._cache is not None:
            self._cache.drop()
        before = self._current.set(run)
        try:
            with self._held(run):
                result = self._skeleton(*args, **kwargs)
        finally:
            self._current.reset(before)
        self._order = tuple(run.sequence)
        self._watched.add(kind)
        return result if self._output_dtype is None else pytree.tree_map(self._cast_output, result)

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Calls of one kind run through the same code, as far as can be seen here."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        plain = [leaf if isinstance(leaf, (bool, int, str, type(None))) else type(leaf).__name__ for leaf in leaves]
        modules = list(self._skeleton.modules())
        state = [(sub.training, len(sub._forward_hooks), len(sub._forward_pre_hooks)) for sub in modules]
        return hash((str(spec), tuple(plain), tuple(state), torch.is_grad_enabled()))

    def _cast_output(self, leaf: Any) -> Any:
        return leaf.to(self._output_dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    @contextmanager
    def _held(self, run: _Run) -> Generator[None, None, None]:
        """Gather the parameters of held units for the whole pass."""
        held: dict[str, torch.Tensor] = {}
        for unit in self.units:
            if unit.held:
                held |= {f"{unit.name}.{path}".lstrip("."): p for path, p in self._kept_places(run, unit).items()}
        with swapped(self._skeleton, held):
            yield

    def _kept_places(self, run: _Run, unit: Unit) -> dict[str, torch.Tensor]:
        """A unit's full parameters by name, which stay gathered until the pass and its backward pass end."""
        for key in unit.groups:
            if key not in run.kept:
                bound = self.bound[key]
                full = Kept.apply(bound, self._shard(run, key), self._accumulator(run, key))
                run.kept[key] = bound.params(DBuffer(bound.whole, full))
        return {path: run.kept[entry.group][entry.index] for path, entry in unit.names}

    def call_unit(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Any) -> Any:
        """Run a unit's own forward with its parameters gathered."""
        run = self._current.get()
        if run is None:
            raise RuntimeError("this module belongs to fully_shard's apply; call apply(sharded_params, ...) instead")
        unit = self.units[index]
        module = self._skeleton.get_submodule(unit.name)
        if self.bound[unit.groups[0]].rests_whole:
            args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: self._cast(unit, tensor), (args, kwargs))
            with swapped(module, self._kept_places(run, unit)):
                return forward(*args, **kwargs)
        inputs, rebuild = tensor_leaves((args, kwargs))
        structure: list[Any] = []
        modes: list[Modes] = []

        def compute(params: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            by_group = dict(zip(unit.groups, params, strict=True))
            places = {path: by_group[entry.group][entry.index] for path, entry in unit.names}
            given = rebuild([self._cast(unit, tensor) for tensor in tensors])
            again = bool(modes)
            with swapped(module, places), (modes[0].restored() if again else nullcontext()):
                with buffers_put_back(module) if again else nullcontext():
                    outputs, put_back = tensor_leaves(forward(*given[0], **given[1]))
            modes[:] = modes or [Modes(module)]
            structure[:] = [put_back]
            return outputs

        outputs = self._run_unit(run, index, inputs, compute)
        return structure[0](outputs)

    def _cast(self, unit: Unit, tensor: torch.Tensor) -> torch.Tensor:
        if not (self._cast_inputs and tensor.is_floating_point()):
            return tensor
        bound = [self.bound[key] for key in unit.groups]
        wanted = {b.param_dtype for b in bound if b.param_dtype.is_floating_point}
        changed = any(b.param_dtype != b.main_dtype for b in bound)
        return tensor.to(next(iter(wanted))) if changed and len(wanted) == 1 else tensor

    def _run_unit(self, run: _Run, index: int, inputs: Sequence[torch.Tensor], compute: Any) -> Sequence[torch.Tensor]:
        unit, place = self.units[index], len(run.sequence)
        run.sequence.append(index)
        bound = tuple(self.bound[key] for key in unit.groups)
        shards = [self._shard(run, key) for key in unit.groups]
        adds = run.accumulator is not None
        accumulators = [self._accumulator_or_zeros(run, key) for key in unit.groups] if adds else []
        apart = bound[0].rests_apart
        sources = [self._source(run, key) for key in unit.groups] if apart else []
        after, before = self._neighbours(place, index)
        call = UnitCall(
            unit.name,
            compute,
            bound,
            accumulate=adds,
            apart=apart,
            following=tuple(self.bound[key] for key in after),
            preceding=tuple(self.bound[key] for key in before),
            cache=self._cache,
            watched=run.watched,
        )
        neighbours = [self._source(run, key) for key in (*after, *before)]
        return call_unit(call, [*shards, *accumulators, *sources, *neighbours, *inputs])

    def _neighbours(self, place: int, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Groups of the units that ran after and before this one the last time; none where the order has changed."""
        if self._cache is None or place >= len(self._order) or self._order[place] != index:
            return (), ()
        own = self.units[index].groups
        after = self.units[self._order[place + 1]].groups if place + 1 < len(self._order) else ()
        before = self.units[self._order[place - 1]].groups if place else ()
        return tuple(k for k in after if k not in own), tuple(k for k in before if k not in own)

    def _shard(self, run: _Run, key: str) -> torch.Tensor:
        return (run.params[key] if key in run.params else self.frozen_params[key]).local_buffer

    def _source(self, run: _Run, key: str) -> torch.Tensor:
        """What a group is gathered from."""
        shard = self._shard(run, key).detach()
        if not self.bound[key].rests_apart:
            return shard
        if key not in run.resting:
            run.resting[key] = self.bound[key].rest(shard)
        return run.resting[key]

    def _accumulator(self, run: _Run, key: str) -> torch.Tensor | None:
        return run.accumulator[key].local_buffer if run.accumulator is not None and key in run.accumulator else None

    def _accumulator_or_zeros(self, run: _Run, key: str) -> torch.Tensor:
        given = self._accumulator(run, key)
        return self._shard(run, key).new_zeros(self.bound[key].average.local_numel) if given is None else given


class _UnitForward:
    """Stands in for a unit's forward."""

    def __init__(self, owner: ShardedModule, index: int, module: nn.Module) -> None:
        functools.update_wrapper(self, module.forward)  # models look at signatures
        self._owner, self._index, self._forward = owner, index, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.call_unit(self._index, args, kwargs, self._forward)
