"""The torch optimizer's state in checkpoints: of buffers, of bare shards, and of FSDP2 onto shards."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from mfsdp_func import checkpoint, optim
from mfsdp_func.checkpoint.dcp import BoxTensor

ROWS = [mf.RowAtomic()]
UNPADDED = mf.FsdpContext(shard_layout=mf.ShardLayout.UNPADDED)


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sharded(mesh: mf.Mesh) -> tuple[Any, dict[str, mf.DBuffer], optim.TorchOptimizer]:
    """A module of two matrices and a norm under one optimizer of Muon and AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 6, bias=False)).double()
    apply, params = mf.fully_shard(model, mesh, mf.Placements(0, ROWS, ROWS, ROWS), context=UNPADDED)
    plan = optim.plan_route(optim.route(model, {"*": "adamw", "[02].weight": "muon"}), params)

    def make(lr: torch.Tensor) -> optim.GradientTransformation[Any]:
        return plan.transformation(muon=partial(optim.muon, lr, row_beta=0.9), adamw=lr)

    return apply, params, optim.TorchOptimizer(params, make, lr=0.1)


def step(apply: Any, params: dict[str, mf.DBuffer], optimizer: optim.TorchOptimizer, number: int) -> None:
    optimizer.zero_grad()
    (apply(params, randn(5, 6, seed=number)) - 1).square().mean().backward()
    optimizer.step()


def test_states_of_a_torch_optimizer_on_another_number_of_ranks(tmp_path: Path) -> None:
    def save(mesh: mf.Mesh) -> None:
        apply, params, optimizer = sharded(mesh)
        for number in range(2):
            step(apply, params, optimizer, number)
        checkpoint.save(tmp_path / "a", {"params": params, "optimizer": optimizer.states}, names=apply.names)

    def proceed(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        apply, params, optimizer = sharded(mesh)
        like = {"params": params, "optimizer": optimizer.states}
        found = checkpoint.load(tmp_path / "a", like, names=apply.names)
        with torch.no_grad():
            for key, buffer in params.items():
                buffer.local_buffer.copy_(found["params"][key].local_buffer)
        optimizer.load_states(found["optimizer"])
        step(apply, params, optimizer, 2)
        with pytest.raises(ValueError, match="of another structure or shape"):
            optimizer.load_states(())
        return apply.state_dict(params, whole=True)

    def straight(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        apply, params, optimizer = sharded(mesh)
        for number in range(3):
            step(apply, params, optimizer, number)
        return apply.state_dict(params, whole=True)

    mf.simulate(save, 3)
    names = set(checkpoint.inspect(tmp_path / "a").tensors)
    assert {"optimizer.0.0.0.weight.momentum", "optimizer.0.0.0.weight.row_squares.0"} <= names
    expected = mf.simulate(straight, 1).results[0]
    for count in (1, 2, 3):
        for name, whole in mf.simulate(proceed, count).results[0].items():
            torch.testing.assert_close(whole, expected[name], rtol=0, atol=1e-12)


def test_state_by_number_is_refused_and_by_name_is_right(tmp_path: Path) -> None:
    """What `state_dict` gives goes by the number of a parameter; its tensors under names are parts of whole ones."""

    def save(mesh: mf.Mesh) -> None:
        _, _, optimizer = sharded(mesh)
        with pytest.raises(checkpoint.CheckpointError, match="a TorchOptimizer as its states"):
            checkpoint.save(tmp_path / "refused", {"o": optimizer.state_dict()["state"]})
        start = 3 * mesh.get_rank()
        mine = BoxTensor(torch.arange(3.0) + start, torch.Size((2, 3)), mf.Range(start, 3))
        checkpoint.save(tmp_path / "a", {"o": {"w": mine}})
        again = checkpoint.load(tmp_path / "a", {"o": {"w": mine}})["o"]["w"]
        assert again is not mine
        assert torch.equal(again.local, mine.local)

    mf.simulate(save, 2)
    whole = checkpoint.load(tmp_path / "a", {"o": {"w": torch.zeros(2, 3)}}, mesh=mf.Mesh(1, rank=0))
    assert torch.equal(whole["o"]["w"], torch.arange(6.0).view(2, 3))


def bare(mesh: mf.Mesh) -> tuple[dict[int, nn.Parameter], optim.TorchOptimizer]:
    """Bare shards: matrices to Muon, whose owner layout tells where they lie; the rest to AdamW, which knows nothing."""
    layout = mf.build_for_row_atomic_unpadding([(5, 4), (4, 2), (3,)], mesh.size())
    full = [randn(*shape, seed=n) for n, shape in enumerate(layout.tensor_shapes)]
    views = mf.DBuffer.distribute_tensors(full, mesh, ROWS, layout).tensor_views()
    leaves = {i: nn.Parameter(view.clone()) for i, view in views.items()}
    owners = mf.GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0], 1: mesh.ranks[-1]})
    matrices = {i: leaf for i, leaf in leaves.items() if i < 2}
    others = {i: leaf for i, leaf in leaves.items() if i == 2}
    groups = [{"params": matrices, "transformation": partial(optim.muon, owner_layout=owners)}, {"params": others}]
    optimizer = optim.TorchOptimizer(groups, optim.adamw, lr=0.1, mesh=mesh)
    for i, leaf in leaves.items():
        leaf.grad = torch.full_like(leaf, float(1 + i + mesh.get_rank()))
    optimizer.step()
    return leaves, optimizer


def test_bare_shards_are_right_in_dcp_or_refused() -> None:
    def program(mesh: mf.Mesh) -> dict[int, int]:
        leaves, optimizer = bare(mesh)
        packed = optimizer.state_dict()
        keys = [key for made in optimizer._groups for key in made.keys]
        saved: dict[int, int] = {}
        for number, key in enumerate(keys):
            field = "momentum" if key < 2 else "exp_avg"
            held = packed["state"][number][field]
            assert isinstance(held, BoxTensor)
            if key < 2:
                assert held.shape == ((5, 4), (4, 2))[key]
                items = _create_write_items(f"{key}.{field}", held)
                saved[key] = sum(item.tensor_data.chunk.sizes.numel() for item in items)
                assert saved[key] == leaves[key].numel()
            else:
                with pytest.raises(checkpoint.CheckpointError, match="belongs to a bare shard, and nothing tells"):
                    _create_write_items(f"{key}.{field}", held)
        before = [tensor.clone() for tensor in pytree.tree_leaves(optimizer.states)]
        optimizer.load_state_dict(packed)
        after = pytree.tree_leaves(optimizer.states)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return saved

    results = mf.simulate(program, 2).results.values()
    assert [sum(saved.get(key, 0) for saved in results) for key in (0, 1)] == [20, 8]


def test_numbers_of_fsdp2_come_to_ranks_that_hold_nothing(tmp_path: Path) -> None:
    """Torch saves a step under each parameter; shards have one beside them, on ranks without any shard, too."""
    names = ("first", "second")
    theirs = {
        name: {"step": torch.tensor(7), "exp_avg": randn(2, 3, seed=n), "exp_avg_sq": randn(2, 3, seed=9 + n)}
        for n, name in enumerate(names)
    }
    checkpoint.save(tmp_path / "a", {"optimizer": theirs}, mesh=mf.Mesh(1, rank=0))

    def load(mesh: mf.Mesh) -> int:
        layout = mf.build_for_row_atomic_unpadding([(2, 3)] * 2, mesh.size())
        owners = mf.GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0], 1: mesh.ranks[1]})
        zeros = [torch.zeros(2, 3, dtype=torch.float64)] * 2
        views = mf.DBuffer.distribute_tensors(zeros, mesh, ROWS, layout).tensor_views()
        shards = [checkpoint.Shards(views, owners, names) for _ in range(2)]
        like = {"optimizer": optim.AdamWState(torch.tensor(0), *shards)}
        got = checkpoint.load(tmp_path / "a", like)["optimizer"]
        assert int(got.step) == 7
        return len(got.exp_avg.tensors)

    held = list(mf.simulate(load, 5).results.values())
    assert 0 in held
    assert sum(held) == 4


def test_what_owners_keep_of_rows_by_bare_shards(tmp_path: Path) -> None:
    """Momentum by shards, running means of rows by pieces with owners of their own, from 2 ranks to 3."""
    heads = optim.blocks("(h d) m -> h d m", d=2)

    def trained(mesh: mf.Mesh, steps: int) -> tuple[optim.MuonState, dict[str, Any]]:
        layout = mf.build_for_row_atomic_unpadding([(6, 4), (4, 5)], mesh.size())
        owners = mf.GroupOwnerLayout.from_params(mesh, layout)
        optimizer = optim.muon(0.1, owner_layout=owners, blocks={0: heads}, row_beta=0.9)

        def shards(seed: int) -> dict[int, torch.Tensor]:
            full = [randn(*shape, seed=seed + n) for n, shape in enumerate(layout.tensor_shapes)]
            return mf.DBuffer.distribute_tensors(full, mesh, ROWS, layout).tensor_views()

        params = shards(0)
        state = optimizer.init(params)
        for number in range(steps):
            updates, state = optimizer.update(shards(10 + number), state, params)
            params = optim.apply_updates(params, updates)
        names = ("wq.weight", "up.weight")
        wrapped = {
            "momentum": checkpoint.Shards(state.momentum, owners, names),
            "rows": checkpoint.Shards(state.row_squares, owners, names, owned=True),
        }
        return state, wrapped

    mf.simulate(lambda mesh: checkpoint.save(tmp_path / "a", trained(mesh, 3)[1]), 2)
    found = checkpoint.inspect(tmp_path / "a").tensors
    rows = {name: tuple(one.shape) for name, one in found.items() if name.startswith("rows.")}
    assert rows == {f"rows.wq.weight.{n}": (2,) for n in range(3)} | {"rows.up.weight.0": (4,)}

    def load(mesh: mf.Mesh) -> None:
        state, wrapped = trained(mesh, 3)
        got = checkpoint.load(tmp_path / "a", checkpoint.spec_of(wrapped))
        for expected, one in ((state.momentum, got["momentum"]), (state.row_squares, got["rows"])):
            assert one.tensors.keys() == expected.keys()
            for key, tensor in expected.items():
                torch.testing.assert_close(one.tensors[key], tensor, rtol=0, atol=1e-12)

    mf.simulate(load, 3)
