"""What a state consists of, by name: every tensor with its logical shape, and this rank's part of it.

A name is the keys and positions on the way through the pytree, then the parameter, then the fields (of named tuples):
``{"optimizer": AdamWState(exp_avg={"layers.0": buffer}, ...)}`` gives ``optimizer.layers.0.wq.weight.exp_avg``. The key
of a group and the index of a tensor are no part of it, since other layouts group otherwise.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils import _pytree as pytree

from mfsdp_func.checkpoint.boxes import Box
from mfsdp_func.checkpoint.dcp import BoxTensor
from mfsdp_func.checkpoint.entry import Entry, GroupNames
from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.checkpoint.parts import counts_as, flat_of, is_writer, owner_coordinate, part_of
from mfsdp_func.checkpoint.paths import join_path, parents_of, word_of
from mfsdp_func.checkpoint.shards import Shards
from mfsdp_func.fsdp.grouping import ParameterNames
from mfsdp_func.fsdp.sharded_module import ShardedModule
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.values.buffer_spec import BufferSpec, local_part, local_view
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import Partial, Replicate
from mfsdp_func.values.ranges import Range


def entries_of(state: Any, names: Any, mesh: Mesh) -> list[Entry]:
    """Everything in a state by name.

    Args:
        state: a pytree of `DBuffer`s, `Shards`, DTensors, tensors and plain values. A tensor under the key
            ``(group, index)`` is this rank's part of a tensor of the buffers that the state has of that group; one under
            ``(group, index, number)`` is whole, and lies on its owner alone (in each replica of the buffer).
        names: see `group_names`.
        mesh: all ranks that save or load.

    Raises:
        CheckpointError: on what has no name, two values of one name, or what is no value (a pending sum).
    """
    groups, leaves = group_names(names), leaves_of(state)[0]
    specs: dict[Any, list[BufferSpec]] = {}
    for path, value in leaves:
        if isinstance(value, DBuffer):
            key, _, _ = _split_group(path, groups, value)
            specs.setdefault(key, []).append(value.spec)
    found: list[Entry] = []
    siblings: dict[str, dict[str, None]] = {}
    paths: dict[str, str] = {}
    for leaf, (path, value) in enumerate(leaves):
        if isinstance(value, DBuffer):
            _, group, rest = _split_group(path, groups, value)
            made = list(_buffer_entries(value, group, rest, leaf))
        elif isinstance(value, Shards):
            made = list((_owned_entries if value.owned else _shards_entries)(value, path, leaf))
        else:
            part = _part_entry(path, value, leaf, groups, specs)
            made = [part or _plain_entry(path, value, leaf, mesh)]
        for entry in made:
            if entry.name in paths:
                raise CheckpointError(
                    f"two values of the state have the name {entry.name!r}: at {paths[entry.name]} and at"
                    f" {pytree.keystr(path)}; give them other keys"
                )
            paths[entry.name] = pytree.keystr(path)
        found += made
        if isinstance(value, (DBuffer, Shards)) or made[0].index >= 0:
            for parent, params in parents_of(path, [entry.name for entry in made]):
                siblings.setdefault(parent, {}).update(dict.fromkeys(params))
    return [_with_aliases(entry, siblings, paths) for entry in found]


def leaves_of(state: Any) -> tuple[list[tuple[Any, Any]], Any]:
    """Paths and leaves of a state, and its structure: buffers, shards and plain sequences are leaves."""
    return pytree.tree_flatten_with_path(state, is_leaf=_is_leaf)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, (DBuffer, Shards)):
        return True
    if type(value) in (list, tuple):
        return bool(value) and not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))
    return False


def group_names(names: Any) -> dict[Any, GroupNames]:
    """What `names` says about each group.

    Args:
        names: `ShardedModule.names`, which knows logical shapes and ties (or the `ShardedModule`); a mapping group ->
            names, one per tensor; or a mapping (group, index) -> name. None says nothing.

    Raises:
        CheckpointError: if it is none of these.
    """
    if names is None:
        return {}
    if isinstance(names, ShardedModule):
        names = names.names
    if isinstance(names, ParameterNames):
        ties = names.ties
        return {key: GroupNames(own, names.shapes[key], ties) for key, own in names.items()}
    if isinstance(names, Mapping) and all(isinstance(key, tuple) and len(key) == 2 for key in names) and names:
        grouped: dict[Any, dict[int, str]] = {}
        for (group, index), name in names.items():
            grouped.setdefault(group, {})[index] = name
        return {group: GroupNames(tuple(own[i] for i in sorted(own))) for group, own in grouped.items()}
    if isinstance(names, Mapping) and not any(isinstance(given, str) for given in names.values()):
        found: dict[Any, GroupNames] = {}
        for group, given in names.items():
            listed = [given[i] for i in sorted(given)] if isinstance(given, Mapping) else list(given)
            found[group] = GroupNames(tuple(map(str, listed)))
        return found
    raise CheckpointError(
        f"names: got {type(names).__name__}, expected apply.names or a mapping from group keys to parameter names in order"
    )


def _split_group(
    path: Sequence[Any], groups: Mapping[Any, GroupNames], value: DBuffer
) -> tuple[Any, GroupNames, list[Any]]:
    for at in range(len(path) - 1, -1, -1):
        key = path[at]
        if isinstance(key, pytree.MappingKey) and key.key in groups:
            group = groups[key.key]
            if len(group.names) != len(value.layout.tensor_shapes):
                raise CheckpointError(
                    f"the buffer at {pytree.keystr(tuple(path))} has {len(value.layout.tensor_shapes)} tensors, but"
                    f" names[{key.key!r}] has {len(group.names)}"
                )
            return key.key, group, [*path[:at], *path[at + 1 :]]
    where = pytree.keystr(tuple(path)) or "the top"
    raise CheckpointError(
        f"the buffer at {where} has no names: buffers know their tensors by index, which other layouts have not."
        f" Give names=apply.names, or a mapping from its group key to its parameters' names (got groups"
        f" {sorted(map(repr, groups))})"
    )


def _buffer_entries(buffer: DBuffer, group: GroupNames, path: Sequence[Any], leaf: int) -> Iterator[Entry]:
    if any(isinstance(placement, Partial) for placement in buffer.placements):
        raise CheckpointError(
            f"the buffer at {pytree.keystr(tuple(path))} is {buffer.placements}: a pending sum is no value; reduce it first"
        )
    layout, spec = buffer.layout, buffer.spec
    for i, name in enumerate(group.names):
        shape = group.shapes[i] if group.shapes else layout.tensor_shapes[i]
        if shape.numel() != layout.tensor_shapes[i].numel():
            raise CheckpointError(f"parameter {name!r} has shape {tuple(shape)}, the layout {layout.tensor_shapes[i]}")
        place, _ = local_view(spec, i)
        part = local_part(spec, i)
        yield Entry(
            join_path(path, name),
            leaf,
            buffer.local_buffer[place.start : place.start + part.numel],
            shape,
            part,
            writes=is_writer(spec.mesh, spec.placements, i) and counts_as(part, shape, spec.mesh, spec.placements),
            loose=not group.shapes,
            aliases=tuple(join_path(path, tied) for tied in group.ties.get(name, ())),
            index=i,
        )


def _shards_entries(shards: Shards, path: Sequence[Any], leaf: int) -> Iterator[Entry]:
    for group, owners in shards.groups().items():
        mesh = owners.mesh
        for i, shape in enumerate(owners.layout.tensor_shapes):
            key = shards.key(group, i)
            part = part_of(owners, i)
            if key not in shards.tensors:
                continue
            name = shards.name_of(group, i)
            writes = is_writer(mesh, owners.placements, i) and counts_as(part, shape, mesh, owners.placements)
            for inner, tensor in _inner_leaves(shards.tensors[key]):
                full = join_path([*path, *inner], name)
                if tensor.numel() != part.numel:
                    raise CheckpointError(
                        f"{full!r}: this rank's shard has {tensor.numel()} elements, its layout gives it {part.numel} of"
                        f" {tuple(shape)}; a tensor that its owner alone holds goes in with Shards(..., owned=True)"
                    )
                yield Entry(full, leaf, flat_of(tensor), shape, part, writes=writes, loose=True)


def _owned_entries(shards: Shards, path: Sequence[Any], leaf: int) -> Iterator[Entry]:
    for key, value in shards.tensors.items():
        group, i, *number = shards.split(key)
        owners, name = shards.groups()[group], shards.name_of(group, i)
        if not number and owners.mesh.coordinate() != owner_coordinate(owners, i):
            raise CheckpointError(f"{name!r} is said to lie whole on its owner, but this rank does not own it")
        writes = is_writer(owners.mesh, owners.placements, i)
        for inner, tensor in _inner_leaves(value):
            yield _whole_entry(join_path([*path, *_words(number), *inner], name), leaf, tensor, writes)


def _whole_entry(name: str, leaf: int, tensor: torch.Tensor, writes: bool) -> Entry:
    return Entry(name, leaf, flat_of(tensor), tensor.shape, Range(0, tensor.numel()), writes=writes)


def _words(numbers: Sequence[int]) -> list[Any]:
    return [pytree.GetAttrKey(str(number)) for number in numbers]


def _inner_leaves(value: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield (), value
        return
    for path, tensor in pytree.tree_flatten_with_path(value)[0]:
        if not isinstance(tensor, torch.Tensor):
            raise CheckpointError(f"Shards: {pytree.keystr(path)} holds a {type(tensor).__name__}, expected tensors")
        yield tuple(pytree.GetAttrKey(word_of(key)) for key in path), tensor  # below the parameter all are fields


def _part_entry(
    path: Sequence[Any], value: Any, leaf: int, groups: Mapping[Any, GroupNames], specs: Mapping[Any, list[BufferSpec]]
) -> Entry | None:
    """The entry of a tensor that goes by ``(group, index)``, as optimizers keep parts; None where no buffer says where."""
    for at, step in enumerate(path):
        key = step.key if isinstance(step, pytree.MappingKey) else None
        if not (isinstance(value, torch.Tensor) and isinstance(key, tuple) and len(key) in (2, 3) and key[0] in specs):
            continue
        group, i, number = groups[key[0]], key[1], key[2:]
        if number:
            spec, rest = specs[key[0]][0], [*path[:at], *path[at + 1 :], *_words(number)]
            return _whole_entry(join_path(rest, group.names[i]), leaf, value, is_writer(spec.mesh, spec.placements, i))
        fitting = [spec for spec in specs[key[0]] if local_part(spec, i).numel == value.numel()]
        name = join_path([*path[:at], *path[at + 1 :]], group.names[i])
        if not fitting:
            expected = local_part(specs[key[0]][0], i).numel
            raise CheckpointError(
                f"{name!r}: the tensor at {pytree.keystr(tuple(path))} has {value.numel()} elements, this rank's part of the"
                f" buffer has {expected}; a tensor that its owner alone holds goes in with Shards(..., owned=True)"
            )
        spec, part = fitting[0], local_part(fitting[0], i)
        shape = group.shapes[i] if group.shapes else spec.layout.tensor_shapes[i]
        writes = is_writer(spec.mesh, spec.placements, i) and counts_as(part, shape, spec.mesh, spec.placements)
        return Entry(
            name,
            leaf,
            flat_of(value),
            shape,
            part,
            writes=writes,
            loose=not group.shapes,
            index=i,
            aliases=tuple(
                join_path([*path[:at], *path[at + 1 :]], tied) for tied in group.ties.get(group.names[i], ())
            ),
        )
    return None


def _plain_entry(path: Sequence[Any], value: Any, leaf: int, mesh: Mesh) -> Entry:
    name = join_path(path, "")
    if isinstance(value, torch.Tensor):
        for key in path:
            if isinstance(key, pytree.MappingKey) and not isinstance(key.key, str):
                raise CheckpointError(
                    f"the tensor at {pytree.keystr(tuple(path))} goes by {key.key!r}, an index that other layouts have not."
                    " Bare shards go in as checkpoint.Shards(dict, owner_layout, names), a TorchOptimizer as its states; else"
                    " give keys that are names"
                )
    if isinstance(value, DTensor):
        if any(isinstance(placement, Partial) for placement in value.placements):
            raise CheckpointError(f"{name!r} is {value.placements}: a pending sum is no value; reduce it first")
        sizes, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        here = value.device_mesh.get_coordinate() or [0]
        copies = [c for c, placement in zip(here, value.placements, strict=True) if isinstance(placement, Replicate)]
        box = Box(tuple(offsets), tuple(sizes))
        return Entry(name, leaf, value.to_local().detach(), value.shape, None, box, writes=not any(copies))
    if isinstance(value, BoxTensor):
        value.pieces()  # raises where nothing tells the part
        return Entry(
            name, leaf, value.local, value.shape, value.part, writes=value.writes and bool(value.local.numel())
        )
    if isinstance(value, torch.Tensor):
        return Entry(name, leaf, flat_of(value), value.shape, Range(0, value.numel()), shared=True)
    return Entry(name, leaf, value, None, shared=True)


def _with_aliases(entry: Entry, siblings: Mapping[str, Mapping[str, None]], paths: Mapping[str, str]) -> Entry:
    """A number that belongs to all parameters beside it (``step``) is also found under each of them, as torch has it."""
    if not entry.shared or entry.shape != torch.Size(()):
        return entry
    parent, _, field = entry.name.rpartition(".")
    found = [f"{param}.{field}" for param in siblings.get(parent, ())]
    return replace(entry, aliases=(*entry.aliases, *(name for name in found if name not in paths)))


def check_names(entries: Sequence[Entry]) -> None:
    """See `entries_of`; names and aliases together must be different, too.

    Raises:
        CheckpointError: naming one that stands twice.
    """
    seen: set[str] = set()
    for entry in entries:
        for name in (entry.name, *entry.aliases):
            if name in seen:
                raise CheckpointError(f"two values of the state have the name {name!r}; give them other keys")
            seen.add(name)
