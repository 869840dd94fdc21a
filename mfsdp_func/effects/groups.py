"""The process groups behind a mesh."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from mfsdp_func.effects.carrier import SIMULATED
from mfsdp_func.values.mesh import Mesh, group_names


def axis_groups(mesh: Mesh) -> tuple[dist.ProcessGroup, ...]:
    """The process groups along each axis through this rank.

    None where the mesh came from no `DeviceMesh`, where its groups were destroyed with their world since, and inside
    `simulate`.
    """
    if SIMULATED.get() is not None:
        return ()
    groups: list[dist.ProcessGroup] = []
    for axis, name in enumerate(group_names(mesh)):
        try:
            group = _resolve_process_group(name)  # pyright: ignore[reportArgumentType]
        except (RuntimeError, LookupError):
            return ()
        if set(dist.get_process_group_ranks(group)) != set(mesh.axis_ranks(axis)):
            return ()  # a new world has given the name to another group
        groups.append(group)
    return tuple(groups)
