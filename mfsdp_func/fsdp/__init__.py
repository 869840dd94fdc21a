"""Fully-sharded training as a pure function of sharded buffers."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from mfsdp_func.effects.agreement import agree, bytes_of, checking
from mfsdp_func.effects.carrier import Call
from mfsdp_func.effects.here import carrier_of
from mfsdp_func.fsdp.arrangement import Arrangement
from mfsdp_func.fsdp.context import FsdpContext
from mfsdp_func.fsdp.grouping import (
    Entry,
    Group,
    Places,
    Unit,
    Units,
    group_parameters,
    owners_of,
    resolve_names,
    resolve_owners,
)
from mfsdp_func.fsdp.param_group import ParamGroup
from mfsdp_func.fsdp.sharded_module import ShardedModule
from mfsdp_func.fsdp.skeleton import copy_without_parameters
from mfsdp_func.fsdp.values import Values
from mfsdp_func.fsdp.watch import Escape
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import build_for_tensor_atomic, build_row_atomic_layout
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.values.placement import (
    BlockAtomic,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    TensorAtomic,
    shard_axes,
)

__all__ = ["Escape", "FsdpContext", "ShardedModule", "fully_shard"]


def fully_shard(
    module: nn.Module,
    mesh: Mesh | MeshLike,
    placements: Placements,
    *,
    units: Units | None = None,
    context: FsdpContext | None = None,
) -> tuple[ShardedModule, dict[str, DBuffer]]:
    """Shard a module's parameters over a mesh, and make its forward a pure function of them.

    What the three roles of `placements` mean here:

    - `optimizer`: how the returned parameters and their gradients lie.
    - `parameter`: what rests between the uses of a unit. Where it says `Replicate` for an axis that `optimizer` shards,
      parameters are gathered along it once per pass, and kept until its backward pass ends. If they then are whole
      (ZeRO-1 and ZeRO-2), units run like any module: nothing is gathered or computed again in the backward pass.
    - `gradient`: what is held between the micro-batches of `ShardedModule.accumulate`: along axes that it shards,
      gradients are reduced in each of them; along those where it says `Partial("avg")` or `Replicate`, once, at the end.
      Else a unit's gradients are reduced straight to `optimizer` as soon as its backward pass is done.

    A unit runs as one operation of its parameters and of the tensors among its arguments. Its Python code runs once per
    forward pass; the backward pass gathers its parameters again, and differentiates the graph that the forward pass has
    built. (It runs again, with the same dropout masks, autocast, modes and module buffers, for derivatives beyond the
    first, in forward mode, under `vmap`, and where `FsdpContext.recompute` says so.) It may not write into its
    parameters or its differentiable arguments, nor keep a differentiable tensor for others (`Escape`). What it computes
    from parameters (casts of autocast, merged weights) counts as an activation, and stays until the backward pass. All
    ranks run the same units in the same order.

    `apply` also works inside ``torch.compile(fullgraph=True)``, alone or in a whole training step. Dynamo then sees one
    call; arguments are tensors and constants in tuples, lists and dicts. Training flags, the numbers of hooks, and
    attributes that are numbers, strings, functions and the like are guarded: after a change the region is compiled anew.
    What containers, closures and other objects hold stays as it was when the region was compiled. Draws from Python's and
    NumPy's generators are refused there. Such a region holds every unit, so that compiling grows with depth;
    `FsdpContext.compile` compiles units each for itself, and equal ones once.

    Args:
        module: any module, on the meta device too; it is not changed, and may be dropped. All ranks must have the same
            values (parameters that are DTensors are joined; an FSDP2 model's go in by `ShardedModule.from_dtensors`).
        mesh: the data-parallel ranks.
        placements: how parameters, gradients and main weights lie on the axes of the mesh.
        units: the modules that gather their parameters while they run: names, modules or classes; by default the
            elements of every `nn.ModuleList`. What no unit covers is split along the modules that own parameters.
        context: see `FsdpContext`.

    Returns:
        `apply` and the sharded parameters: group -> `DBuffer`, in the dtype of the module's parameters. Frozen
        parameters stay inside `apply`, see `ShardedModule.freeze`; so do those that are not sharded at all
        (`FsdpContext.ignored`).

    Raises:
        ValueError: on placements that do not fit the mesh or one another, unknown units, names or owners, or a module
            on the meta device that nothing initialises.
        TypeError: on a module that is sharded by FSDP2 already.

    Effects: allocates this rank's shards; a unit's full parameters exist only while it is laid out. No communication,
    but for DTensor parameters; and where the agreement check is on, ranks compare hashes of all values.

    >>> from mfsdp_func import RowAtomic, simulate
    >>> def program(mesh):
    ...     model = nn.Linear(2, 2, bias=False)
    ...     with torch.no_grad():
    ...         model.weight.fill_(3.0)
    ...     rows = [RowAtomic()]
    ...     apply, params = fully_shard(model, mesh, Placements([0], rows, rows, rows))
    ...     batch = torch.ones(1, 2) * (1 + mesh.get_rank())  # each rank has its own
    ...     gradients = torch.func.grad(lambda params: apply(params, batch).sum())(params)
    ...     return {key: buffer.local_buffer.tolist() for key, buffer in gradients.items()}
    >>> simulate(program, 2).results  # a row on each rank; means of 1 and 2
    {0: {'root': [1.5, 1.5]}, 1: {'root': [1.5, 1.5]}}
    """
    chosen = context or FsdpContext()
    value = as_mesh(mesh)
    _check_placements(value, placements)
    ignored = _ignored(module, chosen.ignored)
    found, groups, places = group_parameters(module, units, ignored)
    choices = _choices(module, places, placements, chosen)
    device = _device(module, value, chosen)
    skeleton = copy_without_parameters(module, device, ignored)
    values = Values(module, skeleton, device, chosen)
    param_groups = {key: _param_group(group, value, placements, choices) for key, group in groups.items()}
    params: dict[str, DBuffer] = {}
    seen = hashlib.sha256(repr((groups.keys(), ignored)).encode()) if checking() else None
    for key, group in groups.items():
        spec = param_groups[key].spec
        shapes = spec.layout.tensor_shapes
        full = [values.parameter(entry).reshape(s) for entry, s in zip(group.entries, shapes, strict=True)]
        params[key] = DBuffer.distribute_tensors(full, value, spec.placements, spec.layout)
        for tensor in full if seen is not None else ():
            seen.update(bytes_of(tensor))  # pyright: ignore[reportOptionalMemberAccess]
        del full
    values.finish(ignored)
    if seen is not None:
        label = "fully_shard with these placements, names and values of parameters"
        agree(carrier_of(value), Call(label, seen.hexdigest(), value, None, (), None, True))
    frozen = {key: buffer for key, buffer in params.items() if not groups[key].trainable}
    apply = ShardedModule(
        skeleton,
        Arrangement(found, groups, places, param_groups, _every_name(module, ignored)),
        frozen,
        prefetch=chosen.prefetch,
        recompute=_named_units(found, "recompute", chosen.recompute),
        compiled=_named_units(found, "compile", chosen.compile),
        compile_options=chosen.compile_options,
        cast_inputs=chosen.cast_forward_inputs,
        output_dtype=chosen.output_dtype,
        device_mesh=mesh if isinstance(mesh, DeviceMesh) else None,
    )
    return apply, {key: buffer for key, buffer in params.items() if key not in frozen}


def _check_placements(mesh: Mesh, placements: Placements) -> None:
    axes = [mesh.axis_index(axis) for axis in placements.dp_axes]
    if axes != list(range(mesh.ndim)):
        raise ValueError(
            f"fully_shard: dp_axes {placements.dp_axes} must be all axes of {mesh}, in order; pass the data-parallel part"
            " of the mesh (DeviceMesh slicing: mesh['dp'])"
        )
    for axis, name in enumerate(mesh.axis_names):
        optimizer = placements.optimizer[axis]
        where = f"fully_shard: axis {name!r} of {placements}"
        if isinstance(optimizer, Partial):
            raise ValueError(f"{where}: main weights are values, not terms of a sum; optimizer cannot be {optimizer!r}")
        if placements.parameter[axis] not in (optimizer, Replicate()):
            raise ValueError(
                f"{where}: parameter is {placements.parameter[axis]!r}, expected {optimizer!r} as the optimizer has it,"
                " or Replicate(): parameters are gathered from the main weights"
            )
        gradient = placements.gradient[axis]
        if gradient != optimizer and not isinstance(gradient, (Replicate, Partial)):
            raise ValueError(
                f"{where}: gradient is {gradient!r}, expected {optimizer!r}: gradients leave as the optimizer takes"
                " them"
            )
    kinds: set[Placement] = {placement for placement in placements.optimizer if isinstance(placement, Shard)}
    if len(kinds) > 1:
        raise ValueError(f"fully_shard: all shards of {placements} must be of one kind, got {sorted(map(repr, kinds))}")


def _ignored(module: nn.Module, given: Iterable[str]) -> tuple[str, ...]:
    """The first names of the parameters that stay whole, in module order."""
    asked, first = [given] if isinstance(given, str) else list(given), {p: n for n, p in module.named_parameters()}
    every = dict(module.named_parameters(remove_duplicate=False))
    if unknown := [name for name in asked if name not in every]:
        raise ValueError(
            f"fully_shard: ignored names {unknown[0]!r}, which is no parameter of {type(module).__name__}; see"
            " named_parameters()"
        )
    chosen = {first[every[name]] for name in asked}
    return tuple(name for name in first.values() if name in chosen)


def _every_name(module: nn.Module, ignored: Sequence[str]) -> dict[str, str]:
    first = {id(module.get_parameter(name)): name for name in ignored}
    every = module.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in every if id(param) in first}


def _named_units(units: Sequence[Unit], what: str, given: bool | Iterable[str]) -> frozenset[str]:
    names = [unit.name for unit in units if not unit.held]
    if isinstance(given, bool):
        return frozenset(names if given else ())
    chosen = frozenset([given] if isinstance(given, str) else given)
    if unknown := sorted(chosen.difference(names)):
        raise ValueError(f"fully_shard: {what} names {unknown[0]!r}, expected names of units: {names}")
    return chosen


class _Choices(NamedTuple):
    """What a context says about single parameters, by their places."""

    context: FsdpContext
    owners: dict[tuple[str, int], int]
    finer: frozenset[tuple[str, int]]


def _choices(module: nn.Module, places: Places, placements: Placements, context: FsdpContext) -> _Choices:
    owners = resolve_owners(module, places, context.parameter_to_owner or {})
    finer = resolve_names(module, places, context.finer_rows, "finer_rows")
    if owners and not any(isinstance(placement, TensorAtomic) for placement in placements.optimizer):
        raise ValueError(
            f"fully_shard: parameter_to_owner is for TensorAtomic() placements, got {placements.optimizer}; other"
            " placements cut tensors by rows"
        )
    return _Choices(context, owners, frozenset(finer))


def _param_group(group: Group, mesh: Mesh, placements: Placements, choices: _Choices) -> ParamGroup:
    context, layout = choices.context, _layout(group, mesh, placements, choices)
    param_dtype = context.param_dtype if context.param_dtype and group.dtype.is_floating_point else group.dtype
    if param_dtype.is_complex and context.reduce_dtype is not None and not context.reduce_dtype.is_complex:
        raise TypeError(
            f"fully_shard: reduce_dtype is {context.reduce_dtype}, and parameter {group.entries[0].name!r} is {param_dtype}:"
            " the imaginary part of its gradient would be dropped; leave reduce_dtype out, or give a complex one"
        )
    return ParamGroup(
        key=group.key,
        spec=BufferSpec(mesh, placements.optimizer, layout, group.key),
        resting=BufferSpec(mesh, placements.parameter, layout, group.key),
        main_dtype=group.dtype,
        param_dtype=param_dtype,
        reduce_dtype=context.reduce_dtype or param_dtype,
        names=tuple(entry.name for entry in group.entries),
        shapes=tuple(entry.shape for entry in group.entries),
        gradient=tuple(placements.gradient),
        trainable=group.trainable,
        deterministic=context.deterministic,
    )


def _layout(group: Group, mesh: Mesh, placements: Placements, choices: _Choices) -> GlobalLayout:
    """Cut by rows, which may be finer than dim 0; the shapes are the parameters' own."""
    cut = _cut(group, mesh, placements, choices)
    shapes = [entry.shape or torch.Size([1]) for entry in group.entries]
    equal = cut.stores_equal_segments
    return GlobalLayout(shapes, cut.tensor_to_offset, cut.size, cut.rank_to_offset, stores_equal_segments=equal)


def _cut(group: Group, mesh: Mesh, placements: Placements, choices: _Choices) -> GlobalLayout:
    shapes = [_rows(entry, choices) for entry in group.entries]
    axes = shard_axes(placements.optimizer)
    if not axes:
        return build_row_atomic_layout(shapes, 1)
    count = mesh.shard_count(axes)
    shard = placements.optimizer[axes[0]]
    if isinstance(shard, TensorAtomic):
        owners = owners_of(group, choices.owners, mesh, axes)
        return build_for_tensor_atomic(shapes, count, tensor_owners=owners)
    block_size = shard.block_size if isinstance(shard, BlockAtomic) else 1
    try:
        return build_row_atomic_layout(
            shapes,
            count,
            block_size=block_size,
            shard_layout=choices.context.shard_layout,
            max_padding=choices.context.max_padding,
        )
    except ValueError as error:
        error.add_note(f"in group {group.key!r}, whose tensors are {[entry.name for entry in group.entries]}")
        raise


def _rows(entry: Entry, choices: _Choices) -> torch.Size:
    """The shape in which a parameter is laid out."""
    shape = entry.shape
    if not shape:
        return torch.Size([1])
    return torch.Size([shape[:-1].numel(), shape[-1]]) if (entry.group, entry.index) in choices.finer else shape


def _device(module: nn.Module, mesh: Mesh, context: FsdpContext) -> torch.device:
    if context.device is not None:
        return torch.device(context.device)
    devices = [param.device for param in module.parameters() if not param.is_meta]
    return devices[0] if devices else carrier_of(mesh).device(mesh)
