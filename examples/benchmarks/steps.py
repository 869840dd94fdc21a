"""One Muon step: every rank computes everything, a peer's round-robin owners, and this library's balanced ones."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from measure import on_cuda
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from workloads import Shape

from mfsdp_func import GroupOwnerLayout, Mesh, build_for_row_atomic
from mfsdp_func.operations.pipeline import pipeline
from mfsdp_func.optim.muon import muon
from mfsdp_func.optim.newton_schulz import newton_schulz
from mfsdp_func.values.balance import balance_owner_work

RATE, MOMENTUM, STEPS = 0.02, 0.95, 5
DEPTH = 4
"""Of the pipeline over blocks: a rank that owns nothing of a few blocks in a row does not wait for the others."""
DTYPE = torch.bfloat16
"""Of Newton-Schulz, in all methods."""
TOLERANCE = 0.15
"""Largest difference between two methods' first updates, over the largest element: five steps of bfloat16 products,
rounded in other orders (0.05 to 0.08 is usual).
"""


@dataclass
class Step:
    """One method.

    Attributes:
        run: one step; timed.
        prepare: what must happen before each step and is not timed.
        result: the full parameters, on every rank; communicates.
    """

    run: Callable[[], None]
    result: Callable[[], list[torch.Tensor]]
    prepare: Callable[[], None] = field(default=lambda: None)


def matrices(shapes: list[Shape]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights and gradients, the same on all ranks."""
    generator = torch.Generator("cpu").manual_seed(5)

    def randn(shape: Shape) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device())

    return [randn(shape) / shape[1] ** 0.5 for shape in shapes], [randn(shape) for shape in shapes]


def steps_of(blocks: list[list[Shape]], *, peer: bool = True) -> dict[str, Step]:
    """All methods on fresh copies of the same matrices. A peer that cannot take the shapes is left out.

    Args:
        blocks: matrix shapes per block.
        peer: whether to measure the package muon-fsdp2, if it is installed.
    """
    device_mesh = init_device_mesh("cuda" if on_cuda() else "cpu", (dist.get_world_size(),))
    shapes = [shape for block in blocks for shape in block]
    weights, gradients = matrices(shapes)
    found = {"full tensor": _full_tensor(device_mesh, weights, gradients)}
    # Its scatter takes equal chunks of rows only, and one mesh axis.
    equal = all(shape[0] % device_mesh.size() == 0 for shape in shapes)
    if peer and equal and (optimizer := _peer()) is not None:
        found["muon-fsdp2"] = _muon_fsdp2(optimizer, device_mesh, weights, gradients)
    mesh = Mesh(dist.get_world_size(), rank=dist.get_rank())
    found["ours"] = _ours(mesh, [shapes], weights, gradients, depth=None)
    found["ours, coalesced"] = _ours(mesh, blocks, weights, gradients, depth=None)
    found["ours, one by one"] = _ours(mesh, blocks, weights, gradients, depth=0)
    found["ours, pipelined"] = _ours(mesh, blocks, weights, gradients, depth=DEPTH)
    return found


def _peer() -> Any:
    try:
        from muon_fsdp2 import Muon
    except ImportError:
        return None
    return Muon


class _Matrices(nn.Module):
    """One linear layer per weight; never called."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(w.shape[1], w.shape[0], bias=False, device="meta") for w in weights)
        for layer, weight in zip(self.layers, weights, strict=True):
            layer.weight = nn.Parameter(weight.clone())


def _sharded(
    mesh: DeviceMesh, weights: list[torch.Tensor], gradients: list[torch.Tensor]
) -> tuple[list[nn.Parameter], Callable[[], None], Callable[[], list[torch.Tensor]]]:
    """Parameters sharded by FSDP2, what gives them fresh gradients, and what reads them back."""
    module = _Matrices(weights)
    fully_shard(module, mesh=mesh)
    params = list(module.parameters())
    me, count = mesh.get_local_rank(), mesh.size()
    shards = [(list(gradient.chunk(count)) + [gradient[:0]] * count)[me].clone() for gradient in gradients]

    def prepare() -> None:
        for param, shard, gradient in zip(params, shards, gradients, strict=True):
            param.grad = DTensor.from_local(
                shard.clone(), mesh, [Shard(0)], run_check=False, shape=gradient.shape, stride=gradient.stride()
            )

    return params, prepare, lambda: [param.full_tensor().detach() for param in params]  # pyright: ignore[reportAttributeAccessIssue]


def _full_tensor(mesh: DeviceMesh, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> Step:
    params, prepare, result = _sharded(mesh, weights, gradients)
    optimizer = torch.optim.Muon(params, lr=RATE, momentum=MOMENTUM, weight_decay=0.0, ns_steps=STEPS)
    return Step(lambda: optimizer.step() and None, result, prepare)


def _muon_fsdp2(optimizer: Any, mesh: DeviceMesh, weights: list[torch.Tensor], gradients: list[torch.Tensor]) -> Step:
    params, prepare, result = _sharded(mesh, weights, gradients)
    group = {
        "params": params,
        "lr": RATE,
        "momentum": MOMENTUM,
        "rms_scale": False,
        "ns_steps": STEPS,
        "use_muon": True,
    }
    made = optimizer([group])
    return Step(lambda: made.step() and None, result, prepare)


def _ours(
    mesh: Mesh,
    groups: list[list[Shape]],
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    *,
    depth: int | None,
) -> Step:
    """Our step: `muon` on all groups at once (`depth` None), or `pipeline` through them."""
    layouts = [build_for_row_atomic(shapes, mesh.size()) for shapes in groups]
    balance = balance_owner_work([(layout, mesh, range(len(layout.tensor_shapes))) for layout in layouts])
    owners = [GroupOwnerLayout(mesh, layout, chosen) for layout, chosen in zip(layouts, balance.owners, strict=True)]
    numbers = iter(range(len(weights)))
    member = [[next(numbers) for _ in layout.tensor_shapes] for layout in layouts]
    segments = [layout.get_segment(mesh.shard_index((0,)), mesh.size()) for layout in layouts]

    def cut(tensors: list[torch.Tensor], g: int) -> dict[int, torch.Tensor]:
        held = layouts[g].tensors_in(segments[g])
        return {i: tensors[member[g][i]].reshape(-1)[part.start : part.end].clone() for i, part in held}

    params = [cut(weights, g) for g in range(len(layouts))]
    grads = [cut(gradients, g) for g in range(len(layouts))]
    by_group = dict(enumerate(owners))
    optimizer = muon(RATE, owner_layout=by_group, momentum=MOMENTUM, ns_steps=STEPS, ns_dtype=DTYPE)
    state = optimizer.init(_paired(params))

    def run() -> None:
        nonlocal state
        updates, state = optimizer.update(_paired(grads), state, _paired(params))
        for g in by_group:
            params[g] = {i: param + updates[g, i] for i, param in params[g].items()}

    means = [{i: torch.zeros_like(param) for i, param in group.items()} for group in params]

    def run_pipelined() -> None:
        mixed: list[dict[int, torch.Tensor]] = []
        for g, group in enumerate(grads):
            means[g] = {i: torch.lerp(mean, group[i], 1 - MOMENTUM) for i, mean in means[g].items()}
            mixed.append({i: torch.lerp(group[i], mean, MOMENTUM).to(DTYPE) for i, mean in means[g].items()})
        directions, _ = pipeline(lambda _, full: orthogonalize(full), mixed, owners, depth=depth or 0, dtype=DTYPE)
        for g, group in enumerate(directions):
            shapes = layouts[g].tensor_shapes
            rates = {i: RATE * max(1, shapes[i][0] / shapes[i][1]) ** 0.5 for i in group}
            params[g] = {i: param - rates[i] * group[i].view(-1) for i, param in params[g].items()}

    return Step(run if depth is None else run_pipelined, lambda: _whole(mesh, layouts, params))


def _paired(groups: list[dict[int, torch.Tensor]]) -> dict[tuple[int, int], torch.Tensor]:
    return {(g, i): tensor for g, group in enumerate(groups) for i, tensor in group.items()}


def orthogonalize(full: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Newton-Schulz on each matrix."""
    return {i: newton_schulz(matrix, STEPS, dtype=DTYPE) for i, matrix in full.items()}


def _whole(mesh: Mesh, layouts: list[Any], params: list[dict[int, torch.Tensor]]) -> list[torch.Tensor]:
    """All parameters in full, on every rank, by adding up what each holds."""
    found: list[torch.Tensor] = []
    for layout, group in zip(layouts, params, strict=True):
        segment = layout.get_segment(mesh.shard_index((0,)), mesh.size())
        held = dict(layout.tensors_in(segment))
        for i, shape in enumerate(layout.tensor_shapes):
            full = torch.zeros(shape.numel())
            if i in held:
                full[held[i].start : held[i].end] = group[i].reshape(-1)
            dist.all_reduce(full)
            found.append(full.view(shape))
    return found


def largest_difference(blocks: list[list[Shape]], steps: dict[str, Step]) -> dict[str, float]:
    """After one step of each method: the largest difference of the update from that of "full tensor", relative."""
    weights, _ = matrices([shape for block in blocks for shape in block])
    updates: dict[str, list[torch.Tensor]] = {}
    for name, step in steps.items():
        step.prepare()
        step.run()
        updates[name] = [new - old for new, old in zip(step.result(), weights, strict=True)]
    expected = updates["full tensor"]
    return {
        name: max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True))
        for name, found in updates.items()
    }
