"""Units that are compiled each for itself: equal ones once, at any depth, and everything else as without."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.func import grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

import mfsdp_func as mf
from mfsdp_func.fsdp import Escape
from tests import fsdp_cases as cases
from tests.fsdp_cases import loss_of, net, number, on_each, place

pytestmark = [
    pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute:UserWarning"
    ),  # Dynamo's own look at inputs that are no leaves
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def context_of(backend: Any, names: Any = True) -> mf.FsdpContext:
    return mf.FsdpContext(compile=names, compile_options={"backend": backend, "fullgraph": True})


@pytest.mark.parametrize("roles", ["two", pytest.param("hsdp", marks=pytest.mark.slow), "zero2"])
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_gradients_are_the_dense_ones(roles: str, how: str) -> None:
    """Tied and held parameters; the call that watches, and calls that do not."""
    shape, *_ = cases.ROLES[roles]
    module = net(blocks=3)

    def program(mesh: mf.Mesh) -> None:
        data = cases.batches(mesh.size())
        expected, value = cases.dense_step(module, data)
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles), context=context_of("aot_eager"))
        x = data[number(mesh)]
        for _ in range(3):
            if how == "grad":
                found = grad(lambda params: loss_of(apply(params, x), x))(params)
            else:
                leaves = cases.leaves_of(params)
                loss_of(apply(leaves, x), x).backward()
                found = {key: mf.DBuffer(b.spec, b.local_buffer.grad) for key, b in leaves.items()}
            cases.assert_same(apply.gather_parameters(found), expected)
        losses = mf.DBuffer.from_local(
            loss_of(apply(params, x), x).detach().reshape(1), mesh, [mf.Partial("avg")] * mesh.ndim, ONE
        )
        torch.testing.assert_close(losses.redistribute([mf.Replicate()] * mesh.ndim).local_buffer[0], value)

    on_each(shape, program)


ONE = mf.GlobalLayout([(1,)], [0], 1, [0])


def graphs_of(depth: int) -> int:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def program(mesh: mf.Mesh) -> None:
        names = [f"blocks.{n}" for n in range(depth)]
        choices = context_of(counter, names)
        apply, params = mf.fully_shard(net(blocks=depth), mesh, place(mesh, "one"), context=choices)
        x = cases.batches(1)[0]
        for _ in range(3):
            grad(lambda params: loss_of(apply(params, x), x))(params)

    on_each((1,), program)
    return counter.frame_count


def test_equal_units_are_compiled_once() -> None:
    assert graphs_of(2) == graphs_of(5) <= 2


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_parameters_are_there_one_unit_at_a_time(backend: str) -> None:
    module, x = net(blocks=3, tie=False), cases.batches(1)[0]

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"), context=context_of(backend))
        sizes = cases.bytes_of(apply)
        held = sizes.pop("root")

        def loss(params: Any) -> torch.Tensor:
            return loss_of(apply(params, x), x)

        for _ in range(2):
            grad(loss)(params)
        with cases.gathers_watched() as seen:
            grad(loss)(params)
        assert seen.count == 1 + 2 * len(sizes)
        assert seen.peak <= held + 2 * max(sizes.values())

    on_each((1,), program)


def test_other_transforms_twins_and_regions_around() -> None:
    """What runs a unit again, or traces it, takes the forward as it was written."""
    module, data = net(blocks=1, tie=False), cases.batches(2)

    def program(mesh: mf.Mesh) -> None:
        plain, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        apply, _ = mf.fully_shard(module, mesh, place(mesh, "one"), context=context_of("aot_eager"))
        twin = copy.deepcopy(apply)

        def results(apply: Any) -> list[Any]:
            def loss(params: Any, x: torch.Tensor = data[0]) -> torch.Tensor:
                return loss_of(apply(params, x), x)

            def square(params: Any) -> torch.Tensor:
                return sum((b.local_buffer**2).sum() for b in grad(loss)(params).values())

            whole = torch.compile(grad(loss), fullgraph=True, backend="aot_eager")
            return [
                grad(square)(params),
                jvp(loss, (params,), (params,))[1],
                vmap(lambda x: loss(params, x))(data),
                whole(params),
                apply.train(False)(params, data[0]),
            ]

        expected = results(plain)
        for given in (apply, apply, twin, twin):
            for a, b in zip(results(given), expected, strict=True):
                pairs = [(a, b)] if isinstance(a, torch.Tensor) else [(a[k].local_buffer, b[k].local_buffer) for k in b]
                for found, wanted in pairs:
                    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)

    on_each((1,), program)


class Around(nn.Module):
    """Activation checkpointing around units and inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("how", ["grad", "backward"])
def test_activation_checkpointing_around_units(how: str) -> None:
    """What runs again in a backward pass runs as it did in the forward pass, also in the first step."""

    def program(mesh: mf.Mesh) -> None:
        torch.manual_seed(0)
        module, x = Around().double(), torch.randn(2, 4, dtype=torch.float64)
        plain, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        apply, _ = mf.fully_shard(module, mesh, place(mesh, "one"), context=context_of("aot_eager"))
        expected = grad(lambda params: plain(params, x).square().sum())(params)
        for _ in range(3):
            if how == "grad":
                cases.assert_same_buffers(grad(lambda params: apply(params, x).square().sum())(params), expected)
                continue
            leaves = cases.leaves_of(params)
            apply(leaves, x).square().sum().backward()
            found = {key: mf.DBuffer(b.spec, b.local_buffer.grad) for key, b in leaves.items()}
            cases.assert_same_buffers(found, expected)

    on_each((1,), program)


def test_dropout_where_units_run_again() -> None:
    """Recomputation draws the same masks; a transform, which takes the forward as it was written, is refused."""
    module, x = net(blocks=2, dropout=0.5), cases.batches(1)[0]

    def program(mesh: mf.Mesh) -> None:
        plain, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        choices = dataclasses.replace(context_of("aot_eager"), recompute=True)
        apply, _ = mf.fully_shard(module, mesh, place(mesh, "one"), context=choices)

        def gradients(apply: Any) -> Any:
            torch.manual_seed(4)
            return grad(lambda params: loss_of(apply(params, x), x))(params)

        for _ in range(3):
            cases.assert_same_buffers(gradients(apply), gradients(plain))
        with pytest.raises(NotImplementedError, match="could not draw the same again"):
            grad(lambda p: sum((b.local_buffer**2).sum() for b in grad(lambda p: loss_of(apply(p, x), x))(p).values()))(
                params
            )

    on_each((1,), program)


class Keeps(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.kept.append(y)
        return y


def test_the_first_call_is_watched() -> None:
    def program(mesh: mf.Mesh) -> None:
        module = nn.Sequential(Keeps(), nn.Linear(4, 4))
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"), context=context_of("aot_eager"))
        for _ in range(2):
            with pytest.raises(Escape, match="unit '0' keeps a differentiable tensor"):
                grad(lambda params: apply(params, torch.ones(2, 4)).sum())(params)

    on_each((1,), program)


def test_unknown_names_are_refused() -> None:
    rows = mf.Placements(0, [mf.RowAtomic()], [mf.RowAtomic()], [mf.RowAtomic()])
    with pytest.raises(ValueError, match="compile names 'block', expected names of units"):
        mf.fully_shard(net(), mf.Mesh(1, rank=0), rows, context=mf.FsdpContext(compile=["block"]))
