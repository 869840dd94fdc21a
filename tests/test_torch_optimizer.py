"""The optimizer for plain torch loops: against the functional step, torch's own optimizers, and a dense Muon."""

import copy
import io
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.simulation.simulate import simulate
from mfsdp_func.values.mesh import Mesh
from tests.spawn import RankPool
from tests.test_optim import MATRICES, SHAPES, assert_close, full_params, gradients, randn, shards_of, train_torch

REST = [i for i in range(len(SHAPES)) if i not in MATRICES]
UNPADDED = mf.FsdpContext(shard_layout=mf.ShardLayout.UNPADDED)
RATES = [0.1, 0.05, 0.02, 0.01]


def muon_for(owners: mf.GroupOwnerLayout | None):
    return lambda lr: optim.muon(lr, owner_layout=owners, weight_decay=0.1, ns_dtype=torch.float64)


def groups_of(params: dict, owners: mf.GroupOwnerLayout | None) -> list[dict]:
    """Muon for matrices, AdamW at half its rate for the rest."""
    return [
        {"params": {i: p for i, p in params.items() if i in MATRICES}, "transformation": muon_for(owners)},
        {"params": {i: p for i, p in params.items() if i in REST}, "lr": 0.5 * RATES[0]},
    ]


def leaves_of(params: dict) -> dict[int, nn.Parameter]:
    return {i: nn.Parameter(param.clone()) for i, param in params.items()}


def steps(optimizer: torch.optim.Optimizer, leaves: dict, grads_at, rates=RATES, first: int = 0) -> None:
    for number, rate in enumerate(rates, first):
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, 0.5 * rate
        for i, gradient in grads_at(number).items():
            leaves[i].grad = gradient
        optimizer.step()
        optimizer.zero_grad()


def functional(params: dict, owners: mf.GroupOwnerLayout | None, grads_at, rates=RATES) -> dict:
    """The same steps, by hand."""
    states = None
    for number, rate in enumerate(rates):
        rate = torch.tensor(rate, dtype=torch.float64)
        parts = ((MATRICES, muon_for(owners)(rate)), (REST, optim.adamw(0.5 * rate)))
        optimizer = optim.partition(*parts)
        states = optimizer.init(params) if states is None else states
        updates, states = optimizer.update(grads_at(number), states, params)
        params = optim.apply_updates(params, updates)
    return params


def data(leaves: dict) -> dict:
    return {i: leaf.detach() for i, leaf in leaves.items()}


# One process


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_adamw_is_torchs(weight_decay: float) -> None:
    params = {key: randn(*shape, seed=len(key)) for key, shape in {"matrix": (8, 24), "vector": (5,)}.items()}
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    expected = train_torch(lambda leaves: torch.optim.AdamW(leaves, lr=0.01, **options), params)
    ours = train_torch(
        lambda leaves: optim.TorchOptimizer(leaves, lambda lr: optim.adamw(lr, **options), lr=0.01), params
    )
    assert_close(ours, expected, 1e-12)


def test_muon_is_torchs() -> None:
    params = {key: randn(*shape, seed=len(key)) for key, shape in {"wide": (8, 24), "tall": (24, 8)}.items()}
    expected = train_torch(lambda leaves: torch.optim.Muon(leaves, lr=0.02, weight_decay=0.1), params)

    def make(lr: torch.Tensor):
        return optim.muon(lr, weight_decay=0.1, ns_dtype=torch.bfloat16)

    assert_close(train_torch(lambda leaves: optim.TorchOptimizer(leaves, make, lr=0.02), params), expected, 1e-12)


def test_equals_the_functional_step_bitwise() -> None:
    params = full_params()
    leaves = leaves_of(params)
    optimizer = optim.TorchOptimizer(groups_of(leaves, None), optim.adamw, lr=RATES[0])
    steps(optimizer, leaves, lambda number: gradients(params, number))
    expected = functional(params, None, lambda number: gradients(params, number))
    assert all(torch.equal(leaves[i], expected[i]) for i in params)


def test_one_transformation_of_several_parts() -> None:
    """A partition in one group; its parts' states are named without their places."""
    params = full_params()
    leaves = leaves_of(params)

    def make(lr: torch.Tensor):
        return optim.partition((MATRICES, muon_for(None)(lr)), (REST, optim.adamw(0.5 * lr)))

    optimizer = optim.TorchOptimizer(leaves, make, lr=RATES[0])
    for i, gradient in gradients(params, 0).items():
        leaves[i].grad = gradient
    optimizer.step()
    expected = functional(params, None, lambda number: gradients(params, number), RATES[:1])
    assert all(torch.equal(leaves[i], expected[i]) for i in params)
    assert sorted(optimizer.state[leaves[0]]) == ["momentum", "step"]
    assert sorted(optimizer.state[leaves[REST[0]]]) == ["exp_avg", "exp_avg_sq", "step"]


# Simulated and real ranks


def sharded(mesh: Mesh, compile: bool | str, rates=RATES) -> tuple[dict, dict]:
    """Trained shards, and those of the functional step."""
    layout = mf.build_for_row_atomic_unpadding(SHAPES, mesh.size())
    owners = mf.GroupOwnerLayout(mesh, layout, mf.assign_owner_work(layout, mesh, MATRICES))
    me = mesh.shard_index((0,))
    params = shards_of(layout, me, full_params())

    def grads_at(number: int) -> dict:
        return shards_of(layout, me, gradients(full_params(), number))

    leaves = leaves_of(params)
    optimizer = optim.TorchOptimizer(groups_of(leaves, owners), optim.adamw, lr=RATES[0], compile=compile, mesh=mesh)
    steps(optimizer, leaves, grads_at, rates[:1])
    with torch._dynamo.config.patch(error_on_recompile=bool(compile)):
        steps(optimizer, leaves, grads_at, rates[1:], first=1)
    return data(leaves), functional(params, owners, grads_at, rates)


def test_simulated_ranks_step_like_the_functional_step_and_the_dense_one() -> None:
    results = simulate(lambda mesh: sharded(mesh, False), 4).results
    dense = functional(full_params(), None, lambda number: gradients(full_params(), number))
    for i, whole in dense.items():
        parts = [shards[i] for shards, _ in results.values() if i in shards]
        torch.testing.assert_close(torch.cat([p.flatten() for p in parts]), whole.flatten(), rtol=0, atol=1e-10)
    for shards, expected in results.values():
        assert shards.keys() == expected.keys()
        assert all(torch.equal(shards[i], expected[i]) for i in shards)


def test_compiled_on_simulated_ranks() -> None:
    for shards, expected in simulate(lambda mesh: sharded(mesh, "aot_eager"), 4).results.values():
        assert_close(shards, expected, 1e-10)


def train_on_rank(rank: int, compile: bool | str) -> float:
    mesh = mf.as_mesh(init_device_mesh("cpu", (2,)))
    shards, expected = sharded(mesh, compile)
    return max(float((shards[i] - expected[i]).abs().max()) for i in shards)


@pytest.mark.distributed
def test_real_ranks(ranks2: RankPool) -> None:
    assert ranks2.run(train_on_rank, False) == [0.0, 0.0]
    assert max(ranks2.run(train_on_rank, "aot_eager", timeout=120)) < 1e-10


@pytest.mark.slow
@pytest.mark.distributed
def test_real_ranks_with_inductor(ranks2: RankPool) -> None:
    assert max(ranks2.run(train_on_rank, True, timeout=300)) < 1e-10


def test_a_rank_that_holds_nothing_steps_too() -> None:
    """Rank 1 holds nothing, and owns the only matrix."""
    layout = mf.build_for_tensor_atomic([(4, 4)], 2, tensor_owners=[0])
    weight = randn(4, 4, seed=0)

    def program(mesh: Mesh) -> torch.Tensor | None:
        owners = mf.GroupOwnerLayout(mesh, layout, {0: 1})
        leaves = leaves_of(shards_of(layout, mesh.get_rank(), {0: weight}))
        optimizer = optim.TorchOptimizer(leaves, muon_for(owners), lr=0.1)
        for leaf in leaves.values():
            leaf.grad = leaf.detach().clone()
        optimizer.step()
        assert optimizer.state_dict()["param_groups"][0]["params"] == list(leaves)
        return data(leaves).get(0)

    expected = optim.TorchOptimizer([leaf := nn.Parameter(weight.clone())], muon_for(None), lr=0.1)
    leaf.grad = weight.clone()
    expected.step()
    results = simulate(program, 2).results
    assert torch.equal(results[0], leaf.detach().flatten())
    assert results[1] is None


# Flat buffers and DTensors


def flat_training(mesh: Mesh, compile: bool | str) -> tuple[float, float, dict]:
    """`fully_shard` under a plain loop, in buffers, against one process; every rank sees the same batch."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    batch = torch.randn(5, 6, dtype=torch.float64)
    rows = [mf.RowAtomic()]
    apply, params = mf.fully_shard(module, mesh, mf.Placements([0], rows, rows, rows), context=UNPADDED)
    groups = []
    for buffer in params.values():
        buffer.local_buffer.requires_grad_()
        owners = mf.GroupOwnerLayout.from_params(mesh, buffer.layout)
        indices = range(len(buffer.layout.tensor_shapes))
        vectors = [i for i in indices if i not in owners.tensor_to_owner]

        def make(lr: torch.Tensor, owners=owners, vectors=vectors):
            return optim.partition((owners.tensor_to_owner, muon_for(owners)(lr)), (vectors, optim.adamw(0.5 * lr)))

        groups.append({"params": buffer, "transformation": make})
    optimizer = optim.TorchOptimizer(groups, lr=0.1, compile=compile)
    matrices = [param for param in module.parameters() if param.dim() > 1]
    dense = [{"params": matrices, "transformation": muon_for(None)}]
    dense.append({"params": [p for p in module.parameters() if p.dim() == 1], "lr": 0.05})
    reference = optim.TorchOptimizer(dense, optim.adamw, lr=0.1)
    loss = expected = torch.zeros(())
    for _ in range(3):
        loss, expected = apply(params, batch).square().mean(), module(batch).square().mean()
        for chosen, value in ((optimizer, loss), (reference, expected)):
            chosen.zero_grad()
            value.backward()
            chosen.step()
    names = {name for tensors in optimizer.state.values() for name in tensors}
    return float(loss.detach()), float(expected.detach()), names


@pytest.mark.parametrize("compile", [False, "aot_eager"])
def test_flat_buffers_of_fully_shard(compile: bool | str) -> None:
    for loss, expected, names in simulate(lambda mesh: flat_training(mesh, compile), 2).results.values():
        assert loss == pytest.approx(expected, abs=1e-10)
        # "[1].step" where a buffer has both kinds of tensors
        assert {name for name in names if not name[-1].isdigit()} <= {"step", "[1].step"}


def rows_of(param: torch.distributed.tensor.DTensor) -> mf.GlobalLayout:
    """PyTorch's cut of one tensor into chunks of rows, as a layout."""
    rows, ranks = param.shape[0], param.device_mesh.size()
    row, chunk = param.shape[1:].numel(), -(-rows // ranks)
    starts = [min(k * chunk, rows) * row for k in range(ranks)]
    return mf.GlobalLayout([param.shape], [0], param.numel(), starts)


def train_fsdp2(rank: int, compile: bool | str) -> list[tuple[str, float]]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    reference = copy.deepcopy(module)
    fully_shard(module, mesh=mesh)
    groups, dense = [], []
    for number, (param, whole) in enumerate(zip(module.parameters(), reference.parameters(), strict=True)):
        if param.dim() > 1:
            owners = mf.GroupOwnerLayout(mesh, rows_of(param), {0: number % 2}, name=str(number))
            groups.append({"params": [param], "transformation": muon_for(owners)})
            dense.append({"params": [whole], "transformation": muon_for(None)})
        else:
            groups.append({"params": [param]})
            dense.append({"params": [whole]})
    batch = torch.randn(5, 6, dtype=torch.float64)
    optimizers = [optim.TorchOptimizer(groups, optim.adamw, lr=0.1, compile=compile)]
    optimizers.append(optim.TorchOptimizer(dense, optim.adamw, lr=0.1))
    for _ in range(3):
        for model, optimizer in zip((module, reference), optimizers, strict=True):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
    differences = []
    whole_state = get_optimizer_state_dict(module, optimizers[0])["state"]
    for (name, param), whole in zip(module.named_parameters(), reference.parameters(), strict=True):
        differences.append((name, float((param.full_tensor() - whole).detach().abs().max())))
        for field, tensor in optimizers[1].state[whole].items():
            saved = whole_state[name][field]
            saved = saved.full_tensor() if hasattr(saved, "full_tensor") else saved
            differences.append((f"{field} of {name}", float((saved - tensor).abs().max())))
    return differences


@pytest.mark.distributed
@pytest.mark.parametrize("compile", [False, "aot_eager"])
def test_local_shards_of_fsdp2(ranks2: RankPool, compile: bool | str) -> None:
    """Some shards are empty: the last layer has one row. States come out of torch's checkpoint code whole."""
    for differences in ranks2.run(train_fsdp2, compile, timeout=120):
        assert max(difference for _, difference in differences) < 1e-10, differences


# Loops


def small(compile: bool | str = False) -> tuple[dict, optim.TorchOptimizer]:
    leaves = leaves_of({i: param for i, param in full_params().items() if i in (0, 2)})
    return leaves, optim.TorchOptimizer(groups_of(leaves, None), optim.adamw, lr=RATES[0], compile=compile)


def loop(leaves: dict, optimizer: torch.optim.Optimizer, scheduler, numbers: range) -> None:
    for number in numbers:
        optimizer.zero_grad()
        sum((leaf * gradients(leaves, number)[i]).sum() for i, leaf in leaves.items()).backward()
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("compile", [False, "aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own imports
def test_schedulers_work_and_never_recompile(compile: bool | str) -> None:
    leaves, optimizer = small(compile)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 / (1 + number))
    loop(leaves, optimizer, scheduler, range(1))
    with torch._dynamo.config.patch(error_on_recompile=True):
        loop(leaves, optimizer, scheduler, range(1, 4))
    params = {i: param for i, param in full_params().items() if i in leaves}
    rates = [RATES[0] / (1 + number) for number in range(4)]
    grads = [{i: gradients(params, number)[i] for i in params} for number in range(4)]
    assert_close(data(leaves), functional(params, None, grads.__getitem__, rates), 1e-12)


def test_compiled_steps_are_one_graph() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object):
        graphs.append(graph)
        return graph

    torch._dynamo.register_backend(count, name="count_graphs")
    for number in range(12):  # more optimizers than one code object may have variants
        leaves, optimizer = small("count_graphs")
        steps(optimizer, leaves, partial(gradients, leaves), RATES[:2])
        assert len(graphs) == number + 1


@pytest.mark.parametrize("compile", [False, "aot_eager"])
@pytest.mark.parametrize("way", ["state dict", "file", "deep copy"])
def test_resuming_is_bitwise(compile: bool | str, way: str) -> None:
    leaves, optimizer = small(compile)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loop(leaves, optimizer, scheduler, range(2))
    if way == "deep copy":
        others, other = copy.deepcopy((leaves, optimizer))
        resumed = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
    else:
        others, other = small(compile)
        resumed = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
        state = optimizer.state_dict()
        if way == "file":
            torch.save(state, file := io.BytesIO())
            file.seek(0)
            state = torch.load(file)
        other.load_state_dict(state)
        with torch.no_grad():
            for i, leaf in leaves.items():
                others[i].copy_(leaf)
    resumed.load_state_dict(scheduler.state_dict())
    for pair in ((leaves, optimizer, scheduler), (others, other, resumed)):
        loop(*pair, range(2, 4))
    assert all(torch.equal(leaves[i], others[i]) for i in leaves)
    assert int(other.state[others[0]]["step"]) == 4
    for mine, others_state in zip(optimizer.state.values(), other.state.values(), strict=True):
        for name, tensor in mine.items():
            assert torch.equal(tensor, others_state[name])
            assert tensor.data_ptr() != others_state[name].data_ptr()


def test_state_of_bfloat16_parameters_loads_unchanged() -> None:
    leaf = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    layout = mf.build_for_row_atomic([(2, 2)], 1)
    buffer = mf.DBuffer.from_local(leaf.data.flatten(), Mesh(1, rank=0), [mf.RowAtomic()], layout)

    def make(lr: torch.Tensor):
        return optim.partition(([0], optim.muon(lr)), ([], optim.adamw(lr)))

    first, second = (optim.TorchOptimizer(buffer, make) for _ in range(2))
    (held,) = first.state.values()
    held["step"].fill_(1001)
    second.load_state_dict(first.state_dict())
    assert int(next(iter(second.state.values()))["step"]) == 1001


def test_loads_the_state_of_torchs_adamw() -> None:
    params = {"w": randn(3, 4, seed=0)}
    leaves, others = leaves_of(params), leaves_of(params)
    theirs, ours = torch.optim.AdamW(leaves.values(), lr=0.1), optim.TorchOptimizer(others, optim.adamw, lr=0.1)
    for number in range(4):
        leaves["w"].grad, others["w"].grad = (gradients(params, number)["w"] for _ in range(2))
        theirs.step()
        if number < 2:
            others["w"].data.copy_(leaves["w"].data)
            ours.load_state_dict(theirs.state_dict())
        else:
            ours.step()
    assert_close(data(others), data(leaves), 1e-12)


def test_closure() -> None:
    leaves, optimizer = small()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(leaf.square().sum() for leaf in leaves.values())
        loss.backward()
        return loss.detach()

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


# Errors


def test_refusals() -> None:
    leaf = nn.Parameter(torch.ones(2, 2))
    for wrong in (optim.adamw(0.1), None, 3):
        with pytest.raises(TypeError, match="give each parameter group a function from a 0-D learning rate"):
            optim.TorchOptimizer([leaf], wrong)
    with pytest.raises(ValueError, match=r"lr must be a number >= 0, got -0\.1"):
        optim.TorchOptimizer([leaf], optim.adamw, lr=-0.1)
    with pytest.raises(ValueError, match=r"tensor 0 \(2,\) is no matrix; leave it to adamw"):
        optim.TorchOptimizer([nn.Parameter(torch.ones(2))], optim.muon)
    with pytest.raises(ValueError, match="non-leaf"):
        optim.TorchOptimizer([leaf * 2], optim.adamw)
    optimizer = optim.TorchOptimizer([leaf], optim.adamw)
    with pytest.raises(KeyError, match=r"parameter 0 needs 'exp_avg' of shape \(2, 2\), got nothing"):
        optimizer.load_state_dict(torch.optim.SGD([leaf]).state_dict())
    assert sorted(optimizer.state[leaf]) == ["exp_avg", "exp_avg_sq", "step"]


def test_a_missing_gradient_is_told_to_all_ranks() -> None:
    layout = mf.build_for_row_atomic_unpadding([(4, 4)], 2)

    def program(mesh: Mesh) -> str:
        owners = mf.GroupOwnerLayout(mesh, layout, {0: 0})
        leaves = leaves_of(shards_of(layout, mesh.get_rank(), {0: torch.ones(4, 4)}))
        optimizer = optim.TorchOptimizer(leaves, muon_for(owners), mesh=mesh)
        if mesh.get_rank() == 0:
            leaves[0].grad = torch.ones_like(leaves[0])
        with mf.agreement_check(), pytest.raises((RuntimeError, ValueError)) as raised:
            optimizer.step()
        return str(raised.value)

    peer, faulty = simulate(program, 2).results.values()
    wanted = r"no gradient on rank 1 for parameter 0 of group 0 \(1 missing in all\)"
    assert re.search(wanted, faulty)
    assert re.search(r"nothing was sent, because of a fault on another rank: rank 1: .*" + wanted, peer)


def refuses_shards(mesh: mf.Mesh) -> list[str]:
    layout = mf.build_for_row_atomic([(8, 2), (4,)], mesh.size())
    full = [torch.ones(8, 2), torch.ones(4)]
    weights = mf.DBuffer.distribute_tensors(full, mesh, [mf.RowAtomic()], layout)
    weights.local_buffer.requires_grad_()
    messages = []
    for make in (optim.muon, lambda lr: optim.partition(([0], optim.muon(lr)), ([1], optim.adamw(lr)))):
        with pytest.raises(ValueError, match="needs whole tensors") as caught:
            optim.TorchOptimizer(weights, make, lr=0.1)
        messages.append(str(caught.value))
    optim.TorchOptimizer(weights, lambda lr: optim.partition(([], optim.muon(lr)), ([0, 1], optim.adamw(lr))), lr=0.1)
    return messages


def test_muon_without_owners_refuses_shards() -> None:
    for messages in mf.simulate(refuses_shards, 2).results.values():
        assert all("of (8, 2), but its" in m and "owner_layout=owners" in m for m in messages)
