"""Operations as NCCL queues them: what ends depends on each rank's own order alone, and one order for all ends."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from mfsdp_func.simulation.meetings import Meeting
from mfsdp_func.simulation.queues import Operation, Queues

RANKS = range(4)


@st.composite
def operations(draw: st.DrawFn) -> list[tuple[int, frozenset[int]]]:
    """Communicator and ranks of each."""
    lines = draw(st.lists(st.frozensets(st.sampled_from(RANKS), min_size=1), min_size=1, max_size=3))
    return [(n, lines[n]) for n in draw(st.lists(st.integers(0, len(lines) - 1), min_size=1, max_size=6))]


def run(
    wanted: Sequence[tuple[int, frozenset[int]]], orders: Sequence[Sequence[int]], turns: Sequence[int]
) -> dict[tuple[int, int], Operation]:
    """Let ranks launch their operations, each in its order, taking turns."""
    queues, meetings = Queues(), [Meeting[object](n) for n in range(len(wanted))]
    left = {rank: [n for n in orders[rank] if rank in wanted[n][1]] for rank in RANKS}
    found: dict[tuple[int, int], Operation] = {}
    for turn in [*turns, *RANKS] * 30:
        if left[turn]:
            number = left[turn].pop(0)
            communicator, line = wanted[number]
            found[turn, number] = queues.launch(str(number), turn, meetings[number], str(communicator), line, line)
    return found


@given(operations(), st.data())
def test_one_order_on_all_ranks_ends(wanted: list[tuple[int, frozenset[int]]], data: st.DataObject) -> None:
    orders = [range(len(wanted))] * len(RANKS)
    found = run(wanted, orders, data.draw(st.lists(st.sampled_from(RANKS), max_size=20)))
    assert all(operation.done for operation in found.values())


@given(operations(), st.data())
def test_what_ends_depends_on_the_orders_and_not_on_the_turns(
    wanted: list[tuple[int, frozenset[int]]], data: st.DataObject
) -> None:
    orders = [data.draw(st.permutations(range(len(wanted)))) for _ in RANKS]
    turns = st.lists(st.sampled_from(RANKS), max_size=20)
    one, other = (run(wanted, orders, data.draw(turns)) for _ in range(2))
    assert {key: operation.done for key, operation in one.items()} == {key: o.done for key, o in other.items()}
    for (_, number), operation in one.items():  # an operation ends for all its ranks or for none
        assert len({one[rank, number].done for rank in wanted[number][1]}) == 1 or not operation.started


def test_two_orders_hold_each_other_up() -> None:
    both = frozenset({0, 1})
    found = run([(0, both), (1, both)], [[0, 1], [1, 0], [], []], [0, 1])
    assert not any(operation.done for operation in found.values())


def test_a_communicator_that_is_given_up_holds_nobody() -> None:
    queues, meetings = Queues(), [Meeting[object](n) for n in range(2)]
    queues.launch("first", 0, meetings[0], "a", (0, 1), (0, 1))
    behind = [queues.launch("second", rank, meetings[1], "b", (0, 2), (0, 2)) for rank in (0, 2)]
    assert [operation.done for operation in behind] == [False, False]
    queues.drop(0, "a")
    assert [operation.done for operation in behind] == [True, True]
