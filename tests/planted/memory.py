"""Memory that is read too early, or written or freed too early; and what ranks share besides messages."""

import torch

import mfsdp_func as mf
from mfsdp_func.effects.token import Pending
from mfsdp_func.values.mesh import Mesh
from tests.planted.bug import Bug
from tests.planted.kit import buffer, gather, group, is_first, shards, step


def wait_left_out(mesh: Mesh, bug: bool):
    full, token = gather(group(mesh), async_op=True)
    if not bug:
        token.wait()
    for tensor in full.values():
        tensor.sum()
    token.wait()


def after_dropped(mesh: Mesh, bug: bool):
    """Results in flight are sent on, without the token that says when they are there."""
    owners = group(mesh, dtype=torch.float32)
    full, token = gather(owners, async_op=True)
    parts, _ = mf.scatter(full, owner_layout=owners, after=() if bug else token)
    token.wait()
    assert all(part.numel() for part in parts.values())


def token_of_another_call(mesh: Mesh, bug: bool):
    (one, first), (two, second) = (gather(group(mesh, name), async_op=True) for name in ("first", "second"))
    for token in (first, first) if bug else (first, second):
        token.wait()
    for tensor in (*one.values(), *two.values()):
        tensor.sum()
    second.wait()


def token_forgotten(mesh: Mesh, bug: bool):
    """By a rank that only sends, and needs nothing."""
    full, token = gather(group(mesh), async_op=True)
    if full or not bug:
        token.wait()


def token_forgotten_in_a_loop(mesh: Mesh, bug: bool):
    """The variable holds the last token only."""
    tokens = []
    for name in ("first", "second"):
        _, token = gather(group(mesh, name), async_op=True)
        tokens.append(token)
    for each in [token] if bug else tokens:
        each.wait()


def result_written_in_flight(mesh: Mesh, bug: bool):
    """Cleared before it is filled, at least as the program is written."""
    whole, token = mf.allgather(buffer(mesh, 1.0, mf.RowAtomic()), 0, async_op=True)
    if bug:
        whole.local_buffer.zero_()
    token.wait()


def source_reused(mesh: Mesh, bug: bool):
    """The next gradient is written into the buffer while the last is still being sent."""
    source = shards(group(mesh))
    full, token = gather(group(mesh), source, async_op=True)
    if not bug:
        token.wait()
    for tensor in source.values():
        tensor.fill_(-1)
    token.wait()
    return full


def source_freed(mesh: Mesh, bug: bool):
    """Its storage is resized to nothing, as FSDP frees what it has gathered."""
    source = shards(group(mesh))
    full, token = gather(group(mesh), source, async_op=True)
    if not bug:
        token.wait()
    for tensor in source.values():
        tensor.untyped_storage().resize_(0)
    token.wait()
    return full


def gradient_zeroed(mesh: Mesh, bug: bool):
    """`zero_grad` between the launch of a reduction and its end."""
    gradient = buffer(mesh, 1.0, mf.Partial())
    reduced, token = mf.reduce_scatter(gradient, 0, mf.RowAtomic(), async_op=True)
    if not bug:
        token.wait()
    gradient.local_buffer.zero_()
    token.wait()
    return reduced


def updated_while_gathered(mesh: Mesh, bug: bool):
    """An optimizer in place, under a prefetched all-gather of the same shard."""
    weights = buffer(mesh, 1.0, mf.RowAtomic())
    whole, token = mf.allgather(weights, 0, async_op=True)
    if not bug:
        token.wait()
    weights.local_buffer.mul_(0.9)
    token.wait()
    return whole


def shared_buffer(mesh: Mesh, bug: bool):
    """Two operations in flight send from one scratch buffer."""
    owners, scratch, found = group(mesh), torch.empty(24), []
    for n in range(2):
        if not bug:
            scratch = torch.empty(24)
        sources, at = {}, 0
        for i, tensor in shards(owners).items():
            sources[i] = scratch[at : at + tensor.numel()].copy_(tensor + n)
            at += tensor.numel()
        found.append(gather(group(mesh, f"group {n}"), sources, async_op=True))
    for _, token in found:
        token.wait()
    return [full for full, _ in found]


def memory_not_kept(mesh: Mesh, bug: bool):
    """A library whose tokens forget the inputs of what is in flight."""
    full, token = gather(group(mesh), async_op=True)
    for work in token.pending if bug else ():
        forget(work)
    token.wait()
    return full


def forget(work: Pending) -> None:
    work._keep = ()
    work._finish.__self__.keep.clear()


def memory_not_kept_of_copies(mesh: Mesh, bug: bool):
    """The same of an input that is not contiguous, of which the library makes a copy."""
    source = {i: torch.stack([t, t], dim=1)[:, 0] for i, t in shards(group(mesh)).items()}
    full, token = gather(group(mesh), source, async_op=True)
    for work in token.pending if bug else ():
        forget(work)
    token.wait()
    return full


# What ranks share besides messages: a folder, a counter. The order in which they run is theirs.


def read_before_written(mesh: Mesh, bug: bool, folder: dict):
    """Rank 0 writes a file, the others read it; an exchange in between says that it is there."""
    if is_first(mesh):
        folder["weights"] = [1, 2, 3]
    if not bug:
        step(group(mesh))
    found = folder.get("weights")
    if bug:
        step(group(mesh))
    return found


def read_half_written(mesh: Mesh, bug: bool, folder: dict):
    """The reader comes between two halves of a write, where the writer communicates."""
    if is_first(mesh):
        folder["weights"] = [1, 2]
    step(group(mesh))
    if is_first(mesh):
        folder["weights"] = [1, 2, 3]
    if not bug:
        step(group(mesh))
    found = list(folder["weights"])
    if bug:
        step(group(mesh))
    return found


def one_file_for_all(mesh: Mesh, bug: bool, folder: dict):
    """All ranks write a file of one name, and read it after an exchange."""
    name = "state" if bug else f"state {mesh.get_rank()}"
    folder[name] = mesh.get_rank()
    step(group(mesh))
    return folder[name]


def first_come_first_served(mesh: Mesh, bug: bool, taken: list):
    """Pieces of work go to whoever asks first."""
    step(group(mesh))
    mine = len(taken) if bug else mesh.get_rank()
    taken.append(mine)
    return step(group(mesh), 1.0 + mine)


def leader_is_who_comes_first(mesh: Mesh, bug: bool, elected: list):
    step(group(mesh))
    elected.append(mesh.get_rank())
    step(group(mesh))
    leader = elected[0] if bug else 0
    return leader, step(group(mesh, owner=leader))


def deleted_while_read(mesh: Mesh, bug: bool, folder: dict):
    """A rank deletes the old checkpoint as soon as its own part of the new one is written."""
    folder.setdefault("old", "weights")
    step(group(mesh))
    if not is_first(mesh) and bug:
        folder["old"] = "gone"
    found = folder["old"]
    step(group(mesh))
    return found


BUGS = [
    Bug("a wait left out", wait_left_out, "uses a result of gather 'group' before its token was waited for"),
    Bug("`after=` dropped", after_dropped, "uses a result of gather 'group' before its token was waited for"),
    Bug("the token of another call waited for", token_of_another_call, "uses a result of gather 'second' before"),
    Bug("a token forgotten by a rank that only sends", token_forgotten, "never waited for the token of gather 'group'"),
    Bug("only the last token of a loop waited for", token_forgotten_in_a_loop, "never waited for the token of gather"),
    Bug("a result written to while in flight", result_written_in_flight, "uses a result of allgather"),
    Bug("a reused buffer, still being sent", source_reused, "wrote into memory that gather 'group' was still sending"),
    Bug("early free: a storage resized to nothing", source_freed, "freed memory that gather 'group' was still sending"),
    Bug("gradients zeroed while they are reduced", gradient_zeroed),
    Bug("weights updated while they are gathered", updated_while_gathered, "wrote into memory that allgather"),
    Bug("a scratch buffer shared by two calls in flight", shared_buffer, "wrote into memory that gather 'group 0'"),
    Bug("early free: a token that keeps no inputs", memory_not_kept, "freed memory that gather 'group' was still"),
    Bug("early free: a token that keeps no copies", memory_not_kept_of_copies, "freed memory that gather 'group' was"),
    Bug("a file read before it is written", read_before_written, fresh=dict),
    Bug("a file read when half of it is written", read_half_written, fresh=dict),
    Bug("one file name for all ranks", one_file_for_all, fresh=dict),
    Bug("work for whoever asks first", first_come_first_served, fresh=list),
    Bug("a leader, who is whoever comes first", leader_is_who_comes_first, fresh=list, shape=3),
    Bug("an old checkpoint deleted while others read it", deleted_while_read, fresh=dict),
]
