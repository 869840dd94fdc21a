"""Groups of the torch optimizer: their settings, their buffers, and what they decide for all ranks."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.values.mesh import Mesh
from tests.algebra import KEYS, MATRICES, buffers, draw, gradients, owners_of, tensors, with_tensors
from tests.spawn import RankPool

ROWS = mf.RowAtomic()
VECTORS = [key for key in KEYS if key not in MATRICES]


def ones(*shape: int, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.ones(shape, dtype=dtype))


def steps(optimizer: torch.optim.Optimizer, grads: dict, number: int) -> None:
    for _ in range(number):
        for param, grad in grads.items():
            param.grad = grad.clone()
        optimizer.step()


@pytest.mark.parametrize("compile", [False, "aot_eager"])
def test_settings_of_groups_count_also_when_changed_later(compile: Any) -> None:
    w, b = ones(1), ones(1)
    groups = [{"params": [w], "weight_decay": 0.5, "name": "decayed"}, {"params": [b], "weight_decay": 0.0}]
    optimizer = optim.TorchOptimizer(groups, optim.adamw, lr=0.1, compile=compile)
    zeros = {param: torch.zeros_like(param) for param in (w, b)}
    steps(optimizer, zeros, 3)
    assert (w.item(), b.item()) == (pytest.approx(0.95**3), 1.0)
    with torch._dynamo.config.patch(error_on_recompile=bool(compile)):
        optimizer.param_groups[1]["weight_decay"] = 0.2
        steps(optimizer, zeros, 1)
    assert (w.item(), b.item()) == (pytest.approx(0.95**4), pytest.approx(0.98))


SETTINGS = [
    (optim.adamw, torch.optim.AdamW, {"betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.3}),
    (
        partial(optim.muon, ns_dtype=torch.bfloat16),
        torch.optim.Muon,
        {"momentum": 0.5, "weight_decay": 0.3, "nesterov": False},
    ),
]


@pytest.mark.parametrize(("make", "theirs", "settings"), SETTINGS, ids=["adamw", "muon"])
def test_settings_are_torchs(make: Any, theirs: Any, settings: dict) -> None:
    """Given to a group, and set after construction."""
    torch.manual_seed(0)
    grads = [torch.randn(4, 6, dtype=torch.float64) for _ in range(4)]
    results: list[torch.Tensor] = []
    for kind in ("torch", "at construction", "later"):
        leaf = ones(4, 6)
        if kind == "torch":
            optimizer: Any = theirs([{"params": [leaf], **settings}], lr=0.05)
        elif kind == "at construction":
            optimizer = optim.TorchOptimizer([{"params": [leaf], **settings}], make, lr=0.05)
        else:
            optimizer = optim.TorchOptimizer([leaf], make, lr=0.05)
            optimizer.param_groups[0].update(settings)
        for grad in grads:
            leaf.grad = grad
            optimizer.step()
        results.append(leaf.detach())
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-12)


def test_unknown_settings_are_refused() -> None:
    for make, setting in ((optim.adamw, "momentum"), (lambda lr: optim.muon(lr), "weight_decay")):
        with pytest.raises(ValueError, match=f"sets {setting}, which its transformation .* does not know; it knows lr"):
            optim.TorchOptimizer([{"params": [ones(2, 2)], setting: 0.1}], make)
    with pytest.raises(ValueError, match="call backward several times"):
        optim.TorchOptimizer([ones(1)], lambda lr: optim.accumulate(optim.adamw(lr), 2))


def test_complex_parameters_are_torchs() -> None:
    torch.manual_seed(0)
    start = torch.randn(3, 2, dtype=torch.complex128)
    leaves = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [torch.optim.AdamW([leaves[0]], lr=0.1), optim.TorchOptimizer([leaves[1]], optim.adamw, lr=0.1)]
    for _ in range(5):
        grad = torch.randn(3, 2, dtype=torch.complex128)
        for leaf, optimizer in zip(leaves, optimizers, strict=True):
            leaf.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(leaves[1].detach(), leaves[0].detach(), rtol=0, atol=1e-12)


def whole(params: dict[str, mf.DBuffer]) -> dict:
    found = {name: mf.DBuffer(b.spec, b.local_buffer.detach()).allgather(0) for name, b in params.items()}
    return {(name, i): found[name].get_tensor_view(i) for name, i in KEYS}


def set_gradients(params: dict[str, mf.DBuffer], number: int, spoil: bool = False) -> None:
    grads = buffers(params["a"].mesh, tensors(gradients(number)), [ROWS])
    for name, buffer in params.items():
        buffer.local_buffer.grad = grads[name].local_buffer
    if spoil:
        params["b"].local_buffer.grad[:1] = torch.inf


def expected_of(rates: tuple[float, float], count: int = 3) -> dict:
    muon = optim.muon(rates[0], weight_decay=0.1)
    return with_tensors(optim.partition((MATRICES, muon), (VECTORS, optim.adamw(rates[1]))), steps=count)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_dict_of_fully_shard_and_a_buffer_of_two_groups(ranks: int) -> None:
    def program(mesh: Mesh) -> tuple[dict, list]:
        params = buffers(mesh, tensors(draw(0)), [ROWS])
        muon = partial(optim.muon, owner_layout=owners_of(params), stack_equal_shapes=False)
        groups = [
            {"params": params, "tensors": MATRICES, "transformation": muon, "lr": 0.05, "weight_decay": 0.1},
            {"params": params, "tensors": VECTORS, "lr": 0.1},
        ]
        optimizer = optim.TorchOptimizer(groups, optim.adamw)
        assert all(buffer.local_buffer.requires_grad for buffer in params.values())
        for number in range(3):
            optimizer.zero_grad()
            set_gradients(params, number)
            optimizer.step()
        names = [{name for name in held if not name[-1].isdigit()} for held in optimizer.state_dict()["state"].values()]
        with pytest.raises(ValueError, match="appears in more than one parameter group"):
            optimizer.add_param_group({"params": params, "tensors": ["a"]})
        return whole(params), names

    simulation = mf.simulate(program, ranks)
    expected = expected_of((0.05, 0.1))
    for trained, names in simulation.results.values():
        for key in KEYS:
            torch.testing.assert_close(trained[key], expected[key], rtol=0, atol=1e-12)
        assert names == simulation.results[0][1]  # the same on all ranks
    if ranks > 1:
        moved = [sent.operation for sent in simulation.trace if "allgather" not in sent.operation]
        assert set(moved) == {"gather 'a' and 1 more", "scatter 'a' and 1 more"}


def test_one_transformation_for_the_dict() -> None:
    def program(mesh: Mesh) -> dict:
        params = buffers(mesh, tensors(draw(0)), [ROWS])
        optimizer = optim.TorchOptimizer(params, optim.adamw, lr=0.1)
        others = buffers(mesh, tensors(draw(0)), [ROWS])
        for number in range(3):
            set_gradients(params, number)
            optimizer.step()
            if number == 1:  # a state loads into another optimizer
                other = optim.TorchOptimizer(others, optim.adamw, lr=0.1)
                other.load_state_dict(optimizer.state_dict())
                for name, buffer in others.items():
                    buffer.local_buffer.data.copy_(params[name].local_buffer.data)
        set_gradients(others, 2)
        other.step()
        assert all(torch.equal(params[name].local_buffer, others[name].local_buffer) for name in params)
        return whole(params)

    expected = with_tensors(optim.adamw(0.1), steps=3)
    for trained in mf.simulate(program, 2).results.values():
        for key in KEYS:
            torch.testing.assert_close(trained[key], expected[key], rtol=0, atol=1e-12)


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_norms_are_clipped_over_all_ranks(norm_type: float) -> None:
    flat = torch.cat([grad.flatten() for grad in tensors(gradients(0)).values()])
    true = float(torch.linalg.vector_norm(flat, norm_type))

    def program(mesh: Mesh) -> tuple[float, float]:
        params = buffers(mesh, tensors(draw(0)), [ROWS])
        groups = [{"params": params, "tensors": MATRICES}, {"params": params, "tensors": VECTORS}]
        optimizer = optim.TorchOptimizer(groups, optim.adamw)
        set_gradients(params, 0)
        found = [optimizer.clip_grad_norm_(1.0, norm_type) for _ in range(2)]
        return tuple(map(float, found))

    for before, after in mf.simulate(program, 4).results.values():
        assert before == pytest.approx(true)
        assert after == pytest.approx(1.0, rel=1e-5)


def clip_and_scale(rank: int) -> list[tuple[float, float, bool, float]]:
    """An FSDP2 model and its dense twin: norms, differences after clipped steps, whether an inf on one rank skipped all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    twin = copy.deepcopy(module)
    fully_shard(module, mesh=mesh)
    matrices = {name: param for name, param in module.named_parameters() if param.dim() > 1}
    vectors = [param for param in module.parameters() if param.dim() == 1]
    muon = partial(optim.muon, owner_layout=optim.owners_of(matrices, mesh))
    groups = [{"params": {(name, 0): param for name, param in matrices.items()}, "transformation": muon}]
    optimizer = optim.TorchOptimizer([*groups, {"params": vectors}], optim.adamw, lr=0.1)
    dense = optim.TorchOptimizer(
        [
            {"params": [param for param in twin.parameters() if param.dim() > 1], "transformation": optim.muon},
            {"params": [param for param in twin.parameters() if param.dim() == 1]},
        ],
        optim.adamw,
        lr=0.1,
    )
    scaler, batch = optim.GradScaler("cpu", init_scale=8.0), torch.randn(5, 6, dtype=torch.float64)
    found: list[tuple[float, float, bool, float]] = []
    for step in range(3):
        for one in (optimizer, dense):
            one.zero_grad()
        scaler.scale(module(batch).square().mean()).backward()
        if step == 1 and rank == 1:
            vectors[0].grad.to_local()[:1] = math.inf
        before = [param.to_local().clone() for param in module.parameters()]
        scaler.unscale_(optimizer)
        norm = float(optimizer.clip_grad_norm_(0.5))
        scaler.step(optimizer)
        scaler.update()
        same = all(torch.equal(a, b.to_local()) for a, b in zip(before, module.parameters(), strict=True))
        if step != 1:
            twin(batch).square().mean().backward()
            expected = float(nn.utils.clip_grad_norm_(twin.parameters(), 0.5))
            dense.step()
        pairs = zip(module.parameters(), twin.parameters(), strict=True)
        difference = max(float((param.full_tensor() - whole).detach().abs().max()) for param, whole in pairs)
        found.append((abs(norm - expected), difference, same, scaler.get_scale()))
    return found


@pytest.mark.distributed
def test_dtensors_of_fsdp2_are_clipped_and_skipped_by_all_ranks(ranks2: RankPool) -> None:
    for first, skipped, last in ranks2.run(clip_and_scale):
        for norm, difference, same, _ in (first, last):
            assert (norm, difference) == (pytest.approx(0, abs=1e-10), pytest.approx(0, abs=1e-10))
            assert not same
        assert skipped[1:] == (pytest.approx(0, abs=1e-10), True, 4.0)


def test_norms_of_plain_shards() -> None:
    def program(mesh: Mesh) -> float:
        leaf = ones(2)
        leaf.grad = torch.full_like(leaf, float(1 + mesh.get_rank()))
        with pytest.raises(ValueError, match=r"2 ranks run this program.*Give mesh="):
            optim.TorchOptimizer([leaf], optim.adamw).clip_grad_norm_(1.0)
        optimizer = optim.TorchOptimizer([leaf], optim.adamw, mesh=mesh)
        with pytest.raises(ValueError, match="expected max_norm > 0"):
            optimizer.clip_grad_norm_(0.0)
        return float(optimizer.clip_grad_norm_(100.0)) ** 2

    assert [round(value, 9) for value in mf.simulate(program, 2).results.values()] == [10.0, 10.0]


@pytest.mark.parametrize("unscaled", [False, True])
def test_a_scaled_step_is_skipped_by_all_ranks_or_none(unscaled: bool) -> None:
    """An inf on one rank at step 1. With Muon, ranks that parted would wait for ever."""

    def program(mesh: Mesh) -> dict:
        params = buffers(mesh, tensors(draw(0)), [ROWS])
        muon = partial(optim.muon, owner_layout=owners_of(params), weight_decay=0.1)
        groups = [{"params": params, "tensors": MATRICES, "transformation": muon, "lr": 0.05}]
        groups.append({"params": params, "tensors": VECTORS, "lr": 0.1})
        optimizer = optim.TorchOptimizer(groups, optim.adamw)
        scaler = optim.GradScaler("cpu", init_scale=4.0)
        for number in (0, 7, 1, 2):
            scale = scaler.scale(torch.ones(1)).item()
            set_gradients(params, number, spoil=number == 7 and mesh.get_rank() == 1)
            for buffer in params.values():
                buffer.local_buffer.grad *= scale
            before = [leaf.clone() for leaf in torch.utils._pytree.tree_leaves([g.state for g in optimizer._groups])]
            if unscaled:
                scaler.unscale_(optimizer)
                optimizer.clip_grad_norm_(1e9)
            scaler.step(optimizer)
            scaler.update()
            after = torch.utils._pytree.tree_leaves([g.state for g in optimizer._groups])
            same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            assert same == (number == 7)
            assert scaler.get_scale() == (4.0 if number == 0 else 2.0)
        return whole(params)

    expected = expected_of((0.05, 0.1))
    for trained in mf.simulate(program, 2).results.values():
        for key in KEYS:
            torch.testing.assert_close(trained[key], expected[key], rtol=0, atol=1e-12)


def test_a_bare_scaler_is_refused_on_several_ranks() -> None:
    def program(mesh: Mesh) -> str:
        params = buffers(mesh, tensors(draw(0)), [ROWS])
        optimizer = optim.TorchOptimizer(params, optim.adamw)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(1))
        set_gradients(params, 0, spoil=mesh.get_rank() == 1)
        with pytest.raises(RuntimeError, match=r"decides on each rank alone.*use mfsdp_func\.optim\.GradScaler"):
            scaler.step(optimizer)
        return ""

    mf.simulate(program, 2)
    leaf = ones(1)
    optimizer, scaler = optim.TorchOptimizer([leaf], optim.adamw), torch.amp.GradScaler("cpu")
    for value in (1.0, math.inf):  # one process: it works as with any optimizer
        scaler.scale(torch.ones(1))
        leaf.grad = torch.full_like(leaf, value)
        before = leaf.item()
        scaler.step(optimizer)
        scaler.update()
        assert (leaf.item() == before) == math.isinf(value)


def test_state_that_owners_hold_is_saved_and_loaded() -> None:
    """A transformation whose state is a number per tensor on its owner, as whitening matrices would be."""

    def held_by_owners(lr: torch.Tensor, owners: Any = None) -> optim.GradientTransformation[Any]:
        mine = [key for name, layout in owners.items() for key in [(name, i) for i in layout.tensor_to_owner]]
        rank = next(iter(owners.values())).mesh.rank
        mine = [key for key in mine if owners[key[0]].tensor_to_owner[key[1]] == rank]

        def init(_: Any) -> Any:
            return {"preconditioner": {f"{name}.{i}": torch.zeros(2, 2) for name, i in mine}}

        def update(grads: Any, state: Any, params: Any) -> Any:
            return torch.utils._pytree.tree_map(lambda grad: -lr * grad, grads), {
                "preconditioner": {key: value + 1 for key, value in state["preconditioner"].items()}
            }

        return optim.GradientTransformation(init, update)

    def program(mesh: Mesh) -> list[str]:
        params = buffers(mesh, tensors(draw(0)), [ROWS])
        make = partial(held_by_owners, owners=owners_of(params))
        first, second = (optim.TorchOptimizer(params, make) for _ in range(2))
        set_gradients(params, 0)
        first.step()
        saved = first.state_dict()
        second.load_state_dict(saved)
        for name, value in saved["state"]["owned"].items():
            assert torch.equal(second.state["owned"][name], torch.ones(2, 2)), value
        return list(saved["state"]["owned"])

    names = [name for found in mf.simulate(program, 2).results.values() for name in found]
    assert sorted(names) == [f"0['preconditioner']['{name}.{i}']" for name, i in sorted(MATRICES)]
