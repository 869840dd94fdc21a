"""One forward pass: which parameters a unit takes, where they are gathered from, and which unit comes next."""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, filterfalse
from operator import itemgetter
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mfsdp_func.effects.agreement import agree, checking
from mfsdp_func.effects.carrier import Call
from mfsdp_func.effects.here import carrier_of
from mfsdp_func.effects.torch_internals import is_transformed, is_untransformed, unwrapped
from mfsdp_func.fsdp.arrangement import Arrangement, Site
from mfsdp_func.fsdp.forward import Forward
from mfsdp_func.fsdp.grouping import Unit
from mfsdp_func.fsdp.param_group import GatherCache, Kept, ParamGroup
from mfsdp_func.fsdp.replay import Start, buffers_written, exchanged, is_traced, places_of, swapped
from mfsdp_func.fsdp.torch_internals import current_node, inner_of, is_batched, is_wrapped, version_of
from mfsdp_func.fsdp.trees import containers_of, flat_leaves, flat_substituted, is_flat, substituted, tensor_leaves
from mfsdp_func.fsdp.unit import UnitCall
from mfsdp_func.fsdp.unit_function import call_of_node, call_unit
from mfsdp_func.fsdp.watch import Writes, written
from mfsdp_func.operations.dbuffer import DBuffer

Params: TypeAlias = Mapping[str, DBuffer]

_PATH = itemgetter(0)


@dataclass(eq=False)
class Pass:
    """One call of `apply`.

    Attributes:
        skeleton: the module without parameters.
        arrangement: of the parameters.
        params: buffers of all groups, frozen ones too.
        ignored: values of the parameters that are not sharded, by their first names.
        accumulator: buffers that gradients go to, of the trainable groups; None where they go to `params`.
        cache: gathers in flight; None to start none.
        cast_inputs: see `FsdpContext`.
        recompute: names of units that run again in the backward pass.
        order: indices of the units in the order of the last pass.
        changing: index of a unit -> names of the module buffers that it writes into, once it has run.
        sequence: like `order`, of this pass so far.
    """

    skeleton: nn.Module
    arrangement: Arrangement
    params: Params
    ignored: Mapping[str, torch.Tensor]
    accumulator: Params | None
    cache: GatherCache | None
    cast_inputs: bool
    recompute: frozenset[str]
    order: tuple[int, ...]
    changing: dict[int, frozenset[str]]
    sequence: list[int] = field(default_factory=list)
    ended: bool = False
    """Whether what runs now is a part of it once more, for activation checkpointing."""
    _resting: dict[str, torch.Tensor] = field(default_factory=dict)
    _kept: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _kept_versions: dict[str, int] = field(default_factory=dict)
    _plain: set[int] = field(default_factory=set[int])
    """Units that ran as they were written: so they run again, for activation checkpointing, in this pass."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """See `Arrangement`."""
        return self.arrangement.units

    @property
    def param_groups(self) -> Mapping[str, ParamGroup]:
        """See `Arrangement`."""
        return self.arrangement.param_groups

    @contextmanager
    def held(self) -> Generator[None, None, None]:
        """Gather the parameters of held units until the end of the pass."""
        places = {path: self.ignored[name] for path, name in self.arrangement.ignored.items()}
        for unit in self.arrangement.units:
            if unit.held:
                places |= {f"{unit.name}.{path}".lstrip("."): p for path, p in self._kept_places(unit).items()}
        open_modules = self._open_modules() if is_transformed() else ()
        with swapped(self.skeleton, places), buffers_written(open_modules):
            yield
        self._check_unwritten(self.arrangement.units)

    def _open_modules(self) -> list[nn.Module]:
        """The modules that run as any module does, and not as one operation with others."""
        if any(group.rests_whole for group in self.param_groups.values()):
            return list(self.skeleton.modules())
        units = [self.skeleton.get_submodule(unit.name) for unit in self.units if not unit.held]
        closed = {id(sub) for unit in units for sub in unit.modules()}
        return [sub for sub in self.skeleton.modules() if id(sub) not in closed]

    def run_unit(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results of a unit's own forward, with its parameters gathered."""
        site = self.arrangement.sites[index]
        unit = site.unit
        module = self.skeleton.get_submodule(unit.name)
        flat = is_flat(args, kwargs)
        tensors, rebuild = flat_leaves(args, kwargs) if flat else tensor_leaves((args, kwargs))
        if site.param_groups[0].rests_whole:
            forward.is_checked = True  # it runs like any module
            args, kwargs = rebuild(self._cast(site, tensors))
            kept = self._kept_places(unit)
            full = {f"{unit.name}.{path}".lstrip("."): param for path, param in kept.items()}
            with swapped(module, kept), self._first_watched(index, full, forward):
                results = forward(*args, **kwargs)
            self.changing.setdefault(index, frozenset())
            self._check_unwritten([unit])
            return results
        if checking() and not is_traced([buffer.local_buffer for buffer in self.params.values()]):
            self._agree_on(unit)
        whole = dict(zip(site.ignored, map(self.ignored.__getitem__, site.ignored.values()), strict=True))
        routed = _routed([*tensors, *whole.values()])
        numbers = dict(zip(routed, range(len(routed)), strict=True))
        slots = [*map(numbers.get, map(id, tensors), tensors)]
        modules, own = list(module.modules()), set[int]() if flat else containers_of((args, kwargs))
        places = places_of(module, (*map(_PATH, unit.names), *whole))
        if not forward.is_compiled:
            self._plain.add(index)
        run = forward.plain if index in self._plain else forward
        structure: list[Any] = []
        starts: list[Start] = []

        def placed(
            params: Sequence[Sequence[torch.Tensor]], given: Sequence[torch.Tensor]
        ) -> AbstractContextManager[None]:
            values = [params[group][i] for group, i in site.places]
            if whole:
                values += [given[numbers[id(v)]] if id(v) in numbers else v for v in whole.values()]
            return exchanged(places, values)

        def compute(params: Sequence[Sequence[torch.Tensor]], given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            casted = self._cast(site, [given[slot] if isinstance(slot, int) else slot for slot in slots])
            if starts:  # again: on copies of the containers, as they were
                args_again, kwargs_again = rebuild(casted)
                with placed(params, given), starts[0].again():
                    outputs, filled = tensor_leaves(run(*args_again, **kwargs_again))
                structure[:] = [filled]
                return outputs
            starts.append(Start(module, self.changing.get(index)))
            inner = dict(zip(map(id, tensors), casted, strict=True))
            other = nullcontext(flat_substituted(args, kwargs, inner)) if flat else substituted((args, kwargs), inner)
            names = chain.from_iterable(group.names for group in site.param_groups)
            full = dict(zip(names, chain.from_iterable(params), strict=True))
            watched = self._first_watched(index, full, forward)
            with other as trees, placed(params, given), buffers_written(modules), watched:
                results = run(*trees[0], **trees[1])
            outputs, filled = tensor_leaves(results, own)
            structure[:] = [filled]
            self.changing[index] = self.changing.get(index, frozenset()) | starts[0].changed()
            return outputs

        around = [tensor for tensor in chain(tensors, whole.values()) if id(tensor) not in numbers]
        around += [buffer for sub in modules for buffer in sub._buffers.values() if buffer is not None]
        outputs = self._call(site, index, list(routed.values()), compute, placed, around, forward)
        return structure[0](outputs)

    def _first_watched(
        self, index: int, params: Mapping[str, torch.Tensor], forward: Forward
    ) -> AbstractContextManager[Any]:
        """A unit's first run is watched for writes into its parameters that no counter tells."""
        if index in self.changing or not forward.is_plain or is_traced(list(params.values())):
            return nullcontext()
        return Writes(self.units[index].name, list(params), [*map(unwrapped, params.values())])

    def _agree_on(self, unit: Unit) -> None:
        """Compare with the other ranks which unit runs now, before any of them gathers what another does not.

        Raises:
            ValueError: on every rank, if they run different ones, or one of them is done.
        """
        mesh = self.param_groups[unit.groups[0]].spec.mesh
        agree(carrier_of(mesh), Call(f"unit {unit.name!r}", "", mesh, None, (), None, True))

    def _call(
        self,
        site: Site,
        index: int,
        inputs: Sequence[torch.Tensor],
        compute: Callable[..., list[torch.Tensor]],
        placed: Callable[..., AbstractContextManager[None]],
        around: Sequence[torch.Tensor],
        forward: Forward,
    ) -> Sequence[torch.Tensor]:
        unit, place = site.unit, len(self.sequence)
        apart, accumulate = site.param_groups[0].rests_apart, self.accumulator is not None
        after, before = ((), ()) if self.ended else self._neighbours(place, index)
        if not self.ended:
            self.sequence.append(index)
        call = UnitCall(
            unit.name,
            compute,
            placed,
            around,
            site.param_groups,
            accumulate=accumulate,
            apart=apart,
            following=self._sources(after),
            preceding=self._sources(before),
            cache=self.cache,
            recompute=unit.name in self.recompute,
            watched=index in self._plain,
            origin=self,
        )
        tensors = [self.params[key].local_buffer for key in unit.groups]
        if accumulate:
            tensors += map(self._accumulator_or_zeros, unit.groups)
        if apart:
            tensors += map(self._source, unit.groups)
        outputs = call_unit(call, [*tensors, *inputs])
        forward.is_checked = forward.is_checked or (call.learned is not None and call.learned.checked)
        return outputs

    def _check_unwritten(self, units: Sequence[Unit]) -> None:
        """Parameters that stay gathered for the pass were not written into."""
        for unit in units if self._kept else ():
            for key in unit.groups:
                if key in self._kept and self._kept_versions.get(key, 0) != (now := _version(self._kept[key][0])):
                    self._kept_versions[key] = now
                    raise written(unit.name, self.param_groups[key].names)

    def _kept_places(self, unit: Unit) -> dict[str, torch.Tensor]:
        """A unit's full parameters by name, which stay gathered until the pass and its backward pass end."""
        for key in unit.groups:
            if key not in self._kept:
                group = self.param_groups[key]
                full = Kept.apply(group, self.params[key].local_buffer, self._accumulator(key))
                self._kept[key] = group.params(DBuffer(group.whole, full))
                self._kept_versions[key] = _version(full)
        return {path: self._kept[entry.group][entry.index] for path, entry in unit.names}

    def find_held(self, name: str) -> torch.Tensor | None:
        """A parameter that stays gathered until the pass and its backward pass end; None if it does not."""
        key, index = self.arrangement.places[name]
        return self._kept[key][index] if key in self._kept else None

    def _cast(self, site: Site, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        if not self.cast_inputs or site.compute_dtype is None:
            return tensors
        return [tensor.to(site.compute_dtype) if tensor.is_floating_point() else tensor for tensor in tensors]

    def _neighbours(self, place: int, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Groups of the units that ran after and before this one the last time; none where the order has changed."""
        if self.cache is None or place >= len(self.order) or self.order[place] != index:
            return (), ()
        units = self.arrangement.units
        own = frozenset(units[index].groups)
        after = units[self.order[place + 1]].groups if place + 1 < len(self.order) else ()
        before = units[self.order[place - 1]].groups if place else ()
        return (*filterfalse(own.__contains__, after),), (*filterfalse(own.__contains__, before),)

    def _source(self, key: str) -> torch.Tensor:
        """What a group is gathered from."""
        shard = self.params[key].local_buffer.detach()
        if not self.arrangement.param_groups[key].rests_apart:
            return shard
        if key not in self._resting:
            self._resting[key] = self.param_groups[key].rest(shard)
        return self._resting[key]

    def _sources(self, keys: Sequence[str]) -> tuple[tuple[ParamGroup, torch.Tensor], ...]:
        """What groups are gathered from, below all transforms; without what `vmap` maps over."""
        found: list[tuple[ParamGroup, torch.Tensor]] = []
        for key in keys:
            source = self._source(key)
            while is_wrapped(source) and not is_batched(source):
                source = inner_of(source)
            if not is_batched(source):
                found.append((self.arrangement.param_groups[key], source))
        return tuple(found)

    def _accumulator(self, key: str) -> torch.Tensor | None:
        given = None if self.accumulator is None else self.accumulator.get(key)
        return None if given is None else given.local_buffer

    def _accumulator_or_zeros(self, key: str) -> torch.Tensor:
        given = self._accumulator(key)
        return (
            self.params[key].local_buffer.new_zeros(self.param_groups[key].accumulator.local_numel)
            if given is None
            else given
        )


def pass_of_backward(skeleton: nn.Module) -> Pass | None:
    """The pass of which activation checkpointing runs a part again: the one whose graph is being differentiated."""
    start = current_node()
    pending, seen = [start] if start is not None else [], set[Any]()
    while pending:
        node = pending.pop(0)
        call = call_of_node(node)
        if call is not None and isinstance(call.origin, Pass) and call.origin.skeleton is skeleton:
            return call.origin
        for after, _ in node.next_functions:
            if after is not None and after not in seen:
                seen.add(after)
                pending.append(after)
    return None


def _routed(tensors: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
    """The tensors that must come as inputs of the operation, by id; the others are constants of it."""
    every = not is_untransformed() or is_traced(tensors)
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        if every or tensor.requires_grad or is_wrapped(tensor):
            found[id(tensor)] = tensor
    return found


def _version(tensor: torch.Tensor) -> int:
    return version_of(unwrapped(tensor))


def cast_floats(tree: Any, dtype: torch.dtype) -> Any:
    """A pytree with its floating-point tensors in another dtype."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
