"""Fully-sharded training as a pure function of sharded buffers."""

import copy
import hashlib

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mfsdp_func.buffer_spec import BufferSpec
from mfsdp_func.dbuffer import DBuffer
from mfsdp_func.fsdp.absent import copy_without_parameters
from mfsdp_func.fsdp.context import FsdpContext
from mfsdp_func.fsdp.grouping import Entry, Group, Units, group_parameters, owners_of
from mfsdp_func.fsdp.sharded_module import ShardedModule
from mfsdp_func.fsdp.unit import Bound
from mfsdp_func.layout import GlobalLayout
from mfsdp_func.layout_builder import build_for_tensor_atomic, build_row_atomic_layout
from mfsdp_func.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.placement import BlockAtomic, Placement, Placements, Shard, TensorAtomic, shard_axes
from mfsdp_func.transport import carrier_of

__all__ = ["FsdpContext", "ShardedModule", "fully_shard"]


def fully_shard(
    module: nn.Module,
    mesh: Mesh | MeshLike,
    placements: Placements,
    *,
    units: Units | None = None,
    context: FsdpContext | None = None,
) -> tuple[ShardedModule, dict[str, DBuffer]]:
    """Shard a module's parameters over a mesh, and make its forward a pure function of them.

    Args:
        module: any module, on the meta device too; it is not changed, and may be dropped. All ranks must have the same
            values (parameters that are DTensors are joined).
        mesh: the data-parallel ranks.
        placements: how parameters, gradients and main weights lie on the axes of the mesh. Main weights and gradients
            come as ``placements.optimizer``; units gather from there.
        units: the modules that gather their parameters while they run: names, modules or classes; by default the
            elements of every `nn.ModuleList`. What no unit covers is split along the modules that own parameters.
        context: see `FsdpContext`.

    Returns:
        `apply` and the sharded parameters: group -> `DBuffer`, in the dtype of the module's parameters. Frozen
        parameters stay inside `apply`.

    Raises:
        ValueError: on placements that do not fit the mesh, unknown units or owners, or modules whose values are not
            there (a meta buffer, a module without `reset_parameters`).

    Effects: allocates this rank's shards; a unit's full parameters exist only while it is laid out. No communication,
    but for DTensor parameters.
    """
    chosen = context or FsdpContext()
    value = as_mesh(mesh)
    _check_placements(value, placements)
    found, groups = group_parameters(module, units)
    device = _device(module, value, chosen)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ValueError(
                f"fully_shard: buffer {name!r} is on the meta device and has no values; build the module's buffers on a"
                " real device (torch.nn.utils.skip_init, or register them again)"
            )
    skeleton = copy_without_parameters(module, device)
    bound = {key: _bind(group, value, placements, chosen) for key, group in groups.items()}
    params: dict[str, DBuffer] = {}
    values = _Values(module, device, chosen)
    for key, group in groups.items():
        spec = bound[key].spec
        full = [values(entry).reshape(s) for entry, s in zip(group.entries, spec.layout.tensor_shapes, strict=True)]
        params[key] = DBuffer.distribute_tensors(full, value, spec.placements, spec.layout)
        del full
    frozen = {key: buffer for key, buffer in params.items() if not groups[key].trainable}
    apply = ShardedModule(
        skeleton,
        found,
        groups,
        bound,
        frozen,
        prefetch=chosen.prefetch,
        cast_inputs=chosen.cast_forward_inputs,
        output_dtype=chosen.output_dtype,
    )
    return apply, {key: buffer for key, buffer in params.items() if key not in frozen}


def _check_placements(mesh: Mesh, placements: Placements) -> None:
    axes = [mesh.axis_index(axis) for axis in placements.dp_axes]
    if axes != list(range(mesh.ndim)):
        raise ValueError(
            f"fully_shard: dp_axes {placements.dp_axes} must be all axes of {mesh}, in order; pass the data-parallel part of"
            " the mesh (DeviceMesh slicing: mesh['dp'])"
        )
    kinds: set[Placement] = set()
    for role in (placements.parameter, placements.gradient, placements.optimizer):
        kinds |= {placement for placement in role if isinstance(placement, Shard)}
    if len(kinds) > 1:
        raise ValueError(f"fully_shard: all shards of {placements} must be of one kind, got {sorted(map(repr, kinds))}")


def _bind(group: Group, mesh: Mesh, placements: Placements, context: FsdpContext) -> Bound:
    spec = BufferSpec(mesh, placements.optimizer, _layout(group, mesh, placements, context))
    param_dtype = context.param_dtype if context.param_dtype and group.dtype.is_floating_point else group.dtype
    return Bound(
        spec=spec,
        main_dtype=group.dtype,
        param_dtype=param_dtype,
        reduce_dtype=context.reduce_dtype or param_dtype,
        shapes=tuple(entry.param.shape for entry in group.entries),
        trainable=group.trainable,
        deterministic=context.deterministic,
    )


def _layout(group: Group, mesh: Mesh, placements: Placements, context: FsdpContext) -> GlobalLayout:
    shapes = [_rows(entry, context) for entry in group.entries]
    roles = (placements.parameter, placements.gradient, placements.optimizer)
    widest = max(roles, key=lambda role: len(shard_axes(role)))
    axes = shard_axes(widest)
    if not axes:
        return build_row_atomic_layout(shapes, 1)
    ranks = mesh.shard_ranks(axes)
    shard = widest[axes[0]]
    if isinstance(shard, TensorAtomic):
        owners = owners_of(group, _owners_by_name(group, context), ranks)
        return build_for_tensor_atomic(shapes, len(ranks), tensor_owners=owners)
    block_size = shard.block_size if isinstance(shard, BlockAtomic) else 1
    return build_row_atomic_layout(shapes, len(ranks), block_size=block_size, shard_layout=context.shard_layout)


def _rows(entry: Entry, context: FsdpContext) -> torch.Size:
    """The shape in which a parameter is laid out."""
    shape = entry.param.shape
    if not shape:
        return torch.Size([1])
    if entry.name in context.finer_rows:
        return torch.Size([shape[:-1].numel(), shape[-1]])
    return shape


def _owners_by_name(group: Group, context: FsdpContext) -> dict[str, int]:
    given = context.parameter_to_owner or {}
    by_name = {name: owner for name, owner in given.items() if isinstance(name, str)}
    by_id = {id(param): owner for param, owner in given.items() if not isinstance(param, str)}
    return by_name | {entry.name: by_id[id(entry.param)] for entry in group.entries if id(entry.param) in by_id}


def _device(module: nn.Module, mesh: Mesh, context: FsdpContext) -> torch.device:
    if context.device is not None:
        return torch.device(context.device)
    devices = [param.device for param in module.parameters() if not param.is_meta]
    return devices[0] if devices else carrier_of(mesh).device(mesh)


class _Values:
    """The full values of a module's parameters, one owning module at a time."""

    def __init__(self, module: nn.Module, device: torch.device, context: FsdpContext) -> None:
        self._module, self._device, self._context = module, device, context
        self._owner: str | None = None
        self._made: dict[str, torch.Tensor] = {}

    def __call__(self, entry: Entry) -> torch.Tensor:
        """The value of one parameter."""
        if isinstance(entry.param, DTensor):
            return entry.param.detach().full_tensor().to(self._device)
        if not entry.param.is_meta:
            return entry.param.detach().to(self._device)
        owner, _, leaf = entry.name.rpartition(".")
        if owner != self._owner:
            self._owner, self._made = owner, self._initialise(owner)
        return self._made[leaf]

    def _initialise(self, name: str) -> dict[str, torch.Tensor]:
        owner = self._module.get_submodule(name)
        empty: dict[int, nn.Parameter] = {
            id(p): nn.Parameter(torch.empty_like(p, device=self._device), p.requires_grad)
            for p in owner.parameters(recurse=False)
        }
        copied = copy.deepcopy(owner, dict[int, object](empty))
        init, reset = self._context.init, getattr(copied, "reset_parameters", None)
        if init is None and reset is None:
            raise ValueError(
                f"fully_shard: module {name!r} ({type(owner).__name__}) owns parameters on the meta device and has no"
                " reset_parameters; pass FsdpContext(init=...)"
            )
        # The same values on every rank, whatever was drawn before.
        seed = self._context.seed + int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(seed)
            init(name, copied) if init is not None else reset()  # pyright: ignore[reportOptionalCall]
        return {leaf: param.detach() for leaf, param in copied.named_parameters(recurse=False)}
