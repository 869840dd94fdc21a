"""The simulated mesh searches: carriers, live memory, and one tape of choices that replays what was found."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import mfsdp_func as mf
from mfsdp_func.simulation.choices import Tape
from mfsdp_func.testing import simulated  # noqa: F401  # a fixture
from mfsdp_func.values.mesh import Mesh
from tests.test_simulated import check_step, group, shards, step

CARRIERS = ("eager", "rendezvous", "nccl")


def fails(program: Callable[[Mesh], Any], shape: Any, **keywords: Any) -> str:
    """What a run raises, with its notes; empty where it ends well."""
    try:
        mf.simulate(program, shape, **keywords)
    except Exception as error:
        return "\n".join([str(error), *error.__notes__])
    return ""


# One tape.


def test_a_tape_gives_the_run_that_it_was_taken_from() -> None:
    for choices in (3, mf.PCT(3, 2), [1, 2, 3, 4, 5, 6]):
        first = mf.simulate(step, 3, choices=choices, memory="live")
        again = mf.simulate(step, 3, choices=first.tape, memory="live")
        assert again.trace == first.trace
        assert again.tape == first.tape
    assert len({mf.simulate(step, 3, choices=seed).trace for seed in range(10)}) > 1


def test_past_its_end_a_tape_is_first_in_first_out() -> None:
    usual = mf.simulate(step, 3)
    assert usual.tape == ()
    assert mf.simulate(step, 3, choices=()).trace == mf.simulate(step, 3, choices=[0, 0, 0]).trace == usual.trace


@given(
    st.lists(st.integers(0, 5), max_size=30),
    st.sampled_from(CARRIERS),
    st.sampled_from(["copied", "live"]),
    st.booleans(),
)
@settings(max_examples=60)
def test_any_tape_gives_the_same_results(tape: list[int], carrier: Any, memory: Any, check: bool) -> None:
    with mf.agreement_check(check):
        results = mf.simulate(step, 3, choices=tape, carrier=carrier, memory=memory).results
    for rank, parts in results.items():
        check_step(parts, group(Mesh(3, rank=rank)))


def test_pct_lowers_the_first_at_the_moments_it_drew() -> None:
    """Without such moments one order of all actors holds to the end; with one, the first becomes the last."""
    for seed in range(20):
        tape = Tape(mf.PCT(seed, depth=1))
        assert len({tape.choose(("a", "b", "c")) for _ in range(30)}) == 1
        tape = Tape(mf.PCT(seed, depth=2, steps=10))
        taken = [tape.choose(("a", "b", "c")) for _ in range(11)]
        assert len(set(taken)) == 2
        assert sum(before != after for before, after in pairwise(taken)) <= 1


def test_tapes_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"a tape holds integers from 0 on, got -1"):
        mf.simulate(step, 2, choices=[0, -1])
    with pytest.raises(ValueError, match=r"carrier='ncll' is not known; take one of 'eager', 'rendezvous', 'nccl'"):
        mf.simulate(step, 2, carrier="ncll")  # pyright: ignore[reportArgumentType]


def shared_list(mesh: Mesh, seen: list[int]) -> int:
    """Ranks that share something of the process: who comes first depends on the order in which they run."""
    step(mesh)
    seen.append(mesh.get_rank())
    return seen[0]


def order_matters(tape: list[int]) -> bool:
    usual, other = (mf.simulate(partial(shared_list, seen=[]), 3, choices=c).results[0] for c in (None, tape))
    return usual != other


def test_hypothesis_shrinks_to_the_shortest_tape() -> None:
    tape = find(st.lists(st.integers(0, 3)), order_matters, settings=settings(database=None))
    assert order_matters(tape)
    assert 1 <= sum(number > 0 for number in tape) <= 3
    assert not order_matters(tape[:-1])


def test_a_failure_tells_the_line_that_replays_it() -> None:
    def program(mesh: Mesh, seen: list[int]) -> None:
        if shared_list(mesh, seen) == 0:
            raise AssertionError("rank 0 came first")

    found = next(seed for seed in range(50) if fails(partial(program, seen=[]), 3, choices=seed, memory="live"))
    notes = fails(partial(program, seen=[]), 3, choices=found, memory="live").splitlines()
    (line,) = [note for note in notes if note.startswith("replay with")]
    keywords = eval(line.replace("replay with simulate(program, shape, ", "dict("))
    assert keywords["memory"] == "live"
    assert fails(partial(program, seen=[]), 3, **keywords).splitlines()[0] == notes[0]


def test_the_fixture_takes_the_keywords(
    simulated: Callable[..., Any],  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    simulated(step, 2)
    assert capsys.readouterr().out == ""
    results, _ = simulated(step, 2, carrier="nccl", choices=mf.PCT(1, 2), memory="live")
    tape = list(mf.simulate(step, 2, carrier="nccl", choices=mf.PCT(1, 2), memory="live", poison=True).tape)
    line = f"replay with simulate(program, shape, carrier='nccl', memory='live', choices={tape}, poison=True)\n"
    assert capsys.readouterr().out == line
    for rank, parts in results.items():
        check_step(parts, group(Mesh(2, rank=rank)))


# Carriers.


def two_meshes(mesh: Mesh, crossed: bool) -> None:
    """Two operations in flight, over meshes with process groups of their own, of which each rank sends in one."""
    rank = mesh.get_rank()
    first, second = Mesh(2, ["a"], rank=rank), Mesh(2, ["b"], rank=rank)
    groups = [group(first, owner=0, name="first"), group(second, owner=1, name="second")]
    order = groups if rank == 0 or not crossed else groups[::-1]
    tokens = [mf.gather(shards(owners), owner_layout=owners, async_op=True)[1] for owners in order]
    for token in tokens:
        token.wait()


def test_operations_launched_in_different_orders() -> None:
    for carrier in CARRIERS:
        assert not fails(partial(two_meshes, crossed=False), 2, carrier=carrier)
    assert not fails(partial(two_meshes, crossed=True), 2)
    text = fails(partial(two_meshes, crossed=True), 2, carrier="nccl")
    assert "rank 0 waits in gather 'first' (call 0) for rank 1, whose stream another operation holds" in text
    assert "rank 1 waits in gather 'second' (call 0) for rank 0, whose stream another operation holds" in text


def sends_first(mesh: Mesh, crossed: bool) -> None:
    """Each rank sends to the other in one of two operations, and begins with the one in which it sends."""
    rank = mesh.get_rank()
    groups = {owner: group(Mesh(2, [f"to_{owner}"], rank=rank), owner=owner, name=f"to {owner}") for owner in (0, 1)}
    order = (1 - rank, rank) if crossed else (0, 1)
    tokens = [mf.gather(shards(groups[o]), owner_layout=groups[o], async_op=True)[1] for o in order]
    for token in tokens:
        token.wait()


def test_sends_wait_for_their_receives() -> None:
    assert not fails(partial(sends_first, crossed=False), 2, carrier="rendezvous")
    assert not fails(partial(sends_first, crossed=True), 2)
    text = fails(partial(sends_first, crossed=True), 2, carrier="rendezvous")
    assert "rank 0 waits in gather 'to 1' (call 0) to send to rank 1" in text
    assert "rank 1 waits in gather 'to 0' (call 0) to send to rank 0" in text


def test_nccl_holds_a_stream_until_the_first_call_of_a_mesh_has_all_its_ranks() -> None:
    """Rank 2 takes no part in what the others exchange, but sets up the communicator with them."""

    def program(mesh: Mesh, leaves_out: bool) -> str:
        rank = mesh.get_rank()
        layout = mf.build_for_row_atomic_unpadding([(2, 3)], 3)
        owners = mf.GroupOwnerLayout(mesh, layout, {0: 0}, name="first")
        if not (leaves_out and rank == 2):
            local = layout.get_local_range(owners.mesh, owners.placements)
            source = {i: torch.ones(part.numel) for i, part in layout.tensors_in(local)}
            _, token = mf.gather(source, owner_layout=owners, async_op=True, dtype=torch.float32)
        if rank != 2:
            small = Mesh(2, ["small"], rank=rank)
            step(small)  # behind it on the same stream
        if not (leaves_out and rank == 2):
            token.wait()
        return "ended"

    assert not fails(partial(program, leaves_out=False), 3, carrier="nccl")
    text = fails(partial(program, leaves_out=True), 3, carrier="nccl")
    assert (
        "waits in gather 'group' (call 0) for its stream, which gather 'first' (call 0) holds until ranks 2 come"
        in text
    )


# Live memory.


def tampering(mesh: Mesh, tamper: Callable[[torch.Tensor], Any], wait: bool) -> None:
    owners = group(mesh)
    source = shards(owners)
    _, token = mf.gather(source, owner_layout=owners, async_op=True)
    if wait:
        token.wait()
    if mesh.get_rank() == 0:
        for tensor in source.values():
            tamper(tensor)
    token.wait()


@pytest.mark.parametrize(
    ("tamper", "words"),
    [
        (lambda t: t.fill_(-1), "rank 0 wrote into memory that gather 'group' was still sending to rank 2"),
        (
            lambda t: t.untyped_storage().resize_(0),
            "rank 0 freed memory that gather 'group' was still sending to rank 2",
        ),
    ],
)
def test_memory_that_is_still_being_sent(tamper: Callable[[torch.Tensor], Any], words: str) -> None:
    for carrier in CARRIERS:
        keywords = {"memory": "live", "carrier": carrier}
        assert words in fails(partial(tampering, tamper=tamper, wait=False), 3, **keywords)
        assert not fails(partial(tampering, tamper=tamper, wait=True), 3, **keywords)
        assert not fails(partial(tampering, tamper=tamper, wait=False), 3, carrier=carrier)


def test_inputs_that_a_program_drops_are_kept_for_it() -> None:
    """Memory is lent without being kept alive; the token keeps what the program has forgotten."""

    def program(mesh: Mesh) -> dict[int, torch.Tensor]:
        owners = group(mesh)
        gathered, token = mf.gather(shards(owners), owner_layout=owners, async_op=True, dtype=torch.float32)
        token.wait()
        return mf.scatter({i: 2 * t for i, t in gathered.items()}, owner_layout=owners, after=token)[0]

    for rank, parts in mf.simulate(program, 3, memory="live").results.items():
        check_step(parts, group(Mesh(3, rank=rank)))


def peeks(mesh: Mesh) -> list[float]:
    """Looks at a result before its token, past all operators: poison, or what has come, as the tape has it."""
    layout = mf.build_for_row_atomic_unpadding([(2, 2)], 2)
    buffer = mf.DBuffer.distribute_tensors([torch.ones(2, 2)], mesh, [mf.RowAtomic()], layout)
    whole, token = mf.allgather(buffer, 0, async_op=True)
    step(Mesh(2, ["else"], rank=mesh.get_rank()))
    seen = whole.local_buffer.numpy().tolist()
    token.wait()
    assert whole.local_buffer.tolist() == [1] * 4
    return seen


def test_messages_may_arrive_early_and_arrive_at_the_last_moment() -> None:
    def has_come(tape: list[int]) -> bool:
        return mf.simulate(peeks, 2, memory="live", choices=tape, poison=True).results[1] == [1] * 4

    assert not has_come([])
    tape = find(st.lists(st.integers(0, 3)), has_come, settings=settings(database=None))
    assert 1 <= sum(number > 0 for number in tape) <= 3
