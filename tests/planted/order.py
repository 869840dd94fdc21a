"""Calls that are left out, made once too often, in another order, or over other ranks."""

import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests.planted.bug import Bug
from tests.planted.kit import buffer, gather, group, is_first, shards, step


def call_under_if_rank(mesh: Mesh, bug: bool):
    """What the owner alone needs, the others must help to gather."""
    owners = group(mesh)
    return gather(owners)[0] if mesh.get_rank() == mesh.ranks[-1] or not bug else {}


def last_call_left_out(mesh: Mesh, bug: bool):
    owners = group(mesh)
    return [step(owners) for _ in range(2 if bug and is_first(mesh) else 3)]


def one_call_too_many(mesh: Mesh, bug: bool):
    owners = group(mesh)
    for _ in range(2 if bug and is_first(mesh) else 1):
        step(owners)


def rank_without_tensors_leaves(mesh: Mesh, bug: bool):
    """A rank that holds nothing and owns nothing returns early."""
    layout = mf.build_for_row_atomic_unpadding([(2, 3)], 3)
    owners = mf.GroupOwnerLayout(mesh, layout, {0: 0}, name="small")
    local = layout.get_local_range(mesh, owners.placements)
    if bug and not local.numel:
        return None
    source = {i: torch.ones(part.numel) for i, part in layout.tensors_in(local)}
    return gather(owners, source)[0]


def groups_swapped(mesh: Mesh, bug: bool):
    names = ["first", "second"]
    return [gather(group(mesh, name))[0] for name in (names[::-1] if bug and is_first(mesh) else names)]


def unnamed_groups_swapped(mesh: Mesh, bug: bool):
    """Equal groups without a name, of different layers."""
    layers = [group(mesh, "", dtype=torch.float32) for _ in range(2)]
    with mf.agreement_check():
        for owners in layers:  # each has a number from here on
            step(owners)
        return [step(owners, 3) for owners in (layers[::-1] if bug and is_first(mesh) else layers)]


def gather_meets_scatter(mesh: Mesh, bug: bool):
    owners = group(mesh)
    full, token = gather(owners)
    if bug and is_first(mesh):
        full, token = gather(owners)
    else:
        mf.scatter(full, owner_layout=owners, after=token)


def swallowed_error(mesh: Mesh, bug: bool):
    """A rank whose input is bad catches its own error, and goes on without the call."""
    owners, source = group(mesh), shards(group(mesh))
    if bug and is_first(mesh):
        source = {i: t[:-1] for i, t in source.items()}
    try:
        return gather(owners, source)[0]
    except ValueError:
        return {}


def circle_of_ranks(mesh: Mesh, bug: bool):
    """Neighbours exchange something in pairs; where each begins with the next one, all wait."""
    rank, size = mesh.get_rank(), mesh.size()
    pairs = sorted({tuple(sorted((rank, (rank + by) % size))) for by in (1, -1)})
    if bug:
        pairs = [(rank, (rank + 1) % size), ((rank - 1) % size, rank)]
    return [step(group(Mesh(2, ranks=pair, rank=rank))) for pair in pairs]


def check_on_one_rank(mesh: Mesh, bug: bool):
    with mf.agreement_check(not bug or is_first(mesh)):
        return step(group(mesh))


def steps_that_differ(mesh: Mesh, bug: bool):
    """A rank leaves a step out and makes another at the end: only its label tells."""
    owners = group(mesh)
    for number in [0, 2, 3] if bug and is_first(mesh) else [0, 1, 2]:
        with mf.agreement_check(label=f"step {number}"):
            step(owners)


def communicators_inverted(mesh: Mesh, bug: bool):
    """Two operations in flight over two meshes, from one rank to the other, launched in two orders."""
    groups = [group(Mesh(2, [axis], rank=mesh.rank), axis) for axis in ("a", "b")]
    order = groups[::-1] if bug and is_first(mesh) else groups
    pairs = {owners.name: gather(owners, async_op=True) for owners in order}
    for _, token in pairs.values():
        token.wait()
    return [pairs[name][0] for name in "ab"]


def rows_and_columns_inverted(mesh: Mesh, bug: bool):
    """On a square of ranks, some begin with their row and some with their column."""
    row, column = mesh.coordinate()
    lines = [
        Mesh(2, ["row"], [2 * row, 2 * row + 1], mesh.rank),
        Mesh(2, ["column"], [column, 2 + column], mesh.rank),
    ]
    order = lines[::-1] if bug and row == column else lines
    tokens = [mf.allgather(buffer(line, 1.0, mf.RowAtomic()), 0, async_op=True)[1] for line in order]
    for token in tokens:
        token.wait()


def both_send_first(mesh: Mesh, bug: bool):
    """Each rank begins with the operation in which it sends, and nobody receives."""
    rank = mesh.get_rank()
    order = (1 - rank, rank) if bug else (0, 1)
    groups = {o: group(Mesh(2, [f"to {o}"], rank=rank), f"to {o}", o) for o in (0, 1)}
    tokens = [gather(groups[o], async_op=True)[1] for o in order]
    for token in tokens:
        token.wait()


def a_rank_in_another_order(mesh: Mesh, bug: bool):
    """The ranks of a mesh in another order on one rank: another mesh."""
    ranks = mesh.ranks[::-1] if bug and is_first(mesh) else mesh.ranks
    return step(group(Mesh(2, ranks=ranks, rank=mesh.rank), owner=1))


def loss_ignores_results(mesh: Mesh, bug: bool):
    owners = group(mesh)
    source = {i: t.requires_grad_() for i, t in shards(owners).items()}
    full, token = gather(owners, source)
    loss = sum((t.square().sum() for t in full.values()), token.link)
    if bug and is_first(mesh):
        loss = sum(t.sum() for t in source.values())
    loss.backward()
    return {i: t.grad for i, t in source.items()}


def loss_is_detached(mesh: Mesh, bug: bool):
    """Parts are differentiated on one rank, and were detached by another."""
    owners = group(mesh)
    source = {i: t.requires_grad_() for i, t in shards(owners).items()}
    given = {i: t.detach() for i, t in source.items()} if bug and is_first(mesh) else source
    full, token = gather(owners, given)
    loss = sum((t.square().sum() for t in full.values()), token.link)
    if loss.requires_grad:
        loss.backward()
    return {i: t.grad for i, t in source.items()}


def token_not_threaded(mesh: Mesh, bug: bool):
    """A rank that owns nothing has no tensor for scatter, and its gradient depends on the token alone."""
    owners = group(mesh, dtype=torch.float32)

    def loss(source):
        full, token = gather(owners, source)
        parts, _ = mf.scatter({i: t**2 for i, t in full.items()}, owner_layout=owners, after=() if bug else token)
        return sum(part.sum() for part in parts.values())

    return torch.func.grad(loss)(shards(owners))


def batches_of_other_sizes(mesh: Mesh, bug: bool):
    owners = group(mesh)
    size = 3 if bug and is_first(mesh) else 2
    batched = {i: t.expand(size, -1).contiguous() for i, t in shards(owners).items()}
    return torch.func.vmap(lambda source: gather(owners, source)[0])(batched)


ABSENT = "deadlock: no rank can go on"
BUGS = [
    Bug("a call under `if rank`", call_under_if_rank, ABSENT, 3),
    Bug("the last call of a loop left out on one rank", last_call_left_out, ABSENT),
    Bug("one call too many on one rank", one_call_too_many, ABSENT),
    Bug("a rank that holds nothing leaves its call out", rank_without_tensors_leaves, ABSENT, 3),
    Bug("groups swapped on one rank", groups_swapped, "operation: gather 'second' on ranks [0], gather 'first'"),
    Bug("equal groups without names swapped", unnamed_groups_swapped, "unnamed groups, numbered by first use"),
    Bug("a gather meets a scatter", gather_meets_scatter, "operation: gather 'group' on ranks [0], scatter"),
    Bug("an error swallowed, and the call left out", swallowed_error, ABSENT),
    Bug("a circle of ranks, each waiting for the next", circle_of_ranks, ABSENT, 3),
    Bug("the agreement check on one rank only", check_on_one_rank, "waits in an agreement check"),
    Bug("a step left out, and made up for at the end", steps_that_differ, "label: step 2 on ranks [0], step 1"),
    Bug("communicators inverted", communicators_inverted, "whose stream another operation holds"),
    Bug("rows and columns inverted", rows_and_columns_inverted, "to send to rank", (2, 2)),
    Bug("all begin with a send", both_send_first, "to send to rank"),
    Bug("the ranks of a mesh in another order on one rank", a_rank_in_another_order, ABSENT),
    Bug("a loss that ignores the results", loss_ignores_results, "its loss does not depend on"),
    Bug("inputs detached on one rank", loss_is_detached, "differentiated: "),
    Bug("a token not threaded under torch.func.grad", token_not_threaded, "Thread the token"),
    Bug("vmap over batches of other sizes", batches_of_other_sizes, "batch size under vmap: "),
]
