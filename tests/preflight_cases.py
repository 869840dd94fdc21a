"""Models for the tests of pre-flight, and runs of the same step whose traffic can be counted."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.func import grad

import mfsdp_func as mf
from mfsdp_func.optim import muon
from mfsdp_func.preflight.traffic import Operation
from mfsdp_func.simulation.results import Sent

Shapes = list[tuple[int, ...]]


def scaled(shapes: Shapes, factor: int) -> Shapes:
    return [tuple(max(2, size // factor) for size in shape) for shape in shapes]


BLOCKS: dict[str, Shapes] = {
    "GPT-2": scaled([(768, 2304), (768, 768), (768, 3072), (3072, 768), (2304,), (768,), (3072,), (768,), (768,)], 24),
    "Llama-3 8B": scaled(
        [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)], 128
    ),
    "Qwen2.5 0.5B": scaled(
        [(896, 896), (128, 896), (128, 896), (896, 896), *[(4864, 896)] * 2, (896, 4864), (896,)], 32
    ),
    "Mixtral 8x7B": [*scaled([(4096, 4096), (1024, 4096)], 128), (8, 64, 32), (8, 32, 32), (8, 32)],
    "Gemma 2B": scaled([(2048, 2048), (256, 2048), (256, 2048), (2048, 2048), *[(16384, 2048)] * 2, (2048, 16384)], 64),
}
"""The shapes of one block of five public models, scaled down."""


def units_of(name: str, count: int = 3) -> dict[str, Shapes]:
    """Some blocks of a model, and an odd buffer that divides by nothing."""
    return {f"{name}.{n}": BLOCKS[name] for n in range(count)} | {"odd": [(7, 3), (11,), (5, 13)]}


def step_of_shapes(mesh: mf.Mesh, result: mf.Preflight) -> None:
    """What a step sends, by the operations themselves: gather twice, reduce, then to the owners and back."""
    settings, parts = result.settings, result.parts.parts
    sources: list[dict[int, torch.Tensor]] = []
    owners = result.owner_layouts(mesh)
    for key, part in parts.items():
        spec = mf.BufferSpec(mesh, settings.placements, part.layout)
        buffer = mf.DBuffer(spec, torch.zeros(spec.local_numel, dtype=settings.gather_dtype))
        whole = [mf.Replicate()] * mesh.ndim
        for _ in range(2):
            gathered = buffer.redistribute(whole)
        summed = gathered.cast(settings.gradient_dtype).view([mf.Partial("avg"), *whole[1:]])
        for axis in range(1, mesh.ndim):
            summed = summed.view([mf.Partial("avg")] * (axis + 1) + whole[axis + 1 :])
        summed.redistribute(settings.placements)
        if key in owners:
            fine = mf.DBuffer(mf.BufferSpec(mesh, settings.placements, part.fine), buffer.local_buffer)
            views = fine.cast(settings.travel_dtype).tensor_views()
            sources.append({i: view for i, view in views.items() if i in part.owners})
    full, token = mf.gather_coalesced(sources, owner_layouts=list(owners.values()), dtype=settings.travel_dtype)
    mf.scatter_coalesced(full, owner_layouts=list(owners.values()), dtype=settings.travel_dtype, after=token)


def train(mesh: mf.Mesh, result: mf.Preflight, make: Callable[[], torch.nn.Module], data: torch.Tensor) -> None:
    """One step of a real module under `fully_shard`, with Muon over all its blocks in one exchange each way."""
    settings = result.settings
    placements = mf.Placements(tuple(range(mesh.ndim)), *[list(settings.placements)] * 3)
    context = mf.FsdpContext(
        shard_layout=settings.layout, param_dtype=settings.param_dtype, reduce_dtype=settings.reduce_dtype
    )
    apply, params = mf.fully_shard(make(), mesh, placements, context=context)
    for key, part in result.parts.parts.items():
        assert apply.param_groups[key].spec.layout == part.layout
    gradients = grad(lambda params: loss_of(apply(params, data)))(params)
    owners = result.owner_layouts(mesh)
    optimizer = muon(0.1, owner_layout=owners, ns_dtype=settings.travel_dtype, ns_steps=1)
    weights, slopes = (
        {(key, i): view for key in owners for i, view in finer(result, key, buffers).items()}
        for buffers in (params, gradients)
    )
    optimizer.update(slopes, optimizer.init(weights), weights)


def finer(result: mf.Preflight, key: str, buffers: Mapping[str, mf.DBuffer]) -> dict[int, torch.Tensor]:
    part, buffer = result.parts.parts[key], buffers[key]
    views = mf.DBuffer(mf.BufferSpec(buffer.mesh, buffer.placements, part.fine), buffer.local_buffer).tensor_views()
    return {i: view for i, view in views.items() if i in part.owners}


def loss_of(output: Any) -> torch.Tensor:
    return (output.logits if hasattr(output, "logits") else output).float().square().mean()


def counted(trace: tuple[Sent, ...], result: mf.Preflight) -> dict[str, tuple[Any, ...]]:
    """The trace of a simulated run in the form of `foretold`."""
    world, node = result.settings.world, result.settings.node
    found: dict[str, tuple[Any, ...]] = {}
    for label in dict.fromkeys(label_of(sent) for sent in trace):
        nbytes, messages = torch.zeros(2, 2, world, dtype=torch.int64), torch.zeros(2, 2, world, dtype=torch.int64)
        peers: list[set[int]] = [set() for _ in range(world)]
        for sent in trace:
            if label_of(sent) != label:
                continue
            link = int(sent.src // node != sent.dst // node)
            for side, rank, other in ((0, sent.src, sent.dst), (1, sent.dst, sent.src)):
                nbytes[side, link, rank] += sent.nbytes
                messages[side, link, rank] += 1
                peers[rank].add(other)
        if int(nbytes.sum()):
            found[label] = nbytes.tolist(), messages.tolist(), [len(each) for each in peers]
    return found


def label_of(sent: Sent) -> str:
    """Exchanges are named after their groups too."""
    return sent.operation if " over " in sent.operation else sent.operation.split()[0]


def foretold(operations: tuple[Operation, ...]) -> dict[str, tuple[Any, ...]]:
    """Bytes and messages, (side, link, rank), and peers of each rank, by label of the trace."""
    found: dict[str, tuple[Any, ...]] = {}
    for label in dict.fromkeys(operation.label for operation in operations):
        alike = [operation for operation in operations if operation.label == label]
        nbytes = sum(torch.stack([op.sent, op.received]) for op in alike)
        messages = sum(torch.stack([op.sent_messages, op.received_messages]) for op in alike)
        peers = torch.stack([op.peers for op in alike]).amax(0)
        found[label] = nbytes.tolist(), messages.tolist(), peers.tolist()
    return found
