"""What a rank owns; the owners of an FSDP2 model's DTensors, and the recipe that trains with them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import optim
from tests.spawn import RankPool

RECIPE = Path(__file__).parent.parent / "examples" / "recipes" / "fsdp2_muon.py"


def load_recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fsdp2_muon", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_tensor_has_one_owner_and_its_full_shape() -> None:
    layout = mf.build_for_row_atomic([(4, 4), (6, 2), (2,)], 4)

    def program(mesh: mf.Mesh) -> dict[int, tuple[tuple[int, ...], torch.dtype]]:
        owners = mf.GroupOwnerLayout(mesh, layout, {0: 3, 1: 3}, [mf.RowAtomic()], dtype=torch.bfloat16)
        several = {"a": owners, "b": owners}
        assert list(optim.owned({}, several)) == [(name, i) for name in several for i in optim.owned({}, owners)]
        buffer = mf.DBuffer.empty(mesh, [mf.RowAtomic()], layout, dtype=torch.float64)
        told = optim.owned(buffer, owners)
        assert all(told[i].dtype == torch.float64 for i in told if i in buffer.tensor_views())
        assert all(tensor.is_meta for tensor in told.values())
        return {i: (tuple(tensor.shape), tensor.dtype) for i, tensor in optim.owned({}, owners).items()}

    results = mf.simulate(program, 4).results
    assert results[3] == {0: ((4, 4), torch.bfloat16), 1: ((6, 2), torch.bfloat16)}
    assert not any(results[rank] for rank in range(3))


def test_owners_replicate_where_the_mesh_does() -> None:
    layout = mf.build_for_row_atomic([(4, 4), (4, 4)], 2)

    def program(mesh: mf.Mesh) -> list[int]:
        owners = mf.GroupOwnerLayout(mesh, layout, {0: 0, 1: 1}, [mf.Replicate(), mf.RowAtomic()])
        return list(optim.owned({}, owners))

    assert mf.simulate(program, (2, 2)).results == {0: [0], 1: [1], 2: [0], 3: [1]}


def dense(steps: int = 5) -> dict[str, torch.Tensor]:
    """The recipe's training in one process, without FSDP2 and without owners."""
    recipe = load_recipe()
    model = recipe.make_model()
    route = optim.route(model)
    params = dict(model.named_parameters())
    matrices = [name for name in params if route[name].optimizer == "muon"]
    groups = [
        {"params": {name: params[name] for name in matrices}, "transformation": optim.muon, "lr": 0.02},
        {"params": [params[name] for name in params if name not in matrices], "lr": 0.002},
    ]
    optimizer = optim.TorchOptimizer(groups, optim.adamw)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    words = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        optimizer.zero_grad()
        recipe.loss_of(model, words).backward()
        optimizer.step()
        scheduler.step()
    return {name: param.detach() for name, param in params.items()}


def run_recipe(rank: int) -> tuple[list[float], dict[str, torch.Tensor], list[tuple[str, ...]]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh, recipe = init_device_mesh("cpu", (2,)), load_recipe()
    refused: list[tuple[str, ...]] = []
    for wrong in ({"w": torch.ones(2, 2)}, [torch.distributed.tensor.distribute_tensor(torch.ones(2, 2), mesh)]):
        try:
            optim.owners_of(wrong, mesh)
        except (TypeError, ValueError) as error:
            refused.append((type(error).__name__, str(error)))
    return (*recipe.train(mesh), refused)


@pytest.mark.distributed
def test_the_recipe_trains_as_one_process_does(ranks2: RankPool) -> None:
    expected = dense()
    for losses, weights, refused in ranks2.run(run_recipe, timeout=120):
        assert losses[-1] < losses[0]
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-5)
        assert [name for name, _ in refused] == ["TypeError", "ValueError"]
        assert "expected a DTensor" in refused[0][1]
        assert "expected Shard(0) on one axis" in refused[1][1]
