"""What `TorchOptimizer` does with tensors: one step in place, compiled or not, and state as checkpoints expect it."""

from collections.abc import Callable, Hashable, Mapping, MutableMapping, Sequence
from types import FunctionType
from typing import Any, TypeAlias, cast

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from mfsdp_func.optim.torch_groups import Group, Make, Place, local_of
from mfsdp_func.optim.transformation import apply_updates
from mfsdp_func.values.buffer_spec import is_first_replica, local_part

Path: TypeAlias = tuple[Any, ...]
Held: TypeAlias = MutableMapping[Any, dict[str, torch.Tensor]]
Indices: TypeAlias = dict[tuple[int, str], int]
"""Of buffers: (number of the parameter, name in the state) -> tensor index."""

# Steps


def _advance(
    makes: tuple[Make, ...],
    rates: tuple[torch.Tensor, ...],
    settings: tuple[dict[str, Any], ...],
    params: list[dict[Hashable, torch.Tensor]],
    grads: list[dict[Hashable, torch.Tensor]],
    states: tuple[Any, ...],
    skip: torch.Tensor | None,
) -> list[list[int]]:
    """One step of every group; writes into `params` and `states`, what was there where `skip` holds.

    Returns:
        What the host counts, by group.
    """
    counts: list[list[int]] = []
    for make, rate, given, param, grad, state in zip(makes, rates, settings, params, grads, states, strict=True):
        updates, new_state = make(rate, **given).update(grad, state, param)
        # One after the other: no second copy of all parameters lives at once.
        pytree.tree_map(lambda old, update: _write(old, apply_updates(old, update), skip), param, updates)
        counts.append([])
        for old, value in zip(pytree.tree_leaves(state), pytree.tree_leaves(new_state), strict=True):
            if isinstance(old, torch.Tensor):
                _write(old, value, skip)
            else:
                counts[-1].append(value)
    return counts


def _write(old: torch.Tensor, value: torch.Tensor, skip: torch.Tensor | None) -> None:
    old.copy_(value if skip is None else torch.where(skip.to(old.device), old, value))


def compiled_step(compile: bool | str) -> Callable[..., list[list[int]]]:
    """The function that takes one step of every group, compiled if asked for."""
    if not compile:
        return _advance
    # Compiled code is kept per code object, at most a few variants of it: each optimizer has a code object of its own.
    own = FunctionType(_advance.__code__.replace(), _advance.__globals__, _advance.__name__)
    backend = compile if isinstance(compile, str) else "inductor"
    return torch.compile(own, fullgraph=True, dynamic=False, backend=backend)


def as_tensors(state: Any) -> tuple[Any, tuple[int, ...]]:
    """A state with what the host counts as 0-D tensors on the CPU, and which leaves these are."""
    leaves, structure = pytree.tree_flatten(state)
    counts = tuple([n for n, leaf in enumerate(leaves) if not isinstance(leaf, torch.Tensor)])
    return pytree.tree_unflatten(
        [torch.tensor(x) if n in counts else x for n, x in enumerate(leaves)], structure
    ), counts


def with_counts(made: Group) -> Any:
    """The inverse of `as_tensors`."""
    if not made.counts:
        return made.state
    leaves, structure = pytree.tree_flatten(made.state)
    return pytree.tree_unflatten([int(x) if n in made.counts else x for n, x in enumerate(leaves)], structure)


def keep_counts(groups: Sequence[Group], counts: Sequence[Sequence[int]]) -> None:
    """Write what the host counts into the states."""
    for made, found in zip(groups, counts, strict=True):
        leaves = pytree.tree_leaves(made.state) if made.counts else []
        for n, count in zip(made.counts, found, strict=True):
            leaves[n].fill_(count)


# State by parameter


def show_state(held: Held, number: int, made: Group, params: Sequence[torch.Tensor]) -> Indices:
    """Let an optimizer's `state` show the tensors of a group's state, each under the parameters to which it belongs.

    Tensors of no parameter of this rank, such as those that an owner holds for others, are under ``"owned"``, and what the
    host counts, which ranks without parameters need, too. Names come from the state's structure, the same on all ranks.

    Args:
        held: of the optimizer; tensors are added to it.
        number: of the group.
        made: the group.
        params: its parameters.
    """
    indices: Indices = {}
    places, buffered = made.places(), {n for n, spec in enumerate(made.specs) if spec is not None}
    leaves = cast("list[tuple[Path, torch.Tensor]]", pytree.tree_leaves_with_path(made.state))
    shared: list[tuple[Path, torch.Tensor]] = []
    owners: list[tuple[Path, int]] = []
    for position, (path, leaf) in enumerate(leaves):
        keys = [k.key for k in path if isinstance(k, pytree.MappingKey)]
        key = next((k for k in keys if k in places), None)
        if key is not None:
            n, i = places[key]
            owners.append((path, n))
            name = _show(held[params[n]], number, path, wrapped(leaf, params[n]), "" if i is None else f".{i}")
            if i is not None:
                indices[n, name] = i
        elif keys or position in made.counts:
            held["owned"][f"{number}{pytree.keystr(path)}"] = leaf
        else:
            shared.append((path, leaf))
    for path, leaf in shared:
        # It belongs to all parameters whose tensors lie beside or below it, and to all buffers.
        beside = {n for other, n in owners if other[: len(path) - 1] == path[:-1]} | buffered
        for n in sorted(beside):
            _show(held[params[n]], number, path, leaf, "")
    return indices


def _show(held: dict[str, torch.Tensor], number: int, path: Path, leaf: torch.Tensor, suffix: str) -> str:
    """Name a leaf by its field in the state, and where that is taken, by its whole path."""
    fields = ".".join(key.name for key in path if isinstance(key, pytree.GetAttrKey))
    names = (fields and fields + suffix, pytree.keystr(path), f"{number}{pytree.keystr(path)}")
    name = next(name for name in names if name and name not in held)
    held[name] = leaf
    return name


def with_boxes(packed: dict[str, Any], groups: Sequence[Group], indices: Sequence[Indices]) -> dict[str, Any]:
    """See `TorchOptimizer.state_dict`; `packed` is what torch gives."""
    from mfsdp_func.checkpoint.dcp import BoxTensor

    bare = any(layout.mesh.size() > 1 for made in groups for layout in made.owner_layouts().values())
    for made, own, group in zip(groups, indices, packed["param_groups"], strict=True):
        for n, (key, number) in enumerate(zip(made.keys, group["params"], strict=True)):
            if bare and made.specs[n] is None:
                held, place = packed["state"].get(number, {}), made.place_of(key)
                packed["state"][number] = {name: _boxed(value, place) for name, value in held.items()}
        for (n, name), i in own.items():
            spec, number = made.specs[n], group["params"][n]
            if spec is None or not spec.is_sharded:
                continue
            part, held = local_part(spec, i), dict(packed["state"][number])
            if held[name].numel() == part.numel:
                writes = is_first_replica(spec.mesh, spec.placements)
                held[name] = BoxTensor(held[name], spec.layout.tensor_shapes[i], part, writes)
            packed["state"][number] = held
    return packed


def _boxed(value: Any, place: Place | None) -> Any:
    """State of a bare shard: of no DTensor, and of no buffer, in an optimizer whose transformations know of shards."""
    from mfsdp_func.checkpoint.dcp import BoxTensor

    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.dim():
        return value
    if place is None or value.numel() != place.part.numel:
        return BoxTensor(value, value.shape, None)
    return BoxTensor(value, place.shape, place.part, place.writes)


@torch.no_grad()
def copy_state(own: Mapping[Any, Mapping[str, torch.Tensor]], params: Sequence[Any], given: Mapping[str, Any]) -> None:
    """Copy a loaded state into an optimizer's `own`, by the order of parameters.

    Raises:
        KeyError, ValueError: see `TorchOptimizer.load_state_dict`; nothing is copied then.
    """
    saved = [number for group in given["param_groups"] for number in group["params"]]
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for number, param in zip(saved, params, strict=True):
        for name, tensor in own.get(param, {}).items():
            value = unwrapped(given["state"].get(number, {}).get(name), tensor)
            if value is None or value.shape != tensor.shape:
                raise (KeyError if value is None else ValueError)(
                    f"TorchOptimizer.load_state_dict: parameter {number} needs {name!r} of shape {tuple(tensor.shape)}, got"
                    f" {'nothing' if value is None else tuple(value.shape)}; load the state of an optimizer with the same"
                    " transformations and layout"
                )
            copies.append((local_of(tensor), local_of(value)))
    for shared in [key for key in own if not isinstance(key, torch.Tensor)]:
        for name, tensor in own[shared].items():
            value = given["state"].get(shared, {}).get(name)
            if value is None or value.shape != tensor.shape:
                raise KeyError(f"TorchOptimizer.load_state_dict: state {name!r}, which this rank owns, is missing")
            copies.append((tensor, value))
    for tensor, value in copies:
        tensor.copy_(value)


def unwrapped(value: Any, own: torch.Tensor) -> Any:
    """What `state_dict` wrapped, in the shape of this rank's part."""
    local = getattr(value, "local", None)
    if local is None or local.numel() != own.numel():
        return value
    return local.view(own.shape)


def wrapped(tensor: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """State as checkpoints of DTensors expect it."""
    if not isinstance(param, DTensor) or tensor.shape != local_of(param).shape:
        return tensor
    return DTensor.from_local(
        tensor, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
