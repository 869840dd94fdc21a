"""Calls that are equal but for where they stand in the program are told apart; what differs is named.

Each program runs on simulated ranks, where calls are always compared, and on real ones.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_func as mf
from mfsdp_func.effects.agreement import ENVIRONMENT_VARIABLE
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.faults import SHORT, assert_says, catch
from tests.meshes import RunOnMesh
from tests.spawn import RankPool

LAYOUT = mf.build_for_row_atomic([(4, 2)], 2)
FULL = torch.arange(8.0)


def alone(mesh: Mesh) -> bool:
    """Whether this is the rank that does otherwise."""
    return mesh.rank == mesh.ranks[-1]


def group(mesh: Mesh, name: str = "", owner: int = 0) -> GroupOwnerLayout:
    return GroupOwnerLayout(mesh, LAYOUT, {0: mesh.ranks[owner]}, name=name, dtype=torch.float32)


def shard(mesh: Mesh, scale: float = 1.0) -> torch.Tensor:
    return (FULL * scale).view(mesh.size(), -1)[mesh.ranks.index(mesh.get_rank())].clone()


def buffer(mesh: Mesh, scale: float = 1.0, name: str = "") -> mf.DBuffer:
    return mf.DBuffer.from_local(shard(mesh, scale), mesh, [mf.RowAtomic()], LAYOUT, name=name)


def partial_buffer(mesh: Mesh, op: str = "sum", dtype: torch.dtype = torch.float32) -> mf.DBuffer:
    return mf.DBuffer.from_local(FULL.to(dtype), mesh, [mf.Partial(op)], LAYOUT)


class Blocks(nn.Module):
    """Equal blocks, of which each rank leaves another one out."""

    def __init__(self, skip: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])
        self.skip = skip

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if not self.skip or i != rank:
                x = block(x)
        return x


def skipped_unit(mesh: Mesh) -> None:
    torch.manual_seed(0)
    sharded = mf.Placements(("axis0",), [mf.RowAtomic()], [mf.RowAtomic()], [mf.RowAtomic()])
    names = mf.Placements(mesh.axis_names, sharded.parameter, sharded.gradient, sharded.optimizer)
    apply, params = mf.fully_shard(Blocks(skip=True), mesh, names)
    apply(params, torch.ones(2, 4), mesh.ranks.index(mesh.get_rank()))


def named_buffers_in_another_order(mesh: Mesh) -> None:
    buffers = [buffer(mesh, 1.0, "a"), buffer(mesh, 2.0, "b")]
    for one in reversed(buffers) if alone(mesh) else buffers:
        one.allgather(0)


def buffers_on_other_lines(mesh: Mesh) -> None:
    first, second = buffer(mesh, 1.0), buffer(mesh, 2.0)
    if alone(mesh):
        second.allgather(0)
        first.allgather(0)
    else:
        first.allgather(0)
        second.allgather(0)


def steps_left_out(mesh: Mesh) -> None:
    owners = group(mesh, "block")
    for step in range(4):
        if step != (2 if alone(mesh) else 1):
            with mf.agreement_check(label=f"step {step}"):
                mf.gather({0: shard(mesh, step)}, owner_layout=owners)


def unnamed_groups_in_another_order(mesh: Mesh) -> None:
    groups = [group(mesh), group(mesh)]
    assert groups[0] == groups[1]
    for turn in range(2):
        for owners in reversed(groups) if turn and alone(mesh) else groups:
            mf.gather({0: shard(mesh)}, owner_layout=owners)


def another_backward(mesh: Mesh) -> None:
    owners = group(mesh, "block")
    a, b = (shard(mesh, k).requires_grad_() for k in (1.0, 2.0))
    first, token = mf.gather({0: a}, owner_layout=owners)
    second, _ = mf.gather({0: b}, owner_layout=owners)
    loss = token.link if alone(mesh) else sum((full.sum() for full in second.values()), torch.zeros(()))
    assert first.keys() == second.keys()
    loss.backward()


PROGRAMS: dict[str, tuple[Callable[[Mesh], Any], tuple[str, ...]]] = {
    "unit left out": (
        skipped_unit,
        # Of a unit where the check is on, else of its buffer.
        ("blocks.1", "blocks.0", "on ranks [0]", "on ranks [1]"),
    ),
    "named buffers": (named_buffers_in_another_order, ("allgather over", "name: a on ranks [0], b on ranks [1]")),
    "buffers on lines": (buffers_on_other_lines, ("allgather over", "line: tests/test_told_apart.py:", "on ranks [1]")),
    "steps": (steps_left_out, ("gather 'block'", "label: step 2 on ranks [0], step 1 on ranks [1]")),
    "unnamed groups": (
        unnamed_groups_in_another_order,
        ("gather: ", "unnamed groups, numbered by first use: 0 on ranks [0], 1 on ranks [1]"),
    ),
    "backward": (another_backward, ("transpose of gather 'block'", "forward call: number 1 at", "number 0 at")),
}


def run_and_go_on(mesh: Mesh, name: str) -> str:
    """What this rank raises under the check, if ranks can go on from there; then they do."""
    with mf.agreement_check():
        error = catch(PROGRAMS[name][0], mesh)
        if name != "backward" and name != "unit left out":
            assert mf.gather({0: shard(mesh)}, owner_layout=group(mesh, "after"))[0].keys() <= {0}
    return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("check", [False, True])
def test_simulated_ranks_are_told(name: str, check: bool) -> None:
    def program(mesh: Mesh) -> None:
        with mf.agreement_check(check):
            PROGRAMS[name][0](mesh)

    with pytest.raises(ValueError, match="nothing was sent, because the ranks disagree") as caught:
        mf.simulate(program, 2)
    assert_says(caught.value, *PROGRAMS[name][1])


@pytest.mark.distributed
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_ranks_are_told(name: str, ranks2: RankPool) -> None:
    for text in ranks2.run(run_and_go_on_rank, name, group_timeout=2 * SHORT):
        assert_says(text, "ValueError", "nothing was sent", *PROGRAMS[name][1])


def run_and_go_on_rank(rank: int, name: str) -> str:
    from torch.distributed.device_mesh import DeviceMesh

    return run_and_go_on(mf.as_mesh(DeviceMesh("cpu", [0, 1], mesh_dim_names=("axis0",))), name)


# What differs is named, not hashed.


def other_owner(mesh: Mesh) -> None:
    with mf.agreement_check():
        mf.gather({0: shard(mesh)}, owner_layout=group(mesh, "block", owner=int(alone(mesh))))


def other_layout(mesh: Mesh) -> None:
    layout = mf.GlobalLayout([(4, 2)], [0], 8 + int(alone(mesh)), [0, 4])
    with mf.agreement_check():
        mf.gather(
            {0: shard(mesh)},
            owner_layout=GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0]}, name="block", dtype=FULL.dtype),
        )


def other_reduction(mesh: Mesh) -> None:
    with mf.agreement_check():
        partial_buffer(mesh, "avg" if alone(mesh) else "sum").allreduce(0)


def one_of_several(mesh: Mesh) -> None:
    groups = [group(mesh, "first"), group(mesh, "second", owner=int(alone(mesh)))]
    with mf.agreement_check():
        mf.gather_coalesced([{0: shard(mesh)}] * 2, owner_layouts=groups)


DETAILS = {
    "owner": (other_owner, "plan: tensor 0: owner 0 on ranks [0], 1 on ranks [1]. "),
    "layout": (other_layout, "plan: buffer size 8 on ranks [0], 9 on ranks [1]. "),
    "reduction": (other_reduction, "plan: reduction sum on ranks [0], average on ranks [1]"),
    "several": (one_of_several, "plan: group second, tensor 0: owner 0 on ranks [0], 1 on ranks [1]. "),
}


def details_on(mesh: Mesh, name: str) -> str:
    return str(catch(DETAILS[name][0], mesh))


@pytest.mark.parametrize("name", DETAILS)
def test_what_differs_is_named(name: str, run_on_mesh: RunOnMesh) -> None:
    for text in run_on_mesh(details_on, 2, name).values():
        assert_says(text, DETAILS[name][1])


# The check off, on gloo: nothing mixes, and no process dies.

RAGGED = mf.build_for_row_atomic([(6, 2)], 2)


def other_dtype(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    one = buffer(mesh)
    return (one.cast(dtype) if alone(mesh) else one).allgather(0).local_buffer


def other_size(mesh: Mesh) -> torch.Tensor:
    if alone(mesh):
        return mf.DBuffer.from_local(torch.ones(6), mesh, [mf.RowAtomic()], RAGGED).allgather(0).local_buffer
    return buffer(mesh).allgather(0).local_buffer


def other_sum(mesh: Mesh, dtype: torch.dtype) -> torch.Tensor:
    return partial_buffer(mesh, "sum", dtype if alone(mesh) else torch.float32).allreduce(0).local_buffer


def other_operation(mesh: Mesh) -> torch.Tensor:
    one = partial_buffer(mesh)
    return (one.allreduce(0) if alone(mesh) else one.reduce_scatter(0, mf.RowAtomic())).local_buffer


def sum_and_average(mesh: Mesh) -> torch.Tensor:
    return partial_buffer(mesh, "avg" if alone(mesh) else "sum").allreduce(0).local_buffer


UNCHECKED: dict[str, tuple[Callable[..., torch.Tensor], tuple[Any, ...]]] = {
    "float32 and float64": (other_dtype, (torch.float64,)),
    "float32 and int32": (other_dtype, (torch.int32,)),
    "another size": (other_size, ()),
    "sums of float32 and float64": (other_sum, (torch.float64,)),
    "sums of float32 and int32": (other_sum, (torch.int32,)),
    "allreduce and reduce_scatter": (other_operation, ()),
    "sum and average": (sum_and_average, ()),
}


def unchecked(rank: int, name: str, check: bool) -> str:
    from torch.distributed.device_mesh import DeviceMesh

    mesh = mf.as_mesh(DeviceMesh("cpu", [0, 1]))
    function, args = UNCHECKED[name]
    assert buffer(mesh).allgather(0).local_buffer.tolist() == FULL.tolist()
    assert partial_buffer(mesh).allreduce(0).local_buffer.tolist() == (2 * FULL).tolist()
    with mf.agreement_check(check):
        error = catch(function, mesh, *args)
    return f"{type(error).__name__}: {error}"


@pytest.mark.distributed
@pytest.mark.parametrize("name", UNCHECKED)
def test_unequal_collectives_never_mix(name: str, ranks2: RankPool) -> None:
    for text in ranks2.run(unchecked, name, False, group_timeout=SHORT):
        assert_says(text, "ExchangeError: ", "made other calls (agreement_check() tells which)")
    pids = ranks2.pids
    for text in ranks2.run(unchecked, name, True, group_timeout=SHORT):
        assert_says(text, "ValueError: ", "nothing was sent")
    assert ranks2.pids == pids, "a process died"


def unchecked_in_simulation(mesh: Mesh, name: str) -> None:
    function, args = UNCHECKED[name]
    function(mesh, *args)


@pytest.mark.parametrize("name", UNCHECKED)
def test_simulated_collectives_never_mix(name: str) -> None:
    with pytest.raises(ValueError, match="nothing was sent, because the ranks disagree"):
        mf.simulate(lambda mesh: unchecked_in_simulation(mesh, name), 2)


# The check on one rank only.


def checked_here_only(rank: int, by_environment: bool) -> str:
    mesh = Mesh(2, rank=rank)
    if by_environment:
        os.environ[ENVIRONMENT_VARIABLE] = str(int(rank == 0))
    try:
        with mf.agreement_check(rank == 0) if not by_environment else mf.agreement_check(False):
            errors = [
                catch(mf.gather, {0: shard(mesh)}, owner_layout=group(mesh, "block")) for _ in range(1 + by_environment)
            ]
    finally:
        os.environ.pop(ENVIRONMENT_VARIABLE, None)
    assert len({str(error) for error in errors}) == 1
    return f"{type(errors[0]).__name__}: {errors[0]}"


@pytest.mark.distributed
def test_the_environment_variable_is_compared_once_per_mesh(ranks2: RankPool) -> None:
    for text in ranks2.run(checked_here_only, True, group_timeout=SHORT):
        assert_says(text, "ValueError", f"{ENVIRONMENT_VARIABLE}: on on ranks [0], off on ranks [1]")


@pytest.mark.distributed
def test_the_checked_rank_names_those_that_did_not_answer(ranks2: RankPool) -> None:
    checked, unchecked = ranks2.run(checked_here_only, False, group_timeout=SHORT)
    assert_says(checked, "ExchangeError: the agreement check of gather 'block'", "for rank 1", "switched alike")
    assert_says(unchecked, "ExchangeError: gather 'block'", "agreement_check() tells")


def test_a_simulated_rank_that_checks_alone_is_named() -> None:
    def program(mesh: Mesh) -> None:
        with mf.agreement_check(alone(mesh)):
            mf.gather({0: shard(mesh)}, owner_layout=group(mesh, "block"))

    with pytest.raises(mf.SimulationError, match=r"rank 1 waits in an agreement check \(number 0\) for rank 0"):
        mf.simulate(program, 2)


def test_a_deadlock_names_the_line_and_the_buffer() -> None:
    def program(mesh: Mesh) -> None:
        if not alone(mesh):
            buffer(mesh, 1.0, "blocks.0").allgather(0)

    with pytest.raises(mf.SimulationError, match="deadlock") as caught:
        mf.simulate(program, 2)
    assert_says(caught.value, "allgather over 'axis0' of 'blocks.0' (call 0) for rank 1, at tests/test_told_apart.py:")


# Threads.


def gather_in_two_threads(rank: int) -> list[str]:
    """One thread is inside a gather that waits for the peer; another begins one over the same mesh."""
    mesh, owners, outcomes = Mesh(2, rank=rank), group(Mesh(2, rank=rank), "block"), []
    if rank == 1:
        time.sleep(0.5)
        mf.gather({0: shard(mesh)}, owner_layout=owners)
        return ["right"]
    first = threading.Thread(target=lambda: outcomes.append(mf.gather({0: shard(mesh)}, owner_layout=owners)[0]))
    first.start()
    while not outcomes and not _is_inside(mesh):
        pass
    error = catch(mf.gather, {0: shard(mesh)}, owner_layout=owners)
    first.join()
    assert torch.equal(outcomes[0][0], FULL.view(4, 2))
    return [f"{type(error).__name__}: {error}"]


def _is_inside(mesh: Mesh) -> bool:
    from mfsdp_func.effects.here import carrier_of

    return mesh.digest in carrier_of(mesh).inside


@pytest.mark.distributed
def test_a_call_inside_another_threads_call_is_refused(ranks2: RankPool) -> None:
    (refused,), _ = ranks2.run(gather_in_two_threads)
    assert_says(
        refused, "RuntimeError: gather 'block': on rank 0, thread 'MainThread' began this call", "one after the other"
    )


def gather_in_threads_by_turns(rank: int) -> int:
    mesh, owners = Mesh(2, rank=rank), group(Mesh(2, rank=rank), "block")
    found: list[torch.Tensor] = []

    def work(k: int) -> None:
        leaf = shard(mesh, k).requires_grad_()
        full, token = mf.gather({0: leaf}, owner_layout=owners)
        loss = sum((t.sum() for t in full.values()), token.link)
        loss.backward()
        assert leaf.grad is not None
        found.append(leaf.grad)

    for k in range(5):
        thread = threading.Thread(target=work, args=(k,))
        thread.start()
        thread.join()
    assert all(torch.equal(grad, torch.ones(4)) for grad in found)
    return len(found)


@pytest.mark.distributed
def test_calls_one_after_the_other_from_several_threads_are_legal(ranks2: RankPool) -> None:
    assert ranks2.run(gather_in_threads_by_turns) == [5, 5]


# Numbers of groups are no part of anything else.


def test_equal_groups_have_numbers_of_their_own_and_stay_equal() -> None:
    def program(mesh: Mesh) -> None:
        groups = [group(mesh) for _ in range(3)]
        before = [(hash(one), one.digest, one.key) for one in groups]
        for one in (*groups, *groups):
            mf.gather({0: shard(mesh)}, owner_layout=one)
        mf.gather_coalesced([{0: shard(mesh)}] * 2, owner_layouts=groups[:2])
        assert [(hash(one), one.digest, one.key) for one in groups] == before
        assert groups[0] == groups[1] == groups[2]
        from mfsdp_func.effects.here import carrier_of

        ledger = carrier_of(mesh).ledger(mesh)
        assert ledger.numbers_of(groups) == [0, 1, 2]
        groups.clear()
        del one
        assert len(ledger.numbers) <= 1  # (a cache of plans keeps the first of equal groups)

    mf.simulate(program, 2)


def test_a_name_is_no_part_of_a_spec() -> None:
    mesh = Mesh(2, rank=0)
    one, other = (BufferSpec(mesh, [mf.RowAtomic()], LAYOUT, name) for name in ("a", "b"))
    assert one == other
    assert one.key == other.key
    assert (one.name, other.name) == ("a", "b")


def test_results_keep_the_name_of_their_buffer() -> None:
    def program(mesh: Mesh) -> None:
        for name in ("a", "b", ""):
            whole = buffer(mesh, 1.0, name).allgather(0)
            assert (whole.spec.name, whole.view([mf.RowAtomic()]).spec.name) == (name, name)

    mf.simulate(program, 2)


# Without NumPy, which is no dependency.

WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import torch
from torch import nn
import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh

def program(mesh):
    torch.manual_seed(0)
    sharded = [mf.RowAtomic()]
    with mf.agreement_check():
        apply, params = mf.fully_shard(nn.Linear(4, 4, bias=False), mesh, mf.Placements(0, sharded, sharded, sharded))
        apply(params, torch.ones(2, 4))
    return True

assert mf.simulate(program, 2).results == {0: True, 1: True}
print("done")
"""


def test_the_check_needs_no_numpy() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT_NUMPY], capture_output=True, text=True, check=False
    )
    assert run.stdout == "done\n", run.stderr


def without_numpy_on(rank: int) -> bool:
    def refuse(tensor: torch.Tensor) -> None:
        raise RuntimeError("Numpy is not available")

    numpy, torch.Tensor.numpy = torch.Tensor.numpy, refuse
    try:
        mesh = Mesh(2, rank=rank)
        with mf.agreement_check():
            mf.gather({0: shard(mesh)}, owner_layout=group(mesh, "block"))
    finally:
        torch.Tensor.numpy = numpy
    return True


@pytest.mark.distributed
def test_the_check_on_real_ranks_needs_no_numpy(ranks2: RankPool) -> None:
    assert ranks2.run(without_numpy_on) == [True, True]
