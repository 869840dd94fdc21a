"""What states may hold: shards, what owners hold, experts, real optimizers; and saves that go on in the background."""

import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_func as mf
from mfsdp_func import checkpoint, optim
from mfsdp_func.checkpoint import background
from mfsdp_func.checkpoint.staging import Staging
from tests.checkpoint_cases import SHAPES, Way, assert_same, buffers, state_of, value_of

pytestmark = pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")
NAMES = tuple(SHAPES)
MATRICES = (0, 1, 4)


def owner_layout(mesh: mf.Mesh, way: Way, shift: int) -> mf.GroupOwnerLayout:
    owners = {i: mesh.ranks[(i + shift) % mesh.size()] for i in MATRICES}
    return mf.GroupOwnerLayout(mesh, way.layout(NAMES), owners, way.placements())


def gram_of(name: str) -> torch.Tensor:
    whole = value_of(name, 5).flatten(1)
    return whole @ whole.T


def shards_state(mesh: mf.Mesh, way: Way, shift: int) -> dict[str, Any]:
    """Momentum by shards, and what owners alone hold: of other shapes, and several per parameter."""
    owners = owner_layout(mesh, way, shift)
    whole = mf.DBuffer.distribute_tensors(
        [value_of(name, 4) for name in NAMES], mesh, way.placements(), way.layout(NAMES)
    )
    axes = [axis for axis, p in enumerate(way.placements()) if not isinstance(p, mf.Replicate)]
    mine = [
        i
        for i, owner in owners.tensor_to_owner.items()
        if all(mesh.coordinate(owner)[axis] == mesh.coordinate()[axis] for axis in axes)
    ]
    held = {i: {"gram": gram_of(NAMES[i]), "count": torch.tensor(i)} for i in mine}
    return {
        "muon": optim.MuonState(torch.tensor(3), checkpoint.Shards(whole.tensor_views(), owners, NAMES)),
        "soap": checkpoint.Shards(held, owners, NAMES, owned=True),
        "groups": checkpoint.Shards(
            {("g", i): view for i, view in whole.tensor_views().items()}, {"g": owners}, {"g": dict(enumerate(NAMES))}
        ),
    }


WAYS = (Way((3,), "padded"), Way((1,), "unpadded"), Way((2, 2), "balanced"), Way((2, 2), "tensor", replicas=False))


@pytest.mark.parametrize("source", WAYS, ids=str)
def test_shards_and_what_owners_hold(source: Way, tmp_path: Path) -> None:
    path = tmp_path / "a"
    mf.simulate(lambda mesh: checkpoint.save(path, shards_state(mesh, source, 1)), source.shape)
    found = checkpoint.inspect(path).tensors
    assert {"muon.step", "muon.words.weight.momentum", "muon.words.weight.step", "soap.words.weight.gram"} <= set(found)
    assert len([name for name in found if name.startswith("soap.")]) == 2 * len(MATRICES)
    assert found["soap.layers.1.conv.weight.gram"].shape == (4, 4)
    for target in WAYS:

        def load(mesh: mf.Mesh, target: Way = target) -> None:
            expected = shards_state(mesh, target, 2)
            got = checkpoint.load(path, checkpoint.spec_of(expected))
            assert_same(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(expected))
            assert isinstance(got["soap"], checkpoint.Shards)

        mf.simulate(load, target.shape)


def test_what_owners_hold_is_refused_elsewhere(tmp_path: Path) -> None:
    def save(mesh: mf.Mesh) -> None:
        owners = mf.GroupOwnerLayout(mesh, mf.build_for_row_atomic([(4, 2)], 2), {0: 1})
        checkpoint.save(tmp_path / "a", checkpoint.Shards({0: torch.ones(3)}, owners, ["w"], owned=True))

    with pytest.raises(checkpoint.CheckpointError, match=r"on rank 0: 'w' is said to lie whole on its owner"):
        mf.simulate(save, 2)


def test_experts_on_columns(tmp_path: Path) -> None:
    """Dense weights on all ranks; each column of a mesh has experts of its own, by other names."""

    def state(mesh: mf.Mesh, seed: int) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
        column = mesh.coordinate()[1]
        own = mf.Mesh(mesh.axis_ranks(0).__len__(), ranks=mesh.axis_ranks(0), rank=mesh.get_rank())
        rows = mf.build_for_row_atomic_unpadding([(5, 3)], own.size())
        torch.manual_seed(seed)
        experts = [torch.randn(5, 3) for _ in range(mesh.size(1))]
        dense = mf.build_for_row_atomic_unpadding([(7, 2)], mesh.size())
        return (
            {
                "dense": mf.DBuffer.distribute_tensors([torch.randn(7, 2)], mesh, [mf.RowAtomic()] * 2, dense),
                "experts": mf.DBuffer.distribute_tensors([experts[column]], own, [mf.RowAtomic()], rows),
            },
            {"dense": ("dense.w",), "experts": (f"experts.{column}.w",)},
        )

    def save(mesh: mf.Mesh) -> None:
        value, names = state(mesh, 1)
        checkpoint.save(tmp_path / "a", value, names=names)

    def load(mesh: mf.Mesh) -> None:
        like, names = state(mesh, 2)
        assert_same(checkpoint.load(tmp_path / "a", like, names=names), state(mesh, 1)[0])

    mf.simulate(save, (2, 2))
    assert set(checkpoint.inspect(tmp_path / "a").tensors) == {"dense.w", "experts.0.w", "experts.1.w"}
    mf.simulate(load, (2, 2))
    mf.simulate(load, (3, 2))


class Model(nn.Module):
    """Tied, a scalar, rows finer than dim 0, frozen parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 4)])
        self.scale = nn.Parameter(torch.randn(()))
        self.experts = nn.Parameter(torch.randn(3, 4, 2))
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.layers[1].bias.requires_grad_(False)


def model_state(mesh: mf.Mesh, seed: int, *, finer: bool) -> tuple[Any, Any]:
    roles = mf.Placements(mesh.axis_names, *[[mf.RowAtomic()] * mesh.ndim] * 3)
    context = mf.FsdpContext(finer_rows=frozenset({"experts"} if finer else ()), shard_layout=mf.ShardLayout.UNPADDED)
    apply, params = mf.fully_shard(Model(seed), mesh, roles, context=context)
    means, squares = (
        {key: mf.DBuffer(b.spec, f(b.local_buffer)) for key, b in params.items()} for f in (torch.sin, torch.cos)
    )
    state = optim.AdamWState(torch.tensor(5), means, squares)
    return apply, {"params": {**params, **apply.frozen_params}, "optimizer": state}


def test_fully_sharded_models(tmp_path: Path) -> None:
    def save(mesh: mf.Mesh) -> None:
        apply, state = model_state(mesh, 1, finer=False)
        checkpoint.save(tmp_path / "a", state, names=apply.names)

    def load(mesh: mf.Mesh) -> None:
        apply, expected = model_state(mesh, 1, finer=True)
        like = model_state(mesh, 2, finer=True)[1]
        assert_same(checkpoint.load(tmp_path / "a", like, names=apply.names), expected)

    mf.simulate(save, 3)
    found = checkpoint.inspect(tmp_path / "a")
    assert found.tensors["params.scale"].shape == ()
    assert found.tensors["optimizer.scale.exp_avg"].shape == ()
    assert found.tensors["params.experts"].shape == (3, 4, 2)
    assert found.aliases["params.head.weight"] == "params.words.weight"
    for shape in ((1,), (4,), (2, 2)):
        mf.simulate(load, shape)


# In the background.


def test_save_async_is_the_same_and_publishes_without_wait(tmp_path: Path) -> None:
    way = Way((3,), "unpadded", 1)

    def program(mesh: mf.Mesh) -> None:
        state = state_of(mesh, way)
        handle = checkpoint.save_async(tmp_path / "a", state, names=way.names)
        handle.wait()
        handle.wait()
        assert handle.done()
        checkpoint.save(tmp_path / "b", state, names=way.names)
        checkpoint.save_async(tmp_path / "c", state, names=way.names)

    mf.simulate(program, way.shape)
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint to c"):
            thread.join(30)
    for name in ("a", "b", "c"):
        checkpoint.verify(tmp_path / name)
    assert not checkpoint.diff(tmp_path / "a", tmp_path / "b")
    assert not checkpoint.diff(tmp_path / "a", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves wait before they copy anything."""
    event = threading.Event()
    whole = Staging.on_cpu

    def wait_and_copy(self: Staging, view: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            event.wait(30)
        return whole(self, view)

    monkeypatch.setattr(Staging, "on_cpu", wait_and_copy)
    return event


def test_a_save_holds_what_it_was_given(tmp_path: Path, paused: threading.Event) -> None:
    """A functional step goes on with new tensors, and the old ones are saved."""
    state = {"w": torch.ones(4)}
    handle = checkpoint.save_async(tmp_path / "a", state)
    state["w"] = state["w"] + 1
    assert not handle.done()
    paused.set()
    handle.wait()
    assert torch.equal(checkpoint.load(tmp_path / "a", state)["w"], torch.ones(4))


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_write_meanwhile_fails_on_all_ranks(culprit: int, tmp_path: Path, paused: threading.Event) -> None:
    way = Way((2,), "padded")
    failed: list[int] = []

    def program(mesh: mf.Mesh) -> None:
        state = state_of(mesh, way)
        handle = checkpoint.save_async(tmp_path / "a", state, names=way.names)
        if mesh.get_rank() == culprit:
            state["params"]["a"].local_buffer.add_(1)
        mf.checkpoint.consensus.share(mesh, None)
        paused.set()
        message = rf"rank {culprit}: .*'params\..* was written while it was being saved"
        for _ in range(2):
            with pytest.raises(checkpoint.CheckpointError, match=message):
                handle.wait()
        failed.append(mesh.get_rank())

    mf.simulate(program, 2)
    assert sorted(failed) == [0, 1]
    assert list(tmp_path.iterdir()) == []


def test_torch_optimizers_are_refused_in_the_background(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = optim.TorchOptimizer([("w", weight)], optim.adamw)
    for state in ({"optimizer": optimizer.state_dict()["state"][0]}, {"w": weight}, {"w": weight.detach()}):
        with pytest.raises(checkpoint.CheckpointError, match="belongs to a TorchOptimizer"):
            checkpoint.save_async(tmp_path / "a", state)
        checkpoint.save(tmp_path / str(len(list(tmp_path.iterdir()))), state)
    assert torch.equal(checkpoint.load(tmp_path / "1", {"w": torch.zeros(2, 2)})["w"], torch.ones(2, 2))


def test_inference_tensors(tmp_path: Path) -> None:
    with torch.inference_mode():
        state = {"w": torch.ones(3)}
        handle = checkpoint.save_async(tmp_path / "a", state)
        handle.wait()
        assert torch.equal(checkpoint.load(tmp_path / "a", state)["w"], state["w"])


def test_large_replicated_values_are_compared_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_HASH_MOST", 8)

    def program(mesh: mf.Mesh, differ: int) -> None:
        state = {"w": torch.full((9,), 1.0 + differ * mesh.get_rank())}
        checkpoint.save_async(tmp_path / str(differ), state).wait()

    mf.simulate(lambda mesh: program(mesh, 0), 2)
    assert checkpoint.load(tmp_path / "0", {"w": torch.zeros(9)})["w"].sum() == 9
    with pytest.raises(checkpoint.CheckpointError, match="'w' differs between ranks"):
        mf.simulate(lambda mesh: program(mesh, 1), 2)


# A disk that is full.


@pytest.mark.parametrize("save", ["save", "save_async", "export_hf"])
@pytest.mark.parametrize("room", [0, 100, 1000, 5000])
def test_a_full_disk_leaves_nothing(save: str, room: int, tmp_path: Path) -> None:
    """Every rank raises; the quota is that of the file system, by a limit on the size of files."""
    resource = pytest.importorskip("resource")
    way = Way((2,), "padded")
    failed: list[tuple[int, bool]] = []

    def program(mesh: mf.Mesh) -> None:
        state = buffers(mesh, way, 0, torch.float64)
        try:
            if save == "save_async":
                checkpoint.save_async(tmp_path / "a", state, names=way.names).wait()
            elif save == "save":
                checkpoint.save(tmp_path / "a", state, names=way.names)
            else:
                checkpoint.export_hf(state, tmp_path / "a", names=way.names)
        except checkpoint.CheckpointError as error:
            failed.append((mesh.get_rank(), "File too large" in str(error)))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    sys.stdout.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        mf.simulate(program, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if failed:
        assert sorted(failed) == [(0, True), (1, True)]
        assert list(tmp_path.iterdir()) == []
    assert failed or room == 5000


def routed(mesh: mf.Mesh, layout: mf.ShardLayout) -> tuple[Any, Any, dict[str, Any], dict[str, torch.Tensor]]:
    """A module with Muon and AdamW by route: `apply`, the transformation, the state, and fixed whole gradients."""
    torch.manual_seed(0)
    module = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(2))})
    route = optim.route(module).override({"*.weight": "muon"})
    rows = [mf.RowAtomic()]
    context = mf.FsdpContext(shard_layout=layout)
    apply, params = mf.fully_shard(module, mesh, mf.Placements(0, rows, rows, rows), context=context)
    transformation = optim.from_route(route, params, muon=0.02, adamw=0.1, names=apply.names)
    gradients = {name: torch.randn(p.shape) for name, p in module.named_parameters()}
    state = {"params": params, "optimizer": transformation.init(params), "step": 3}
    return apply, transformation, state, gradients


def one_step(apply: Any, transformation: Any, state: dict[str, Any], gradients: dict[str, torch.Tensor]) -> Any:
    params = state["params"]
    grads = {
        key: mf.DBuffer.distribute_tensors(
            [gradients[name] for name in apply.names[key]], buffer.mesh, buffer.placements, buffer.layout
        )
        for key, buffer in params.items()
    }
    updates, optimizer = transformation.update(grads, state["optimizer"], params)
    return {"params": optim.apply_updates(params, updates), "optimizer": optimizer, "step": state["step"] + 1}


def whole_of(apply: Any, params: dict[str, mf.DBuffer]) -> dict[str, torch.Tensor]:
    return {
        name: buffer.redistribute([mf.Replicate()]).get_tensor_view(i).clone()
        for key, buffer in params.items()
        for i, name in enumerate(apply.names[key])
    }


def test_parts_that_optimizers_keep_by_group_and_index(tmp_path: Path) -> None:
    """The state of a route goes in as it is, and goes on on other ranks and layouts: no wrapping, no owner layout."""
    path = tmp_path / "step"

    def write(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        apply, transformation, state, gradients = routed(mesh, mf.ShardLayout.UNPADDED)
        state = one_step(apply, transformation, state, gradients)
        checkpoint.save(path, state, names=apply.names)
        return whole_of(apply, one_step(apply, transformation, state, gradients)["params"])

    def read(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        apply, transformation, like, gradients = routed(mesh, mf.ShardLayout.BALANCED)
        state = checkpoint.load(path, checkpoint.spec_of(like), names=apply.names)
        assert state["step"] == 4
        return whole_of(apply, one_step(apply, transformation, state, gradients)["params"])

    expected = mf.simulate(write, 3).results[0]
    assert any("layers.0.weight" in name and "momentum" in name for name in checkpoint.inspect(path).tensors)
    for found in mf.simulate(read, 2).results.values():
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
