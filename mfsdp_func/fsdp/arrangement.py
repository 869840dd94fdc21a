"""Which parameters lie in which buffers, how these lie on the mesh, and which unit takes what: a value."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from mfsdp_func.fsdp.grouping import Group, ParameterNames, Places, Unit
from mfsdp_func.fsdp.param_group import ParamGroup
from mfsdp_func.operations.dbuffer import DBuffer


class Site(NamedTuple):
    """One unit: what every call of it needs to know.

    Attributes:
        unit: which.
        param_groups: its groups, in order.
        places: for each of its names, by position in `param_groups` and in the group, which parameter.
        ignored: names of parameters that are not sharded, relative to the module -> their first names.
        compute_dtype: of its floating-point arguments, where `FsdpContext.cast_forward_inputs` casts them.
    """

    unit: Unit
    param_groups: tuple[ParamGroup, ...]
    places: tuple[tuple[int, int], ...]
    ignored: Mapping[str, str]
    compute_dtype: torch.dtype | None


@dataclass(frozen=True, eq=False)
class Arrangement:
    """See the attributes of `ShardedModule`.

    Attributes:
        units: likewise.
        groups: likewise.
        places: likewise.
        param_groups: likewise.
        ignored: every name of a parameter that stays whole on every rank -> its first name.
    """

    units: tuple[Unit, ...]
    groups: Mapping[str, Group]
    places: Places
    param_groups: Mapping[str, ParamGroup]
    ignored: Mapping[str, str]

    @cached_property
    def names(self) -> ParameterNames:
        """The parameters of each buffer."""
        return ParameterNames(self.groups, self.places)

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The units, in order."""
        return tuple(map(self._site, self.units))

    def _site(self, unit: Unit) -> Site:
        groups = [self.param_groups[key] for key in unit.groups]
        inside = f"{unit.name}." if unit.name else ""
        dtypes = {group.param_dtype for group in groups if group.param_dtype.is_floating_point}
        casts = len(dtypes) == 1 and any(group.param_dtype != group.main_dtype for group in groups)
        return Site(
            unit,
            tuple(groups),
            tuple((unit.groups.index(entry.group), entry.index) for _, entry in unit.names),
            {path.removeprefix(inside): name for path, name in self.ignored.items() if path.startswith(inside)},
            dtypes.pop() if casts else None,
        )

    def check(self, given: Mapping[str, DBuffer], what: str, *, accumulates: bool = False) -> None:
        """Whether buffers are those of the trainable groups, as parameters and gradients lie, or as accumulators do.

        Raises:
            ValueError: if there are others, or they lie otherwise.
            TypeError: if one of them is no `DBuffer`, or of another dtype.
        """
        expected = {key: group for key, group in self.param_groups.items() if group.trainable}
        if set(given) != set(expected):
            raise ValueError(
                f"apply: {what} has buffers {sorted(given)}, expected {sorted(expected)}; pass what fully_shard"
                " returned, or buffers like them"
            )
        for key, group in expected.items():
            buffer, spec = given[key], group.accumulator if accumulates else group.spec
            dtype = group.reduce_dtype if accumulates else group.main_dtype
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
