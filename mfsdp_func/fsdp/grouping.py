"""Which parameters of a module live together in one flat buffer, and which modules run as units."""

from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from mfsdp_func.values.mesh import Mesh

Units: TypeAlias = Iterable[str | nn.Module | type[nn.Module]]


class Entry(NamedTuple):
    """One physical parameter: what it is, and its place in a group. Not the parameter itself, which may be huge."""

    name: str
    """Its first name; tied parameters have several."""
    shape: torch.Size
    dtype: torch.dtype
    trainable: bool
    group: str
    index: int


@dataclass(frozen=True)
class Group:
    """The parameters of one buffer: those that one unit owns, of one dtype, trainable or not."""

    key: str
    entries: tuple[Entry, ...]

    @property
    def trainable(self) -> bool:
        """Whether gradients are taken."""
        return self.entries[0].trainable

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the main weights."""
        return self.entries[0].dtype


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are gathered while it runs.

    Attributes:
        name: qualified name; "" for the root.
        names: for each of its parameter names, relative to the module, the physical parameter behind it. A tied
            parameter may live in the group of another unit.
        groups: keys of the groups that hold them, in order.
        held: whether only the parameters that the module owns directly belong to it: they stay gathered for the whole
            pass, because modules inside run as units of their own.
    """

    name: str
    names: tuple[tuple[str, Entry], ...]
    groups: tuple[str, ...]
    held: bool


Places: TypeAlias = dict[str, tuple[str, int]]
"""Every name of a parameter -> its group, and its index there."""


class ParameterNames(dict[str, tuple[str, ...]]):
    """Key of a group -> the first name of each of its parameters, by index in the buffer.

    Attributes:
        shapes: key of a group -> the logical shapes, which a layout may write otherwise (0-D, finer rows).
        ties: first name -> the further names of the same parameter.
    """

    def __init__(self, groups: Mapping[str, Group], places: Places) -> None:
        super().__init__({key: tuple(entry.name for entry in group.entries) for key, group in groups.items()})
        self.shapes = {key: tuple(entry.shape for entry in group.entries) for key, group in groups.items()}
        self.ties: dict[str, tuple[str, ...]] = {}
        for name, (key, index) in places.items():
            first = self[key][index]
            if name != first:
                self.ties[first] = (*self.ties.get(first, ()), name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_names, (dict(self), self.shapes, self.ties)


def _restore_names(names: Any, shapes: Any, ties: Any) -> ParameterNames:
    made = ParameterNames({}, {})
    made.update(names)
    made.shapes, made.ties = shapes, ties
    return made


def group_parameters(
    module: nn.Module, units: Units | None, ignored: Collection[str] = ()
) -> tuple[tuple[Unit, ...], dict[str, Group], Places]:
    """Split a module into units, and its physical parameters into groups.

    Units are the modules named by `units` (by default: the elements of every `nn.ModuleList`), and of the rest, each
    outermost module that owns parameters directly and has no unit inside. Parameters that a module with units inside, or
    one without a forward of its own (`nn.ParameterList`), owns directly form a held unit. Tied parameters are found by
    identity: the first name owns the entry. The parameters named in `ignored` are left out.

    Raises:
        ValueError: if a unit does not exist, lies inside another, shares a module with another, or has no parameters.
    """
    left_out = {id(module.get_parameter(name)) for name in ignored}
    chosen = _chosen_units(module, units, left_out)
    entries: dict[int, Entry] = {}
    members: dict[str, list[Entry]] = {}
    found: list[Unit] = []
    for name, owner, held in _walk(module, chosen, left_out):
        found_names: list[tuple[str, Entry]] = []
        for path, param in owner.named_parameters(recurse=not held, remove_duplicate=False):
            if id(param) in left_out:
                continue
            if id(param) not in entries:
                key = _group_key(name, param, [p for p in owner.parameters(recurse=not held) if id(p) not in left_out])
                group = members.setdefault(key, [])
                full_name = f"{name}.{path}".lstrip(".")
                entry = Entry(full_name, param.shape, param.dtype, param.requires_grad, key, len(group))
                entries[id(param)] = entry
                group.append(entry)
            found_names.append((path, entries[id(param)]))
        groups = tuple(dict.fromkeys(entry.group for _, entry in found_names))
        found.append(Unit(name, tuple(found_names), groups, held))
    groups = {key: Group(key, tuple(group)) for key, group in members.items()}
    names = module.named_parameters(remove_duplicate=False)
    places = {
        name: (entries[id(param)].group, entries[id(param)].index) for name, param in names if id(param) in entries
    }
    return tuple(found), groups, places


def _owns(module: nn.Module, left_out: Container[int], *, recurse: bool = True) -> bool:
    return any(id(param) not in left_out for param in module.parameters(recurse))


def _chosen_units(module: nn.Module, units: Units | None, left_out: Container[int]) -> dict[nn.Module, str]:
    names = {sub: name for name, sub in module.named_modules()}
    if units is None:
        lists = [sub for sub in module.modules() if isinstance(sub, nn.ModuleList)]
        wanted = [element for sub in lists for element in sub if _owns(element, left_out)]
        inside = _inner(wanted)
        return {sub: names[sub] for sub in wanted if sub not in inside}
    chosen: dict[nn.Module, str] = {}
    for unit in units:
        if isinstance(unit, type):
            matches = [sub for sub in module.modules() if isinstance(sub, unit)]
        else:
            every = module.named_modules(remove_duplicate=False)
            matches = [sub for name, sub in every if sub is unit or name == unit]
        if not matches:
            raise ValueError(f"fully_shard: unit {unit!r} is no module of {type(module).__name__}; see named_modules()")
        for sub in matches:
            if not _owns(sub, left_out):
                raise ValueError(f"fully_shard: unit {names[sub]!r} has no parameters to shard")
            chosen[sub] = names[sub]
    inside = _inner(chosen)
    for sub, name in chosen.items():
        if sub in inside:
            raise ValueError(f"fully_shard: unit {name!r} lies inside another unit; name only one of them")
    return chosen


def _inner(modules: Iterable[nn.Module]) -> set[nn.Module]:
    """All modules inside of `modules`."""
    return {inner for module in modules for inner in module.modules() if inner is not module}


def _walk(
    module: nn.Module, chosen: Mapping[nn.Module, str], left_out: Container[int]
) -> Iterator[tuple[str, nn.Module, bool]]:
    """The units of a module, in module order: name, module, held. Modules under several names are met once.

    Raises:
        ValueError: if a module would be a unit, and part of another one.
    """
    pending: list[tuple[str, nn.Module]] = [("", module)]
    met, units, inside = set[nn.Module](), set[nn.Module](), _inner(chosen)
    while pending:
        name, sub = pending.pop()
        if sub in met or sub in inside:
            continue
        met.add(sub)
        has_units = any(inner in chosen for inner in sub.modules())
        owns = _owns(sub, left_out, recurse=False)
        # A ParameterList, say, does not run: others use what it has.
        runs = "forward" in vars(sub) or getattr(type(sub), "forward", None) is not nn.Module.forward
        if sub not in chosen and (has_units or not owns or not runs):
            if owns:
                yield name, sub, True
            pending += [(f"{name}.{leaf}".lstrip("."), child) for leaf, child in reversed(list(sub.named_children()))]
            continue
        inner = _inner([sub])
        if shared := inner & units:
            raise ValueError(
                f"fully_shard: a {type(next(iter(shared))).__name__} is part of {name!r} and is used outside of it too;"
                " name a module around both in units="
            )
        inside |= inner
        units.add(sub)
        yield name, sub, False


def _group_key(unit: str, param: nn.Parameter, own: Sequence[nn.Parameter]) -> str:
    """The unit's name, told apart by dtype and trainability only where the unit has several of them."""
    kinds = {(p.dtype, p.requires_grad) for p in own}
    words = [unit or "root"]
    if len({dtype for dtype, _ in kinds}) > 1:
        words.append(str(param.dtype).removeprefix("torch."))
    if len({trainable for _, trainable in kinds}) > 1 and not param.requires_grad:
        words.append("frozen")
    return ":".join(words)


def resolve_names(
    module: nn.Module, places: Places, given: Iterable[str | nn.Parameter], what: str
) -> list[tuple[str, int]]:
    """The places of parameters that are given by any of their names, or themselves.

    Raises:
        ValueError: if one of them is no parameter of the module.
    """
    names = {id(param): name for name, param in module.named_parameters()}
    found: list[tuple[str, int]] = []
    for key in given:
        place = places.get(key if isinstance(key, str) else names.get(id(key), ""))
        if place is None:
            shown = repr(key) if isinstance(key, str) else f"of shape {tuple(key.shape)}"
            raise ValueError(
                f"fully_shard: {what} has a parameter {shown} that {type(module).__name__} has not; see"
                " named_parameters()"
            )
        found.append(place)
    return found


def resolve_owners(
    module: nn.Module, places: Places, parameter_to_owner: Mapping[str | nn.Parameter, int]
) -> dict[tuple[str, int], int]:
    """The place of each parameter -> the global rank that owns it.

    Raises:
        ValueError: on unknown parameters, or one that is given two owners under different names.
    """
    found = resolve_names(module, places, parameter_to_owner, "parameter_to_owner")
    owners: dict[tuple[str, int], int] = {}
    for key, place, owner in zip(parameter_to_owner, found, parameter_to_owner.values(), strict=True):
        if owners.setdefault(place, owner) != owner:
            shown = key if isinstance(key, str) else tuple(key.shape)
            raise ValueError(
                f"fully_shard: parameter {shown!r} is given the owners {owners[place]} and {owner}; tied names share one"
            )
    return owners


def owners_of(group: Group, owners: Mapping[tuple[str, int], int], mesh: Mesh, axes: Sequence[int]) -> list[int]:
    """The shard index that owns each parameter of a group.

    On axes that do not cut the buffer, the rank with the same coordinates owns in every replica group.

    Raises:
        ValueError: if a parameter has no owner, or one outside the mesh.
    """
    indices: list[int] = []
    for entry in group.entries:
        owner = owners.get((entry.group, entry.index))
        if owner is None:
            raise ValueError(
                f"fully_shard: TensorAtomic needs an owner for parameter {entry.name!r}; add it to"
                " FsdpContext(parameter_to_owner=...)"
            )
        if owner not in mesh:
            raise ValueError(f"fully_shard: parameter {entry.name!r} is given owner {owner}, expected a rank of {mesh}")
        indices.append(mesh.shard_index(axes, owner))
    return indices
