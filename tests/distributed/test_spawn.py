"""The ranks that the other distributed tests run on."""

import os
import pickle
import time

import pytest
import torch
import torch.distributed as dist

from tests.spawn import RankPool, run_ranks

pytestmark = pytest.mark.distributed


class Unpicklable(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")


def add_ranks(rank: int, scale: float) -> tuple[int, torch.Tensor, int, str]:
    value = torch.full((3,), scale * rank)
    dist.all_reduce(value)
    return rank, value, torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def send_large(rank: int, tensor: torch.Tensor) -> torch.Tensor:
    return tensor[rank::2].t()


def fail_on(rank: int, ranks: tuple[int, ...]) -> int:
    if rank in ranks:
        raise KeyError(f"rank {rank} was told to fail")
    return rank


def wait_for_failed_peer(rank: int) -> None:
    if rank == 0:
        raise ValueError("before communication")
    dist.recv(torch.empty(1), src=0)


def leave_a_message(rank: int) -> None:
    if rank == 0:
        dist.isend(torch.full((1,), 666.0), dst=1)


def receive(rank: int) -> float:
    value = torch.full((1,), 5.0)
    dist.send(value, dst=1) if rank == 0 else dist.recv(value, src=0)
    return value.item()


def sleep_on(rank: int, who: int) -> int:
    if rank == who:
        time.sleep(600)
    return rank


def die_on(rank: int, who: int) -> int:
    if rank == who:
        os._exit(3)
    return rank


def raise_unpicklable(rank: int) -> None:
    raise Unpicklable(rank, 7)


def return_unpicklable(rank: int) -> object:
    return lambda: rank


def random_number(rank: int) -> float:
    return torch.rand(()).item()


def process_id(rank: int) -> int:
    return os.getpid()


def test_results_come_in_rank_order(ranks2: RankPool) -> None:
    results = ranks2.run(add_ranks, 2.5)
    assert [result[0] for result in results] == [0, 1]
    for _, value, threads, env in results:
        assert value.tolist() == [2.5] * 3
        assert (threads, env) == (1, "1")


def test_new_processes() -> None:
    assert [result[1].tolist() for result in run_ranks(add_ranks, 3, 1.0)] == [[3.0] * 3] * 3


def test_tensors_travel_by_value(ranks2: RankPool) -> None:
    tensor = torch.arange(2_000_000).view(4, -1)
    even, odd = ranks2.run(send_large, tensor)
    assert torch.equal(even, tensor[::2].t())
    assert torch.equal(odd, tensor[1::2].t())


def test_processes_stay_and_the_seed_does_not_move(ranks2: RankPool) -> None:
    pids = ranks2.run(process_id)
    assert len(set(pids) | {os.getpid()}) == 3
    assert ranks2.run(random_number) == ranks2.run(random_number)
    assert ranks2.run(process_id) == pids == ranks2.pids


def test_error_carries_the_tracebacks_of_all_failed_ranks(ranks2: RankPool) -> None:
    with pytest.raises(RuntimeError, match=r"fail_on failed on ranks \[0, 1\] of 2") as caught:
        ranks2.run(fail_on, (0, 1))
    message = str(caught.value)
    assert "rank 0 was told to fail" in message
    assert "rank 1 was told to fail" in message
    assert message.count("in fail_on\n") == 2


def test_errors_as_values(ranks2: RankPool) -> None:
    pids = ranks2.run(process_id)
    good, bad = ranks2.run(fail_on, (1,), return_exceptions=True)
    assert good == 0
    assert isinstance(bad, KeyError)
    assert bad.args == ("rank 1 was told to fail",)
    assert "in fail_on\n" in bad.__notes__[0]
    assert ranks2.run(process_id) == pids


def test_a_group_timeout_is_an_error_of_the_waiting_rank(ranks2: RankPool) -> None:
    pids = ranks2.run(process_id)
    faulty, peer = ranks2.run(wait_for_failed_peer, group_timeout=1.0, return_exceptions=True)
    assert isinstance(faulty, ValueError)
    assert isinstance(peer, RuntimeError)
    assert "imed out" in str(peer)
    assert ranks2.run(process_id) == pids


def test_a_failed_rank_does_not_hold_up_the_report(ranks2: RankPool) -> None:
    ranks2.run(process_id)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="before communication") as caught:
        ranks2.run(wait_for_failed_peer)
    assert time.monotonic() - start < 20
    assert "ranks [1] were still running" in str(caught.value)
    assert "in wait_for_failed_peer" in str(caught.value)
    assert ranks2.run(receive) == [5.0, 5.0]


def test_messages_do_not_leak_into_the_next_run(ranks2: RankPool) -> None:
    ranks2.run(leave_a_message)
    assert ranks2.run(receive) == [5.0, 5.0]


def test_timeout_names_the_ranks_and_the_pool_goes_on(ranks2: RankPool) -> None:
    pids = ranks2.run(process_id)
    with pytest.raises(TimeoutError, match=r"ranks \[1\] were still running after 1.0 s") as caught:
        ranks2.run(sleep_on, 1, timeout=1.0)
    assert "in sleep_on" in str(caught.value)
    assert ranks2.pids == []
    assert not set(ranks2.run(process_id)) & set(pids)


def test_a_dead_rank_is_reported_and_the_pool_goes_on(ranks2: RankPool) -> None:
    good, dead = ranks2.run(die_on, 1, return_exceptions=True)
    assert good == 0
    assert str(dead) == "rank 1 died with exit code 3"
    with pytest.raises(RuntimeError, match="rank 0 died with exit code 3"):
        ranks2.run(die_on, 0)
    assert ranks2.run(fail_on, ()) == [0, 1]


def test_what_cannot_be_pickled_is_an_error(ranks2: RankPool) -> None:
    for rank, error in enumerate(ranks2.run(raise_unpicklable, return_exceptions=True)):
        assert type(error) is RuntimeError
        assert str(error) == f"Unpicklable: {rank} and 7"
    with pytest.raises(RuntimeError, match="return_unpicklable"):
        ranks2.run(return_unpicklable)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        ranks2.run(lambda rank: rank)
    assert ranks2.run(fail_on, ()) == [0, 1]
