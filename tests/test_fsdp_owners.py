"""Whole tensors on their owners: gradients arrive there whole, and Muon sends nothing."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad

import mfsdp_func as mf
from mfsdp_func.effects.launch import launches_watched
from mfsdp_func.optim import muon
from mfsdp_func.plans.linear_map import LinearMap
from mfsdp_func.plans.plan import Plan
from tests import fsdp_cases as cases
from tests.fsdp_cases import FULL, WHOLE, loss_of, net, number
from tests.spawn import RankPool

STEPS = 2


def owners_of(module: nn.Module, count: int, *, by_parameter: bool) -> dict[Any, int]:
    return {param if by_parameter else name: n % count for n, (name, param) in enumerate(module.named_parameters())}


def matrices_of(apply: Any, key: str) -> list[int]:
    return [i for i, entry in enumerate(apply.groups[key].entries) if len(entry.shape) > 1]


def train(mesh: mf.Mesh, module: nn.Module, placements: mf.Placements, data: torch.Tensor, **choices: Any) -> Any:
    """A few steps: Muon for matrices, gradient descent for the rest. Returns full weights and calls per step."""
    apply, params = mf.fully_shard(module, mesh, placements, context=mf.FsdpContext(**choices))
    x, states = data[number(mesh)], {}
    for _ in range(STEPS):
        gradients = grad(lambda params: loss_of(apply(params, x), x))(params)
        updated = {}
        for key, buffer in params.items():
            local = buffer.local_buffer.clone()
            new = mf.DBuffer(buffer.spec, local)
            layout = owner_layout(apply, key, buffer)
            optimizer = muon(0.1, owner_layout=layout)
            views = {i: v for i, v in buffer.tensor_views().items() if i in layout.tensor_to_owner}
            slopes = {i: v for i, v in gradients[key].tensor_views().items() if i in layout.tensor_to_owner}
            states.setdefault(key, optimizer.init(views))
            updates, states[key] = optimizer.update(slopes, states[key], views)
            for i, view in new.tensor_views().items():
                view += updates[i] if i in updates else -0.1 * gradients[key].get_tensor_view(i)
            updated[key] = new
        params = updated
    return apply.gather_parameters(params)


def owner_layout(apply: Any, key: str, buffer: mf.DBuffer) -> mf.GroupOwnerLayout:
    """The owners that the layout itself has."""
    mesh, placements = buffer.mesh, buffer.placements
    owners = {}
    for i in matrices_of(apply, key):
        for rank in mesh.ranks:
            held, whole = buffer.layout.get_rank_range(mesh, placements, rank), buffer.layout.get_tensor_range(i)
            if held.start <= whole.start and whole.end <= held.end:
                owners.setdefault(i, rank)
    shards = [placement if isinstance(placement, mf.TensorAtomic) else FULL for placement in placements]
    return mf.GroupOwnerLayout(mesh, buffer.layout, owners, shards, key)


def whole_module_train(module: nn.Module, data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same in one process."""
    weights = {name: param.detach() for name, param in module.named_parameters()}
    matrices = {name: n for n, name in enumerate(weights) if weights[name].dim() > 1}
    optimizer = muon(0.1)
    state = optimizer.init({n: weights[name] for name, n in matrices.items()})
    for _ in range(STEPS):
        with torch.no_grad():
            for name, param in module.named_parameters():
                param.copy_(weights[name])
        gradients, _ = cases.dense_step(module, data)
        updates, state = optimizer.update(
            {n: gradients[name] for name, n in matrices.items()},
            state,
            {n: weights[name] for name, n in matrices.items()},
        )
        weights = {
            name: value + (updates[matrices[name]] if name in matrices else -0.1 * gradients[name])
            for name, value in weights.items()
        }
    return weights


@pytest.mark.parametrize("by_parameter", [False, True])
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_training_on_owners(by_parameter: bool, shape: tuple[int, ...]) -> None:
    """Gathers and reductions of the training step are all that is sent; Muon's own calls send nothing."""
    module, data = net(), cases.batches(4)
    placement = [WHOLE] if len(shape) == 1 else [FULL, WHOLE]
    placements = mf.Placements(tuple(range(len(shape))), placement, placement, placement)
    owners = owners_of(module, 4, by_parameter=by_parameter)

    def program(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        return train(mesh, module, placements, data, parameter_to_owner=owners)

    with cases.calls_watched() as labels:
        run = mf.simulate(program, shape)
    expected = whole_module_train(net(), data)
    for weights in run.results.values():
        cases.assert_same(weights, expected, rtol=1e-9, atol=1e-9)
    operations = {sent.operation for sent in run.trace}
    assert all("over 'axis" in operation for operation in operations), operations
    # It has called them, though, for every group with matrices.
    called = [label for label in labels[0] if label.startswith(("gather", "scatter"))]
    assert len(called) >= 2 * STEPS * 4


def test_gradients_arrive_whole_at_the_owner() -> None:
    module, data = net(), cases.batches(4)
    expected, _ = cases.dense_step(module, data)
    owners = owners_of(module, 4, by_parameter=False)
    placement = [WHOLE]

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(parameter_to_owner=owners)
        apply, params = mf.fully_shard(module, mesh, mf.Placements(0, placement, placement, placement), context=context)
        x = data[number(mesh)]
        gradients = grad(lambda params: loss_of(apply(params, x), x))(params)
        for key, group in apply.groups.items():
            for i, entry in enumerate(group.entries):
                view = gradients[key].get_tensor_view(i)
                if owners[entry.name] == mesh.get_rank():
                    torch.testing.assert_close(view.view(entry.shape), expected[entry.name], rtol=1e-12, atol=1e-12)
                else:
                    assert view.numel() == 0

    mf.simulate(program, 4)


def train_on_real_ranks(rank: int, world_size: int) -> tuple[dict[str, torch.Tensor], list[str]]:
    sent: list[str] = []

    def watch(linear: LinearMap, outputs: object) -> None:
        if isinstance(linear, Plan):
            sent.extend(linear.label for _ in linear.local.sends)

    module, mesh = net(), init_device_mesh("cpu", (world_size,))
    placements = mf.Placements(0, [WHOLE], [WHOLE], [WHOLE])
    owners = owners_of(module, world_size, by_parameter=False)
    with launches_watched(watch):
        weights = train(mf.as_mesh(mesh), module, placements, cases.batches(world_size), parameter_to_owner=owners)
    return weights, sent


@pytest.mark.distributed
def test_training_on_real_owners(ranks2: RankPool) -> None:
    expected = whole_module_train(net(), cases.batches(2))
    for weights, sent in ranks2.run(train_on_real_ranks, 2):
        cases.assert_same(weights, expected, rtol=1e-9, atol=1e-9)
        assert sent == []
