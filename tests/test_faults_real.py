"""Real ranks that end, stall, raise or leave a call out: every survivor is told so, in time, and can go on."""

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import mfsdp_func as mf
from mfsdp_func import checkpoint, faults
from mfsdp_func.effects import blocks, messages, waiting
from mfsdp_func.effects.torch_internals import device_types_of, name_of, timeout_of
from mfsdp_func.effects.waiting import FAILED
from mfsdp_func.values.mesh import Mesh
from tests.fault_cases import (
    NAMES,
    SLACK,
    TIMEOUT,
    WORLD,
    Outcome,
    faulty_step,
    first_state,
    join,
    tried_again,
    world_mesh,
)
from tests.faults import assert_says, catch
from tests.spawn import RankPool

pytestmark = pytest.mark.distributed

FAULTY = 2
LEFT = tuple(rank for rank in range(WORLD) if rank != FAULTY)
LATE = TIMEOUT + 1.5
"""How long a rank stalls that comes too late."""
POINTS = 10
"""Of the step: two all-gathers and their transposes, the clip, a gather and a scatter per group, the vote."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint from which steps begin."""
    folder = tmp_path_factory.mktemp("faults") / "step0"
    mf.simulate(lambda mesh: checkpoint.save(folder, first_state(mesh), names=NAMES), WORLD)
    return folder


@pytest.fixture(scope="module")
def unharmed(saved: Path, tmp_path_factory: pytest.TempPathFactory, ranks4: RankPool) -> list[Outcome]:
    """The step without a fault."""
    return ranks4.run(faulty_step, saved, tmp_path_factory.mktemp("faults"), (), ())


@pytest.fixture(scope="module")
def expected(saved: Path, tmp_path_factory: pytest.TempPathFactory, ranks4: RankPool) -> list[list[bytes]]:
    """The step of a run that began with as many ranks as are left."""
    return ranks4.run(begin, saved, tmp_path_factory.mktemp("faults"))[: len(LEFT)]


def begin(rank: int, folder: Path, store: Path) -> list[bytes] | None:
    return tried_again(rank, len(LEFT), folder, store) if rank < len(LEFT) else None


def test_the_step_has_all_its_points(unharmed: list[Outcome]) -> None:
    assert {outcome.points for outcome in unharmed} == {POINTS}
    assert all(outcome.error is None and outcome.kept for outcome in unharmed)


SOME = [faults.Kill(FAULTY, POINTS - 1), faults.Stall(FAULTY, 5, LATE), faults.Raise(FAULTY, 6)]
ALL = [
    fault
    for at in range(POINTS)
    for fault in (faults.Kill(FAULTY, at), faults.Stall(FAULTY, at, LATE), faults.Raise(FAULTY, at))
]


@pytest.mark.parametrize(
    "fault", [*SOME, *(pytest.param(fault, marks=pytest.mark.slow) for fault in ALL if fault not in SOME)], ids=str
)
def test_a_step_with_a_fault(
    fault: faults.Fault,
    saved: Path,
    unharmed: list[Outcome],
    expected: list[list[bytes]],
    ranks4: RankPool,
    tmp_path: Path,
) -> None:
    found = ranks4.run(
        faulty_step,
        saved,
        tmp_path,
        (fault,),
        LEFT,
        return_exceptions=True,
    )
    faulty: Any = found[FAULTY]
    if isinstance(fault, faults.Kill):
        assert "died with exit code -9" in str(faulty)
    elif isinstance(fault, faults.Raise):
        assert isinstance(faulty.error, faults.InjectedFault)
        assert faulty.kept
    else:
        check_survivor(faulty, FAULTY, unharmed[FAULTY], voting=fault.at == POINTS - 1, since=fault.seconds)
    for rank, again in zip(LEFT, expected, strict=True):
        check_survivor(found[rank], rank, unharmed[rank], voting=fault.at == POINTS - 1)
        assert found[rank].again == again


def check_survivor(outcome: Outcome, rank: int, unharmed: Outcome, *, voting: bool, since: float = 0.0) -> None:
    """Told by name, in time, and left with the old state; with the new one too, where it had it."""
    assert isinstance(outcome, Outcome), outcome
    error = outcome.error
    assert isinstance(error, mf.ExchangeError), error
    assert_says(error, f"rank {rank} ", "make a new one")
    assert error.elapsed <= since + TIMEOUT + SLACK
    assert outcome.seconds <= since + TIMEOUT + SLACK + 0.5
    assert outcome.kept
    assert isinstance(error, mf.CommitError) or outcome.new is None
    if isinstance(error, mf.CommitError):
        assert error.step == 0
        assert outcome.new == unharmed.new
    assert isinstance(error, mf.CommitError) or not voting  # who needs nothing of the faulty rank comes to the vote
    text, seconds = outcome.at_once
    assert_says(text, "allgather", "did not begin this call", "The first to fail was rank ")
    assert seconds < 0.5


def test_a_short_stall_changes_nothing(saved: Path, unharmed: list[Outcome], ranks4: RankPool, tmp_path: Path) -> None:
    stalls = tuple(faults.Stall(rank, at, 0.5) for rank, at in ((0, 0), (3, 4), (1, POINTS - 1)))
    for outcome, before in zip(ranks4.run(faulty_step, saved, tmp_path, stalls, ()), unharmed, strict=True):
        assert outcome.error is None
        assert outcome.new == before.new


# Single calls, on pools of their own timeouts.


def run_short(pool: RankPool, program: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a program in groups that give up soon, on processes that have started."""
    if not pool.pids:
        pool.run(float)
    return pool.run(program, *args, group_timeout=TIMEOUT)


def test_what_is_known_of_a_group(ranks2: RankPool) -> None:
    for found in ranks2.run(facts_of_a_group, group_timeout=12.5):
        assert found[:2] == (12.5, 7.0)
        assert "cpu" in found[2]
        assert found[3] == "default_pg"


def facts_of_a_group(rank: int) -> tuple[float | None, float | None, set[str], str]:
    group = dist.distributed_c10d._get_default_group()
    before = timeout_of(group)
    group.set_timeout(timedelta(seconds=7))
    return before, timeout_of(group), device_types_of(group), name_of(group)


def rows(mesh: Mesh, name: str = "rows") -> tuple[dict[int, torch.Tensor], mf.GroupOwnerLayout]:
    """One matrix, a row of it on every rank, owned by the first."""
    layout = mf.build_for_row_atomic([(mesh.size(), 2)], mesh.size())
    owners = mf.GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0]}, name=name, dtype=torch.float32)
    return {0: torch.full((1, 2), float(mesh.get_rank()))}, owners


def timed(function: Callable[..., Any], *args: Any, **keywords: Any) -> tuple[BaseException | None, float]:
    start = time.monotonic()
    return catch(function, *args, **keywords), time.monotonic() - start


def leave_out(rank: int, way: str) -> Any:
    """Rank 3 leaves a call out."""
    mesh = Mesh(4, rank=rank)
    shards, owners = rows(mesh)
    mf.gather(shards, owner_layout=owners)
    if rank == 3:
        time.sleep(TIMEOUT + 0.5)
        return timed(mf.gather, shards, owner_layout=owners)
    if way == "async":
        _, token = mf.gather(shards, owner_layout=owners, async_op=True)
        return timed(token.wait)
    if way == "checked":
        with mf.agreement_check():
            return timed(mf.gather, shards, owner_layout=owners)
    if way == "in place":
        into = {0: torch.zeros(4, 2)} if rank == 0 else {}
        return timed(mf.inplace.gather, shards, into, owner_layout=owners)
    return timed(mf.gather, shards, owner_layout=owners)


@pytest.mark.parametrize("way", ["plain", "async", "checked", "in place"])
def test_a_rank_that_leaves_a_call_out(way: str, ranks4: RankPool) -> None:
    found = run_short(ranks4, leave_out, way)
    waiting = range(3) if way == "checked" else (0,)  # the others send, and are done
    for rank in waiting:
        error, seconds = found[rank]
        assert isinstance(error, mf.ExchangeError)
        assert_says(error, "gather 'rows'", "in process group 'default_pg'", "timeout 2 s")
        assert 3 in error.awaited
        assert 0.5 <= seconds <= TIMEOUT + SLACK
    late, _ = found[3]
    assert isinstance(late, mf.ExchangeError)
    assert_says(late, "The first to fail was rank ", "gather 'rows'")


def wait_through(rank: int) -> Any:
    """Rank 0 waits for rank 1, which waits for rank 2, which waits for rank 3, which never comes."""
    if rank == 3:
        time.sleep(TIMEOUT + 1)
        return []
    outcomes = []
    time.sleep((2 - rank) * 0.4)
    for pair in ((2, 3), (1, 2), (0, 1)):
        if rank in pair:
            shards, owners = rows(Mesh(2, ranks=pair, rank=rank))
            with mf.agreement_check():
                outcomes.append(timed(mf.gather, shards, owner_layout=owners))
    return outcomes


def test_those_who_wait_through_others(ranks4: RankPool) -> None:
    for rank, outcomes in enumerate(run_short(ranks4, wait_through)[:3]):
        assert len(outcomes) == 1 + (rank in (1, 2))
        for error, seconds in outcomes:
            assert isinstance(error, mf.ExchangeError)
            assert seconds <= TIMEOUT + SLACK
        error, _ = outcomes[0]
        assert_says(error, "the first call")
        assert error.awaited == (rank + 1,)
        if rank < 2:  # long before its own timeout
            assert_says(error, "The first to fail was rank 2, ")


def come_late(rank: int, seconds: float) -> Any:
    mesh = Mesh(4, rank=rank)
    shards, owners = rows(mesh)
    if rank == 3:
        time.sleep(seconds)
    return timed(mf.gather, shards, owner_layout=owners)[0]


def test_a_rank_that_joins_late(ranks4: RankPool) -> None:
    assert ranks4.run(come_late, 1.0, group_timeout=10.0) == [None] * 4
    for error in run_short(ranks4, come_late, TIMEOUT + 1):
        assert isinstance(error, mf.ExchangeError)
        assert_says(error, "gather 'rows'")


def fail_and_join_again(rank: int, folder: Path) -> Any:
    """A group fails and is destroyed with a token in flight; its successor, of the same ranks, is another one."""
    first = join(rank, 2, folder / "first", TIMEOUT)
    shards, owners = rows(first)
    mf.gather(shards, owner_layout=owners)
    token = mf.gather(shards, owner_layout=owners, async_op=True)[1] if rank == 0 else None
    error = catch(mf.scatter, {0: torch.ones(2, 2)} if rank == 0 else {}, owner_layout=owners) if rank else None
    mesh = join(rank, 2, folder / "second", 20.0)
    in_flight = None if token is None else timed(token.wait)
    shards, owners = rows(mesh)
    gathered, _ = mf.gather(shards, owner_layout=owners)
    return error, in_flight, gathered[0].tolist() if rank == 0 else None, len(FAILED)


def test_a_group_destroyed_and_used_again(ranks2: RankPool, tmp_path: Path) -> None:
    (_, (in_flight, seconds), gathered, failed), (error, *_) = ranks2.run(fail_and_join_again, tmp_path)
    assert gathered == [[0.0, 0.0], [1.0, 1.0]]
    assert isinstance(error, mf.ExchangeError)
    assert isinstance(in_flight, mf.ExchangeError)
    assert seconds <= TIMEOUT + SLACK
    assert failed <= 1  # that of the token's group, which the error's traceback keeps


def store_of_rank_0(rank: int, folder: Path) -> dist.TCPStore:
    """A store that rank 0 serves."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        (folder / "port.new").write_text(str(store.port))
        (folder / "port.new").rename(folder / "port")
        return store
    while not (folder / "port").exists():
        time.sleep(0.05)
    return dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), is_master=False)


def fail_twice(rank: int, folder: Path) -> list[str | None]:
    """Two groups, one after the other in one store, each behind a prefix (as gloo needs it) and with a failure of its own."""
    dist.destroy_process_group()
    store, causes = store_of_rank_0(rank, folder), list[str | None]()
    for name in ("first", "second"):
        part = dist.PrefixStore(name, store)
        dist.init_process_group("gloo", store=part, rank=rank, world_size=2, timeout=timedelta(seconds=30))
        shards, owners = rows(world_mesh(), name)
        mf.gather(shards, owner_layout=owners)
        if rank == 0:
            waiting.give_up(dist.distributed_c10d._get_default_group(), f"rank 0, told in the {name} group")
        else:
            time.sleep(0.5)
        error = catch(mf.gather, shards, owner_layout=owners)
        causes.append(error.cause if isinstance(error, mf.ExchangeError) else repr(error))
        dist.destroy_process_group()
    return causes


def test_a_second_group_in_the_same_store_quotes_its_own_failure(ranks2: RankPool, tmp_path: Path) -> None:
    for causes in ranks2.run(fail_twice, tmp_path):
        assert causes == ["rank 0, told in the first group", "rank 0, told in the second group"]


def lose_memory(rank: int) -> Any:
    """Rank 1 cannot make a buffer in the middle of a call; the others learn of it at once."""
    mesh = Mesh(4, rank=rank)
    shards, owners = rows(mesh)
    mf.gather(shards, owner_layout=owners)
    if rank == 1:
        messages.packed = raise_memory_error
    try:
        return timed(mf.gather, shards, owner_layout=owners)
    finally:
        messages.packed = blocks.packed


def raise_memory_error(*_: Any) -> torch.Tensor:
    raise MemoryError("no buffer")


def test_memory_that_fails_inside_a_call(ranks4: RankPool) -> None:
    (error, seconds), (own, _), *_ = ranks4.run(lose_memory, group_timeout=10.0)
    assert isinstance(own, MemoryError)
    assert isinstance(error, mf.ExchangeError)
    assert_says(error, "The first to fail was rank 1, in gather 'rows': MemoryError: no buffer")
    assert seconds < 5


def fail_between(rank: int, shape: tuple[int, ...]) -> Any:
    """Between two exchanges of a step that commits, rank 1 fails; the others learn of it at once, through whatever group."""
    mesh = mf.as_mesh(DeviceMesh("cpu", torch.arange(4).view(shape)))
    layout = mf.build_for_row_atomic([(4, 2)], mesh.size(mesh.ndim - 1))
    placements = [mf.Replicate()] * (mesh.ndim - 1) + [mf.RowAtomic()]
    buffer = mf.DBuffer.distribute_tensors([torch.ones(4, 2)], mesh, placements, layout)

    def step(buffer: mf.DBuffer) -> mf.DBuffer:
        whole = buffer.allgather(mesh.ndim - 1)
        if rank == 1:
            raise OSError("No space left on device")
        return whole.redistribute([mf.RowAtomic()] * mesh.ndim if mesh.ndim == 1 else placements).allgather(
            mesh.ndim - 1
        )

    before = buffer.local_buffer.clone()
    error, seconds = timed(mf.commit(step, mesh=mesh), buffer)
    return error, seconds, torch.equal(before, buffer.local_buffer)


@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_a_rank_that_fails_between_exchanges(shape: tuple[int, ...], ranks4: RankPool) -> None:
    for rank, (error, seconds, kept) in enumerate(ranks4.run(fail_between, shape, group_timeout=10.0)):
        assert kept
        assert seconds < 5
        if rank == 1:
            assert isinstance(error, OSError)
        else:
            assert isinstance(error, mf.ExchangeError)
            assert_says(error, "The first to fail was rank 1, in step 0: OSError: No space left on device")


def die_inside_the_vote(rank: int, folder: Path) -> Any:
    """Rank 3 dies when some of the others can end the vote and some cannot: it goes by messages, peer after peer."""
    join(rank, 4, folder / "store", TIMEOUT)
    mesh = Mesh(4, ["alone"], rank=rank)  # without groups of its own, so that the vote goes by messages
    committed = mf.commit(lambda state: {"x": state["x"] + 1}, mesh=mesh)
    state = committed({"x": torch.zeros(1)})
    if rank == 3:
        messages._isend = die_after(1 + 2)  # a term of rank 1's sum; and its own sum, to two of three
    try:
        state = committed(state)
        return True, committed.number, {committed.number: float(state["x"])}
    except mf.CommitError as error:
        return False, error.step + 1, {error.step: float(error.old["x"]), error.step + 1: float(error.new["x"])}


def die_after(number: int) -> Callable[..., Any]:
    send, sent = messages._isend, list[None]()

    def send_or_die(*args: Any) -> Any:
        if len(sent) == number:
            time.sleep(0.3)  # what was sent arrives
            os.kill(os.getpid(), signal.SIGKILL)
        sent.append(None)
        return send(*args)

    return send_or_die


@pytest.mark.slow
def test_a_death_inside_the_vote(ranks4: RankPool, tmp_path: Path) -> None:
    *survivors, killed = ranks4.run(die_inside_the_vote, tmp_path, return_exceptions=True)
    assert "died with exit code -9" in str(killed)
    assert [ended for ended, *_ in survivors] == [True, True, False]
    lowest = min(number for _, number, _ in survivors)
    for _, _, states in survivors:
        assert states[lowest] == float(lowest)


class Deaf:
    """A group whose store never answers."""

    group_name = "deaf"

    def get_group_store(self) -> Any:
        return self

    def compare_set(self, *_: str) -> bytes:
        time.sleep(5)
        return b""


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_close", lambda group: None)
    group: Any = Deaf()
    start = time.monotonic()
    assert waiting.give_up(group, "rank 1: KeyError") == "rank 1: KeyError"
    assert time.monotonic() - start < 1.0
    assert waiting.give_up(group, "rank 1: ValueError") == "rank 1: KeyError"


def lose_the_store(rank: int, folder: Path) -> Any:
    """Rank 0, which serves the store, is killed."""
    dist.destroy_process_group()
    store = store_of_rank_0(rank, folder)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=timedelta(seconds=30))
    mesh = world_mesh()
    shards, owners = rows(mesh)
    mf.gather(shards, owner_layout=owners)
    with faults.injected(faults.Kill(0, 0)), mf.agreement_check():
        first = timed(mf.gather, shards, owner_layout=owners)
    return first, timed(mf.gather, shards, owner_layout=owners)


@pytest.mark.slow
def test_a_store_that_died_with_its_rank(ranks4: RankPool, tmp_path: Path) -> None:
    killed, *survivors = ranks4.run(lose_the_store, tmp_path, return_exceptions=True)
    assert "died with exit code -9" in str(killed)
    for found in survivors:
        assert not isinstance(found, BaseException), found
        (error, seconds), (again, at_once) = found
        assert isinstance(error, mf.ExchangeError)
        assert isinstance(again, mf.ExchangeError)
        assert seconds < 5
        assert at_once < 0.5
