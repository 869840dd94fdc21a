"""Destinations that do not fit are refused before anything is written."""

from functools import partial

import pytest
import torch
from torch.func import vmap

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.faults import SHORT, Tensors, assert_says, block, catch, results, shards
from tests.spawn import RankPool


def in_place(mesh: Mesh, result: torch.dtype, shard: torch.dtype) -> tuple[str, Tensors]:
    into = {i: torch.full_like(t, -1, dtype=shard) for i, t in shards(mesh).items() if mesh.rank == mesh.ranks[1]}
    error = catch(mf.inplace.scatter, results(mesh, result), into, owner_layout=block(mesh, dtype=None))
    return f"{type(error).__name__}: {error}" if error else "", into


def in_place_on(rank: int, result: torch.dtype, shard: torch.dtype, check: bool) -> tuple[str, Tensors]:
    with mf.agreement_check(check):
        return in_place(Mesh(2, rank=rank), result, shard)


TWO_DTYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.distributed
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize(("result", "shard"), TWO_DTYPES)
def test_result_into_a_shard_of_another_dtype(
    result: torch.dtype, shard: torch.dtype, check: bool, ranks2: RankPool
) -> None:
    (owner, _), (holder, into) = ranks2.run(in_place_on, result, shard, check, group_timeout=SHORT)
    words = (str(result).removeprefix("torch."), str(shard).removeprefix("torch."))
    if check:
        assert_says(ValueError(holder), "ValueError: scatter 'block': nothing was sent", *words)
    else:  # their messages never meet
        assert holder.startswith("ExchangeError")
    assert owner.startswith("ValueError: scatter 'block': nothing was sent" if check else "ExchangeError")
    assert all(torch.equal(tensor, torch.full_like(tensor, -1)) for tensor in into.values()), "written all the same"
    owner, holder = mf.simulate(lambda mesh: catch_in_place(mesh, result, shard), 2).results.values()
    assert "float32" in holder
    assert "bfloat16" in holder


def catch_in_place(mesh: Mesh, result: torch.dtype, shard: torch.dtype) -> str:
    with mf.agreement_check():
        return in_place(mesh, result, shard)[0]


def test_destinations_of_the_in_place_form() -> None:
    layout = mf.build_for_row_atomic([(4, 2), (2, 2)], 1)
    owners = GroupOwnerLayout(Mesh(1, rank=0), layout, {0: 0, 1: 0}, name="block")
    source = {0: torch.ones(8), 1: torch.ones(4)}
    gather = partial(mf.inplace.gather, source, owner_layout=owners)
    with pytest.raises(KeyError) as missing:
        gather({0: torch.zeros(8)})
    assert_says(missing.value, "gather 'block'", "destination", "no entry for tensor 1")
    with pytest.raises(ValueError, match="destination of tensor 1 has 3 elements") as wrong:
        gather({0: torch.zeros(8), 1: torch.zeros(3)})
    assert_says(wrong.value, "gather 'block'", "expected 4")
    with pytest.raises(TypeError, match=r"torch\.float64") as mixed:
        gather({0: torch.zeros(8), 1: torch.zeros(4).double()})
    assert_says(mixed.value, "gather 'block'", "tensor 1", "torch.float32")
    with pytest.raises(TypeError, match=r"torch\.float64"):
        gather({0: torch.zeros(8).double(), 1: torch.zeros(4).double()})
    with pytest.raises(RuntimeError, match=r"use mfsdp_func\.gather, which returns new tensors"):
        vmap(lambda x: gather({0: x, 1: torch.zeros(4)}) or x)(torch.zeros(2, 8))
