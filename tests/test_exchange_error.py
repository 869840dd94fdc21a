"""The error that names an exchange which did not end."""

import pickle

import pytest

import mfsdp_func as mf

MESH = mf.Mesh((2, 2), ["replica", "shard"], rank=1)


def test_it_names_the_call_the_ranks_and_the_times() -> None:
    error = mf.ExchangeError(
        "gather 'block'", MESH, rank=1, awaited=[0, 3], elapsed=2.04, timeout=2, cause="rank 3: MemoryError"
    )
    for words in (
        "gather 'block'",
        str(MESH),
        "rank 1 waited 2.04 s (timeout 2 s) for ranks 0, 3",
        "rank 3: MemoryError",
    ):
        assert words in str(error)
    assert isinstance(error, RuntimeError)
    assert (error.operation, error.mesh, error.rank) == ("gather 'block'", MESH, 1)
    assert (error.awaited, error.elapsed, error.timeout) == ((0, 3), 2.04, 2)


def test_it_says_what_to_do() -> None:
    text = str(mf.ExchangeError("gather 'block'", MESH, rank=1, reason="this group failed before"))
    assert "did not begin this call: this group failed before" in text
    assert "make a new one" in text


def test_long_lists_of_ranks_are_cut() -> None:
    text = str(mf.ExchangeError("gather", MESH, rank=1, awaited=range(100), elapsed=1, timeout=1))
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 92 more" in text


@pytest.mark.parametrize("awaited", [(), (0,), (0, 2)])
def test_it_travels_by_pickle(awaited: tuple[int, ...]) -> None:
    error = mf.ExchangeError("gather", MESH, rank=1, awaited=awaited, elapsed=1.5, timeout=3, cause="rank 0: KeyError")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is mf.ExchangeError
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
