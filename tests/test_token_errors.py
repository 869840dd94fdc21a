"""A token raises its operation's own error, and may not enter a compiled region in flight."""

from functools import partial

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.faults import SHORT, assert_says, block, catch, check_round_trip, shards
from tests.spawn import RankPool


def skip_on_rank_1(rank: int) -> list[str]:
    mesh = Mesh(2, rank=rank)
    check_round_trip(mesh)
    if rank == 1:
        return []
    _, token = mf.gather(shards(mesh), owner_layout=block(mesh), async_op=True)
    errors = [catch(token.wait) for _ in range(3)]
    assert all(type(error) is type(errors[0]) for error in errors)
    return [f"{type(error).__name__}: {error}" for error in errors]


@pytest.mark.distributed
def test_a_token_raises_its_own_error_at_every_wait(ranks2: RankPool) -> None:
    errors, _ = ranks2.run(skip_on_rank_1, group_timeout=SHORT, return_exceptions=True)
    assert len(errors) == 3
    assert len(set(errors)) == 1
    assert_says(errors[0], "ExchangeError: gather 'block'", "for rank 1")


def test_a_token_in_flight_may_not_enter_a_compiled_region() -> None:
    layout = mf.build_for_row_atomic([(4, 2)], 1)
    owners = GroupOwnerLayout(Mesh(1, rank=0), layout, {0: 0}, name="block")

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(source: torch.Tensor, token: mf.Token) -> torch.Tensor:
        return mf.gather({0: source}, owner_layout=owners, after=token)[0][0] * 2

    gathered, token = mf.gather({0: torch.ones(4, 2)}, owner_layout=owners, async_op=True)
    with pytest.raises(Exception, match="work in flight came into a compiled region") as caught:
        step(torch.ones(4, 2), token)
    assert_says(caught.value, "gather 'block'", "call token.wait() before entering it")
    token.wait()
    assert torch.equal(gathered[0], torch.ones(4, 2))
