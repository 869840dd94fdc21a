"""SOAP against a dense reference written from the paper, and on owners."""

from typing import Any

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import optim
from tests.spawn import RankPool

SHAPES = [(6, 4), (5,), (4, 8), (3, 4, 2), (8, 8)]
STEPS, EVERY = 9, 3
OPTIONS = {"betas": (0.9, 0.8), "eps": 1e-6, "weight_decay": 0.1}


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(i: int, step: int) -> torch.Tensor:
    return randn(*SHAPES[i], seed=100 * step + i)


class Reference:
    """The authors' algorithm for one matrix, written with explicit products: means in the matrix's own basis."""

    def __init__(self, weight: torch.Tensor, offset: int, rate: float) -> None:
        m, n = weight.shape
        self.w, self.m, self.v = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
        self.left, self.right = (torch.zeros(size, size, dtype=weight.dtype) for size in (m, n))
        self.ql = self.qr = torch.empty(0)
        self.t, self.offset, self.rate = 0, offset, rate

    def step(self, g: torch.Tensor) -> None:
        (b1, b2), eps, decay = OPTIONS["betas"], OPTIONS["eps"], OPTIONS["weight_decay"]
        if self.t:
            self.m = b1 * self.m + (1 - b1) * g
            self.v = b2 * self.v + (1 - b2) * (self.ql.T @ g @ self.qr) ** 2
            rotated = self.ql.T @ self.m @ self.qr
            direction = self.ql @ (rotated / (self.v.sqrt() + eps)) @ self.qr.T
            correction = (1 - b2**self.t) ** 0.5 / (1 - b1**self.t)
            self.w = self.w - self.rate * correction * direction
            self.w = self.w - self.rate * decay * self.w
        # By lerp: (6, 4) leaves two dims of the first basis to rounding.
        self.left = self.left.lerp(g @ g.T, 1 - b2)
        self.right = self.right.lerp(g.T @ g, 1 - b2)
        if not self.t:
            self.ql, self.qr = (
                torch.linalg.eigh(x + 1e-30 * torch.eye(len(x)).double())[1].flip(1) for x in (self.left, self.right)
            )
        elif (self.t + self.offset) % EVERY == 0:
            rows = torch.diag(self.ql.T @ self.left @ self.ql).argsort(descending=True)
            columns = torch.diag(self.qr.T @ self.right @ self.qr).argsort(descending=True)
            self.v = self.v[rows][:, columns]
            self.ql = torch.linalg.qr(self.left @ self.ql[:, rows])[0]
            self.qr = torch.linalg.qr(self.right @ self.qr[:, columns])[0]
        self.t += 1


MATRICES = [i for i, shape in enumerate(SHAPES) if len(shape) == 2]


def expected_of(i: int, offset: int) -> torch.Tensor:
    reference = Reference(randn(*SHAPES[i], seed=i), offset, 0.05)
    for step in range(STEPS):
        reference.step(gradient(i, step))
    return reference.w


def make(**options: Any) -> optim.GradientTransformation[optim.SoapState]:
    return optim.soap(0.05, precondition_frequency=EVERY, **OPTIONS, **options)


def train(optimizer: Any, params: dict, grads_at: Any) -> tuple[dict, Any]:
    state = optimizer.init(params)
    for step in range(STEPS):
        updates, state = optimizer.update(grads_at(step), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


@pytest.mark.parametrize("stagger", [False, True])
def test_the_authors_algorithm(stagger: bool) -> None:
    params = {i: randn(*SHAPES[i], seed=i) for i in MATRICES}
    found, state = train(make(stagger=stagger), params, lambda step: {i: gradient(i, step) for i in params})
    offsets = optim.soap_offsets({i: SHAPES[i] for i in MATRICES}, EVERY) if stagger else dict.fromkeys(MATRICES, 0)
    assert len(set(offsets.values())) == (3 if stagger else 1)
    for i in MATRICES:
        torch.testing.assert_close(found[i], expected_of(i, offsets[i]), rtol=0, atol=1e-6)
    assert int(state.step) == STEPS


def test_vectors_and_long_dims_have_no_statistics() -> None:
    """Then it is Adam with the authors' first step, which changes nothing."""
    params = {0: randn(6, 4, seed=0), 1: randn(5, seed=1)}
    grads = [{key: randn(*param.shape, seed=50 + step) for key, param in params.items()} for step in range(4)]
    optimizer = optim.soap(0.05, max_precond_dim=3, weight_decay=0.0, betas=(0.9, 0.8))
    state, found = optimizer.init(params), params
    for grad in grads:
        updates, state = optimizer.update(grad, state, found)
        found = optim.apply_updates(found, updates)
    assert all(not matrix.numel() for matrices in state.statistics.values() for matrix in matrices)
    leaves = {key: torch.nn.Parameter(param.clone()) for key, param in params.items()}
    adam = torch.optim.Adam(leaves.values(), lr=0.05, betas=(0.9, 0.8), eps=1e-8)
    for grad in grads[1:]:
        for key, leaf in leaves.items():
            leaf.grad = grad[key]
        adam.step()
    for key, leaf in leaves.items():
        torch.testing.assert_close(found[key], leaf.data, rtol=0, atol=1e-6)


def sharded(mesh: mf.Mesh, stagger: bool, state_of: bool = False) -> Any:
    layout = mf.build_for_row_atomic_unpadding(SHAPES, mesh.size())
    taking_part = [i for i, shape in enumerate(SHAPES) if len(shape) > 1]
    owners = mf.GroupOwnerLayout(mesh, layout, mf.assign_owner_work(layout, mesh, taking_part))

    def shards(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        views = mf.DBuffer.distribute_tensors(tensors, mesh, [mf.RowAtomic()], layout).tensor_views()
        return {i: view for i, view in views.items() if i in taking_part}

    params = shards({i: randn(*shape, seed=i) for i, shape in enumerate(SHAPES)})
    optimizer = make(stagger=stagger, owner_layout=owners)
    found, state = train(optimizer, params, lambda step: shards({i: gradient(i, step) for i in range(len(SHAPES))}))
    assert list(state.exp_avg) == list(optim.owned(params, owners)) == list(state.bases)
    offsets = optim.soap_offsets(owners, EVERY) if stagger else dict.fromkeys(taking_part, 0)
    return found, offsets


def check(results: list[Any]) -> None:
    for i in MATRICES:
        whole = torch.cat([found[i].flatten() for found, _ in results if i in found]).view(SHAPES[i])
        torch.testing.assert_close(whole, expected_of(i, results[0][1][i]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("stagger", [False, True])
def test_on_owners(ranks: int, stagger: bool) -> None:
    check(list(mf.simulate(lambda mesh: sharded(mesh, stagger), ranks).results.values()))


def on_real_ranks(rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return sharded(mf.as_mesh(init_device_mesh("cpu", (2,))), True)


@pytest.mark.distributed
def test_on_real_owners(ranks2: RankPool) -> None:
    check(ranks2.run(on_real_ranks))


def test_no_update_is_much_longer() -> None:
    shapes = {n: (64, 64) if n % 3 else (32, 96) for n in range(20)}
    load = [0] * 10
    for n, offset in optim.soap_offsets(shapes, 10).items():
        load[offset] += sum(size**3 for size in shapes[n])
    assert max(load) < 1.3 * sum(load) / 10


def test_wrong_numbers_are_refused() -> None:
    for options, message in [
        ({"betas": (1.0, 0.9)}, "betas and shampoo_beta"),
        ({"precondition_frequency": 0}, "precondition_frequency be at least 1"),
        ({"weight_decay": -1.0}, "must not be negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            optim.soap(0.1, **options)
    optimizer = optim.soap(0.1)
    params = {"w": torch.ones(2, 2)}
    with pytest.raises(KeyError, match="no gradient of tensor 'w'"):
        optimizer.update({}, optimizer.init(params), params)


def test_state_of_owners_in_a_torch_optimizer() -> None:
    """Every tensor that this rank owns is in its state dict, also those of which it holds nothing; and comes back."""
    layout = mf.build_for_row_atomic([(4, 4), (4, 2)], 2)

    def program(mesh: mf.Mesh) -> None:
        owners = mf.GroupOwnerLayout(mesh, layout, {0: 1, 1: 0})
        moved = mf.GroupOwnerLayout(mesh, layout, {0: 1, 1: 1})

        def make(owners: mf.GroupOwnerLayout) -> tuple[optim.TorchOptimizer, torch.Tensor]:
            full = [randn(*shape, seed=1) for shape in layout.tensor_shapes]
            buffer = mf.DBuffer.distribute_tensors(full, mesh, [mf.RowAtomic()], layout)
            leaf = buffer.local_buffer.requires_grad_()
            return optim.TorchOptimizer(buffer, lambda lr: optim.soap(lr, owner_layout=owners), lr=0.1), leaf

        for chosen in (owners, moved):
            (first, leaf), (second, other) = make(chosen), make(chosen)
            for step in range(3):
                leaf.grad = randn(*leaf.shape, seed=step)
                first.step()
            saved = first.state_dict()
            held = sum(tensor.numel() for fields in saved["state"].values() for tensor in fields.values())
            assert held >= sum(2 * tensor.numel() for tensor in optim.owned({}, chosen).values())
            second.load_state_dict(saved)
            with torch.no_grad():
                other.copy_(leaf)
            for one, optimizer in ((leaf, first), (other, second)):
                one.grad = randn(*leaf.shape, seed=9)
                optimizer.step()
            assert torch.equal(leaf, other)

    mf.simulate(program, 2)
