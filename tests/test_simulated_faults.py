"""Faults on simulated ranks, under a virtual clock: who fails, when, with which words, and what is left."""

import gc
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func.effects.faults import Fault, InjectedFault
from mfsdp_func.faults import Corrupt, Kill, Raise, Stall
from mfsdp_func.values.mesh import Mesh
from tests.test_simulated import check_step, group, shards, step


def two_steps(mesh: Mesh) -> Any:
    """Two calls each; what failed, and what a later call says."""
    failed: list[mf.ExchangeError] = []
    for _ in range(2):
        try:
            step(mesh)
        except mf.ExchangeError as error:
            failed.append(error)
    return failed


def of(faults: list[Fault], **keywords: Any) -> mf.Simulation[list[mf.ExchangeError]]:
    return mf.simulate(two_steps, 4, faults=faults, timeout=30.0, **keywords)


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_killed_rank_is_named_at_once(at: int) -> None:
    run = of([Kill(2, at)])
    assert list(run.results) == [0, 1, 3]
    assert not run.errors
    assert run.seconds == 0
    for rank, (first, *later) in run.results.items():
        assert (first.rank, first.awaited, first.elapsed, first.timeout) == (rank, (2,), 0, 30)
        assert first.operation == ("gather 'group'", "scatter 'group'")[at % 2]
        assert first.mesh.ranks == (0, 1, 2, 3)
        assert "ranks [2] have ended" in str(first)
        for error in later:
            assert error.awaited == ()
            assert "an exchange over this mesh has failed before" in str(error)
            assert error.cause is not None
            assert "ranks [2] have ended" in error.cause
    assert run.points == dict.fromkeys(range(4), at + 1)


def test_a_rank_that_stands_still_for_a_short_time_is_waited_for() -> None:
    start = time.monotonic()
    run = of([Stall(1, 1, 29.0), Stall(3, 2, 20.0)])
    assert run.results == {rank: [] for rank in range(4)}
    assert run.seconds == 49
    assert time.monotonic() - start < 5


def test_a_rank_that_stands_still_for_too_long_is_given_up() -> None:
    run = of([Stall(1, 1, 1000.0)])
    assert run.seconds == 1000
    for rank in (0, 2, 3):
        first, later = run.results[rank]
        assert (first.operation, first.awaited, first.elapsed) == ("scatter 'group'", (1,), 30)
        assert "nobody came" in f"{first} {first.cause}"
        assert later.elapsed == 0
    # Its own call finds what the others sent before they gave up; its next one fails at once.
    (error,) = run.results[1]
    assert (error.operation, error.awaited, error.elapsed) == ("gather 'group'", (0, 2, 3), 0)
    assert error.cause is not None
    assert "scatter 'group'" in error.cause


def test_a_rank_that_raises_tells_its_peers() -> None:
    run = of([Raise(0, 1)])
    assert list(run.errors) == [0]
    assert isinstance(run.errors[0], InjectedFault)
    for rank in (1, 2, 3):
        first = run.results[rank][0]
        assert first.awaited == (0,)
        assert first.cause is not None
        assert "rank 0 fails at its point 1, as asked by Raise(rank=0, at=1)" in first.cause


def test_a_rank_that_catches_its_own_fault_goes_on_alone() -> None:
    def program(mesh: Mesh) -> str:
        try:
            step(mesh)
        except InjectedFault:
            step(Mesh(1, ranks=(0,), rank=0))
            with pytest.raises(mf.ExchangeError, match="an exchange over this mesh has failed before"):
                step(mesh)
            return "raised"
        except mf.ExchangeError as error:
            return "told" if "ranks [0] have " in f"{error} {error.cause}" else str(error)
        return "ended"

    run = mf.simulate(program, 3, faults=[Raise(0, 1)])
    assert run.results == {0: "raised", 1: "told", 2: "told"}
    assert not run.errors


def test_survivors_go_on_over_a_mesh_of_their_own() -> None:
    def program(mesh: Mesh) -> Any:
        rank = mesh.get_rank()
        try:
            return step(mesh)
        except mf.ExchangeError as error:
            survivors = Mesh(3, ranks=tuple(r for r in mesh.ranks if r not in error.awaited), rank=rank)
            return step(survivors)

    run = mf.simulate(program, 4, faults=[Kill(1, 1)])
    assert list(run.results) == [0, 2, 3]
    for rank, parts in run.results.items():
        check_step(parts, group(Mesh(3, ranks=(0, 2, 3), rank=rank)))


def test_waiting_through_others_ends_too() -> None:
    """Rank 2 waits for rank 1, which waits for rank 0 on another mesh."""

    def program(mesh: Mesh) -> Any:
        rank = mesh.get_rank()
        for pair in ((0, 1), (1, 2)):
            if rank in pair:
                step(Mesh(2, ranks=pair, rank=rank))
        return "ended"

    run = mf.simulate(program, 3, faults=[Kill(0, 0)])
    assert run.results == {}
    assert {rank: error.awaited for rank, error in run.errors.items()} == {1: (0,), 2: (1,)}  # pyright: ignore[reportAttributeAccessIssue]


def test_other_errors_are_raised_as_ever() -> None:
    def program(mesh: Mesh) -> None:
        step(mesh)
        if mesh.get_rank() == 1:
            raise KeyError("a bug")

    with pytest.raises(KeyError, match="a bug"):
        mf.simulate(program, 3, faults=[Kill(2, 5)])
    with pytest.raises(mf.SimulationError, match="deadlock"):  # a fault that never happens excuses nothing
        mf.simulate(lambda mesh: step(mesh) if mesh.get_rank() else None, 3, faults=[Kill(0, 5)])


@pytest.mark.parametrize("bit", [0, 31, 70, 10**6])
def test_a_flipped_bit(bit: int) -> None:
    """Without the agreement check it is another number; with it, messages carry a hash."""
    clean = mf.simulate(step, 2).results
    changed = mf.simulate(step, 2, faults=[Corrupt(0, 0, bit)]).results
    pairs = [(changed[rank][i], clean[rank][i]) for rank in clean for i in clean[rank]]
    assert sum(int((a.view(torch.int32) != b.view(torch.int32)).sum()) for a, b in pairs) == 1
    with mf.agreement_check():  # points 0, 2: the check; 1, 3: the exchange
        run = mf.simulate(step, 2, faults=[Corrupt(0, 1, bit)])
    error = run.errors[1]
    assert isinstance(error, mf.ExchangeError)
    assert error.awaited == (0,)
    assert "what came from ranks [0] was damaged on the way" in str(error)


def test_a_flipped_bit_in_the_check_itself() -> None:
    with mf.agreement_check():
        run = mf.simulate(step, 2, faults=[Corrupt(1, 0, 77)])
    assert all("gather" not in str(error) and "damaged on the way" in str(error) for error in [run.errors[0]])
    assert list(run.errors) == [0, 1]


def test_a_rank_that_sends_nothing_has_nothing_to_flip() -> None:
    run = mf.simulate(step, 2, faults=[Corrupt(1, 0, 5)])
    for rank, parts in run.results.items():
        check_step(parts, group(Mesh(2, rank=rank)))


@pytest.mark.parametrize("choices", range(10))
@pytest.mark.parametrize("carrier", ["eager", "rendezvous", "nccl"])
def test_whatever_the_order_survivors_are_told(choices: int, carrier: Any) -> None:
    for fault in (Kill(1, 1), Stall(1, 1, 100.0), Raise(1, 1)):
        run = of([fault], carrier=carrier, choices=choices, memory="live")
        for rank in (0, 2, 3):
            assert run.results[rank], fault
            assert all(error.elapsed <= 31 for error in run.results[rank])


def test_inputs_are_as_they_were() -> None:
    def program(mesh: Mesh) -> bool:
        owners = group(mesh)
        source = shards(owners)
        kept = {i: t.clone() for i, t in source.items()}
        with pytest.raises(mf.ExchangeError):
            mf.gather(source, owner_layout=owners)
        return all(torch.equal(source[i], kept[i]) for i in kept)

    assert mf.simulate(program, 3, faults=[Kill(1, 0)]).results == {0: True, 2: True}


def test_faults_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Kill\(rank=7, at=0\) is of a rank or a point that Mesh.* does not have"):
        mf.simulate(step, 2, faults=[Kill(7, 0)])
    with pytest.raises(TypeError, match=r"takes values of mfsdp_func\.faults, got 'kill'"):
        mf.simulate(step, 2, faults=["kill"])  # pyright: ignore[reportArgumentType]


def test_a_run_leaves_nothing_behind() -> None:
    """Whatever its ranks had in flight when they ended, were killed or failed; a search runs thousands."""
    kept: list[weakref.ref[torch.Tensor]] = []

    def program(mesh: Mesh, fails: bool) -> None:
        owners = group(mesh)
        source = shards(owners)
        kept.extend(weakref.ref(tensor) for tensor in source.values())
        mf.gather(source, owner_layout=owners, async_op=True)
        if fails and mesh.get_rank() == 1:
            raise KeyError("a bug")
        step(mesh)

    mf.simulate(partial(program, fails=False), 3)
    mf.simulate(partial(program, fails=False), 3, faults=[Kill(1, 1)], memory="live")
    with pytest.raises(KeyError):
        mf.simulate(partial(program, fails=True), 3)
    gc.collect()
    assert len(kept) > 6
    assert [ref() for ref in kept if ref() is not None] == []
