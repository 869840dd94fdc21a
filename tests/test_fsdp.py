"""`fully_shard`: gradients, averages and values against the same module whole, for every way to lie on a mesh."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value

import mfsdp_func as mf
from mfsdp_func.optim import adamw, apply_updates
from tests import fsdp_cases as cases
from tests.fsdp_cases import FULL, ROLES, ROWS, WHOLE, WORDS, loss_of, net, number, on_each, place

pytestmark = [
    pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning"),
    # torch's forward mode scripts a few decompositions when it is first used.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("shard_layout", mf.ShardLayout)
def test_gradients_are_those_of_the_mean_loss(roles: str, shard_layout: mf.ShardLayout) -> None:
    """By `torch.func`, by plain autograd, by an accumulator; tied once, frozen ones none, 0-D ones too."""
    module = net()
    module.blocks[0].requires_grad_(False)
    count = cases.ROLES[roles][0][0] * (2 if len(ROLES[roles][0]) > 1 else 1)
    data = cases.batches(count)
    expected, expected_loss = cases.dense_step(module, data)

    def program(mesh: mf.Mesh) -> torch.Tensor:
        apply, params = mf.fully_shard(
            module, mesh, place(mesh, roles), context=mf.FsdpContext(shard_layout=shard_layout)
        )
        x = data[number(mesh)]
        for _ in range(2):  # the second pass has gathers in flight
            gradients, loss = grad_and_value(lambda params: loss_of(apply(params, x), x))(params)
            cases.assert_same(apply.gather_parameters(gradients), expected)
        leaves = cases.leaves_of(params)
        loss_of(apply(leaves, x), x).backward()
        plain = {key: mf.DBuffer(b.spec, b.local_buffer.grad) for key, b in leaves.items()}
        cases.assert_same_buffers(plain, gradients)
        accumulated = grad(lambda accumulator: loss_of(apply.accumulate(params, accumulator, x), x))(
            apply.init_accumulator(params)
        )
        cases.assert_same_buffers(apply.reduce(accumulated), gradients)
        assert set(apply.frozen_params) == {"blocks.0"}
        return loss

    losses = on_each(ROLES[roles][0], program)
    torch.testing.assert_close(torch.stack(list(losses.values())).mean(), expected_loss, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shard", [ROWS, mf.BlockAtomic(3), WHOLE], ids=repr)
def test_parameters_of_every_placement_and_layout(shard: Any) -> None:
    """Values come back bitwise, and every rank holds what its layout says."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(9, 12), nn.Tanh(), nn.Linear(12, 3))
    owners = {name: n % 3 for n, (name, _) in enumerate(module.named_parameters())} if shard == WHOLE else None
    for shard_layout in mf.ShardLayout:

        def program(mesh: mf.Mesh, shard_layout: mf.ShardLayout = shard_layout) -> None:
            context = mf.FsdpContext(parameter_to_owner=owners, shard_layout=shard_layout)
            apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [shard], [shard], [shard]), context=context)
            for name, value in apply.gather_parameters(params).items():
                assert torch.equal(value, module.get_parameter(name))
            for key, group in apply.groups.items():
                for i, view in params[key].tensor_views().items():
                    part = params[key].get_local_part(i)
                    whole = module.get_parameter(group.entries[i].name).reshape(-1)
                    assert torch.equal(view.reshape(-1), whole[part.start : part.end])

        on_each((3,), program)


def test_averages_over_micro_batches_once() -> None:
    """4 ranks with 3 micro-batches: the mean over 12, and nothing is reduced before the last."""
    module, data = net(tie=False), cases.batches(12)
    expected, _ = cases.dense_step(module, data)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [ROWS], [mf.Partial("avg")], [ROWS]))
        accumulator = apply.init_accumulator(params)
        for buffer in accumulator.values():
            assert set(buffer.placements) == {mf.Partial("avg")}
        total = accumulator
        for x in data[number(mesh) :: 4]:
            gradient = grad(lambda a, x=x: loss_of(apply.accumulate(params, a, x), x))(accumulator)
            total = apply_updates(total, cases.scaled(gradient, 1 / 3))
        assert set(labels[mesh.get_rank()]) == {"allgather over 'axis0'"}
        gathers = len(labels[mesh.get_rank()])
        gradients = apply.reduce(total)
        assert labels[mesh.get_rank()][gathers:] == ["reduce_scatter over 'axis0'"] * len(apply.groups)
        cases.assert_same(apply.gather_parameters(gradients), expected)

    with cases.calls_watched() as labels:
        trace = mf.simulate(program, 4).trace
    assert {sent.operation for sent in trace} == {"allgather over 'axis0'", "reduce_scatter over 'axis0'"}


@pytest.mark.parametrize(("one", "other"), [("four", "hsdp"), ("four", "both"), ("four", "zero2"), ("both", "outer")])
def test_meshes_of_as_many_ranks_agree(one: str, other: str) -> None:
    module, data = net(), cases.batches(4)

    def program(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        roles = one if mesh.ndim == len(ROLES[one][0]) and first else other
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles))
        optimizer, x = adamw(0.1), data[number(mesh)]
        state = optimizer.init(params)
        for _ in range(3):
            gradients = grad(lambda params: loss_of(apply(params, x), x))(params)
            updates, state = optimizer.update(gradients, state, params)
            params = apply_updates(params, updates)
        return apply.gather_parameters(params)

    first = True
    expected = on_each(ROLES[one][0], program)
    first = False
    for rank, weights in on_each(ROLES[other][0], program).items():
        cases.assert_same(weights, expected[rank], rtol=1e-10, atol=1e-10)


def test_one_rank_changes_nothing() -> None:
    """No bit of a loss, nor of a gradient."""
    module, data = net(tie=False), cases.batches(1)
    expected, expected_loss = cases.dense_step(module, data)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        gradients, loss = grad_and_value(lambda params: loss_of(apply(params, data[0]), data[0]))(params)
        assert torch.equal(loss, expected_loss)
        cases.assert_same(apply.gather_parameters(gradients), expected, rtol=0, atol=0)

    run = mf.simulate(program, 1)
    assert run.trace == ()


@pytest.mark.parametrize("roles", ["one", "hsdp", "both", "zero2", "outer"])
def test_derivatives_beyond_the_first(roles: str) -> None:
    """A gradient of anything is the mean over ranks of their derivatives, so the factor 1/ranks comes in once more.

    The objective here is the sum of squares of all gradients, which ranks have in shards (or, as replicas, alike).
    """
    module, data = net(), cases.batches(4 if len(ROLES[roles][0]) > 1 or roles == "zero2" else 1)
    weights = {name: param.detach() for name, param in module.named_parameters()}

    def dense(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([loss_of(functional_call(module, weights, (x,)), x) for x in data]).mean()

    def squares(tree: dict[str, Any]) -> torch.Tensor:
        return sum((leaf.square().sum() for leaf in torch.utils._pytree.tree_leaves(tree)), torch.zeros(()))

    shape = ROLES[roles][0]
    second = grad(lambda weights: squares(grad(dense)(weights)))(weights)
    ones = {name: torch.ones_like(value) for name, value in weights.items()}
    hessian_ones = torch.func.jvp(grad(dense), (weights,), (ones,))[1]

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles))
        x = data[number(mesh)]

        def loss(params: Any) -> torch.Tensor:
            return loss_of(apply(params, x), x)

        got = grad(lambda params: squares(grad(loss)(params)))(params)
        copies = 2 if roles == "hsdp" else 1  # every replica counts the squares of its copy
        expected = {name: value * copies / mesh.size() for name, value in second.items()}
        cases.assert_same(apply.gather_parameters(got), expected)
        direction = {k: mf.DBuffer(b.spec, torch.ones_like(b.local_buffer)) for k, b in params.items()}
        along = torch.func.jvp(grad(loss), (params,), (direction,))[1]
        cases.assert_same(apply.gather_parameters(along), hessian_ones)
        own = torch.func.jvp(lambda w: loss_of(functional_call(module, w, (x,)), x), (weights,), (ones,))[1]
        torch.testing.assert_close(torch.func.jvp(loss, (params,), (direction,))[1], own, rtol=1e-10, atol=1e-12)

    on_each(shape, program)


@pytest.mark.parametrize("roles", ["two", "hsdp", "zero2", "outer"])
def test_vmap(roles: str) -> None:
    """Over several weights at once, inside and outside of the gradient."""
    module, data = net(), cases.batches(4)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles))
        x = data[number(mesh)]

        def loss(params: Any, factor: torch.Tensor) -> torch.Tensor:
            return loss_of(apply(cases.scaled(params, factor), x), x)

        factors = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
        each = [grad(loss)(params, factor) for factor in factors]
        mapped = torch.func.vmap(grad(loss), in_dims=(None, 0))(params, factors)
        for n, expected in enumerate(each):
            given = {key: mf.DBuffer(b.spec, b.local_buffer[n]) for key, b in mapped.items()}
            cases.assert_same_buffers(given, expected)
        summed = grad(lambda params: torch.func.vmap(loss, in_dims=(None, 0))(params, factors).sum())(params)
        total = {key: mf.DBuffer(b.spec, sum(e[key].local_buffer for e in each)) for key, b in params.items()}
        cases.assert_same_buffers(summed, total)

    on_each(ROLES[roles][0], program)


@pytest.mark.parametrize("roles", ["two", "zero2"])
def test_dropout_draws_the_same_mask_again(roles: str) -> None:
    """In the backward pass, and as the whole module draws it; random states go on alike."""
    module, x = net(dropout=0.5), cases.batches(1)[0]
    weights = {name: param.detach() for name, param in module.named_parameters()}
    torch.manual_seed(5)
    expected = grad(lambda weights: loss_of(functional_call(module, weights, (x,)), x))(weights)
    after = torch.rand(1)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles))
        torch.manual_seed(5)
        gradients = grad(lambda params: loss_of(apply(params, x), x))(params)
        assert torch.equal(torch.rand(1), after)
        cases.assert_same(apply.gather_parameters(gradients), expected)
        apply.eval()
        assert torch.equal(apply(params, x), apply(params, x))
        apply.train()
        assert not torch.equal(apply(params, x), apply(params, x))

    on_each(ROLES[roles][0], program)


def test_mode_and_autocast_of_the_forward_pass() -> None:
    """A backward pass runs units as they ran, whatever has been switched since."""
    module, x = net(dropout=0.5).float(), cases.batches(1)[0]

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        gradients = []
        for switch in (False, True):
            leaves = cases.leaves_of(params)
            torch.manual_seed(3)
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(apply(leaves, x), x)
                if not switch:
                    loss.backward()
            if switch:
                apply.eval()
                loss.backward()
                apply.train()
            gradients.append({key: b.local_buffer.grad for key, b in leaves.items()})
        cases.assert_same(gradients[0], gradients[1], rtol=0, atol=0)

    on_each((2,), program)


@pytest.mark.parametrize("parameter", [ROWS, FULL], ids=repr)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, None], ids=str)
def test_mixed_precision(reduce_dtype: torch.dtype | None, parameter: Any) -> None:
    """fp32 main weights, bf16 compute; bitwise a step written by hand."""
    module, data = net(tie=False).float(), cases.batches(2)
    half = {name: param.detach().bfloat16() for name, param in module.named_parameters()}
    terms = [grad(lambda half, x=x: loss_of(functional_call(module, half, (x,)).float(), x))(half) for x in data]
    travels = reduce_dtype or torch.bfloat16
    means = {  # a fold of halves in float32, rounded once; then divided
        name: (sum(term[name].to(travels).float() for term in terms).to(travels) / 2).float() for name in half
    }

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(
            param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, output_dtype=torch.float32, deterministic=True
        )
        placements = mf.Placements(0, [parameter], [ROWS], [ROWS])
        apply, params = mf.fully_shard(module, mesh, placements, context=context)
        x = data[number(mesh)]
        output = apply(params, x)
        assert output.dtype == torch.float32
        assert params["words"].dtype == torch.float32
        gradients = grad(lambda params: loss_of(apply(params, x), x))(params)
        assert gradients["words"].dtype == torch.float32
        cases.assert_same(apply.gather_parameters(gradients), means, rtol=0, atol=0)

    on_each((2,), program)


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)])
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x + self.table)
        return x.square().mean()


@pytest.mark.parametrize("parameter", [ROWS, FULL], ids=repr)
def test_module_buffers(parameter: Any) -> None:
    """Tables are kept; running statistics count each batch once, on each rank its own."""
    torch.manual_seed(0)
    module, data = WithStatistics(), torch.randn(2, 8, 4)
    dense = [copy.deepcopy(module) for _ in range(2)]
    for model, x in zip(dense, data, strict=True):
        for _ in range(2):
            model(x)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [parameter], [ROWS], [ROWS]))
        x = data[number(mesh)]
        grad(lambda params: apply(params, x))(params)
        apply(cases.leaves_of(params), x).backward()
        expected = dict(dense[number(mesh)].named_buffers())
        assert int(expected["layers.0.1.num_batches_tracked"]) == 2
        cases.assert_same(apply.named_buffers(), expected)
        assert set(apply.named_buffers()) == set(expected)

    on_each((2,), program)
    assert int(module.layers[0][1].num_batches_tracked) == 0


def test_buffers_that_a_forward_pass_changes_and_reads() -> None:
    """The backward pass starts from what the forward pass started from (here: power iteration)."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)) for _ in range(2))).double()
    dense, x, expected = copy.deepcopy(module), torch.randn(3, 4, dtype=torch.float64), []
    for _ in range(3):
        dense.zero_grad()
        dense(x).square().sum().backward()
        expected.append({name: param.grad.clone() for name, param in dense.named_parameters()})

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"), units=["0", "1"])
        for wanted in expected:
            gradients = grad(lambda p: apply(p, x).square().sum())(params)
            cases.assert_same(apply.gather_parameters(gradients), wanted)

    on_each((2,), program)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 6, 10))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.einsum("bi,eio->beo", x, self.up) * self.logit_scale.exp()).square().mean()


def test_three_dims_and_none() -> None:
    """Experts are cut by whole experts, or finer; a logit scale lies on one rank."""
    torch.manual_seed(0)
    module, data = Experts().double(), torch.randn(4, 8, 6, dtype=torch.float64)
    weights = {name: param.detach() for name, param in module.named_parameters()}
    expected = grad(lambda w: torch.stack([functional_call(module, w, (x,)) for x in data]).mean())(weights)
    stored = {}

    def program(mesh: mf.Mesh) -> None:
        for finer in (frozenset(), frozenset({"up"})):
            context = mf.FsdpContext(finer_rows=finer, shard_layout=mf.ShardLayout.BALANCED)
            apply, params = mf.fully_shard(module, mesh, place(mesh, "four"), context=context)
            (buffer,) = params.values()
            stored[bool(finer)] = buffer.spec.local_numel
            assert buffer.layout.tensor_shapes[0] == torch.Size([4, 6, 10])
            gradients = grad(lambda p, apply=apply: apply(p, data[number(mesh)]))(params)
            cases.assert_same(apply.gather_parameters(gradients), expected)
            assert apply.gather_parameters(params)["logit_scale"].shape == ()

    on_each((4,), program)
    assert stored == {False: 61, True: 61}


def with_nan_in_padding(buffer: mf.DBuffer) -> mf.DBuffer:
    local = torch.full_like(buffer.local_buffer, torch.nan)
    for span in buffer.spec.filled:
        local[span.start : span.end] = buffer.local_buffer[span.start : span.end]
    return mf.DBuffer(buffer.spec, local)


@pytest.mark.parametrize("roles", ["four", "zero2", "both"])
def test_nan_in_padding_changes_nothing(roles: str) -> None:
    """No gradient, no norm, no weight."""
    module, data, optimizer = net(), cases.batches(4), adamw(0.1)

    def train(apply: Any, params: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor, Any]:
        state = optimizer.init(params)
        for _ in range(2):
            gradients = grad(lambda p: loss_of(apply(p, x), x))(params)
            updates, state = optimizer.update(gradients, state, params)
            params = apply_updates(params, updates)
        return gradients, mf.global_norm(gradients), params

    def program(mesh: mf.Mesh) -> int:
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles))
        planted = {key: with_nan_in_padding(buffer) for key, buffer in params.items()}
        x = data[number(mesh)]
        gradients, norm, trained = train(apply, params, x)
        same_gradients, same_norm, same_trained = train(apply, planted, x)
        assert torch.equal(norm, same_norm)
        cases.assert_same_buffers(same_gradients, gradients, rtol=0, atol=0)
        cases.assert_same_buffers(same_trained, trained, rtol=0, atol=0)
        assert not any(buffer.local_buffer.isnan().any() for buffer in same_gradients.values())
        return sum(int(buffer.local_buffer.isnan().sum()) for buffer in planted.values())

    assert sum(on_each(ROLES[roles][0], program).values()) > 0


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 5, batch_first=True)
        self.shared = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.cell(x)
        return self.shared(torch.tanh(self.shared(y))).square().mean()


def test_a_unit_used_twice_and_a_recurrent_one() -> None:
    torch.manual_seed(0)
    module, data = Recurrent().double(), torch.randn(2, 3, 7, 4, dtype=torch.float64)
    weights = {name: param.detach() for name, param in module.named_parameters()}
    expected = grad(lambda w: torch.stack([functional_call(module, w, (x,)) for x in data]).mean())(weights)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        for _ in range(2):
            gradients = grad(lambda p: apply(p, data[number(mesh)]))(params)
            cases.assert_same(apply.gather_parameters(gradients), expected)

    on_each((2,), program)


class Shares(nn.Module):
    """One embedding under three names, one norm inside both layers, and what `torch.func` refuses inside of units."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(WORDS, 4)
        self.encoder, self.decoder, norm = nn.Module(), nn.Module(), nn.LayerNorm(4)
        self.encoder.words, self.decoder.words = self.shared, self.shared
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), OldFunction(), norm) for _ in range(2)])

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.encoder.words(words)
        for layer in self.layers:
            x = x + layer(x)
        return (x * self.decoder.words(words)).square().mean()


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # without setup_context
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


class OldFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Tripled.apply(x)


def test_shared_modules_and_functions_of_old() -> None:
    torch.manual_seed(0)
    module, data = Shares().double(), cases.batches(2)
    for x in data:
        (module(x) / 2).backward()
    expected = {name: param.grad for name, param in module.named_parameters()}

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        assert list(apply.groups) == ["shared", "layers.0", "layers.1"]
        assert apply.places["decoder.words.weight"] == apply.places["shared.weight"] == ("shared", 0)
        assert apply.places["layers.1.2.bias"] == apply.places["layers.0.2.bias"]
        x = data[number(mesh)]
        gradients = grad(lambda params: apply(params, x))(params)
        cases.assert_same(apply.gather_parameters(gradients), expected)
        leaves = cases.leaves_of(params)
        apply(leaves, x).backward()
        plain = {key: mf.DBuffer(b.spec, b.local_buffer.grad) for key, b in leaves.items()}
        cases.assert_same_buffers(plain, gradients)

    on_each((2,), program)


class Fresh(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 7)
        self.norm = nn.BatchNorm1d(7)
        self.own = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.own)


def test_meta_modules_start_alike_on_every_mesh() -> None:
    """Whatever was drawn before, on every rank; buffers too."""
    with torch.device("meta"):
        module = Fresh()
    found: list[dict[str, torch.Tensor]] = []

    def program(mesh: mf.Mesh) -> None:
        torch.manual_seed(100 + mesh.get_rank())
        roles = "both" if mesh.ndim == 2 else {1: "one", 2: "two", 4: "four"}[mesh.size()]
        state = torch.get_rng_state()
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles))
        assert torch.equal(torch.get_rng_state(), state)
        found.append(apply.gather_parameters(params) | apply.named_buffers())

    for shape in ((1,), (2,), (4,), (2, 2)):
        on_each(shape, program)
    for other in found[1:]:
        cases.assert_same(other, found[0], rtol=0, atol=0)
    assert found[0]["fc.weight"].std() > 0.1
    assert torch.equal(found[0]["norm.running_var"], torch.ones(7))


def test_meta_modules_by_init() -> None:
    with torch.device("meta"):
        module = Fresh()

    def init(name: str, sub: nn.Module) -> None:
        for param in sub.parameters(recurse=False):
            param.fill_(float(len(name)))
        for buffer in sub.buffers(recurse=False):
            buffer.fill_(7)

    mesh = mf.Mesh(1, rank=0)

    def shard(**choices: Any) -> tuple[Any, Any]:
        return mf.fully_shard(module, mesh, mf.Placements(0, [ROWS], [ROWS], [ROWS]), context=mf.FsdpContext(**choices))

    apply, params = shard(init=init)
    values = mf.simulate(lambda mesh: apply.gather_parameters(params), 1).results[0]
    assert (values["own"] == 0).all()
    assert (values["norm.weight"] == 4).all()
    assert (apply.named_buffers()["norm.running_mean"] == 7).all()
    with pytest.raises(ValueError, match=r"left NaN in parameter 'own'"):
        shard(init=lambda name, sub: None)
    with torch.device("meta"):
        module = nn.Sequential(nn.RMSNorm(3), nn.ParameterList([torch.empty(2)]))
    with pytest.raises(ValueError, match=r"module '1' \(ParameterList\) .*no reset_parameters.*init="):
        shard()


def test_values_that_differ_between_ranks_are_seen() -> None:
    def program(mesh: mf.Mesh) -> None:
        torch.manual_seed(mesh.get_rank() // 2)
        with mf.agreement_check():
            mf.fully_shard(nn.Linear(3, 3), mesh, place(mesh, "four"))

    with pytest.raises(ValueError, match=r"fully_shard.*on ranks \[0, 1\].*on ranks \[2, 3\]"):
        on_each((4,), program)


def test_without_gradients_nothing_is_kept() -> None:
    """Inference gathers once, and leaves units free to cache and to write."""
    module, x = net(), cases.batches(1)[0]

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        with torch.no_grad():
            expected = module(x)
        for _ in range(2):
            torch.testing.assert_close(apply(params, x), expected, rtol=1e-12, atol=1e-12)
        with torch.inference_mode():
            torch.testing.assert_close(apply(params, x), expected, rtol=1e-12, atol=1e-12)

    on_each((2,), program)


def test_padding_warns() -> None:
    module = nn.Linear(7, 9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on_each((4,), lambda mesh: mf.fully_shard(module, mesh, place(mesh, "four")))
    assert {warning.category for warning in caught} == {mf.PaddingWarning}


def test_padding_beyond_the_limit_is_refused() -> None:
    """Rows of 997, 991 and 983 elements have a least common multiple of almost 10^9."""
    module = nn.ParameterList([torch.ones(85, size) for size in (997, 991, 983)])

    def shard(mesh: mf.Mesh, **choices: Any) -> int:
        _, params = mf.fully_shard(module, mesh, place(mesh, "two"), context=mf.FsdpContext(**choices))
        return sum(buffer.local_buffer.numel() for buffer in params.values())

    with pytest.raises(ValueError, match=r"BALANCED stores 25\d,\d\d\d .*beyond max_padding=4.0") as caught:
        on_each((2,), shard)
    assert any("in group" in note for note in caught.value.__notes__)
    with pytest.raises(ValueError, match=r"beyond max_padding=1000.0"):
        on_each((2,), lambda mesh: shard(mesh, max_padding=1000.0))
    for layout in (mf.ShardLayout.BALANCED, mf.ShardLayout.UNPADDED):
        stored = on_each((2,), lambda mesh, layout=layout: shard(mesh, shard_layout=layout, max_padding=1.01))
        assert 252_535 <= sum(stored.values()) < 252_535 + 2 * 997


def test_few_rows_are_no_padding_of_the_layout() -> None:
    """A scalar on eight ranks stores eight elements, however its rows are cut."""
    module = nn.ParameterList([torch.tensor(1.0)])

    def stored(mesh: mf.Mesh) -> list[int]:
        _, params = mf.fully_shard(module, mesh, mf.Placements([0], ROWS, ROWS, ROWS))
        return [buffer.local_buffer.numel() for buffer in params.values()]

    assert on_each((8,), stored) == {rank: [1] for rank in range(8)}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"shard_layout": "unpadded"}, r"got 'unpadded'; use ShardLayout.UNPADDED"),
        ({"shard_layout": None}, r"got None; use ShardLayout.PADDED or ShardLayout.UNPADDED or"),
        ({"max_padding": 0.5}, "max_padding must be a number of at least 1, got 0.5"),
        ({"max_padding": float("nan")}, "max_padding must be a number of at least 1, got nan"),
        ({"max_padding": "4"}, "max_padding must be a number of at least 1, got '4'"),
    ],
)
def test_wrong_contexts(choices: dict[str, Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        mf.FsdpContext(**choices)


class Counting(nn.Module):
    """Two units, of which each counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.BatchNorm1d(6), nn.BatchNorm1d(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


def test_deep_copies_of_apply_have_buffers_and_modes_of_their_own() -> None:
    torch.manual_seed(0)
    module, x = Counting().double(), torch.randn(4, 6, dtype=torch.float64)
    expected = grad(lambda w: functional_call(copy.deepcopy(module), w, (x,)))(dict(module.named_parameters()))

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        twin = copy.deepcopy({"apply": apply})["apply"]
        for _ in range(2):
            gradients = grad(lambda params: twin(params, x))(params)
            cases.assert_same(twin.gather_parameters(gradients), expected)
        name = "blocks.1.num_batches_tracked"
        assert (int(apply.named_buffers()[name]), int(twin.named_buffers()[name])) == (0, 2)
        again = copy.deepcopy(twin).eval()
        again(params, x)
        twin(params, x)
        apply(params, x)
        counted = [int(each.named_buffers()[name]) for each in (apply, twin, again)]
        assert counted == [1, 3, 2]
        with pytest.raises(TypeError, match="call fully_shard again where"):
            pickle.dumps(apply)

    on_each((2,), program)
