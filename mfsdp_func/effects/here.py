"""Where this code runs: which rank it is, and which carrier serves a mesh."""

import torch.distributed as dist

from mfsdp_func.effects.carrier import SIMULATED, Carrier
from mfsdp_func.effects.process_group import PROCESS_GROUPS
from mfsdp_func.values.mesh import Mesh


def carrier_of(mesh: Mesh) -> Carrier:
    """The carrier that serves a mesh here: the simulated one inside `simulate`, else the process groups."""
    simulated = SIMULATED.get()
    return PROCESS_GROUPS if simulated is None else simulated.carrier


def world() -> Mesh:
    """All ranks that there are, as a mesh of one axis: of the simulated mesh, the default process group, or just one."""
    simulated = SIMULATED.get()
    return PROCESS_GROUPS.world() if simulated is None else simulated.carrier.world()


def this_rank() -> int | None:
    """The rank of the simulation, or of the process; None where there is neither."""
    simulated = SIMULATED.get()
    if simulated is not None:
        return simulated.rank
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else None


def check_place(mesh: Mesh, what: str) -> None:
    """Refuse a value that another rank made, before its elements are mistaken for this rank's.

    Raises:
        ValueError: if the mesh is one that another rank sees.
    """
    if mesh.rank is None:
        return
    simulated = SIMULATED.get()
    here = simulated.rank if simulated is not None else None
    if simulated is None and dist.is_available() and dist.is_initialized():  # as in `this_rank`, here at every call
        here = dist.get_rank()
    if here is not None and mesh.rank != here:
        raise ValueError(
            f"{what}: made on rank {mesh.rank}, used on rank {here}: offsets and messages would be those of rank"
            f" {mesh.rank}. Values have value.with_rank({here}); a DBuffer holds the elements of rank {mesh.rank}, so make"
            " one on each rank"
        )
