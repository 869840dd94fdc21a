"""What a rank owns, and who owns the DTensors of an FSDP2 model."""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from mfsdp_func.operations.views import has_buffers, tensors_of
from mfsdp_func.optim.block_layout import tree_cost
from mfsdp_func.optim.block_split import block_tree
from mfsdp_func.optim.blocks import Blocks, as_blocks
from mfsdp_func.optim.owners import Owners
from mfsdp_func.values.balance import WorkGroup, balance_owner_work
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import Placement, RowAtomic, shard_axes


def owned(params: Any, owner_layout: Owners) -> dict[Any, torch.Tensor]:
    """The tensors that this rank owns, which are those whose state an owner keeps.

    Args:
        params: shards by key, a buffer, or a dict of buffers: they tell the dtype.
        owner_layout: who owns what.

    Returns:
        Key -> a tensor of the full shape on the meta device, which holds no memory; of tensors of which this rank has no
        element too. In the order of the owner layout, the same whatever `params` holds.

    Raises:
        ValueError: if the mesh says no rank.

    >>> from mfsdp_func import build_for_row_atomic
    >>> owners = GroupOwnerLayout(Mesh(2, rank=1), build_for_row_atomic([(2, 2), (4, 2)], 2), {0: 1, 1: 0})
    >>> {key: tuple(tensor.shape) for key, tensor in owned({}, owners).items()}
    {0: (2, 2)}
    """
    shards: Mapping[Any, torch.Tensor] = tensors_of(params) if has_buffers(params) else params
    usual = next((shard.dtype for shard in shards.values()), None)
    groups = {None: owner_layout} if isinstance(owner_layout, GroupOwnerLayout) else dict(owner_layout)
    found: dict[Any, torch.Tensor] = {}
    for name, owners in groups.items():
        axes = shard_axes(owners.placements)
        me = owners.mesh.shard_index(axes, owners.mesh.get_rank())
        for i, owner in owners.tensor_to_owner.items():
            if owners.mesh.shard_index(axes, owner) == me:
                key = i if name is None else (name, i)
                dtype = shards[key].dtype if key in shards else owners.dtype or usual
                found[key] = torch.empty(owners.layout.tensor_shapes[i], dtype=dtype, device="meta")
    return found


def owners_of(
    dtensors: Mapping[Hashable, torch.Tensor] | Iterable[torch.Tensor],
    mesh: Mesh | MeshLike | None = None,
    *,
    blocks: Mapping[Hashable, Blocks | str] | None = None,
) -> dict[Hashable, GroupOwnerLayout]:
    """Owners for the DTensors of an FSDP2 model, balanced over all of them: what `muon` needs to update their shards.

    Each tensor is a group of its own, as FSDP2 cuts each by itself: with ``owners = owners_of(matrices, mesh)``, the shard
    of ``matrices[name]`` goes to ``muon(owner_layout=owners)`` as ``(name, 0)``; all move in one exchange each way. The
    recipe ``examples/recipes/fsdp2_muon.py`` shows it. Where `dtensors` is a list, names are 0, 1, ...

    Args:
        dtensors: placed as ``Shard(0)`` on one axis of the mesh, and `Replicate` on the others (HSDP).
        mesh: where they lie, by default their own; a `DeviceMesh`, or a `Mesh` made from it.
        blocks: specs of some of them, which say what their work is; see `mfsdp_func.optim.blocks`.

    Raises:
        TypeError: on something that is no DTensor.
        ValueError: on other placements, or DTensors of different meshes.
    """
    named: dict[Any, torch.Tensor] = dict(dtensors) if isinstance(dtensors, Mapping) else dict(enumerate(dtensors))
    layouts: dict[Hashable, tuple[GlobalLayout, Mesh, tuple[Placement, ...]]] = {}
    costs: list[dict[int, float]] = []
    for key, tensor in named.items():
        if not isinstance(tensor, DTensor):
            raise TypeError(f"owners_of: {key!r} is a {type(tensor).__name__}, expected a DTensor")
        value = as_mesh(tensor.device_mesh if mesh is None else mesh)
        layouts[key] = _placed(key, tensor, value)
        spec = as_blocks((blocks or {}).get(key, "m ... -> m (...)"))
        costs.append({0: tree_cost(block_tree(spec, tensor.shape))})
    work = [WorkGroup(layout, place, [0], placements) for layout, place, placements in layouts.values()]
    chosen = balance_owner_work(work, costs).owners
    return {
        key: GroupOwnerLayout(place, layout, owner, placements, str(key), dtype=named[key].dtype)
        for (key, (layout, place, placements)), owner in zip(layouts.items(), chosen, strict=True)
    }


def _placed(key: Hashable, tensor: DTensor, mesh: Mesh) -> tuple[GlobalLayout, Mesh, tuple[Placement, ...]]:
    """PyTorch's cut of one tensor into chunks of rows, as a layout."""
    sharded = [axis for axis, placement in enumerate(tensor.placements) if placement == Shard(0)]
    others = [placement for placement in tensor.placements if placement != Shard(0)]
    grid = tensor.device_mesh.mesh
    if len(sharded) != 1 or any(placement != Replicate() for placement in others):
        raise ValueError(
            f"owners_of: {key!r} is placed as {tensor.placements}, expected Shard(0) on one axis and Replicate() on others"
        )
    if tuple(grid.shape) != mesh.shape or tuple(grid.flatten().tolist()) != mesh.ranks:
        raise ValueError(f"owners_of: {key!r} lies on {tensor.device_mesh}, expected the ranks of {mesh}")
    rows, count = tensor.shape[0], mesh.size(sharded[0])
    row, chunk = tensor.shape[1:].numel(), -(-rows // count)
    layout = GlobalLayout([tensor.shape], [0], tensor.numel(), [min(k * chunk, rows) * row for k in range(count)])
    return layout, mesh, tuple(RowAtomic() if axis in sharded else Replicate() for axis in range(mesh.ndim))
