"""Training steps on the simulated mesh: every fault at every point, a thousand orders of events, a thousand ranks."""

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.effects.faults import Fault, InjectedFault
from mfsdp_func.faults import Kill, Raise, Stall
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout

# A Muon step of two groups, on any number of ranks.

SHAPES = {"first": [(8, 6), (4, 4)], "second": [(5, 7), (9, 3)]}
RANKS = 8
TIMEOUT = 30.0


class State(NamedTuple):
    """Parameters and momentum by group, and the number of steps."""

    params: dict[str, dict[int, torch.Tensor]]
    momentum: dict[str, dict[int, torch.Tensor]]
    steps: int

    def numbers(self) -> list[Any]:
        return [[t.tolist() for group in part.values() for t in group.values()] for part in self[:2]]


def groups_on(mesh: Mesh) -> dict[str, GroupOwnerLayout]:
    layouts = {name: mf.build_for_row_atomic_unpadding(shapes, mesh.size()) for name, shapes in SHAPES.items()}
    return {name: GroupOwnerLayout.from_params(mesh, layout, name=name) for name, layout in layouts.items()}


def shards_of(owners: GroupOwnerLayout, seed: int) -> dict[int, torch.Tensor]:
    """This rank's part of the same numbers on any number of ranks: what loading gives."""
    layout, generator = owners.layout, torch.Generator().manual_seed(seed)
    full = [torch.randn(shape, generator=generator) for shape in layout.tensor_shapes]
    views = mf.DBuffer.distribute_tensors(full, owners.mesh, owners.placements, layout).tensor_views()
    return {i: shard for i, shard in views.items() if i in owners.tensor_to_owner}


def loaded(mesh: Mesh) -> State:
    params = {name: shards_of(owners, n) for n, (name, owners) in enumerate(groups_on(mesh).items())}
    return State(params, {name: {i: t * 0 for i, t in group.items()} for name, group in params.items()}, 0)


def step_of(mesh: Mesh) -> Callable[[State, int], State]:
    """Two groups one after the other: a gather and a scatter each."""
    groups = groups_on(mesh)

    def step(state: State, batch: int) -> State:
        params: dict[str, Any] = {}
        momentum: dict[str, Any] = {}
        for name, owners in groups.items():
            muon = optim.muon(0.1, owner_layout=owners, ns_dtype=torch.float32, stack_equal_shapes=False)
            before = muon.init(state.params[name])._replace(momentum=state.momentum[name])
            gradients = shards_of(owners, batch)
            updates, after = muon.update(gradients, before, state.params[name])
            params[name], momentum[name] = optim.apply_updates(state.params[name], updates), after.momentum
        return State(params, momentum, state.steps + 1)

    return step


class Outcome(NamedTuple):
    """How a rank came out of a step."""

    error: Exception | None
    intact: bool
    steps: int
    again: list[Any] | None


def attempt(mesh: Mesh, survivors: tuple[int, ...] | None = None) -> Outcome:
    """One committed step; where it fails and there are survivors, once more by them alone, after a load."""
    state = loaded(mesh)
    before = state.numbers()
    try:
        after = mf.commit(step_of(mesh), mesh=mesh)(state, 7)
    except (mf.ExchangeError, InjectedFault) as error:
        intact, again = state.numbers() == before and state.steps == 0, None
        if isinstance(error, mf.CommitError):  # both states
            intact &= (error.step, error.old.steps, error.new.steps) == (0, 0, 1) and error.old.numbers() == before
            intact &= error.new.numbers() != before
        if survivors is not None:
            fewer = Mesh(len(survivors), ranks=survivors, rank=mesh.rank)
            again = step_of(fewer)(loaded(fewer), 7).numbers()
        return Outcome(error, intact, 0, again)
    return Outcome(None, state.numbers() == before, after.steps, None)


POINTS_OF_STEP, POINTS = 4, 6
"""Two gathers and two scatters; and the vote, whose reduction is two exchanges here."""


def check_outcomes(fault: Fault, run: mf.Simulation[Outcome]) -> None:
    """Whatever happens to one rank, every other one is told by name and has its old state, or has made the step."""
    killed = {fault.rank} if isinstance(fault, Kill) else set[int]()
    assert set(run.results) == set(range(RANKS)) - killed, fault
    for rank, outcome in run.results.items():
        assert outcome.intact, (fault, rank)
        if outcome.error is None:
            # A fault inside the vote may leave ranks one step apart; one before it may not.
            assert fault.at >= POINTS_OF_STEP or isinstance(fault, Stall), (fault, rank)
            assert outcome.steps == 1
        elif rank == fault.rank and isinstance(fault, Raise):
            assert isinstance(outcome.error, InjectedFault)
        else:
            error = outcome.error
            assert isinstance(error, mf.ExchangeError), (fault, rank)
            assert error.rank == rank
            assert error.mesh.ranks == tuple(range(RANKS))
            if rank != fault.rank:  # who stands still may find its messages when it comes to, and go on to the vote
                assert isinstance(error, mf.CommitError) == (fault.at >= POINTS_OF_STEP), (fault, rank)
            assert error.operation.startswith(("gather '", "scatter '", "the vote on step 0"))
            assert error.elapsed <= TIMEOUT + 1
            assert error.timeout == TIMEOUT
            assert error.awaited or error.cause
            assert str(fault.rank) in f"{error} {error.cause}", (fault, rank)
    failed = [rank for rank, outcome in run.results.items() if outcome.error is not None]
    if fault.at < POINTS_OF_STEP:
        assert set(failed) >= set(run.results) - {fault.rank}, fault


def all_faults(kind: str) -> Iterator[Fault]:
    make = {"kill": Kill, "raise": Raise, "stall": lambda rank, at: Stall(rank, at, 1000.0)}[kind]
    return (make(rank, at) for rank in range(RANKS) for at in range(POINTS))


@pytest.mark.parametrize("kind", ["kill", "stall", "raise"])
def test_every_fault_at_every_point_of_a_muon_step(kind: str) -> None:
    assert set(mf.simulate(attempt, RANKS).points.values()) == {POINTS}
    outcomes = {fault: mf.simulate(attempt, RANKS, faults=[fault], timeout=TIMEOUT) for fault in all_faults(kind)}
    for fault, run in outcomes.items():
        check_outcomes(fault, run)
    inside = [run for fault, run in outcomes.items() if fault.at >= POINTS_OF_STEP]
    assert any(isinstance(outcome.error, mf.CommitError) for run in inside for outcome in run.results.values())


@pytest.mark.parametrize("carrier", ["rendezvous", "nccl"])
def test_faults_on_other_carriers_in_other_orders(carrier: Any) -> None:
    for seed, fault in enumerate([*all_faults("kill"), *all_faults("stall"), *all_faults("raise")][::5]):
        keywords = {"carrier": carrier, "memory": "live", "choices": mf.PCT(seed, 3)}
        check_outcomes(fault, mf.simulate(attempt, RANKS, faults=[fault], timeout=TIMEOUT, **keywords))


def test_a_stall_that_ends_in_time_changes_nothing() -> None:
    usual = mf.simulate(partial(after_steps, steps=1), RANKS).results
    for at in range(POINTS_OF_STEP):
        run = mf.simulate(partial(after_steps, steps=1), RANKS, faults=[Stall(3, at, TIMEOUT / 2)], timeout=TIMEOUT)
        assert run.results == usual
        assert run.seconds == TIMEOUT / 2


@pytest.mark.parametrize("at", range(POINTS_OF_STEP))
def test_survivors_try_again_after_a_load(at: int) -> None:
    """With the numbers of a run that began on that many ranks."""
    victim = 2 * at
    survivors = tuple(rank for rank in range(RANKS) if rank != victim)
    run = mf.simulate(partial(attempt, survivors=survivors), RANKS, faults=[Kill(victim, at)])
    fresh = mf.simulate(partial(after_steps, steps=1), RANKS - 1).results
    assert [outcome.again for outcome in run.results.values()] == [*fresh.values()]


def saves(mesh: Mesh, folder: str) -> None:
    layout = mf.build_for_row_atomic_unpadding([(4, 4)], mesh.size())
    weights = mf.DBuffer.distribute_tensors([torch.ones(4, 4)], mesh, [mf.RowAtomic()], layout)
    mf.checkpoint.save(folder, {"step": 3, "weights": weights}, names={"weights": ["weight"]})


@pytest.mark.parametrize("kind", [Kill, Raise])
def test_a_checkpoint_under_faults_is_whole_or_not_there(kind: Any, tmp_path: Path) -> None:
    there = 0
    for at in range(mf.simulate(partial(saves, folder=str(tmp_path / "usual")), 3).points[1]):
        path = tmp_path / str(at)
        run = mf.simulate(partial(saves, folder=str(path)), 3, faults=[kind(1, at)])
        assert set(run.errors) >= {0, 2}
        assert all(isinstance(run.errors[rank], mf.ExchangeError) for rank in (0, 2))
        if path.exists():
            mf.checkpoint.verify(path)
            there += 1
    assert there <= 1  # at the last point, where it has been published


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("kind", ["kill", "raise"])
def test_faults_inside_a_sharded_module(kind: str, check: bool) -> None:
    """In gathers and reductions of units, in the backward pass, in the norm, in Muon's exchanges, in the check."""
    with mf.agreement_check(check):
        points = mf.simulate(sharded_training, 3).points[0]
        for at in range(points):
            run = mf.simulate(sharded_training, 3, faults=[{"kill": Kill, "raise": Raise}[kind](at % 3, at)])
            others = {0, 1, 2} - {at % 3}
            assert run.results == {}
            assert all(isinstance(run.errors[rank], mf.ExchangeError) for rank in others), run.errors


# A thousand orders of events.


def after_steps(mesh: Mesh, steps: int) -> list[Any]:
    state, step = loaded(mesh), step_of(mesh)
    for number in range(steps):
        state = step(state, 7 + number)
    return state.numbers()


def sharded_training(mesh: Mesh) -> list[Any]:
    """`fully_shard`, a gradient by `.backward`'s rules, clipping and Muon with AdamW beside it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
    rows = [mf.RowAtomic()]
    context = mf.FsdpContext(shard_layout=mf.ShardLayout.BALANCED)
    apply, params = mf.fully_shard(model, mesh, mf.Placements([0], rows, rows, rows), units=["0", "2"], context=context)
    routed = optim.from_route(optim.route(model), params, muon=0.02, adamw=0.003)
    optimizer = optim.chain(optim.clip_by_global_norm(1.0), routed)
    state = optimizer.init(params)
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(mesh.get_rank()))
    gradients = torch.func.grad(lambda params: apply(params, inputs).square().mean())(params)
    updates, _ = optimizer.update(gradients, state, params)
    params = optim.apply_updates(params, updates)
    return [buffer.local_buffer.tolist() for buffer in params.values()]


def same_bits(seeds: range) -> int:
    """How many different orders of events there were; every one gave the same bits."""
    program: Callable[[Mesh], Any]
    tapes = set()
    for program, ranks in ((partial(after_steps, steps=2), 4), (sharded_training, 3)):
        usual = mf.simulate(program, ranks).results
        for seed in seeds:
            run = mf.simulate(
                program,
                ranks,
                carrier=("eager", "rendezvous", "nccl")[seed % 3],
                memory=("copied", "live")[seed % 2],
                choices=mf.PCT(seed, 4) if seed % 4 else seed,
                poison=seed % 5 == 0,
            )
            assert run.results == usual, f"{program}: seed {seed}"
            tapes.add((ranks, seed % 3, run.tape))
    return len(tapes)


def test_a_sample_of_tapes_gives_the_same_bits() -> None:
    assert same_bits(range(12)) > 20


@pytest.mark.slow
def test_a_thousand_tapes_give_the_same_bits() -> None:
    """500 seeds of each of two programs."""
    seeds = int(os.environ.get("TAPES", "500"))
    assert same_bits(range(seeds)) > 1.5 * seeds


# A thousand ranks.

WIDTH, KEYS, HIDDEN = 4096, 1024, 14336
LLAMA_BLOCK = [
    (WIDTH, WIDTH),
    (KEYS, WIDTH),
    (KEYS, WIDTH),
    (WIDTH, WIDTH),
    (HIDDEN, WIDTH),
    (HIDDEN, WIDTH),
    (WIDTH, HIDDEN),
]
"""The seven matrices of a block of Llama 3 8B."""


def there_and_back(mesh: Mesh, scale: int) -> int:
    """Gather the matrices, each to an owner, double them, scatter them; the number of matrices owned."""
    layout = mf.build_for_row_atomic_unpadding([(m // scale, n // scale) for m, n in LLAMA_BLOCK], mesh.size())
    owned = {i: (i * mesh.size()) // 7 for i in range(7)}
    owners = GroupOwnerLayout(mesh, layout, owned, name="block", dtype=torch.bfloat16)
    local = layout.get_local_range(mesh, owners.placements)
    source = {i: torch.full((part.numel,), 1.0 + i, dtype=torch.bfloat16) for i, part in layout.tensors_in(local)}
    full, token = mf.gather(source, owner_layout=owners)
    parts, _ = mf.scatter({i: 2 * t for i, t in full.items()}, owner_layout=owners, after=token)
    assert all(bool((part == 2.0 + 2 * i).all()) for i, part in parts.items())
    return len(full)


@pytest.mark.parametrize(
    ("ranks", "scale", "seconds"), [(128, 32, 10.0), pytest.param(1024, 1, 10.0, marks=pytest.mark.slow)]
)
def test_many_ranks(ranks: int, scale: int, seconds: float) -> None:
    start = time.process_time()
    run = mf.simulate(partial(there_and_back, scale=scale), ranks)
    taken = time.process_time() - start
    assert sum(run.results.values()) == 7
    assert taken < seconds, f"{ranks} ranks took {taken:.3g} s of this process"
