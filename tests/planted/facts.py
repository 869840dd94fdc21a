"""Ranks that do not agree on what they do: owners, layouts, dtypes, names, plans, decisions."""

import torch

import mfsdp_func as mf
from mfsdp_func.effects.carrier import Call, Parcel
from mfsdp_func.effects.here import carrier_of
from mfsdp_func.values.mesh import Mesh
from tests.planted.bug import Bug
from tests.planted.kit import buffer, gather, group, is_first, shards, step


def owners_that_disagree(mesh: Mesh, bug: bool):
    return gather(group(mesh, owner=0 if bug and is_first(mesh) else 1))[0]


def owners_from_local_costs(mesh: Mesh, bug: bool):
    """Owners planned with costs that each rank has measured for itself."""
    layout = mf.build_for_row_atomic_unpadding([(4, 3)] * 2, 2)
    costs = [1.0, 5.0] if bug and is_first(mesh) else [5.0, 1.0]
    owners = {i: int(cost < 2) for i, cost in enumerate(costs)}
    return gather(mf.GroupOwnerLayout(mesh, layout, owners, name="planned"))[0]


def other_layout(mesh: Mesh, bug: bool):
    return gather(group(mesh, rows=3 if bug and is_first(mesh) else 2))[0]


def other_blocks(mesh: Mesh, bug: bool):
    """Cut at other rows: the same tensors, the same sizes in all."""
    build = mf.build_for_row_atomic if bug and is_first(mesh) else mf.build_for_row_atomic_unpadding
    layout = build([(3, 3), (4, 3)], 2)
    owners = mf.GroupOwnerLayout(mesh, layout, {0: 1, 1: 1}, name="blocks")
    local = layout.get_local_range(mesh, owners.placements)
    return gather(owners, {i: torch.ones(part.numel) for i, part in layout.tensors_in(local)})[0]


def stale_plan(mesh: Mesh, bug: bool):
    """A tensor was added to a group, and one rank goes on with the plan of before."""
    old = group(mesh)
    layout = mf.build_for_row_atomic_unpadding([(4, 3)] * 2 + [(2, 3)], 2)
    new = mf.GroupOwnerLayout(mesh, layout, {0: 1, 1: 1, 2: 0}, name="group")
    return gather(old if bug and is_first(mesh) else new)[0]


def stale_owners_after_move(mesh: Mesh, bug: bool):
    """Owners were balanced anew between two halves of a step; one rank scatters by the old ones."""
    old, new = group(mesh, owner=0, dtype=torch.float32), group(mesh, owner=1, dtype=torch.float32)
    full, token = gather(new)
    return mf.scatter(full, owner_layout=old if bug and not full else new, after=token)[0]


def dtypes_that_disagree(mesh: Mesh, bug: bool):
    dtype = torch.bfloat16 if bug and is_first(mesh) else torch.float32
    owners = group(mesh)
    return gather(owners, {i: t.to(dtype) for i, t in shards(owners).items()}, dtype=dtype)[0]


def a_rank_in_the_name(mesh: Mesh, bug: bool):
    """The tag of messages is made of the name."""
    return gather(group(mesh, f"block {mesh.get_rank()}" if bug else "block"))[0]


def sum_meets_mean(mesh: Mesh, bug: bool):
    kind = "avg" if bug and is_first(mesh) else "sum"
    return buffer(mesh, 1.0, mf.Partial(kind)).allreduce(0)


def other_axis(mesh: Mesh, bug: bool):
    """Reduced along the axis of the shards on one rank, of the replicas on the others."""
    layout = mf.build_for_row_atomic_unpadding([(4, 2)], 2)
    value = mf.DBuffer.from_local(torch.ones(8), mesh, [mf.Partial(), mf.Partial()], layout)
    return value.allreduce(1 if bug and is_first(mesh) else 0)


def _post(mesh: Mesh, label: str, sends: int, receives: int) -> float:
    """A hand-made exchange of numbers with the other rank, past all plans."""
    peer = 1 - mesh.get_rank()
    parts = [torch.full((1,), 7.0) for _ in range(sends)], [torch.zeros(1) for _ in range(receives)]
    outgoing, incoming = ([Parcel(peer, n, (part,)) for n, part in enumerate(side)] for side in parts)
    call = Call(label, label, mesh, torch.float32, (), None, forward=True)
    carrier_of(mesh).exchange(call, outgoing, incoming, at_once=False)()
    return float(sum(part.sum() for part in parts[1]))


def send_without_receive(mesh: Mesh, bug: bool):
    sends = is_first(mesh)
    return _post(mesh, "hand-made", int(sends), int(not sends and not bug))


def receive_without_send(mesh: Mesh, bug: bool):
    sends = is_first(mesh)
    return _post(mesh, "hand-made", int(sends and not bug), int(not sends))


def wrong_tag(mesh: Mesh, bug: bool):
    sends = is_first(mesh)
    return _post(mesh, "tag 1" if bug and sends else "tag 0", int(sends), int(not sends))


def clipped_by_local_norm(mesh: Mesh, bug: bool):
    """Each rank scales by the norm of its own shard."""
    gradient = buffer(mesh, 1.0 + mesh.get_rank(), mf.RowAtomic())
    norm = gradient.local_buffer.norm() if bug else mf.global_norm([gradient])
    return gradient.local_buffer / norm


def skipped_by_local_finiteness(mesh: Mesh, bug: bool):
    """A step is skipped where a gradient is not finite: on all ranks, or on none."""
    owners = group(mesh)
    gradient = buffer(mesh, float("nan") if is_first(mesh) else 1.0, mf.RowAtomic())
    finite = torch.isfinite(gradient.local_buffer.sum() if bug else mf.global_norm([gradient]))
    return step(owners) if finite else None


def local_number_of_samples(mesh: Mesh, bug: bool):
    """The mean over all samples is not the mean of means, where ranks have batches of other sizes."""
    count = float(1 + mesh.get_rank())
    total = buffer(mesh, 3.0 * count, mf.Partial()).allreduce(0).local_buffer
    counts = 2 * count if bug else buffer(mesh, count, mf.Partial()).allreduce(0).local_buffer
    return total / counts


def schedule_by_local_steps(mesh: Mesh, bug: bool):
    """The learning rate falls with the steps; a rank without samples does not count its own."""
    owners, steps = group(mesh), 0
    for batch in (1, 0, 1):
        steps += bool(batch or not (bug and is_first(mesh)))
    return step(owners), [0.5**steps * t for t in shards(owners).values()]


def replicas_of_other_seeds(mesh: Mesh, bug: bool):
    """Weights that all ranks draw, each with its own random state."""
    generator = torch.Generator().manual_seed(mesh.get_rank() if bug else 0)
    weights = torch.randn(4, 2, generator=generator)
    layout = mf.build_for_row_atomic_unpadding([(4, 2)], 2)
    return mf.DBuffer.distribute_tensors([weights], mesh, [mf.RowAtomic()], layout).allgather(0)


def partial_sums_used_as_whole(mesh: Mesh, bug: bool):
    value = buffer(mesh, 1.0, mf.Partial())
    return value.local_buffer if bug else value.allreduce(0)


def averaged_twice(mesh: Mesh, bug: bool):
    mean = buffer(mesh, 1.0 + mesh.get_rank(), mf.Partial("avg")).allreduce(0).local_buffer
    return mean / mesh.size() if bug else mean


def orthogonalized_by_shard(mesh: Mesh, bug: bool):
    """Muon's Newton-Schulz on the rows that a rank happens to hold, instead of on whole matrices."""
    owners = group(mesh)
    if bug:
        return {i: mf.optim.newton_schulz(t.view(-1, 3)) for i, t in shards(owners).items()}
    full, token = gather(owners)
    updates = {i: mf.optim.newton_schulz(t) for i, t in full.items()}
    return mf.scatter(updates, owner_layout=owners, after=token)[0]


def plan_of_another_rank(mesh: Mesh, bug: bool):
    """A value that one rank has made and the other uses, as after unpickling it."""
    owners = group(mesh)
    return gather(owners.with_rank(0) if bug else owners)[0]


def shard_of_another_size(mesh: Mesh, bug: bool):
    owners = group(mesh)
    return gather(owners, {i: t[1:] if bug and is_first(mesh) else t for i, t in shards(owners).items()})[0]


def mesh_of_somebody_else(mesh: Mesh, bug: bool):
    """A mesh with ranks that do not exist here."""
    return step(group(replace_ranks(mesh, (0, 5)) if bug and is_first(mesh) else mesh))


def replace_ranks(mesh: Mesh, ranks: tuple[int, ...]) -> Mesh:
    return Mesh(len(ranks), ranks=ranks, rank=mesh.rank)


BUGS = [
    Bug("owners that disagree", owners_that_disagree, "owners"),
    Bug("owners planned from costs measured locally", owners_from_local_costs, "owners"),
    Bug("another layout on one rank", other_layout, "plan: "),
    Bug("another cut of the same tensors on one rank", other_blocks, "plan: "),
    Bug("a stale plan after a tensor was added", stale_plan, "plan: "),
    Bug("stale owners in the second half of a step", stale_owners_after_move, "must give every tensor it owns"),
    Bug("dtypes that disagree", dtypes_that_disagree, "dtype: "),
    Bug("a rank in a group's name, so another tag", a_rank_in_the_name, "operation: gather 'block 0'"),
    Bug("a sum meets a mean", sum_meets_mean, "the ranks disagree"),
    Bug("another mesh axis on one rank", other_axis, "the ranks disagree", (2, 2)),
    Bug("a send without receive", send_without_receive, "sends 1 messages to rank 1, which receives 0"),
    Bug("a receive without send", receive_without_send, "sends 0 messages to rank 1, which receives 1"),
    Bug("a wrong tag", wrong_tag, "operation: tag 1 on ranks [0], tag 0 on ranks [1]"),
    Bug("clipping by the norm of the own shard", clipped_by_local_norm),
    Bug("a step skipped because of the own gradient", skipped_by_local_finiteness, "deadlock: no rank can go on"),
    Bug("a mean by the own number of samples", local_number_of_samples),
    Bug("a schedule by the own number of steps", schedule_by_local_steps),
    Bug("replicas drawn from other seeds", replicas_of_other_seeds),
    Bug("partial sums used as a whole", partial_sums_used_as_whole),
    Bug("averaged twice", averaged_twice),
    Bug("whole-matrix work on a shard", orthogonalized_by_shard, shape=3),
    Bug("a plan made for another rank", plan_of_another_rank, "made on rank 0, used on rank 1"),
    Bug("a shard of another size", shard_of_another_size, "elements"),
    Bug("a mesh with ranks that are not there", mesh_of_somebody_else, "which is not a mesh of this simulation"),
]
