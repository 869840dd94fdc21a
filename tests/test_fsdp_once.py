"""A unit's forward runs once: what it does in Python counts once, and the gradients are the dense ones, bit for bit."""

import copy
import functools
import random
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

import mfsdp_func as mf
from mfsdp_func.fsdp import Escape
from tests import fsdp_cases as cases
from tests.fsdp_cases import FULL, ROWS, on_each, place

pytestmark = [
    pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning"),
    pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Complex modules are a new feature:UserWarning"),
]

HOW = ["grad", "backward"]


def gradients_of(apply: Any, params: Any, how: str, *args: Any) -> dict[str, torch.Tensor]:
    """By `torch.func`, or by plain autograd; whole, by name."""
    if how == "grad":
        return apply.gather_parameters(grad(lambda params: apply(params, *args))(params))
    leaves = cases.leaves_of(params)
    apply(leaves, *args).backward()
    found = {
        key: mf.DBuffer(
            b.spec, torch.zeros_like(b.local_buffer) if b.local_buffer.grad is None else b.local_buffer.grad
        )
        for key, b in leaves.items()
    }
    return apply.gather_parameters(found)


def dense_gradients(module: nn.Module, *args: Any) -> dict[str, torch.Tensor]:
    module.zero_grad()
    module(*args).backward()
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def assert_as_dense(module: nn.Module, how: str, *args: Any, roles: str = "one", **choices: Any) -> Any:
    """On one rank, or on two with the same batch; returns the `apply` of the last rank."""
    random.seed(7)
    np.random.seed(7)  # noqa: NPY002
    torch.manual_seed(7)
    expected, found = dense_gradients(copy.deepcopy(module), *args), []

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles), **choices)
        random.seed(7)
        np.random.seed(7)  # noqa: NPY002
        torch.manual_seed(7)
        exact = {"rtol": 0, "atol": 0} if mesh.size() == 1 else {}
        cases.assert_same(gradients_of(apply, params, how, *args), expected, **exact)
        found.append(apply)

    on_each(cases.ROLES[roles][0], program)
    return found[-1]


@dataclass
class Output:
    value: torch.Tensor
    count: int


class Part(nn.Module):
    """A unit that does something by the name `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.more, self.kind, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), kind, 0
        self.seed = 3

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.more(torch.tanh(self.fc(x))))

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return KINDS[self.kind](self, x)


def drawn(part: Part) -> torch.Tensor:
    generator = torch.Generator().manual_seed(part.seed)
    part.seed += 1
    return torch.rand(4, generator=generator)


def captured(part: Part, x: torch.Tensor) -> torch.Tensor:
    weight, y = part.fc.weight, part.fc(x)
    return checkpoint(lambda z: torch.tanh(z @ weight) + y, x, use_reentrant=False)


def hooked(part: Part, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return part.inner(x)


def on_cpu(part: Part, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return part.inner(x)


KINDS: dict[str, Callable[[Part, torch.Tensor], Any]] = {
    "Python's random": lambda part, x: part.inner(x) * random.random(),
    "NumPy's random": lambda part, x: part.inner(x) * float(np.random.rand()),  # noqa: NPY002
    "a generator of its own": lambda part, x: part.inner(x) * drawn(part),
    "its argument": lambda part, x: x,
    "x + p": lambda part, x: x + part.fc.bias,
    "a parameter": lambda part, x: (x, part.fc.bias),
    "x + f(x.detach())": lambda part, x: x + part.inner(x.detach()),
    "straight through": lambda part, x: x + (x.sign() - x).detach() + part.fc.bias,
    "a dataclass": lambda part, x: Output(part.inner(x), 3),
    "a view": lambda part, x: part.inner(x).view(-1).view(x.shape),
    "checkpointing": lambda part, x: checkpoint(part.inner, x, use_reentrant=False),
    "checkpointing a closure": captured,
    "hooks": hooked,
    "save_on_cpu": on_cpu,
    "plain": Part.inner,
}


class Parts(nn.Module):
    def __init__(self, kind: str, around: str = "") -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList([Part(kind) for _ in range(2)])
        self.around = around

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for layer in self.layers:
            if self.around == "unit":
                x = checkpoint(layer, x, use_reentrant=False)
            elif self.around == "more":
                x = checkpoint(lambda x, layer=layer: torch.tanh(layer(x)) * self.scale, x, use_reentrant=False)
            elif self.around == "save_on_cpu":
                with torch.autograd.graph.save_on_cpu():
                    x = layer(x)
            else:
                x = layer(x)
            if isinstance(x, Output):
                assert x.count == 3
                x = x.value
            elif isinstance(x, tuple):
                x = x[0] + x[1]
        return x.square().mean()


def parts(kind: str, around: str = "") -> tuple[Parts, torch.Tensor]:
    torch.manual_seed(0)
    return Parts(kind, around).double(), torch.randn(2, 4, dtype=torch.float64)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", KINDS)
def test_a_unit_counts_once(kind: str, how: str) -> None:
    module, x = parts(kind)
    apply = assert_as_dense(module, how, x)
    assert [layer.calls for layer in apply._skeleton.layers] == [1, 1]


@pytest.mark.parametrize("roles", ["two", "zero2", "outer"])
def test_on_several_ranks(roles: str) -> None:
    module, x = parts("plain")
    for how in HOW:
        assert_as_dense(module, how, x, roles=roles)


@pytest.mark.parametrize(
    ("around", "how"), [("unit", "grad"), *((a, "backward") for a in ("unit", "more", "save_on_cpu"))]
)
def test_activation_checkpointing_around_units(around: str, how: str) -> None:
    module, x = parts("plain", around)
    apply = assert_as_dense(module, how, x)
    assert [layer.calls for layer in apply._skeleton.layers] == [1 if around == "save_on_cpu" else 2] * 2


def test_activation_checkpointing_around_apply() -> None:
    module, x = parts("plain")
    expected = dense_gradients(copy.deepcopy(module), x)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        leaves = cases.leaves_of(params)
        checkpoint(apply, leaves, x, use_reentrant=False).backward()
        found = {key: mf.DBuffer(b.spec, b.local_buffer.grad) for key, b in leaves.items()}
        cases.assert_same(apply.gather_parameters(found), expected)

    on_each((2,), program)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("recompute", [True, ("layers.0",)])
def test_recomputation(how: str, recompute: Any) -> None:
    """The same draws of torch, Python and NumPy; what cannot be the same again is named."""
    for kind in ("Python's random", "NumPy's random", "plain"):
        module, x = parts(kind)
        apply = assert_as_dense(module, how, x, context=mf.FsdpContext(recompute=recompute))
        assert [layer.calls for layer in apply._skeleton.layers] == [2, 2 if recompute is True else 1]
    module, x = parts("a generator of its own")
    with pytest.raises(RuntimeError, match=r"unit 'layers\.\d' runs again .* output 0 differs"):
        assert_as_dense(module, how, x, context=mf.FsdpContext(recompute=recompute))
    with pytest.raises(ValueError, match=r"recompute names 'layer\.0', expected names of units"):
        assert_as_dense(module, how, x, context=mf.FsdpContext(recompute=("layer.0",)))


def test_a_graph_that_is_retained_serves_again() -> None:
    module, x = parts("plain")

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        leaves = cases.leaves_of(params)
        loss = apply(leaves, x)
        tensors = [buffer.local_buffer for buffer in leaves.values()]
        first = torch.autograd.grad(loss, tensors, retain_graph=True)
        again = torch.autograd.grad(loss, tensors)
        for a, b in zip(first, again, strict=True):
            assert torch.equal(a, b)
        assert [layer.calls for layer in apply._skeleton.layers] == [1, 1]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, tensors)

    on_each((1,), program)


@pytest.mark.parametrize("how", HOW)
def test_writing_into_what_is_needed_is_found(how: str) -> None:
    """As autograd finds it: in the unit, and in its results afterwards."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Part("plain")])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x).mul_(2).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace"):
        assert_as_dense(Writes(), how, torch.ones(2, 4))

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(Writes(), mesh, place(mesh, "one"))
        with pytest.raises(RuntimeError, match=r"unit 'layers\.0': one of the variables .* modified by an inplace"):
            gradients_of(apply, params, how, torch.ones(2, 4))

    on_each((1,), program)


class Flops(TorchDispatchMode):
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=output)
        return output


def flops_of(function: Callable[[], Any]) -> int:
    with Flops() as flops:
        function()
    return flops.total


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_models_cost_what_they_cost_whole(name: str, checkpointing: bool) -> None:
    """Floating-point operations of forward and backward, and every bit of the gradients."""
    models = pytest.importorskip("tests.test_fsdp_models")
    model, x = models.model_of(name).train(), models.words(1)[0]
    if checkpointing:
        model.gradient_checkpointing_enable()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> torch.Tensor:
            return cases.loss_of(self.model(x).logits, x)

    whole, expected = Loss(), {}
    dense = flops_of(lambda: expected.update(dense_gradients(whole)))

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(whole, mesh, place(mesh, "one"))
        for how in HOW[1 if checkpointing else 0 :]:
            found: dict[str, torch.Tensor] = {}
            assert flops_of(lambda: found.update(gradients_of(apply, params, how))) == dense  # noqa: B023
            cases.assert_same(found, expected, rtol=0, atol=0)

    on_each((1,), program)


@pytest.mark.parametrize("frozen", [(), ("layers.0",), ("layers.2",), ("layers.1.0.weight", "layers.2.0")], ids=str)
def test_nothing_is_computed_that_nobody_asks_for(frozen: tuple[str, ...]) -> None:
    """Neither gradients of frozen parameters, nor those of inputs before which nothing is trained."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().sum()

    module, dense, x = Stack(), Stack(), torch.randn(4, 8)
    for name, param in dense.named_parameters():
        param.requires_grad_(not any(name == given or name.startswith(f"{given}.") for given in frozen))
    expected = flops_of(lambda: dense(x).backward())

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        fewer = apply.freeze(params, frozen)
        assert flops_of(lambda: apply(cases.leaves_of(fewer), x).backward()) == expected
        assert flops_of(lambda: grad(lambda params: apply(params, x))(fewer)) == expected
        assert not apply(fewer, x).requires_grad

    on_each((1,), program)


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.fc(x)) * (1 + self.bn.running_var)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.k = nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fc(x)) * self.k


class Uses(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for k in (1.0, 3.0):
            self.layers[0].k = k
            x = self.layers[0](x)
        return x.square().sum()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("block", [Statistics, Scaled])
def test_state_that_changes_between_uses(block: type[nn.Module], how: str) -> None:
    torch.manual_seed(0)
    assert_as_dense(Uses(block).double(), how, torch.randn(6, 4, dtype=torch.float64))


class Caches(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        y = self.fc(x)
        if self.kind == "key":
            cache["last"] = y.detach()
            return y + cache["last"]
        if self.kind == "item":
            cache[0] = y.detach()
            return y + cache[0]
        kept = {"detached": y.detach(), "result": y, "weight": self.fc.weight, "alias": self.fc.weight.detach().t()}
        cache.append(kept[self.kind])
        return y + (sum(cache) if self.kind == "detached" else 0)


class Cached(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Caches(kind) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache: Any = {} if self.layers[0].kind == "key" else [torch.ones(2, 4)]
        for layer in self.layers:
            x = layer(x, cache)
        return x.square().sum() + sum(cache.values() if isinstance(cache, dict) else cache).sum()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["detached", "key", "item"])
def test_what_is_written_into_an_argument_stays(kind: str, how: str) -> None:
    torch.manual_seed(0)
    assert_as_dense(Cached(kind), how, torch.randn(2, 4))

    def program(mesh: mf.Mesh) -> torch.Tensor:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        with torch.no_grad():
            return apply(params, x)

    module, x = Cached(kind), torch.randn(2, 4)
    torch.testing.assert_close(on_each((2,), program)[0], module(x).detach())


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("result", r"unit 'layers\.0' keeps a differentiable tensor of shape \(2, 4\)"),
        ("weight", r"unit 'layers\.0' keeps an alias of its parameter 'layers\.0\.fc\.weight'"),
        ("alias", r"unit 'layers\.0' keeps an alias of its parameter 'layers\.0\.fc\.weight'"),
    ],
)
def test_what_outlives_a_unit_is_found_in_every_call(kind: str, message: str, how: str) -> None:
    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(Cached(kind), mesh, place(mesh, "one"))
        for _ in range(3):
            with pytest.raises(Escape, match=message):
                gradients_of(apply, params, how, torch.ones(2, 4))

    on_each((1,), program)


class Reaches(nn.Module):
    def __init__(self, reach: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.emb, self.mid, self.reach = nn.Embedding(5, 4), nn.Linear(4, 4), reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.emb.weight
        assert (tuple(weight.shape), weight.dtype, weight.ndim, weight.numel()) == ((5, 4), torch.float32, 2, 20)
        assert weight.requires_grad
        assert weight.is_leaf
        assert "absent" in repr(weight)
        return self.reach(torch.tanh(self.mid(self.emb(x))), weight).sum()


@pytest.mark.parametrize(
    "reach",
    [
        lambda h, w: h @ w.T,
        lambda h, w: h @ w.mT,
        lambda h, w: h @ w.H,
        lambda h, w: h @ w.data.T,
        lambda h, w: h @ w[0],
        lambda h, w: nn.functional.linear(h, w),
        lambda h, w: torch.cat([h, w]),
        lambda h, w: sum((h @ row).sum() for row in w),
        lambda h, w: w.tolist(),
        lambda h, w: w.clamp_(0),
    ],
)
@pytest.mark.parametrize("parameter", [ROWS, FULL], ids=repr)
def test_an_absent_parameter_never_reads_as_numbers(reach: Any, parameter: Any) -> None:
    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(Reaches(reach), mesh, mf.Placements(0, [parameter], [ROWS], [ROWS]))
        match = r"parameter emb\.weight was used outside .* unit 'emb' runs.*one module around.*shares the Parameter"
        with pytest.raises(RuntimeError, match=match):
            apply(params, torch.arange(3))

    on_each((1,), program)


class Clamps(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(4, 4)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "view":
                self.weight.view(-1)[0] = 3
            elif self.how == "data":
                self.weight.data.clamp_(-0.1, 0.1)
            else:
                self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@pytest.mark.parametrize("how", [*HOW, "no_grad"])
@pytest.mark.parametrize("parameter", [ROWS, FULL], ids=repr)
def test_writing_into_parameters_is_refused(parameter: Any, how: str) -> None:
    def run(unit: nn.Module, x: torch.Tensor) -> None:
        def program(mesh: mf.Mesh) -> None:
            module = nn.Sequential(unit, nn.Linear(4, 4), Sums())
            apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [parameter], [ROWS], [ROWS]))
            with torch.set_grad_enabled(how != "no_grad"):
                gradients_of(apply, params, how, x) if how != "no_grad" else apply(params, x)

        on_each((1,), program)

    with pytest.raises(RuntimeError, match=r"unit '0' writes into its parameter '0\.weight'.*max_norm"):
        run(nn.Embedding(5, 4, max_norm=1.0), torch.arange(3))
    for kind in ("no_grad", "view", "data"):
        with pytest.raises(RuntimeError, match=r"unit '0' writes into its parameter '0\.weight'"):
            run(Clamps(kind), torch.ones(2, 4))


class Sums(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().sum()


class Closes(nn.Module):
    """Functions that hold the module: an attribute, a bound method, one inside a list that calls the others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 2.0))
        self.layers = nn.ModuleList([nn.Linear(4, 4)])
        self.f = lambda x: x * self.scale
        self.g = self.add
        self.all = [lambda x: self.f(x) + self.g(x)]
        self.layers[0].register_forward_hook(lambda module, args, output: output + self.scale)

    def add(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.all[0](self.g(self.layers[0](x))).square().sum()


@pytest.mark.parametrize("how", HOW)
def test_functions_that_hold_the_module(how: str) -> None:
    module, x = Closes(), torch.randn(2, 4)
    expected = dense_gradients(module, x)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        cases.assert_same(gradients_of(apply, params, how, x), expected, rtol=0, atol=0)

    on_each((1,), program)


def wrapped(layer: nn.Module) -> None:
    before = layer.forward
    layer.forward = lambda x: before(x) * 3


def bound(layer: nn.Module) -> None:
    layer.forward = types.MethodType(lambda self, x: nn.functional.linear(x, self.weight) * 3, layer)


def by_partial(layer: nn.Module) -> None:
    layer.forward = functools.partial(lambda layer, x: nn.functional.linear(x, layer.weight) * 3, layer)


def by_default(layer: nn.Module) -> None:
    layer.forwards = {"plain": layer.forward}
    layer.forward = lambda x, every=layer.forwards: every["plain"](x) * 2


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.T


SET: dict[str, Callable[[nn.Module], Any]] = {
    "a hook": lambda layer: layer.register_forward_hook(lambda module, args, output: output * 2),
    "a hook before": lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "a parametrization": lambda layer: parametrize.register_parametrization(layer, "weight", Symmetric()),
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "a wrapped forward": wrapped,
    "a bound forward": bound,
    "a partial": by_partial,
    "a default": by_default,
    "a backward hook": lambda layer: layer.register_full_backward_hook(lambda module, before, after: (before[0] * 2,)),
    "a backward hook before": lambda layer: layer.register_full_backward_pre_hook(
        lambda module, after: (after[0] * 2,)
    ),
}


def with_set(kind: str) -> nn.Module:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Sums())
    SET[kind](module[1])
    return module


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", SET)
def test_what_is_set_on_a_module_before_stays(kind: str, how: str) -> None:
    x, expected = torch.ones(2, 4), dense_gradients(with_set(kind), torch.ones(2, 4))

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(with_set(kind), mesh, place(mesh, "one"))
        if "backward" in kind and how == "grad":
            with pytest.raises(RuntimeError, match=r"module '1' has backward hooks, which torch runs in backward\(\)"):
                gradients_of(apply, params, how, x)
        else:
            cases.assert_same(gradients_of(apply, params, how, x), expected)

    on_each((1,), program)


class Lists(nn.Module):
    """Parameters in a list, which does not run, and as attributes and items that are no parameters' own."""

    def __init__(self) -> None:
        super().__init__()
        self.output = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
        self.own, self.listed = (
            nn.Parameter(torch.ones(4)),
            nn.ParameterList([nn.Parameter(torch.ones(4) * n) for n in (2, 3)]),
        )
        self.more = [self.own, self.listed[1]]
        object.__setattr__(self, "other", self.listed[0])

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.listed[0] + sum(self.more) * self.other
        return self.output(last_hidden_state=y, hidden_states=(y * self.own,))


class ListsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList([Lists()]), Lists()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.last):
            output = layer(x)
            assert type(output) is layer.output
            x = output.last_hidden_state + output.hidden_states[0]
        return x.square().sum()


@pytest.mark.parametrize("how", HOW)
def test_parameters_in_lists(how: str) -> None:
    """In a unit and in a module that is held; and results of transformers' kind."""
    x = torch.randn(2, 4)
    expected = dense_gradients(ListsInside(), x)
    for roles in ("one", "zero2"):

        def program(mesh: mf.Mesh, roles: str = roles) -> None:
            apply, params = mf.fully_shard(ListsInside(), mesh, place(mesh, roles))
            cases.assert_same(gradients_of(apply, params, how, x), expected, rtol=1e-6, atol=1e-6)

        on_each(cases.ROLES[roles][0], program)


LAYER = nn.Linear(4, 4)


class Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.f = LAYER, lambda x: LAYER(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(x)


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    hooked, compiled = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        old = nn.utils.weight_norm(nn.Linear(4, 4))
    hooked.weight.register_hook(lambda gradient: gradient * 2)
    compiled[0].compile()
    rows = mf.Placements(0, [ROWS], [ROWS], [ROWS])
    for module, message in (
        (hooked, r"parameter 'weight' has tensor hooks"),
        (compiled, r"module '0' is compiled"),
        (nn.Sequential(torch.compile(nn.Linear(4, 4))), r"module '0' is compiled"),
        (
            nn.Sequential(torch.jit.script(nn.Linear(4, 4))),
            r"module '0' is scripted.*pass the module that was scripted",
        ),
        (nn.Sequential(old), r"module '0' keeps a differentiable tensor as 'weight'.*parametrizations"),
        (Global(), r"set on module '', refers to the module by the global name 'LAYER'"),
    ):
        with pytest.raises(TypeError, match=message):
            mf.fully_shard(module, mf.Mesh(1, rank=0), rows)
    linear = nn.Linear(4, 4).to(torch.complex64)
    with pytest.raises(TypeError, match=r"the imaginary part of its gradient would be dropped"):
        mf.fully_shard(linear, mf.Mesh(1, rank=0), rows, context=mf.FsdpContext(reduce_dtype=torch.float32))


@pytest.mark.parametrize("how", HOW)
def test_parameters_made_in_inference_mode(how: str) -> None:
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(4, 4), Sums())
    x = torch.randn(2, 4)
    plain = nn.Sequential(nn.Linear(4, 4), Sums())
    plain.load_state_dict({name: param.clone() for name, param in module.state_dict().items()})
    expected = torch.autograd.grad(plain(x), list(plain.parameters()))

    def program(mesh: mf.Mesh) -> None:
        with torch.inference_mode():
            apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
            torch.testing.assert_close(apply(params, x), plain(x))
        if how == "grad":
            found = grad(lambda params: apply(params, x))(params)["0"]
        else:
            leaves = cases.leaves_of(params)
            apply(leaves, x).backward()
            found = mf.DBuffer(params["0"].spec, leaves["0"].local_buffer.grad)
        whole = found.redistribute([mf.Replicate()])
        for i, gradient in enumerate(expected):
            torch.testing.assert_close(whole.get_tensor_view(i), gradient)

    on_each((2,), program)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("parameter", [ROWS, FULL], ids=repr)
def test_buffers_made_in_inference_mode(parameter: Any, how: str) -> None:
    with torch.inference_mode():
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Sums())
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Sums()), torch.randn(6, 4)
    plain.load_state_dict({name: value.clone() for name, value in module.state_dict().items()})
    expected = dense_gradients(plain, x)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [parameter], [ROWS], [ROWS]))
        cases.assert_same(gradients_of(apply, params, how, x), expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(apply.named_buffers()["1.running_var"], plain[1].running_var)

    on_each((1,), program)


def test_micro_batches_on_two_axes() -> None:
    """Shard axes are reduced in each pass, others once at the end: 3 units, 3 micro-batches."""
    module, data = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)), Sums()).double(), torch.randn(12, 2, 5).double()
    expected = dense_gradients(copy.deepcopy(module), data.flatten(0, 1))
    average, rows = mf.Partial("avg"), ROWS

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, mf.Placements((0, 1), [FULL, rows], [average, rows], [FULL, rows]))
        total = zeros = apply.init_accumulator(params)
        assert {buffer.placements for buffer in zeros.values()} == {(average, rows)}
        assert sum(buffer.local_buffer.numel() for buffer in zeros.values()) <= 15 * 3 * 2
        for x in data[cases.number(mesh) :: 4]:
            gradient = grad(lambda a, x=x: apply.accumulate(params, a, x))(zeros)
            total = {key: mf.DBuffer(b.spec, b.local_buffer + gradient[key].local_buffer) for key, b in total.items()}
        found = apply.gather_parameters(apply.reduce(total))
        cases.assert_same({name: tensor * 4 for name, tensor in found.items()}, expected)

    with cases.calls_watched() as labels:
        on_each((2, 2), program)
    for own in labels.values():
        assert own.count("reduce_scatter over 'axis1'") == 9
        assert own.count("allreduce over 'axis0'") == 3


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", ["float32", "bfloat16 compute", "autocast"])
def test_a_checkpointed_llama(kind: str, how: str) -> None:
    """Bit for bit as the dense one that computes likewise."""
    models = pytest.importorskip("tests.test_fsdp_models")
    model, x = models.model_of("llama").float().train(), models.words(1)[0]
    model.gradient_checkpointing_enable()
    if how == "grad":  # transformers marks inputs by a hook, which torch.func refuses
        model.disable_input_require_grads()

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cases.loss_of(self.model(x).logits, x)

    whole, autocast = Loss(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast")
    dense = copy.deepcopy(whole).bfloat16() if kind == "bfloat16 compute" else whole
    with autocast:
        expected = {name: gradient.float() for name, gradient in dense_gradients(dense, x).items()}

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(param_dtype=torch.bfloat16 if kind == "bfloat16 compute" else None)
        apply, params = mf.fully_shard(whole, mesh, place(mesh, "two"), context=context)
        with autocast:
            cases.assert_same(gradients_of(apply, params, how, x), expected, rtol=0, atol=0)

    on_each((2,), program)
