"""Checkpoints of real processes: the sample of pairs, files of torch.distributed.checkpoint and FSDP2, both ways."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor

import mfsdp_func as mf
from mfsdp_func import checkpoint, optim
from mfsdp_func.checkpoint.dcp import BoxTensor
from tests.checkpoint_cases import KINDS, Way, assert_same, load_in_simulation, save_in_simulation, state_of
from tests.spawn import RankPool

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")]


def mesh_of(rank: int, way: Way) -> mf.Mesh:
    return mf.Mesh(way.shape, rank=rank)


def save(rank: int, path: Path, ways: list[Way]) -> None:
    for n, way in enumerate(ways):
        checkpoint.save(path / str(n), state_of(mesh_of(rank, way), way, n), names=way.names)
        handle = checkpoint.save_async(path / f"{n}-async", state_of(mesh_of(rank, way), way, n), names=way.names)
        handle.wait()


def load(rank: int, path: Path, ways: list[Way], count: int) -> None:
    for n, way in itertools.product(range(count), ways):
        like = state_of(mesh_of(rank, way), way, n + 50)
        got = checkpoint.load(path / str(n), like, names=way.names)
        assert_same(got, state_of(mesh_of(rank, way), way, n))
    found = checkpoint.latest(path, mesh=mf.Mesh(way.shape, rank=rank))
    assert found == path / f"{count - 1}-async"


def test_a_sample_of_pairs_on_gloo(tmp_path: Path, ranks2: RankPool, ranks4: RankPool) -> None:
    two = [Way((2,), kind, n % 2) for n, kind in enumerate(KINDS)]
    four = [Way((4,), "unpadded", 1), Way((2, 2), "tensor"), Way((2, 2), "balanced", 1, replicas=False)]
    ranks2.run(save, tmp_path / "two", two)
    ranks4.run(save, tmp_path / "four", four)
    ranks2.run(load, tmp_path / "four", two, len(four))
    ranks4.run(load, tmp_path / "two", four, len(two))
    print(f"{2 * len(two) * len(four)} pairs bitwise on gloo")
    # Simulated ranks write the same files.
    for n, way in enumerate(two):
        save_in_simulation(tmp_path / "simulated" / str(n), way, n)
        for file in (tmp_path / "two" / str(n)).iterdir():
            if file.name != "manifest.json":
                assert file.read_bytes() == (tmp_path / "simulated" / str(n) / file.name).read_bytes()
        assert not checkpoint.diff(tmp_path / "two" / f"{n}-async", tmp_path / "simulated" / str(n))
    for n in range(len(four)):
        load_in_simulation(tmp_path / "four" / str(n), Way((3,), "padded"), n)


def fail(rank: int, path: Path) -> None:
    """One rank's fault is everybody's error, and nothing changes."""
    way = Way((2,), "padded")
    state = state_of(mesh_of(rank, way), way, 1)
    checkpoint.save(path / "good", state, names=way.names)
    wrong = dict(state, step=object() if rank else 1)
    for act in (checkpoint.save, checkpoint.save_async):
        with pytest.raises(checkpoint.CheckpointError, match="on rank 1: 'step' is a object"):
            act(path / "bad", wrong, names=way.names)
    with pytest.raises(checkpoint.CheckpointError, match="on rank 1: the state and the file do not fit"):
        checkpoint.load(path / "good", dict(state, more=torch.ones(1)) if rank else state, names=way.names)
    with pytest.raises(checkpoint.CheckpointError, match="different paths"):
        checkpoint.save(path / str(rank), state, names=way.names)
    assert_same(checkpoint.load(path / "good", state, names=way.names), state)


def test_errors_are_alike_on_gloo(tmp_path: Path, ranks2: RankPool) -> None:
    ranks2.run(fail, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["good"]


# torch.distributed.checkpoint and FSDP2.


class Model(nn.Module):
    """Tied, with rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
        self.experts = nn.Parameter(torch.randn(3, 6, 2))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x) + torch.einsum("bti,eio->bteo", x, self.experts).mean()


def fsdp2_twin(seed: int, mesh: Any, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model(seed)
    for layer in model.layers:
        fsdp2(layer, mesh=mesh)
    fsdp2(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        model(torch.arange(8).view(2, 4) + step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def ours(seed: int, mesh: Any, layout: str) -> tuple[Any, Any]:
    roles = mf.Placements((0,), [mf.RowAtomic()], [mf.RowAtomic()], [mf.RowAtomic()])
    apply, params = mf.fully_shard(
        Model(seed), mesh, roles, context=mf.FsdpContext(shard_layout=mf.ShardLayout(layout))
    )

    def zeros() -> Any:
        return {key: mf.DBuffer(b.spec, torch.zeros_like(b.local_buffer)) for key, b in params.items()}

    return apply, {"model": params, "optim": {"state": optim.AdamWState(torch.tensor(0), zeros(), zeros())}}


def full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def check_equal(apply: Any, state: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    whole = apply.gather_parameters(state["model"])
    found = get_optimizer_state_dict(model, optimizer)["state"]
    adamw = state["optim"]["state"]
    means, squares = apply.gather_parameters(adamw.exp_avg), apply.gather_parameters(adamw.exp_avg_sq)
    for name, value in get_model_state_dict(model).items():
        assert torch.equal(whole[name], full(value)), name
    for name, entry in found.items():
        assert torch.equal(means[name], full(entry["exp_avg"])), name
        assert torch.equal(squares[name], full(entry["exp_avg_sq"])), name
        assert int(adamw.step) == int(entry["step"]), name


def from_fsdp2(rank: int, path: Path, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    model, optimizer = fsdp2_twin(1, mesh, 3)
    optimizer_state = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": get_model_state_dict(model), "optim": optimizer_state}, checkpoint_id=str(path / "theirs"))
    apply, like = ours(2, mesh, "unpadded")
    with pytest.raises(
        checkpoint.CheckpointError, match=r"'optim\.state\.step': is torch\.float32 in the file, expected"
    ):
        checkpoint.load(path / "theirs", like, names=apply.names, only=["model", "optim.state"])
    options: Any = {"names": apply.names, "only": ["model", "optim.state"], "cast": True}
    got = checkpoint.load(path / "theirs", like, **options)
    check_equal(apply, got, model, optimizer)
    assert not checkpoint.inspect(path / "theirs").hashed

    # Back again, by dcp.load into another FSDP2 model, whole and in part.
    checkpoint.save(path / "ours", got, names=apply.names)
    back, back_optimizer = fsdp2_twin(3, mesh, 1)
    target: Any = {
        "model": get_model_state_dict(back),
        "optim": {"state": get_optimizer_state_dict(back, back_optimizer)["state"]},
    }
    dcp.load(target, checkpoint_id=str(path / "ours"))
    set_model_state_dict(back, target["model"])
    check_equal(apply, got, back, back_optimizer)


def onto_other_ranks(rank: int, path: Path, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    for layout in ("padded", "balanced"):
        apply, like = ours(4, mesh, layout)
        got = checkpoint.load(path / "ours", checkpoint.spec_of(like), names=apply.names)
        back, optimizer = fsdp2_twin(3, mesh, 1)
        target: Any = {
            "model": get_model_state_dict(back),
            "optim": {"state": get_optimizer_state_dict(back, optimizer)["state"]},
        }
        dcp.load(target, checkpoint_id=str(path / "ours"))
        check_equal(apply, got, back, optimizer)
    # A state of DTensors goes through our own save and load, too.
    dtensors = dict(back.named_parameters())
    checkpoint.save(path / f"dtensors{world_size}", {"model": dtensors})
    fresh, _ = fsdp2_twin(5, mesh, 0)
    loaded = checkpoint.load(path / f"dtensors{world_size}", {"model": dict(fresh.named_parameters())})["model"]
    for name, value in loaded.items():
        assert torch.equal(full(value), full(dtensors[name])), name


def test_fsdp2_both_ways(tmp_path: Path, ranks2: RankPool, ranks4: RankPool) -> None:
    ranks2.run(from_fsdp2, tmp_path, 2)
    ranks4.run(onto_other_ranks, tmp_path, 4)
    checkpoint.verify(tmp_path / "ours")


def flat_optimizer(mesh: Any, kind: str, grad: float) -> tuple[optim.TorchOptimizer, mf.DBuffer]:
    shapes = [(5, 4), (3,), (2, 2)]
    build = {"padded": mf.build_for_row_atomic, "unpadded": mf.build_for_row_atomic_unpadding}[kind]
    whole = [torch.arange(float(torch.Size(shape).numel())).view(shape) + grad for shape in shapes]
    buffer = mf.DBuffer.distribute_tensors(whole, mesh, [mf.RowAtomic()], build(shapes, mesh.size()))
    optimizer = optim.TorchOptimizer(mf.DBuffer(buffer.spec, buffer.local_buffer.requires_grad_()), optim.adamw)
    (param,) = optimizer.param_groups[0]["params"]
    param.grad = buffer.local_buffer.detach().clone()
    optimizer.step()
    return optimizer, buffer


def save_flat(rank: int, path: Path, world_size: int) -> None:
    optimizer, _ = flat_optimizer(init_device_mesh("cpu", (world_size,)), "unpadded", 1.0)
    state = optimizer.state_dict()
    assert any(isinstance(value, BoxTensor) for value in state["state"][0].values())
    dcp.save({"optimizer": state}, checkpoint_id=str(path))
    again, _ = flat_optimizer(init_device_mesh("cpu", (world_size,)), "unpadded", 5.0)
    torch.save(state, path.parent / f"{rank}.pt")
    again.load_state_dict(torch.load(path.parent / f"{rank}.pt", weights_only=False))
    for name, value in optimizer.state_dict()["state"][0].items():
        other = again.state_dict()["state"][0][name]
        assert torch.equal(getattr(other, "local", other), getattr(value, "local", value)), name


def load_flat(rank: int, path: Path, world_size: int) -> None:
    """The state of an optimizer that took the same step on this number of ranks."""
    mesh = init_device_mesh("cpu", (world_size,))
    expected, _ = flat_optimizer(mesh, "padded", 1.0)
    other, _ = flat_optimizer(mesh, "padded", 7.0)
    state: Any = {"optimizer": other.state_dict()}
    state["optimizer"].pop("param_groups")
    dcp.load(state, checkpoint_id=str(path))
    other.load_state_dict({"state": state["optimizer"]["state"], "param_groups": other.state_dict()["param_groups"]})
    for name, value in expected.state_dict()["state"][0].items():
        got = other.state_dict()["state"][0][name]
        torch.testing.assert_close(getattr(got, "local", got), getattr(value, "local", value), rtol=0, atol=0)


def refuse_buffers(rank: int, path: Path) -> None:
    layout = mf.build_for_row_atomic([(4, 2)], 2)
    buffer = mf.DBuffer.distribute_tensors([torch.ones(4, 2)], init_device_mesh("cpu", (2,)), [mf.RowAtomic()], layout)
    with pytest.raises(CheckpointException, match="cannot save the DBuffer 'a'"):
        dcp.save({"a": buffer}, checkpoint_id=str(path / "refused"))


def test_optimizers_over_flat_buffers_in_dcp(tmp_path: Path, ranks2: RankPool, ranks4: RankPool) -> None:
    ranks2.run(save_flat, tmp_path / "flat", 2)
    ranks2.run(load_flat, tmp_path / "flat", 2)
    ranks4.run(load_flat, tmp_path / "flat", 4)
    ranks2.run(refuse_buffers, tmp_path)
