"""Routes: the decision for every parameter, and one transformation that carries it out."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import grad

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.optim.block_split import join_blocks, split_blocks
from tests import fsdp_cases as cases

ROWS, FULL = mf.RowAtomic(), mf.Replicate()
RATES = {"muon": 0.05, "adamw": 0.01}


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.out = nn.Linear(8, 8)
        self.depthwise = nn.Conv1d(8, 8, 3, padding=1, groups=8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + self.out(torch.tanh(q) * torch.tanh(k) + v)
        return x + self.conv(self.depthwise(x.mT)).mT


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(8, 17)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def test_a_line_for_every_parameter_and_why() -> None:
    found = optim.route(model())
    told = {line.name: (line.optimizer, line.why) for line in found.lines}
    assert list(told) == [name for name, _ in model().named_parameters()]
    assert told["embed.weight"] == ("adamw", "embedding")
    assert told["lm_head.weight"] == ("adamw", "head")
    assert told["layers.0.norm.weight"] == ("adamw", "norm")
    assert told["layers.1.qkv.weight"] == ("muon", "matrix of a block, fused")
    assert told["layers.1.out.weight"] == ("muon", "matrix of a block")
    assert told["layers.0.out.bias"] == ("adamw", "bias: not a matrix")
    assert told["layers.0.depthwise.weight"] == ("adamw", "depthwise convolution: not a matrix")
    assert told["layers.0.conv.weight"] == ("muon", "convolution")
    assert str(found["layers.0.qkv.weight"].blocks) == "(q + k + v) m -> q m | k m | v m k=8 q=8 v=8"
    assert found["layers.0.conv.weight"].factors == (1.0,)
    assert hash(found) == hash(optim.route(model()))
    assert len(found.summary().splitlines()) < len(str(found).splitlines())
    with torch.device("meta"):
        assert optim.route(Model()) == found


def test_overrides_by_pattern() -> None:
    heads = optim.blocks("((q + k + v) h d) m -> q h d m | k h d m | v h d m", q=1, k=1, v=1, d=4)
    chosen = {
        "*.qkv.weight": heads,
        "layers.0.*": "adamw",
        "lm_head.weight": "muon",
        "layers.0.qkv.weight": "n m -> m n",
    }
    found = optim.route(model(), chosen)
    assert found["layers.1.qkv.weight"].blocks == heads
    assert (found["layers.0.out.weight"].optimizer, found["lm_head.weight"].optimizer) == ("adamw", "muon")
    assert found["layers.0.qkv.weight"].why == "asked for by 'layers.0.qkv.weight'"
    assert optim.route(model()).override(chosen) == found
    with pytest.raises(ValueError, match=r"pattern 'layer\.\*' matches no parameter that is trained"):
        optim.route(model(), {"layer.*": "adamw"})
    with pytest.raises(ValueError, match="the left has 3 dims, the parameter 2"):
        optim.route(model(), {"*.out.weight": "a b c -> a b c"})
    with pytest.raises(ValueError, match="with one arrow"):
        optim.route(model(), {"*.out.weight": "sgd"})


def test_frozen_parameters_get_nothing() -> None:
    module = model()
    module.embed.weight.requires_grad_(False)
    assert optim.route(module)["embed.weight"].optimizer == "frozen"


def test_names_alone_decide_likewise() -> None:
    shapes = {name: param.shape for name, param in model().named_parameters()}
    by_name, by_module = optim.route(shapes), optim.route(model())
    for one, other in zip(by_name.lines, by_module.lines, strict=True):
        assert one.optimizer == other.optimizer, one.name


# One transformation


def dense_train(steps: int, data: torch.Tensor, found: optim.Route) -> dict[str, torch.Tensor]:
    """Each matrix by itself, stored apart; the rest by AdamW."""
    module = model()
    weights = {name: param.detach() for name, param in module.named_parameters()}

    def apart(tensors: dict[str, torch.Tensor]) -> dict[Any, torch.Tensor]:
        parts: dict[Any, torch.Tensor] = {}
        for line in found.lines:
            if line.blocks is None:
                parts[line.name] = tensors[line.name]
                continue
            for n, kind in enumerate(split_blocks(tensors[line.name], line.blocks)):
                for m, matrix in enumerate(kind.reshape(-1, *kind.shape[-2:])):
                    parts[line.name, n, m] = matrix.contiguous()
        return parts

    def together(parts: dict[Any, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for line in found.lines:
            if line.blocks is None:
                tensors[line.name] = parts[line.name]
                continue
            kinds = split_blocks(weights[line.name], line.blocks)
            new = [
                torch.stack([parts[line.name, n, m] for m in range(kind.shape[:-2].numel())]).reshape(kind.shape)
                for n, kind in enumerate(kinds)
            ]
            tensors[line.name] = join_blocks(new, line.blocks, line.shape)
        return tensors

    params = apart(weights)
    keys = [key for key in params if isinstance(key, tuple)]
    rest = [key for key in params if not isinstance(key, tuple)]
    optimizer = optim.partition((keys, optim.muon(RATES["muon"])), (rest, optim.adamw(RATES["adamw"])))
    state = optimizer.init(params)
    for _ in range(steps):
        with torch.no_grad():
            for name, param in module.named_parameters():
                param.copy_(together(params)[name])
        gradients, _ = cases.dense_step(module, data)
        updates, state = optimizer.update(apart(gradients), state, params)
        params = optim.apply_updates(params, updates)
    return together(params)


PLACES = {
    "rows": ((4,), [ROWS]),
    "HSDP": ((2, 2), [FULL, ROWS]),
    "replicas": ((2,), [FULL]),
    "blocks": ((2,), [mf.BlockAtomic(1)]),
}


@pytest.mark.parametrize("place", PLACES)
def test_three_lines_train_as_one_process_does(place: str) -> None:
    shape, placement = PLACES[place]
    data = cases.batches(4)[: torch.Size(shape).numel()]
    heads = {"*.qkv.weight": optim.blocks("(three h d) m -> three h d m", three=3, d=4)}
    expected = dense_train(3, data, optim.route(model(), heads))

    def program(mesh: mf.Mesh) -> tuple[dict[str, torch.Tensor], Any]:
        module, axes = model(), tuple(range(mesh.ndim))
        context = mf.FsdpContext(shard_layout=mf.ShardLayout.BALANCED)
        apply, params = mf.fully_shard(module, mesh, mf.Placements(axes, *[placement] * 3), context=context)
        optimizer = optim.from_route(optim.route(module), params, **RATES, blocks=heads)
        state, x = optimizer.init(params), data[cases.number(mesh)]
        for _ in range(3):
            gradients = grad(lambda params: cases.loss_of(apply(params, x), x))(params)
            updates, state = optimizer.update(gradients, state, params)
            params = optim.apply_updates(params, updates)
        same = optim.from_route(optim.route(module), params, **RATES, blocks=heads, names=apply.names)
        assert torch.utils._pytree.tree_structure(same.init(params)) == torch.utils._pytree.tree_structure(state)
        return apply.gather_parameters(params), optim.plan_route(optim.route(module, heads), params).trade

    for weights, trade in mf.simulate(program, shape).results.values():
        cases.assert_same(weights, expected, rtol=1e-10, atol=1e-10)
        assert trade.imbalance < 2


def test_one_exchange_each_way() -> None:
    """However many groups there are."""

    def program(mesh: mf.Mesh) -> int:
        module = model()
        context = mf.FsdpContext(shard_layout=mf.ShardLayout.BALANCED)
        _, params = mf.fully_shard(module, mesh, mf.Placements(0, [ROWS], [ROWS], [ROWS]), context=context)
        optimizer = optim.from_route(optim.route(module), params, **RATES)
        state = optimizer.init(params)
        with cases.calls_watched() as labels:
            optimizer.update(params, state, params)
        return sum(label.startswith(("gather", "scatter")) for label in labels[mesh.get_rank()])

    assert set(mf.simulate(program, 2).results.values()) == {2}


def small(mesh: mf.Mesh) -> tuple[nn.Module, dict[str, mf.DBuffer]]:
    module = model()
    context = mf.FsdpContext(shard_layout=mf.ShardLayout.UNPADDED)
    return module, mf.fully_shard(module, mesh, mf.Placements(0, [ROWS], [ROWS], [ROWS]), context=context)[1]


def test_how_an_optimizer_is_given() -> None:
    module, params = small(mf.Mesh(1, rank=0))
    route = optim.route(module)
    expected = optim.from_route(route, params, muon=0.05, adamw=0.01)
    updates, _ = expected.update(params, expected.init(params), params)
    for muon, adamw in [
        (partial(optim.muon, 0.05), partial(optim.adamw, 0.01)),
        ({"learning_rate": 0.05}, {"learning_rate": 0.01}),
        (lambda step: 0.05, lambda step: 0.01),
        (torch.tensor(0.05, dtype=torch.float64), optim.adamw(0.01)),
    ]:
        optimizer = optim.from_route(route, params, muon=muon, adamw=adamw)
        found, _ = optimizer.update(params, optimizer.init(params), params)
        cases.assert_same_buffers(found, updates)


def test_what_cannot_be_carried_out_is_refused() -> None:
    module, params = small(mf.Mesh(1, rank=0))
    route = optim.route(module)
    with pytest.raises(ValueError, match="the route names muon; give muon="):
        optim.from_route(route, params, adamw=0.1)
    with pytest.raises(TypeError, match="finished transformation, which cannot be given owners"):
        optim.from_route(route, params, muon=optim.muon(0.1), adamw=0.1)
    with pytest.raises(ValueError, match=r"no buffer holds parameter 'layers.1.norm.weight'"):
        optim.from_route(route, {k: b for k, b in params.items() if k != "layers.1"}, **RATES)
    with pytest.raises(ValueError, match="matches no parameter"):
        optim.from_route(route, params, **RATES, blocks={"q": "a b -> a b"})
    other = optim.route({name: (*line.shape, 1) for name, line in ((line.name, line) for line in route.lines)})
    with pytest.raises(ValueError, match=r"give names=apply.names"):
        optim.from_route(other, params, **RATES)
