"""One forward pass: which parameters a unit takes, where they are gathered from, and which unit comes next."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mfsdp_func.fsdp.bound import Bound, GatherCache, Kept
from mfsdp_func.fsdp.grouping import Unit
from mfsdp_func.fsdp.replay import Start, buffers_written, swapped, tensor_leaves
from mfsdp_func.fsdp.unit import Compute, UnitCall, call_unit
from mfsdp_func.operations.dbuffer import DBuffer

Params: TypeAlias = Mapping[str, DBuffer]


@dataclass(eq=False)
class Pass:
    """One call of `apply`.

    Attributes:
        skeleton: the module without parameters.
        units: its units.
        bound: its groups.
        params: buffers of all groups, frozen ones too.
        accumulator: buffers that gradients go to, of the trainable groups; None where they go to `params`.
        cache: gathers in flight; None to start none.
        cast_inputs: see `FsdpContext`.
        watched: see `UnitCall`.
        order: indices of the units in the order of the last pass.
        changing: index of a unit -> names of the module buffers that it writes into, once it has run.
        sequence: like `order`, of this pass so far.
        all_watched: whether all units so far have been watched.
    """

    skeleton: nn.Module
    units: tuple[Unit, ...]
    bound: Mapping[str, Bound]
    params: Params
    accumulator: Params | None
    cache: GatherCache | None
    cast_inputs: bool
    watched: bool
    order: tuple[int, ...]
    changing: dict[int, frozenset[str]]
    sequence: list[int] = field(default_factory=list)
    all_watched: bool = True
    _resting: dict[str, torch.Tensor] = field(default_factory=dict)
    _kept: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Gather the parameters of held units until the end of the pass."""
        places: dict[str, torch.Tensor] = {}
        for unit in self.units:
            if unit.held:
                places |= {f"{unit.name}.{path}".lstrip("."): p for path, p in self._kept_places(unit).items()}
        with swapped(self.skeleton, places), buffers_written(self._open_modules()):
            yield

    def _open_modules(self) -> list[nn.Module]:
        """The modules that run as any module does, and not as one operation with others."""
        if any(bound.rests_whole for bound in self.bound.values()):
            return list(self.skeleton.modules())
        units = [self.skeleton.get_submodule(unit.name) for unit in self.units if not unit.held]
        closed = {id(sub) for unit in units for sub in unit.modules()}
        return [sub for sub in self.skeleton.modules() if id(sub) not in closed]

    def run_unit(self, index: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a unit's own forward, with its parameters gathered."""
        unit = self.units[index]
        module = self.skeleton.get_submodule(unit.name)
        modules = list(module.modules())
        inputs, rebuild = tensor_leaves((args, kwargs))
        if self.bound[unit.groups[0]].rests_whole:
            args, kwargs = rebuild([self._cast(unit, tensor) for tensor in inputs])
            with swapped(module, self._kept_places(unit)):
                return forward(*args, **kwargs)
        structure: list[Any] = []
        starts: list[Start] = []

        def compute(params: list[list[torch.Tensor]], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            by_group = dict(zip(unit.groups, params, strict=True))
            places = {path: by_group[entry.group][entry.index] for path, entry in unit.names}
            args, kwargs = rebuild([self._cast(unit, tensor) for tensor in tensors])
            first = not starts
            if first:
                starts.append(Start(module, self.changing.get(index)))
            with swapped(module, places), buffers_written(modules) if first else starts[0].again():
                outputs, put_back = tensor_leaves(forward(*args, **kwargs))
            if first:
                self.changing[index] = self.changing.get(index, frozenset()) | starts[0].changed()
            structure[:] = [put_back]
            return outputs

        outputs = self._call(index, inputs, compute)
        return structure[0](outputs)

    def _call(self, index: int, inputs: Sequence[torch.Tensor], compute: Compute) -> Sequence[torch.Tensor]:
        unit, place = self.units[index], len(self.sequence)
        self.sequence.append(index)
        bound = tuple(self.bound[key] for key in unit.groups)
        apart, accumulate = bound[0].rests_apart, self.accumulator is not None
        after, before = self._neighbours(place, index)
        call = UnitCall(
            unit.name,
            compute,
            bound,
            accumulate=accumulate,
            apart=apart,
            following=tuple(self.bound[key] for key in after),
            preceding=tuple(self.bound[key] for key in before),
            cache=self.cache,
            watched=self.watched,
        )
        outputs = call_unit(
            call,
            [
                *(self.params[key].local_buffer for key in unit.groups),
                *(self._accumulator_or_zeros(key) for key in unit.groups if accumulate),
                *(self._source(key) for key in unit.groups if apart),
                *(self._source(key) for key in (*after, *before)),
                *inputs,
            ],
        )
        self.all_watched &= call.was_watched
        return outputs

    def _kept_places(self, unit: Unit) -> dict[str, torch.Tensor]:
        """A unit's full parameters by name, which stay gathered until the pass and its backward pass end."""
        for key in unit.groups:
            if key not in self._kept:
                bound = self.bound[key]
                full = Kept.apply(bound, self.params[key].local_buffer, self._accumulator(key))
                self._kept[key] = bound.params(DBuffer(bound.whole, full))
        return {path: self._kept[entry.group][entry.index] for path, entry in unit.names}

    def _cast(self, unit: Unit, tensor: torch.Tensor) -> torch.Tensor:
        if not (self.cast_inputs and tensor.is_floating_point()):
            return tensor
        bound = [self.bound[key] for key in unit.groups]
        wanted = {b.param_dtype for b in bound if b.param_dtype.is_floating_point}
        changed = any(b.param_dtype != b.main_dtype for b in bound)
        return tensor.to(next(iter(wanted))) if changed and len(wanted) == 1 else tensor

    def _neighbours(self, place: int, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Groups of the units that ran after and before this one the last time; none where the order has changed."""
        if self.cache is None or place >= len(self.order) or self.order[place] != index:
            return (), ()
        own = self.units[index].groups
        after = self.units[self.order[place + 1]].groups if place + 1 < len(self.order) else ()
        before = self.units[self.order[place - 1]].groups if place else ()
        return tuple(k for k in after if k not in own), tuple(k for k in before if k not in own)

    def _source(self, key: str) -> torch.Tensor:
        """What a group is gathered from."""
        shard = self.params[key].local_buffer.detach()
        if not self.bound[key].rests_apart:
            return shard
        if key not in self._resting:
            self._resting[key] = self.bound[key].rest(shard)
        return self._resting[key]

    def _accumulator(self, key: str) -> torch.Tensor | None:
        given = None if self.accumulator is None else self.accumulator.get(key)
        return None if given is None else given.local_buffer

    def _accumulator_or_zeros(self, key: str) -> torch.Tensor:
        given = self._accumulator(key)
        return self.params[key].local_buffer.new_zeros(self.bound[key].average.local_numel) if given is None else given


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """A pytree with its floating-point tensors in another dtype."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
