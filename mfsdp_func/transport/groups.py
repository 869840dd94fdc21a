"""The process groups behind a mesh."""

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from mfsdp_func.mesh import Mesh, group_names


def axis_groups(mesh: Mesh) -> tuple[dist.ProcessGroup, ...]:
    """The process groups along each axis through this rank; none where the mesh came from no `DeviceMesh`.

    Raises:
        RuntimeError: if they were destroyed.
    """
    try:
        return tuple(_resolve_process_group(name) for name in group_names(mesh))  # pyright: ignore[reportArgumentType]
    except (RuntimeError, LookupError) as error:
        raise RuntimeError(f"the process groups of {mesh} are gone; make its layouts again from a new DeviceMesh") from error
