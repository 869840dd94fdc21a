"""The process groups behind a mesh."""

import torch.distributed as dist

from mfsdp_func.effects.carrier import SIMULATED
from mfsdp_func.effects.torch_internals import process_group_named
from mfsdp_func.values.mesh import Mesh, group_names, set_group_names


def axis_groups(mesh: Mesh) -> tuple[dist.ProcessGroup, ...]:
    """The process groups along each axis through this rank.

    None where the mesh came from no `DeviceMesh`, where its groups were destroyed with their world since, and inside
    `simulate`.
    """
    if SIMULATED.get() is not None:
        return ()
    groups: list[dist.ProcessGroup] = []
    for axis, name in enumerate(group_names(mesh)):
        group = process_group_named(name)
        if group is None:
            return ()
        asked = _serves, tuple(dist.get_process_group_ranks(group)), axis
        serves = mesh.memo.get(asked)  # at every call, so the answer is kept
        if serves is None:
            serves = mesh.memo[asked] = _serves(asked[1], mesh, axis)
        if not serves:
            return ()  # a new world has given the name to another group
        groups.append(group)
    return tuple(groups)


def _serves(ranks: tuple[int, ...], mesh: Mesh, axis: int) -> bool:
    """Whether a group of these ranks is that of an axis."""
    return set(ranks) == set(mesh.axis_ranks(axis))


def group_of(mesh: Mesh) -> dist.ProcessGroup:
    """A process group through which the ranks of a mesh can reach one another; none is ever created here.

    Raises:
        RuntimeError: if there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"no process group is initialised, so {mesh} cannot communicate; start the program with torchrun and call"
            " torch.distributed.init_process_group, or run it in one process with mfsdp_func.simulate"
        )
    groups = axis_groups(mesh)
    if len(groups) == 1:
        return groups[0]
    world = dist.group.WORLD
    if world is None or max(mesh.ranks) >= dist.get_world_size():
        raise RuntimeError(f"{mesh} has ranks beyond the {dist.get_world_size()} ranks of the default process group")
    return world


def flat_mesh(mesh: Mesh) -> Mesh:
    """The ranks of a mesh on one axis, where a process group has just them; else the mesh as it is.

    A group that exists serves: that of a mesh of one axis, or the default one. None is created.
    """
    if mesh.ndim == 1:
        return mesh
    flat = Mesh(mesh.size(), ["+".join(mesh.axis_names)], mesh.ranks, mesh.rank)
    if SIMULATED.get() is not None:
        return flat
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or set(dist.get_process_group_ranks(world)) != set(mesh.ranks):
        return mesh
    set_group_names(flat, (world.group_name,))
    return flat


def number_of_ranks() -> int:
    """How many ranks run this program: those of the simulated mesh, or of the default process group; else 1."""
    simulated = SIMULATED.get()
    if simulated is not None:
        return simulated.carrier.number_of_ranks()
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
