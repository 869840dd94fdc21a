"""The pure `apply` of `fully_shard`: the module's own forward, with each unit gathering its parameters while it runs."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mfsdp_func.dbuffer import DBuffer
from mfsdp_func.fsdp.grouping import Group, Unit
from mfsdp_func.fsdp.unit import Bound, GatherCache, UnitCall, call_unit, swapped, tensor_leaves

Params = Mapping[str, DBuffer]


@dataclass
class _Run:
    """One call of `apply`: the buffers it works on, and the units it has seen."""

    params: Params
    accumulator: Params | None
    sequence: list[int]


class ShardedModule:
    """A module as a pure function of its sharded parameters: ``apply(sharded_params, *args, **kwargs)``.

    Args and results are those of the module's forward. Every rank of the mesh calls, each with its own batch; the
    gradient of `sharded_params` is that of the mean over ranks of their losses, sharded like the parameters.

    Attributes:
        units: which modules gather their parameters while they run.
        groups: which parameters share a buffer.
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
        self._skeleton, self._bound = skeleton, dict(bound)
        self._cast_inputs, self._output_dtype = cast_inputs, output_dtype
        self._cache = GatherCache() if prefetch else None
        self._order: tuple[int, ...] = ()
        self._current: ContextVar[_Run | None] = ContextVar("mfsdp_func_apply", default=None)
        for n, unit in enumerate(self.units):
            if not unit.held:
                sub = skeleton.get_submodule(unit.name)
                sub.forward = _UnitForward(self, n, sub)  # pyright: ignore[reportAttributeAccessIssue]

    def __call__(self, sharded_params: Params, *args: Any, **kwargs: Any) -> Any:
        """The module's results.

        Raises:
            ValueError: if `sharded_params` are not the buffers that `fully_shard` returned, or others like them.
        """
        self._check(sharded_params, {k: b.spec for k, b in self._bound.items() if b.trainable}, "sharded_params")
        return self._call(_Run(sharded_params, None, []), args, kwargs)

    def init_accumulator(self, sharded_params: Params) -> dict[str, DBuffer]:
        """Zeros to add unreduced gradients to: one whole buffer per group on every rank, in the reduce dtype."""
        trainable = {key: bound for key, bound in self._bound.items() if bound.trainable}
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
        self._check(sharded_params, {k: b.spec for k, b in self._bound.items() if b.trainable}, "sharded_params")
        self._check(accumulator, {k: b.average for k, b in self._bound.items() if b.trainable}, "accumulator")
        return self._call(_Run(sharded_params, accumulator, []), args, kwargs)

    def reduce(self, accumulator: Params) -> dict[str, DBuffer]:
        """The average over all ranks of accumulated gradients, sharded like the parameters. Communicates."""
        self._check(accumulator, {k: b.average for k, b in self._bound.items() if b.trainable}, "accumulator")
        return {
            key: DBuffer(self._bound[key].spec, self._bound[key].reduce(buffer.local_buffer))
            for key, buffer in accumulator.items()
        }

    def gather_parameters(self, sharded_params: Params) -> dict[str, torch.Tensor]:
        """All parameters in full, by every name (tied ones under each of theirs), on every rank. Communicates."""
        both = {**sharded_params, **self.frozen_params}
        full = {k: self._bound[k].params(both[k].redistribute(self._bound[k].replicated)) for k in self.groups}
        return {
            f"{unit.name}.{path}".lstrip("."): full[entry.group][entry.index]
            for unit in self.units
            for path, entry in unit.names
        }

    def _check(self, given: Params, expected: Mapping[str, object], what: str) -> None:
        if set(given) != set(expected):
            raise ValueError(
                f"apply: {what} has buffers {sorted(given)}, expected {sorted(expected)}; pass what fully_shard returned,"
                " or buffers like them"
            )
        for key, spec in expected.items():
            if given[key].spec != spec:
                raise ValueError(f"apply: {what}[{key!r}] is {given[key].spec}, expected {spec}")

    def _call(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._cache is not None:
            self._cache.drop()
        before = self._current.set(run)
        try:
            with self._held(run):
                result = self._skeleton(*args, **kwargs)
        finally:
            self._current.reset(before)
        self._order = tuple(run.sequence)
        if self._output_dtype is None:
            return result
        return pytree.tree_map(self._cast_output, result)

    def _cast_output(self, leaf: Any) -> Any:
        return leaf.to(self._output_dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    @contextmanager
    def _held(self, run: _Run) -> Generator[None, None, None]:
        """Gather the parameters of held units for the whole pass."""
        held: dict[str, torch.Tensor] = {}
        for n, unit in enumerate(self.units):
            if unit.held:
                outputs = self._run_unit(run, n, [], lambda params, _: [p for group in params for p in group])
                by_place = iter(outputs)
                full = {key: [next(by_place) for _ in self.groups[key].entries] for key in unit.groups}
                held |= {
                    f"{unit.name}.{path}".lstrip("."): full[entry.group][entry.index] for path, entry in unit.names
                }
        with swapped(self._skeleton, held):
            yield

    def call_unit(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], forward: Any) -> Any:
        """Run a unit's own forward with its parameters gathered."""
        run = self._current.get()
        if run is None:
            raise RuntimeError("this module belongs to fully_shard's apply; call apply(sharded_params, ...) instead")
        unit = self.units[index]
        module = self._skeleton.get_submodule(unit.name)
        inputs, rebuild = tensor_leaves((args, kwargs))
        structure: list[Any] = []
        first = True

        def compute(params: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            nonlocal first
            by_group = dict(zip(unit.groups, params, strict=True))
            places = {path: by_group[entry.group][entry.index] for path, entry in unit.names}
            args, kwargs = rebuild([self._cast(unit, tensor) for tensor in tensors])
            with swapped(module, places, fresh_buffers=not first):
                first = False
                outputs, put_back = tensor_leaves(forward(*args, **kwargs))
            structure[:] = [put_back]
            return outputs

        outputs = self._run_unit(run, index, inputs, compute)
        return structure[0](outputs)

    def _cast(self, unit: Unit, tensor: torch.Tensor) -> torch.Tensor:
        if not (self._cast_inputs and tensor.is_floating_point()):
            return tensor
        wanted = {self._bound[key].param_dtype for key in unit.groups if self._bound[key].param_dtype.is_floating_point}
        changed = any(self._bound[key].param_dtype != self._bound[key].main_dtype for key in unit.groups)
        return tensor.to(next(iter(wanted))) if changed and len(wanted) == 1 else tensor

    def _run_unit(self, run: _Run, index: int, inputs: Sequence[torch.Tensor], compute: Any) -> Sequence[torch.Tensor]:
        unit, place = self.units[index], len(run.sequence)
        run.sequence.append(index)
        bound = tuple(self._bound[key] for key in unit.groups)
        shards = [self._shard(run, key) for key in unit.groups]
        accumulators = [self._accumulator(run, key) for key in unit.groups] if run.accumulator is not None else []
        after, before = self._neighbours(place, index)
        call = UnitCall(
            unit.name,
            compute,
            bound,
            run.accumulator is not None,
            tuple(self._bound[key] for key in after),
            tuple(self._bound[key] for key in before),
            self._cache,
        )
        neighbours = [self._shard(run, key).detach() for key in (*after, *before)]
        return call_unit(call, [*shards, *accumulators, *neighbours, *inputs])

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

    def _accumulator(self, run: _Run, key: str) -> torch.Tensor:
        if run.accumulator is not None and key in run.accumulator:
            return run.accumulator[key].local_buffer
        return self.frozen_params[key].local_buffer.new_zeros(self._bound[key].average.local_numel)


class _UnitForward:
    """Stands in for a unit's forward."""

    def __init__(self, owner: ShardedModule, index: int, module: nn.Module) -> None:
        self._owner, self._index, self._forward = owner, index, module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._owner.call_unit(self._index, args, kwargs, self._forward)
