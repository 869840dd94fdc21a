"""What the graphs of compiled steps hold: no operation twice, two gathers of a unit, few graphs for many lengths."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.func import functional_call, grad
from torch.utils.flop_counter import flop_registry

import mfsdp_func as mf
from mfsdp_func.effects.move_operator import remembered
from mfsdp_func.plans.collective import Collective
from tests import fsdp_cases as cases
from tests.fsdp_cases import on_each, place

pytestmark = [
    pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute:UserWarning"
    ),  # Dynamo's own look at inputs that are no leaves
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def value_of(node: Any) -> Any:
    return node.meta["val"] if isinstance(node, torch.fx.Node) else node


class Graphs:
    """The graphs that a backend is given: their floating-point operations, and the collectives in them."""

    def __init__(self) -> None:
        self.flops, self.count = 0, 0
        self.collectives: Counter[str] = Counter()
        self.backend = aot_autograd(fw_compiler=self.look, bw_compiler=self.look)

    def look(self, module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.count += 1
        for node in module.graph.nodes:
            target, args = node.target, node.args
            if getattr(target, "__name__", "") == "with_effects":
                target, args = args[1], args[2:]
            packet = getattr(target, "_overloadpacket", None)
            if packet in flop_registry:
                given = torch.utils._pytree.tree_map(value_of, (args, node.kwargs))
                self.flops += flop_registry[packet](*given[0], **given[1], out_val=node.meta["val"])
            linear = remembered(args[3]) if target is torch.ops.mfsdp_func.move.default else None
            if isinstance(linear, Collective):
                self.collectives[linear.kind] += 1
        return make_boxed_func(module.forward)

    def compile(self, function: Callable[..., Any]) -> Any:
        return torch.compile(function, fullgraph=True, backend=self.backend)


def by_transform(loss: Callable[[Any], torch.Tensor], params: Any, graphs: Graphs) -> None:
    graphs.compile(grad(loss))(params)


def by_backward(loss: Callable[[Any], torch.Tensor], params: Any, graphs: Graphs) -> None:
    leaves = torch.utils._pytree.tree_map(lambda tensor: tensor.detach().clone().requires_grad_(), params)
    graphs.compile(loss)(leaves).backward()


@pytest.mark.parametrize("differentiate", [by_transform, by_backward])
@pytest.mark.parametrize("name", ["gpt2", "llama", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_models_cost_what_they_cost_whole(name: str, differentiate: Callable[..., None]) -> None:
    """One forward of every unit, its backward, two gathers of its parameters and one reduction of its gradients."""
    models = pytest.importorskip("tests.test_fsdp_models")
    choices = {"experts_implementation": "batched_mm"} if name == "mixtral" else {}
    model, x = models.model_of(name, **choices), models.words(1)[0]

    def dense_loss(params: dict[str, torch.Tensor]) -> torch.Tensor:
        return cases.loss_of(functional_call(model, params, (x,)).logits, x)

    dense, ours = Graphs(), Graphs()
    differentiate(dense_loss, {name: param.detach() for name, param in model.named_parameters()}, dense)
    torch._dynamo.reset()

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(model, mesh, place(mesh, "one"))
        differentiate(lambda params: cases.loss_of(apply(params, x).logits, x), params, ours)
        held = sum(len(unit.groups) for unit in apply.units if unit.held)
        others = sum(len(unit.groups) for unit in apply.units if not unit.held)  # a tied one counts where it is used
        assert ours.collectives["allgather"] == held + 2 * others
        assert ours.collectives["reduce_scatter"] == held + others

    on_each((1,), program)
    assert ours.flops == dense.flops > 0


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("how", ["grad", "backward"])
def test_two_graphs_serve_all_lengths(how: str) -> None:
    """The first length alone, and one graph for all others; the numbers are those of eager calls."""
    torch.manual_seed(0)
    module = Stack().double()

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

        def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
            return apply(params, x).square().mean()

        fast = torch.compile(grad(loss) if how == "grad" else loss, fullgraph=True, backend=counter)
        for length in range(8, 136, 8):
            x = torch.randn(2, length, 4, dtype=torch.float64)
            if how == "grad":
                found = fast(params, x)
            else:
                leaves = cases.leaves_of(params)
                fast(leaves, x).backward()
                found = {key: mf.DBuffer(b.spec, b.local_buffer.grad) for key, b in leaves.items()}
            cases.assert_same_buffers(found, grad(loss)(params, x))
        assert counter.frame_count <= 2

    on_each((2,), program)
