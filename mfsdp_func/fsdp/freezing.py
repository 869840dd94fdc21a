"""Freezing and thawing without sharding anew: each rank keeps the rows that it has, in buffers of fewer tensors."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from mfsdp_func.fsdp.arrangement import Arrangement
from mfsdp_func.fsdp.grouping import Entry, Group, Unit
from mfsdp_func.fsdp.param_group import ParamGroup
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.layout import GlobalLayout


def named_parameters(arrangement: Arrangement, names: Iterable[str], where: str) -> frozenset[str]:
    """The first names of the parameters that are meant: by any of their names, or by that of a module around them.

    Raises:
        ValueError: on a name of neither, or of a parameter that is not sharded.
    """
    found = set[str]()
    for name in [names] if isinstance(names, str) else names:
        inside = [place for other, place in arrangement.places.items() if other == name or other.startswith(f"{name}.")]
        if name in arrangement.ignored:
            raise ValueError(f"{where}: parameter {name!r} is not sharded; use requires_grad_ of apply.ignored_params")
        if not inside:
            raise ValueError(f"{where}: {name!r} is neither a parameter nor a module with parameters; see apply.places")
        found.update(arrangement.groups[key].entries[i].name for key, i in inside)
    return frozenset(found)


def frozen_names(arrangement: Arrangement) -> frozenset[str]:
    """The first names of the parameters that are not trained."""
    groups = arrangement.groups.values()
    return frozenset(entry.name for group in groups if not group.trainable for entry in group.entries)


def with_frozen(base: Arrangement, frozen: Collection[str]) -> Arrangement:
    """The arrangement in which exactly these parameters are not trained.

    A group of both kinds becomes two: what is as in `base` keeps the key. A group of one kind stays as it is.

    Args:
        base: as `fully_shard` made it.
        frozen: first names.
    """
    groups: dict[str, Group] = {}
    param_groups: dict[str, ParamGroup] = {}
    moved: dict[tuple[str, int], Entry] = {}
    for key, group in base.groups.items():
        same = [entry for entry in group.entries if (entry.name not in frozen) == group.trainable]
        other = [entry for entry in group.entries if (entry.name not in frozen) != group.trainable]
        for entries, trainable in ((same, group.trainable), (other, not group.trainable)):
            if entries:
                apart = f"{key}:now {'trained' if trainable else 'frozen'}" if entries is other and same else key
                made = [entry._replace(group=apart, index=n, trainable=trainable) for n, entry in enumerate(entries)]
                groups[apart] = Group(apart, tuple(made))
                param_groups[apart] = _part(
                    base.param_groups[key], apart, [entry.index for entry in entries], trainable
                )
                moved |= {(key, old.index): new for old, new in zip(entries, made, strict=True)}
    places = {name: (moved[place].group, moved[place].index) for name, place in base.places.items()}
    units = tuple(_with_entries(unit, moved) for unit in base.units)
    return replace(base, units=units, groups=groups, places=places, param_groups=param_groups)


def _with_entries(unit: Unit, moved: Mapping[tuple[str, int], Entry]) -> Unit:
    names = tuple((path, moved[entry.group, entry.index]) for path, entry in unit.names)
    return replace(unit, names=names, groups=tuple(dict.fromkeys(entry.group for _, entry in names)))


def _part(group: ParamGroup, key: str, indices: Sequence[int], trainable: bool) -> ParamGroup:
    """The group of some of the tensors of a group."""
    if len(indices) == len(group.names):
        return replace(group, trainable=trainable)
    layout = _part_of_layout(group.spec.layout, indices)
    return replace(
        group,
        key=key,
        spec=BufferSpec(group.spec.mesh, group.spec.placements, layout, key),
        resting=BufferSpec(group.spec.mesh, group.resting.placements, layout, key),
        names=tuple(group.names[i] for i in indices),
        shapes=tuple(group.shapes[i] for i in indices),
        trainable=trainable,
    )


def _part_of_layout(layout: GlobalLayout, indices: Sequence[int]) -> GlobalLayout:
    """Some tensors of a layout, side by side without padding; every rank has the elements of them that it had."""
    order = sorted(indices, key=lambda i: (layout.tensor_to_offset[i], layout.tensor_numels[i]))
    starts: dict[int, int] = {}
    size = 0
    for i in order:
        starts[i], size = size, size + layout.tensor_numels[i]
    ranks: list[int] = []
    for cut in layout.rank_to_offset:
        before = [min(max(cut - layout.tensor_to_offset[i], 0), layout.tensor_numels[i]) for i in order]
        ranks.append(sum(before))
    return GlobalLayout([layout.tensor_shapes[i] for i in indices], [starts[i] for i in indices], size, ranks)


def moved_to(new: Arrangement, old: Arrangement, buffers: Mapping[str, DBuffer]) -> dict[str, DBuffer]:
    """The same parameters as another arrangement of them has them. Local; what stays together is not copied."""
    held = {entry.name: (key, entry.index) for key, group in old.groups.items() for entry in group.entries}
    made: dict[str, DBuffer] = {}
    for key, group in new.param_groups.items():
        if key in buffers and old.param_groups[key].names == group.names:
            made[key] = buffers[key]
            continue
        first = buffers[held[group.names[0]][0]].local_buffer
        made[key] = DBuffer(group.spec, first.new_zeros(group.spec.local_numel))
        for i, name in enumerate(group.names):
            before, j = held[name]
            view = made[key].get_tensor_view(i)
            view.copy_(buffers[before].get_tensor_view(j).detach().view_as(view))
    return made
