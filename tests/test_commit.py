"""Steps that all ranks take, or none of them leaves a trace of."""

import pickle
from collections.abc import Callable

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import faults
from mfsdp_func.values.mesh import Mesh
from tests.faults import block, shards
from tests.meshes import RunOnMesh


def count_up(mesh: Mesh) -> tuple[float, int]:
    committed = mf.commit(lambda state, batch: {"x": state["x"] + batch}, mesh=mesh, number=5)
    state = {"x": torch.zeros(())}
    for batch in (1.0, 2.0, 4.0):
        state = committed(state, batch)
    return float(state["x"]), committed.number


@pytest.mark.parametrize("shape", [1, 2, (2, 2)], ids=str)
def test_a_step_is_what_it_was_and_is_counted(shape: int | tuple[int, int], run_on_mesh: RunOnMesh) -> None:
    results = run_on_mesh(count_up, shape)
    assert set(results.values()) == {(7.0, 8)}


def leave_in_flight(mesh: Mesh) -> list[bool]:
    tokens: list[mf.Token] = []

    def step(state: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        gathered, token = mf.gather(state, owner_layout=block(mesh), async_op=True)
        tokens.append(token)
        return gathered

    new = mf.commit(step, mesh=mesh)(shards(mesh))
    assert all(torch.isfinite(tensor).all() for tensor in new.values())
    return [work.done for token in tokens for work in token.pending]


def test_the_vote_comes_after_all_that_is_in_flight(run_on_mesh: RunOnMesh) -> None:
    assert run_on_mesh(leave_in_flight, 2) == {0: [True], 1: [True]}


def count_differently(mesh: Mesh) -> str:
    committed = mf.commit(lambda state: state, mesh=mesh, number=mesh.get_rank())
    with pytest.raises(ValueError, match="all must have taken equally many") as caught:
        committed({})
    return str(caught.value)


def test_ranks_vote_on_one_step(run_on_mesh: RunOnMesh) -> None:
    for rank, text in run_on_mesh(count_differently, 4).items():
        assert f"rank {rank} has taken {rank} steps, the ranks together 6" in text


def write_into(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    state["x"].add_(1)
    return state


def test_a_step_that_writes_into_its_state_is_refused() -> None:
    with pytest.raises(ValueError, match="the step wrote into 1 tensors of its state, the first of shape") as caught:
        mf.commit(write_into, mesh=mf.Mesh(1, rank=0))({"x": torch.zeros(3)})
    assert caught.value.__notes__ == ["in step 0, which is not taken: the old state stands on rank 0"]


def test_a_step_that_raises_is_not_counted() -> None:
    def step(state: dict[str, torch.Tensor], batch: int) -> dict[str, torch.Tensor]:
        return {"x": state["x"] + 1 // batch}

    committed, state = mf.commit(step, mesh=mf.Mesh(1, rank=0)), {"x": torch.zeros(())}
    with pytest.raises(ZeroDivisionError):
        committed(state, 0)
    assert committed.number == 0
    assert float(committed(state, 1)["x"]) == 1.0
    assert committed.number == 1


def test_transforms_go_into_the_step() -> None:
    committed = mf.commit(lambda x: x * x, mesh=mf.Mesh(1, rank=0))
    with pytest.raises(RuntimeError, match="put those into the step"):
        torch.func.grad(committed)(torch.ones(()))


def test_the_error_of_a_vote_has_both_states() -> None:
    mesh = mf.Mesh(2, rank=1)
    missed = mf.ExchangeError("allreduce", mesh, rank=1, awaited=[0], elapsed=1, timeout=1, reason="closed by peer")
    error = mf.CommitError(missed, step=3, old={"x": 1}, new={"x": 2})
    for words in ("the vote on step 3", "for rank 0", "closed by peer", "after 3 steps (`old`) and after 4 (`new`)"):
        assert words in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.step, copy.old, copy.new) == (str(error), 3, {"x": 1}, {"x": 2})


STEPS, POINTS = 3, 9
"""Of `take_steps`: an all-gather, and the two halves of the vote's sum."""


def take_steps(mesh: Mesh) -> tuple[int, dict[int, float]]:
    """The number of this rank's last step, and what it has: the state after which step."""
    layout = mf.build_for_row_atomic([(mesh.size(), 1)], mesh.size())

    def step(state: mf.DBuffer) -> mf.DBuffer:
        return mf.DBuffer(state.spec, state.local_buffer + state.allgather(0).local_buffer.sum())

    committed = mf.commit(step, mesh=mesh)
    state = mf.DBuffer.from_local(torch.ones(1), mesh, [mf.RowAtomic()], layout)
    try:
        for _ in range(STEPS):
            state = committed(state)
    except mf.CommitError as error:
        return error.step + 1, {
            error.step: error.old.local_buffer.item(),
            error.step + 1: error.new.local_buffer.item(),
        }
    except (mf.ExchangeError, faults.InjectedFault):
        pass
    return committed.number, {committed.number: state.local_buffer.item()}


@pytest.mark.parametrize("at", range(POINTS))
@pytest.mark.parametrize(
    "fault", [lambda at: faults.Kill(2, at), lambda at: faults.Raise(2, at), lambda at: faults.Stall(2, at, 9.0)]
)
def test_every_survivor_has_the_lowest_last_step(fault: Callable[[int], faults.Fault], at: int) -> None:
    found = mf.simulate(take_steps, 4, faults=[fault(at)], timeout=5.0).results
    assert {0, 1, 3} <= set(found)
    last = {number for number, _ in found.values()}
    assert min(last) in (at // 3, at // 3 + 1)
    assert max(last) - min(last) <= 1
    assert {states[min(last)] for _, states in found.values()} == {float(5 ** min(last))}


def test_without_a_fault_all_steps_are_taken() -> None:
    assert set(map(str, mf.simulate(take_steps, 4).results.values())) == {str((STEPS, {STEPS: 125.0}))}
