"""Whole training steps in one compiled region: the same numbers, each unit gathered again in the backward pass."""

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, grad_and_value, jvp

import mfsdp_func as mf
from mfsdp_func.optim import adamw, apply_updates
from tests import fsdp_cases as cases
from tests.fsdp_cases import FULL, ROWS, loss_of, net, number, on_each, place
from tests.spawn import RankPool

pytestmark = [
    pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what Inductor uses of the standard library
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def compiled(step: Any, backend: str) -> Any:
    return torch.compile(step, fullgraph=True, backend=backend)


def step_of(apply: Any) -> Any:
    """Forward, backward and update."""
    optimizer = adamw(0.1)

    def step(params: Any, state: Any, x: torch.Tensor) -> tuple[Any, Any, torch.Tensor]:
        gradients, loss = grad_and_value(lambda params: loss_of(apply(params, x), x))(params)
        updates, state = optimizer.update(gradients, state, params)
        return apply_updates(params, updates), state, loss

    return step, optimizer.init


@pytest.mark.parametrize("roles", ["two", "hsdp", "zero2 of two"])
def test_a_whole_step(roles: str) -> None:
    """Tied, held and frozen parameters; several steps by one compilation."""
    module, data = net(), cases.batches(8)
    module.blocks[0].requires_grad_(False)
    shape = cases.ROLES.get(roles, ((2,),))[0]

    def program(mesh: mf.Mesh) -> None:
        zero2 = mf.Placements(0, [FULL], [ROWS], [ROWS])
        apply, params = mf.fully_shard(module, mesh, zero2 if roles not in cases.ROLES else place(mesh, roles))
        step, init = step_of(apply)
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast, ours, theirs = compiled(step, counter), (params, init(params)), (params, init(params))
        for x in data[number(mesh) :: mesh.size()][:2]:
            *ours, loss = fast(*ours, x)
            *theirs, expected = step(*theirs, x)
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
            cases.assert_same_buffers(ours[0], theirs[0], rtol=1e-9, atol=1e-9)
        assert counter.frame_count == 1

    on_each(shape, program)


def accumulating(apply: Any) -> Any:
    """Zeros, the sum over micro-batches, the reduction, the global norm and the clipped update."""

    def step(params: Any, batches: torch.Tensor) -> tuple[Any, torch.Tensor]:
        zeros = apply.init_accumulator(params)
        total = zeros
        for x in batches.unbind():
            part = grad(lambda zeros, x=x: loss_of(apply.accumulate(params, zeros, x), x))(zeros)
            total = {key: mf.DBuffer(b.spec, b.local_buffer + part[key].local_buffer) for key, b in total.items()}
        gradients = apply.reduce(total)
        norm = mf.global_norm(gradients)
        rate = 0.1 / norm.clamp(min=1.0)
        new = {k: mf.DBuffer(b.spec, b.local_buffer - rate * gradients[k].local_buffer) for k, b in params.items()}
        return new, norm

    return step


@pytest.mark.parametrize("roles", ["two", "hsdp"])
def test_a_step_that_accumulates_and_clips(roles: str) -> None:
    """All of it in one region, compiled once."""
    module, data = net(blocks=1), cases.batches(8)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles))
        step, counter = accumulating(apply), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast, ours, theirs = compiled(step, counter), params, params
        for x in data[number(mesh) :: mesh.size()][:2].split(1):
            batches = torch.stack([x[0], x[0].flip(0)])
            (ours, norm), (theirs, expected) = fast(ours, batches), step(theirs, batches)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=1e-12)
            cases.assert_same_buffers(ours, theirs)
        assert counter.frame_count == 1

    on_each(cases.ROLES[roles][0], program)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_units_are_gathered_again(backend: str) -> None:
    """One unit's whole parameters at a time, besides the held ones: counted while the compiled code runs."""
    module, x = net(blocks=3, tie=False), cases.batches(1)[0]

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        sizes = cases.bytes_of(apply)
        held = sizes.pop("root")
        step = compiled(grad(lambda params: loss_of(apply(params, x), x)), backend)
        step(params)
        with cases.gathers_watched() as seen:
            got = step(params)
        assert seen.count == 1 + 2 * len(sizes)
        assert seen.peak <= held + 2 * max(sizes.values())
        cases.assert_same_buffers(got, grad(lambda params: loss_of(apply(params, x), x))(params))

    on_each((1,), program)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_dropout(backend: str) -> None:
    """The gradient is that of the loss with the masks that were drawn: beside differences of the loss itself."""
    module, x = net(blocks=1, dropout=0.5), cases.batches(1)[0]

    def program(mesh: mf.Mesh) -> tuple[float, float]:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        step = compiled(grad_and_value(lambda params: loss_of(apply(params, x), x)), backend)
        direction = {key: torch.randn_like(buffer.local_buffer) for key, buffer in params.items()}

        def loss_at(distance: float, seed: int = 3) -> torch.Tensor:
            moved = {
                k: mf.DBuffer(b.spec, b.local_buffer + distance * direction[k] * mask_of(b)) for k, b in params.items()
            }
            torch.manual_seed(seed)
            gradients, loss = step(moved)
            own = sum((g.local_buffer * direction[k] * mask_of(g)).sum() for k, g in gradients.items())
            slopes.append(float(own))
            return loss

        slopes: list[float] = []
        difference = (loss_at(1e-5) - loss_at(-1e-5)) / 2e-5
        assert loss_at(0.0) == loss_at(0.0)
        assert loss_at(0.0) != loss_at(0.0, seed=4)
        return float(difference), slopes[2]

    def mask_of(buffer: mf.DBuffer) -> torch.Tensor:
        mask = torch.zeros_like(buffer.local_buffer)
        for span in buffer.spec.filled:
            mask[span.start : span.end] = 1
        return mask

    results = on_each((2,), program)
    # Both ranks draw the same masks for the same batch; the gradient is the mean over them.
    assert sum(slope for _, slope in results.values()) == pytest.approx(results[0][0], rel=1e-6)


def test_accumulation_statistics_and_other_transforms() -> None:
    module, data = net(blocks=1, tie=False), cases.batches(2)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        x = data[number(mesh)]

        def accumulated(params: Any, accumulator: Any) -> Any:
            gradient = grad(lambda a: loss_of(apply.accumulate(params, a, x), x))(accumulator)
            return apply.reduce(gradient)

        def loss(params: Any) -> torch.Tensor:
            return loss_of(apply(params, x), x)

        expected = grad(loss)(params)
        given = compiled(accumulated, "aot_eager")(params, apply.init_accumulator(params))
        cases.assert_same_buffers(given, expected)
        leaves = cases.leaves_of(params)
        compiled(loss, "aot_eager")(leaves).backward()
        plain = {key: mf.DBuffer(b.spec, b.local_buffer.grad) for key, b in leaves.items()}
        cases.assert_same_buffers(plain, expected)

        def second(params: Any) -> Any:
            return grad(lambda p: sum(b.local_buffer.square().sum() for b in grad(loss)(p).values()))(params)

        cases.assert_same_buffers(compiled(second, "aot_eager")(params), second(params))

    on_each((2,), program)


class Counts(nn.Module):
    def __init__(self, replaces: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))])
        self.register_buffer("seen", torch.zeros(()))
        self.replaces = replaces

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layers[0](x)
        if self.replaces:
            self.seen = self.seen + 1
        else:
            self.seen.add_(1)
        return {"loss": y.square().mean() * self.seen.detach(), "more": (y, [y + 1])}


def test_module_buffers_and_structures() -> None:
    x = torch.randn(8, 4)
    torch.manual_seed(0)
    module = Counts(replaces=False)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        other, _ = mf.fully_shard(module, mesh, place(mesh, "two"))
        results = compiled(lambda params: apply(params, x), "aot_eager")(params)
        expected = other(params, x)
        assert list(results) == ["loss", "more"]
        assert type(results["more"]) is tuple
        torch.testing.assert_close(results["more"][1][0], expected["more"][1][0])
        step = compiled(grad(lambda params: apply(params, x)["loss"]), "aot_eager")
        for _ in range(2):
            cases.assert_same_buffers(
                step(params), grad(lambda params: other(params, x)["loss"])(params), rtol=1e-5, atol=1e-6
            )
        cases.assert_same(apply.named_buffers(), other.named_buffers(), rtol=1e-5, atol=1e-6)
        assert int(apply.named_buffers()["seen"]) == 3

    on_each((2,), program)


def test_errors_name_the_cause() -> None:
    module, x = net(), cases.batches(1)[0]
    torch.manual_seed(0)
    replacing = Counts(replaces=True)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        with pytest.raises(Exception, match=r"apply: sharded_params has buffers \['words'\]"):
            compiled(lambda p: apply(p, x), "aot_eager")({"words": params["words"]})
        apply, params = mf.fully_shard(replacing, mesh, place(mesh, "one"))
        with pytest.raises(Exception, match=r"assigns a new tensor to its buffer 'seen'"):
            compiled(lambda p: apply(p, torch.ones(8, 4)), "aot_eager")(params)

    on_each((1,), program)


class Draws(nn.Module):
    """Draws in its unit, or beside it."""

    def __init__(self, draw: Any, where: str) -> None:
        super().__init__()
        self.layers, self.draw, self.where = nn.ModuleList([Scales(draw if where == "unit" else None)]), draw, where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * (self.draw() if self.where == "root" else 1)


class Scales(nn.Linear):
    def __init__(self, draw: Any) -> None:
        super().__init__(4, 4)
        self.draw, self.scale, self.mode = draw, 2.0, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x) * self.scale
        y = y if self.draw is None else y * self.draw()
        return torch.sin(y) if self.mode == "sin" else y


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())], ids=["Python", "NumPy"])  # noqa: NPY002
@pytest.mark.parametrize("where", ["unit", "root"])
@pytest.mark.parametrize("differentiated", [True, False])
def test_draws_that_would_be_constants_are_refused(draw: Any, where: str, differentiated: bool) -> None:
    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(Draws(draw, where), mesh, place(mesh, "one"))

        def loss(params: Any) -> torch.Tensor:
            return apply(params, torch.ones(2, 4)).sum()

        who = "unit 'layers.0'" if where == "unit" else "the module"
        with pytest.raises(Exception, match=f"{who} draws from Python's or NumPy's generator"):
            compiled(grad(loss) if differentiated else loss, "aot_eager")(params)

    on_each((1,), program)


def test_a_change_of_the_modules_state_compiles_anew() -> None:
    """Training flags, plain attributes, hooks: old code is taken up again where the state is as it was."""

    def program(mesh: mf.Mesh) -> None:
        dropped = nn.Sequential(nn.ModuleList([Scales(None)])[0], nn.Dropout(0.5))
        apply, params = mf.fully_shard(dropped, mesh, place(mesh, "one"), units=["0"])
        unit = apply._skeleton.get_submodule("0")
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast = compiled(grad(lambda params, x: apply(params, x).sum()), counter)
        x = torch.randn(2, 4)

        def check(graphs: int) -> None:
            for _ in range(2):
                torch.manual_seed(5)
                found = fast(params, x)
                torch.manual_seed(5)
                cases.assert_same_buffers(found, grad(lambda params: apply(params, x).sum())(params))
            assert counter.frame_count == graphs

        apply.eval()
        check(1)
        unit.scale = 3.0
        check(2)
        unit.mode = "sin"
        check(3)
        handle = unit.register_forward_hook(lambda module, args, output: output * 2)
        check(4)
        unit.more = torch.relu
        check(5)
        unit.more = torch.tanh
        check(6)
        del unit.more
        handle.remove()
        check(6)
        unit.mode, unit.scale = None, 2.0
        check(6)
        whole = compiled(apply, "aot_eager")
        for training in (False, True, False, True):
            apply.train(training)
            assert bool((whole(params, torch.ones(64, 4)) == 0).any()) is training

    on_each((1,), program)


@pytest.mark.parametrize("how", ["second derivative", "forward mode"])
def test_a_second_run_that_would_draw_anew_is_refused(how: str) -> None:
    """Compiled code has no random state to go back to: another mask would be a wrong derivative."""

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(net(blocks=1, dropout=0.5), mesh, place(mesh, "one"))
        data = cases.batches(1)[0]

        def loss(params: Any) -> torch.Tensor:
            return loss_of(apply(params, data), data)

        def square(params: Any) -> torch.Tensor:
            return sum((buffer.local_buffer**2).sum() for buffer in grad(loss)(params).values())

        step = compiled(grad(square) if how == "second derivative" else lambda p: jvp(loss, (p,), (p,))[1], "aot_eager")
        with pytest.raises(Exception, match="could not draw the same again"):
            step(params)

    on_each((1,), program)


def compiled_steps(rank: int, world_size: int, backend: str) -> list[float]:
    mesh = init_device_mesh("cpu", (world_size,))
    apply, params = mf.fully_shard(net(blocks=1), mesh, mf.Placements(0, [ROWS], [ROWS], [ROWS]))
    step, init = step_of(apply)
    fast, data, losses = compiled(step, backend), cases.batches(2 * world_size)[rank::world_size], []
    ours, theirs = (params, init(params)), (params, init(params))
    for x in data:
        *ours, loss = fast(*ours, x)
        *theirs, expected = step(*theirs, x)
        losses.append(float(loss - expected))
        cases.assert_same_buffers(ours[0], theirs[0], rtol=1e-9, atol=1e-9)
    return losses


@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_on_real_ranks(backend: str, ranks2: RankPool) -> None:
    for losses in ranks2.run(compiled_steps, 2, backend, timeout=180):
        assert losses == pytest.approx([0, 0], abs=1e-12)
