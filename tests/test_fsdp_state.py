"""What surrounds `apply`: other methods, state in and out, micro-batches in place, modules on the meta device."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_func as mf
from tests import fsdp_cases as cases
from tests.fsdp_cases import FULL, ROLES, ROWS, loss_of, net, number, on_each, place

pytestmark = pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList([nn.Linear(4, 4), nn.BatchNorm1d(4)])
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = layer(x)
        return x

    def score(self, x: torch.Tensor, *, power: int = 1) -> torch.Tensor:
        return self(x).sum() * self.scale**power


def test_other_methods() -> None:
    torch.manual_seed(0)
    module, x = Scores().double().eval(), torch.randn(3, 4, dtype=torch.float64)
    module.score(x, power=3).backward()
    expected = {name: param.grad for name, param in module.named_parameters()}

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        assert torch.equal(apply.call("score", params, x, power=3), module.score(x, power=3))
        gradients = torch.func.grad(lambda params: apply.call("score", params, x, power=3))(params)
        cases.assert_same(apply.gather_parameters(gradients), expected)
        with pytest.raises(AttributeError, match=r"apply\.call: Scores has no method 'scores'"):
            apply.call("scores", params, x)

    on_each((2,), program)


def test_a_model_generates() -> None:
    models = pytest.importorskip("tests.test_fsdp_models")
    model, x = models.model_of("llama").eval(), models.words(1)[0]
    choices = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(x, **choices)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(model, mesh, place(mesh, "two"))
        assert torch.equal(apply.call("generate", params, x, **choices), expected)

    on_each((2,), program)


@pytest.mark.parametrize("roles", ["two", "four", "hsdp", "zero2 hsdp", "both", "replicas"])
@pytest.mark.parametrize("shard_layout", mf.ShardLayout)
def test_state_dicts(roles: str, shard_layout: mf.ShardLayout) -> None:
    """Whole on one rank alone, and back; some of it; frozen and tied parameters too."""
    torch.manual_seed(0)
    module, other = net(), net()
    other.load_state_dict({name: torch.randn_like(tensor) for name, tensor in other.state_dict().items()})
    other.head.weight = other.words.weight
    for one in (module, other):
        one.blocks[0].requires_grad_(False)

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(shard_layout=shard_layout)
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles), context=context)
        state = apply.state_dict(params, whole=True)
        if mesh.get_rank() == mesh.ranks[0]:
            assert list(state) == list(dict(module.named_parameters(remove_duplicate=False)))
            cases.assert_same(state, module.state_dict(), rtol=0, atol=0)
        else:
            assert state == {}
        loaded = apply.load(other.state_dict(), params)
        cases.assert_same(apply.gather_parameters(loaded), other.state_dict(), rtol=0, atol=0)
        partly = apply.load({"norm.weight": torch.full((6,), 7.0, dtype=torch.float64)}, params)
        assert (apply.gather_parameters(partly)["norm.weight"] == 7).all()
        assert torch.equal(partly["words"].local_buffer, params["words"].local_buffer)
        cases.assert_same(apply.gather_parameters(params), {"norm.weight": module.norm.weight}, rtol=0, atol=0)

    on_each(ROLES[roles][0], program)


class Renamed(nn.Linear):
    """Knows its weight by an old name, too, and gives it under a new one."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.seen: list[str] = []
        self.register_load_state_dict_pre_hook(self._rename)
        self.register_load_state_dict_post_hook(lambda module, keys: module.seen.append("loaded"))
        self.register_state_dict_pre_hook(lambda module, prefix, keep_vars: module.seen.append(f"asked for {prefix}"))
        self._register_state_dict_hook(self._give)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")

    @staticmethod
    def _give(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight")


class Both(nn.Sequential):
    def seen(self) -> list[str]:
        return self[0].seen


def test_hooks_of_state_dicts_run() -> None:
    model = Both(Renamed(), torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)))
    expected = model.state_dict()
    assert "0.kernel" in expected
    old = {f"1.weight_{end}": expected[f"1.parametrizations.weight.original{n}"] for n, end in enumerate("gv")}

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(model, mesh, place(mesh, "two"))
        zeros = {key: mf.DBuffer(b.spec, torch.zeros_like(b.local_buffer)) for key, b in params.items()}
        given = {"0.kernel": expected["0.kernel"], "0.bias": expected["0.bias"], "1.bias": expected["1.bias"], **old}
        loaded = apply.load(given, zeros)
        assert set(given) >= {"0.kernel", "1.weight_g"}  # the caller's dict stays as it is
        for key, buffer in params.items():
            assert torch.equal(loaded[key].local_buffer, buffer.local_buffer)
        found = apply.state_dict(params, whole=True)
        assert set(found) == (set(expected) if number(mesh) == 0 else set())
        seen = apply.call("seen", params)
        assert seen[-2:] == ["loaded", "asked for 0."]
        with pytest.raises(ValueError, match=r"'0.core' is no parameter"):
            apply.load({"0.core": expected["0.bias"]}, params)

    on_each((2,), program)


def test_wrong_state_changes_nothing() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        good = {"1.running_mean": torch.ones(3)}
        for bad, error, message in (
            ({"0.weights": torch.ones(3, 3)}, ValueError, r"'0\.weights' is no parameter and no buffer"),
            ({"0.weight": torch.ones(3, 4)}, ValueError, r"'0\.weight' has shape \(3, 4\), expected \(3, 3\)"),
            ({"0.weight": torch.ones(3, 3).half()}, TypeError, r"'0\.weight' is torch\.float16.*cast=True"),
            ({"0.weight": 3}, TypeError, r"'0\.weight' is a int"),
        ):
            with pytest.raises(error, match=message):
                apply.load(good | bad, params)
            assert not apply.named_buffers()["1.running_mean"].any()
        loaded = apply.load(good | {"0.weight": torch.ones(3, 3).half()}, params, cast=True)
        assert apply.gather_parameters(loaded)["0.weight"].dtype == torch.float32
        assert apply.named_buffers()["1.running_mean"].all()
        assert "1.running_mean" in (apply.state_dict(params, whole=True) or {"1.running_mean"})

    on_each((2,), program)


@pytest.mark.parametrize("gradient", [[ROWS], [mf.Partial("avg")]], ids=repr)
@pytest.mark.parametrize("parameter", [ROWS, FULL], ids=repr)
def test_micro_batches_in_place(gradient: Any, parameter: Any) -> None:
    """The mean over 6 micro-batches, added up in the accumulator's own memory."""
    module, data = net(), cases.batches(6)
    expected, expected_loss = cases.dense_step(module, data)

    def program(mesh: mf.Mesh) -> torch.Tensor:
        apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [parameter], gradient, [ROWS]))
        accumulator = apply.init_accumulator(params)
        memory = {key: buffer.local_buffer.data_ptr() for key, buffer in accumulator.items()}
        values = [
            mf.inplace.accumulate(lambda logits, x=x: loss_of(logits, x) / 3, apply, params, accumulator, x)
            for x in data[number(mesh) :: 2]
        ]
        assert memory == {key: buffer.local_buffer.data_ptr() for key, buffer in accumulator.items()}
        cases.assert_same(apply.gather_parameters(apply.reduce(accumulator)), expected)
        with pytest.raises(RuntimeError, match=r"inplace\.accumulate cannot run under a torch\.func transform"):
            torch.func.grad(lambda p: mf.inplace.accumulate(lambda y: y.sum(), apply, p, accumulator, data[0]))(params)
        return torch.stack(values).sum()

    losses = on_each((2,), program)
    torch.testing.assert_close(torch.stack(list(losses.values())).mean(), expected_loss, rtol=1e-12, atol=0)


class Rotary(nn.Module):
    """Without parameters; sets a plain attribute and a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.empty(4), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.freqs = torch.arange(4.0)
        self.table.copy_(torch.arange(4.0) * 2)


class Owner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.rotary = nn.Parameter(torch.empty(4)), Rotary()
        self.fc = nn.Linear(4, 4)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        self.scale, self.count = torch.full((4,), 3.0), getattr(self, "count", 0) + 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.weight * self.scale + self.rotary.freqs + self.rotary.table


@pytest.mark.parametrize("by_init", [False, True])
def test_meta_modules_are_initialised_where_they_run(by_init: bool) -> None:
    """Plain attributes and buffers that are set there are there."""
    with torch.device("meta"):
        module = Owner()

    def init(name: str, sub: nn.Module) -> None:
        if hasattr(sub, "reset_parameters"):
            sub.reset_parameters()

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(init=init if by_init else None)
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"), context=context)
        full, x = apply.gather_parameters(params), torch.ones(2, 4)
        expected = nn.functional.linear(x, full["fc.weight"], full["fc.bias"]) * 3 + 3 * torch.arange(4.0)
        torch.testing.assert_close(apply(params, x), expected)
        assert apply._skeleton.count == 2  # when it was built, and here

    on_each((2,), program)


def test_memory_while_sharding_from_meta() -> None:
    """Beside shards, no more than one unit's full values are alive at a time."""
    with torch.device("meta"):
        module = nn.Sequential(*(nn.Linear(100, 100) for _ in range(8)))
    alive: dict[int, int] = {}
    peak = [0]

    def init(name: str, sub: nn.Module) -> None:
        for param in sub.parameters(recurse=False):
            param.fill_(1.0)
            alive[id(param)] = param.nbytes
            weakref.finalize(param.untyped_storage(), alive.pop, id(param), None)
        peak[0] = max(peak[0], sum(alive.values()))

    context = mf.FsdpContext(init=init, device="cpu")
    mf.fully_shard(module, mf.Mesh(4, rank=1), mf.Placements(0, [ROWS], [ROWS], [ROWS]), context=context)
    gc.collect()
    assert not alive
    assert peak[0] <= 2 * 100 * 101 * 4
