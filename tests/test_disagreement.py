"""Ranks that disagree are told so before anything moves; with the check off, nothing mixes."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func.effects.agreement import ENVIRONMENT_VARIABLE
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.faults import SHORT, assert_says, block, catch, check_round_trip, results, round_trip_on, shards
from tests.spawn import RankPool


def call_in_order(mesh: Mesh, names: tuple[str, str]) -> list[Any]:
    return [mf.gather(shards(mesh), owner_layout=block(mesh, name=name))[0] for name in names]


def disagree_owners(mesh: Mesh) -> Any:
    return mf.gather(shards(mesh), owner_layout=block(mesh, {0: mesh.get_rank(), 1: 0}))[0]


def disagree_owners_reversed(mesh: Mesh) -> Any:
    return mf.gather(shards(mesh), owner_layout=block(mesh, {0: 1 - mesh.get_rank(), 1: 0}))[0]


def disagree_dtype(mesh: Mesh) -> Any:
    dtype = torch.float32 if mesh.rank == mesh.ranks[0] else torch.bfloat16
    return mf.gather(shards(mesh, dtype), owner_layout=block(mesh, dtype=dtype))[0]


def disagree_layout(mesh: Mesh) -> Any:
    layout = mf.GlobalLayout([(4, 2), (4, 2), (3,)], [0, 8, 16], 19 + mesh.get_rank(), [0, 6])
    owners = GroupOwnerLayout(mesh, layout, {0: 0, 1: 0}, name="block")
    return mf.gather(shards(mesh), owner_layout=owners)[0]


def disagree_order(mesh: Mesh) -> Any:
    return call_in_order(mesh, ("a", "b") if mesh.rank == mesh.ranks[0] else ("b", "a"))


def disagree_operation(mesh: Mesh) -> Any:
    if mesh.rank == mesh.ranks[0]:
        return mf.gather(shards(mesh), owner_layout=block(mesh))[0]
    return mf.scatter(results(mesh), owner_layout=block(mesh))[0]


def disagree_include_own(mesh: Mesh) -> Any:
    own = mesh.rank == mesh.ranks[0]
    return mf.scatter(results(mesh), owner_layout=block(mesh), include_own=own)[0]


def disagree_asserted_dtype(mesh: Mesh) -> Any:
    """A bf16 result for a rank that says its shards are fp32."""
    keywords = {} if mesh.rank == mesh.ranks[0] else {"dtype": torch.float32}
    return mf.scatter(results(mesh, torch.bfloat16), owner_layout=block(mesh, dtype=torch.bfloat16), **keywords)[0]


DISAGREEMENTS: dict[str, tuple[Callable[[Mesh], Any], tuple[str, ...]]] = {
    "owners": (disagree_owners, ("gather 'block'", "plan: ", "on ranks [0]", "on ranks [1]", "equal layouts, owners")),
    "owners reversed": (disagree_owners_reversed, ("gather 'block'", "plan: ", "on ranks [0]", "on ranks [1]")),
    "dtype": (disagree_dtype, ("gather 'block'", "dtype: float32 on ranks [0], bfloat16 on ranks [1]")),
    "layout": (disagree_layout, ("gather 'block'", "plan: ", "on ranks [0]", "on ranks [1]")),
    "order": (disagree_order, ("operation: gather 'a' on ranks [0], gather 'b' on ranks [1]", "in the same order")),
    "operation": (disagree_operation, ("operation: gather 'block' on ranks [0], scatter 'block' on ranks [1]",)),
    "include_own": (disagree_include_own, ("scatter 'block'", "plan: ", "on ranks [0]", "on ranks [1]")),
    "asserted dtype": (disagree_asserted_dtype, ("scatter 'block'", "bfloat16", "float32")),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_simulated_ranks_that_disagree(name: str) -> None:
    program, words = DISAGREEMENTS[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        mf.simulate(program, 2)
    assert_says(caught.value, *words)
    assert any("raised on simulated rank" in note for note in caught.value.__notes__)


def disagree_on(rank: int, name: str, check: bool) -> Any:
    mesh = Mesh(2, rank=rank)
    with mf.agreement_check(check):
        outcome = DISAGREEMENTS[name][0](mesh)
    return [outcome, results(mesh)]


def disagree_and_go_on(rank: int, name: str) -> tuple[str, str]:
    error = catch(disagree_on, rank, name, True)
    check_round_trip(Mesh(2, rank=rank))
    return type(error).__name__, str(error)


@pytest.mark.distributed
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_the_check_names_the_ranks_that_differ(name: str, ranks2: RankPool) -> None:
    for kind, text in ranks2.run(disagree_and_go_on, name):
        assert kind == "ValueError"
        assert_says(ValueError(text), "nothing was sent", *DISAGREEMENTS[name][1])


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["owners", "owners reversed", "dtype", "order", "operation", "asserted dtype"])
def test_without_the_check_no_wrong_numbers(name: str, ranks2: RankPool) -> None:
    outcomes = ranks2.run(disagree_on, name, False, group_timeout=SHORT, timeout=30, return_exceptions=True)
    pids = ranks2.pids
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert errors, f"no rank noticed: {outcomes}"
    for error in errors:
        assert "died" not in str(error), error
        assert isinstance(error, RuntimeError)
    for outcome in outcomes:
        if not isinstance(outcome, Exception):
            got, wanted = outcome
            got = got[0] if isinstance(got, list) else got
            assert got == {} or all(torch.equal(got[i], wanted[i]) for i in got), "wrong numbers"
    assert ranks2.run(round_trip_on) == ["right", "right"]
    assert ranks2.pids == pids, "a process died"


def check_by_environment(rank: int, value: str, inner: bool | None) -> str:
    os.environ[ENVIRONMENT_VARIABLE] = value
    try:
        if inner is None:
            error = catch(disagree_owners, Mesh(2, rank=rank))
        else:
            with mf.agreement_check(inner):
                error = catch(disagree_owners, Mesh(2, rank=rank))
    finally:
        del os.environ[ENVIRONMENT_VARIABLE]
    return f"{type(error).__name__}: {error}"


@pytest.mark.distributed
@pytest.mark.parametrize(("value", "inner", "checked"), [("1", None, True), ("0", True, True), ("1", False, False)])
def test_the_check_by_environment(value: str, inner: bool | None, checked: bool, ranks2: RankPool) -> None:
    for text in ranks2.run(check_by_environment, value, inner, group_timeout=SHORT):
        assert text.startswith("ValueError: gather 'block': nothing was sent") == checked, text
        assert checked or text.startswith("ExchangeError"), text


def very_long_names(mesh: Mesh, other: bool) -> str:
    name = "x" * 5000 + ("y" if other and mesh.rank == mesh.ranks[1] else "")
    with mf.agreement_check():
        mf.gather(shards(mesh), owner_layout=block(mesh, name=name))
    return "agreed"


def test_the_check_takes_names_of_any_length() -> None:
    assert mf.simulate(lambda mesh: very_long_names(mesh, False), 2).results == {0: "agreed", 1: "agreed"}
    with pytest.raises(ValueError, match="nothing was sent, because the ranks disagree"):
        mf.simulate(lambda mesh: very_long_names(mesh, True), 2)
