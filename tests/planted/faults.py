"""What a program does wrong when a rank fails, or a bit flips."""

from contextlib import nullcontext

import torch

import mfsdp_func as mf
from mfsdp_func.faults import Corrupt, Kill, Raise
from mfsdp_func.values.mesh import Mesh
from tests.planted.bug import Bug
from tests.planted.kit import gather, group, shards, step


def state_written_in_place(mesh: Mesh, bug: bool):
    """Momentum is updated in place before the step has succeeded: what is left is neither the old state nor the new."""
    owners, momentum = group(mesh, dtype=torch.float32), torch.zeros(2)
    try:
        full, token = gather(owners)
        new = momentum.add_(1) if bug else momentum + 1
        mf.scatter(full, owner_layout=owners, after=token)
    except mf.ExchangeError:
        return momentum
    return new


def failure_counted_as_a_step(mesh: Mesh, bug: bool):
    """An error is swallowed, and training goes on as if the step had been made."""
    steps = 0
    for _ in range(2):
        try:
            step(group(mesh))
            steps += 1
        except mf.ExchangeError:
            steps += bug
            break
    return steps


def tried_again_on_the_same_group(mesh: Mesh, bug: bool):
    """After a failure a mesh is of no more use; the survivors need one of their own."""
    try:
        return step(group(mesh))
    except mf.ExchangeError:
        left = [0, 2]
        return step(group(mesh if bug else Mesh(len(left), ranks=left, rank=mesh.rank)))


def one_rank_keeps_the_new_state(mesh: Mesh, bug: bool):
    """A rank that fails in its own code goes on with its old state, and the others do not hear of it."""
    state, caught = 0, RuntimeError if bug else mf.ExchangeError
    try:
        step(group(mesh))
        state = 1
    except caught:
        pass
    return state


def flipped_bit_unnoticed(mesh: Mesh, bug: bool):
    """Without the agreement check, messages carry no hash."""
    with mf.agreement_check(False) if bug else nullcontext(), mf.agreement_check(not bug):
        owners = group(mesh)
        try:
            return gather(owners)[0]
        except mf.ExchangeError:
            return {} if mesh.get_rank() == 0 else shards(group(mesh))


KILLED = {"faults": [Kill(1, 1)]}
BUGS = [
    Bug("state written in place before the step is whole", state_written_in_place, shape=3, keywords=KILLED),
    Bug("a step that failed is counted", failure_counted_as_a_step, shape=3, keywords=KILLED),
    Bug("a step tried again over the mesh that failed", tried_again_on_the_same_group, shape=3, keywords=KILLED),
    Bug("a rank that swallows its own failure", one_rank_keeps_the_new_state, keywords={"faults": [Raise(0, 1)]}),
    Bug(
        "a flipped bit, with the check off",
        flipped_bit_unnoticed,
        keywords={"faults": [Corrupt(0, 0, 30)]},
    ),
]
