"""What cannot be differentiated, batched or mapped over ranks is refused by name, on all ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, vmap

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.faults import SHORT, Tensors, assert_says, block, catch, check_round_trip, shards
from tests.meshes import RunOnMesh
from tests.spawn import RankPool

# torch's forward mode scripts a few decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def test_a_rank_without_input_may_not_be_differentiated_unlinked() -> None:
    def loss(source: Tensors, mesh: Mesh) -> torch.Tensor:
        gathered, _ = mf.gather(source, owner_layout=block(mesh))
        parts, token = mf.scatter(gathered, owner_layout=block(mesh))  # forgets after=
        return sum((part.sum() for part in parts.values()), token.link)

    with pytest.raises(RuntimeError, match="scatter 'block'") as caught:
        mf.simulate(lambda mesh: grad(loss)(shards(mesh), mesh), 2, ranks=(1, 0))
    assert_says(caught.value, "no tensor to give", "silently be zero", "after=", "Token.linked_to")
    assert "raised on simulated rank 0 of" in caught.value.__notes__[-1]


def unlinked_grad_on(rank: int) -> str:
    def loss(source: Tensors) -> torch.Tensor:
        mesh = Mesh(2, rank=rank)
        gathered, _ = mf.gather(source, owner_layout=block(mesh))
        parts, token = mf.scatter(gathered, owner_layout=block(mesh))
        return sum((part.sum() for part in parts.values()), token.link)

    with mf.agreement_check():
        error = catch(grad(loss), shards(Mesh(2, rank=rank)))
        check_round_trip(Mesh(2, rank=rank))
    return f"{type(error).__name__}: {error}"


def short_shard_under_grad_on(rank: int) -> str:
    mesh = Mesh(2, rank=rank)
    source = shards(mesh)
    if rank == 1:
        source[1] = source[1][:6]

    def loss(source: Tensors) -> torch.Tensor:
        gathered, token = mf.gather(source, owner_layout=block(mesh))
        return sum((tensor.sum() for tensor in gathered.values()), token.link)

    with mf.agreement_check():
        error = catch(grad(loss), source)
        check_round_trip(mesh)
    return f"{type(error).__name__}: {error}"


@pytest.mark.distributed
def test_the_check_tells_all_ranks_of_a_fault_under_grad(ranks2: RankPool) -> None:
    peer, faulty = ranks2.run(short_shard_under_grad_on, group_timeout=SHORT)
    assert faulty.startswith("ValueError: gather 'block': tensor 1 has 6 elements")
    assert peer.startswith("ValueError: gather 'block': nothing was sent")
    assert "rank 1: ValueError: gather 'block': tensor 1 has 6 elements" in peer


@pytest.mark.distributed
def test_the_check_tells_all_ranks_of_an_unlinked_one(ranks2: RankPool) -> None:
    peer, unlinked = ranks2.run(unlinked_grad_on, group_timeout=SHORT)
    assert unlinked.startswith("RuntimeError: scatter 'block': differentiated on rank 1")
    assert peer.startswith("ValueError: scatter 'block': nothing was sent")
    assert "rank 1: RuntimeError: scatter 'block': differentiated on rank 1" in peer


def unlinked_backward(mesh: Mesh) -> None:
    gathered, _ = mf.gather(shards(mesh), owner_layout=block(mesh))
    source = {i: tensor.requires_grad_() for i, tensor in gathered.items()}
    mf.scatter(source, owner_layout=block(mesh))


def unlinked_backward_on(rank: int) -> None:
    with mf.agreement_check():
        unlinked_backward(Mesh(2, rank=rank))


@pytest.mark.distributed
def test_ranks_that_disagree_about_gradients(ranks2: RankPool) -> None:
    words = ("scatter 'block'", "differentiated: yes on ranks [0], no on ranks [1]", "thread the token", "after=")
    with pytest.raises(ValueError, match="nothing was sent") as caught:
        mf.simulate(unlinked_backward, 2)
    assert_says(caught.value, *words)
    for error in ranks2.run(unlinked_backward_on, return_exceptions=True):
        assert isinstance(error, ValueError)
        assert_says(error, *words)


def unequal_batches(mesh: Mesh) -> Any:
    batch = 2 + mesh.ranks.index(mesh.get_rank())
    source = {i: tensor.expand(batch, -1) for i, tensor in shards(mesh).items()}
    return vmap(lambda source: mf.gather(source, owner_layout=block(mesh))[0])(source)


def catch_unequal_batches(mesh: Mesh) -> str:
    error = catch(unequal_batches, mesh)
    return f"{type(error).__name__}: {error}"


def test_unequal_batches_under_vmap(run_on_mesh: RunOnMesh) -> None:
    """Refused on all ranks, check or no check."""
    words = ("gather 'block'", "batch size under vmap: 2 on ranks [0], 3 on ranks [1]", "equally many elements")
    for error in run_on_mesh(catch_unequal_batches, 2).values():
        assert error.startswith("ValueError: gather 'block': nothing was sent")
        assert_says(error, *words)


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians_over_ranks_are_refused_by_name(transform: Callable[..., Any]) -> None:
    """Each rank would put its own unit vectors into one exchange: rows of different ranks would mix."""
    layout = mf.build_for_row_atomic([(4, 2)], 2)

    def program(mesh: Mesh) -> Any:
        owners = GroupOwnerLayout(mesh, layout, {0: 0}, name="block")

        def step(shard: torch.Tensor) -> torch.Tensor:
            gathered, token = mf.gather({0: shard}, owner_layout=owners)
            return mf.scatter({i: t**2 for i, t in gathered.items()}, owner_layout=owners, after=token)[0][0]

        return transform(step)(torch.ones(2, 2))

    with pytest.raises(RuntimeError, match=f"gather 'block': torch.func.{transform.__name__}") as caught:
        mf.simulate(program, 2)
    assert_says(caught.value, "mix the rows of different ranks", "vjp or jvp")
