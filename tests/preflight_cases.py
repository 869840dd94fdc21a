"""Models for the tests of pre-flight, and runs of the same step whose traffic can be counted."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.func import grad

import mfsdp_func as mf
from mfsdp_func.effects.here import carrier_of
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


class Door:
    """What a process group's carrier is given to send on this rank, in the form of `foretold` for one rank.

    A reduction, which the backend does itself, counts as a ring: each rank sends all segments but one to the next.
    """

    def __init__(self, carrier: Any, node: int) -> None:
        self.found: dict[str, tuple[Any, Any, set[int]]] = {}
        self._carrier, self._node = carrier, node
        self._exchange, self._collective = carrier.exchange, carrier.collective

    def __enter__(self) -> "Door":
        self._carrier.exchange, self._carrier.collective = self._see_exchange, self._see_collective
        return self

    def __exit__(self, *_: object) -> None:
        del self._carrier.exchange, self._carrier.collective

    def of(self, rank: int) -> dict[str, tuple[Any, ...]]:
        return {label: (b.tolist(), m.tolist(), len(p)) for label, (b, m, p) in self.found.items() if int(b.sum())}

    def _note(self, call: Any, side: int, peer: int, nbytes: int, messages: int = 1) -> None:
        label = (call.operation or call.label).split(" of ")[0]
        label = label if " over " in label else label.split()[0]
        empty = torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, 2, dtype=torch.int64), set[int]()
        sizes, counts, peers = self.found.setdefault(label, empty)
        link = int(call.mesh.get_rank() // self._node != peer // self._node)
        sizes[side, link] += nbytes
        counts[side, link] += messages
        peers.add(peer)

    def _see_exchange(self, call: Any, outgoing: Any, incoming: Any, **options: Any) -> Any:
        for side, parcels in enumerate((outgoing, incoming)):
            for parcel in parcels:
                self._note(call, side, parcel.peer, sum(part.nbytes for part in parcel.parts))
        return self._exchange(call, outgoing, incoming, **options)

    def _see_collective(self, call: Any, collective: Any, source: torch.Tensor, target: torch.Tensor) -> Any:
        wait = self._collective(call, collective, source, target)
        if wait is not None:
            line = list(collective.line)
            at, count = line.index(call.mesh.get_rank()), len(line)
            times = 2 if collective.kind == "allreduce" else 1
            whole = source.nbytes if collective.kind == "allreduce" else target.nbytes * count
            mine = times * whole // count * (count - 1)
            self._note(call, 0, line[(at + 1) % count], mine, times * (count - 1))
            self._note(call, 1, line[at - 1], mine, times * (count - 1))
        return wait


def step_on_gloo(mesh: mf.Mesh, name: str, settings: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """What this rank hands to gloo in a step."""
    result = mf.preflight(units_of(name), mesh.shape, carrier="gloo", **settings)
    with Door(carrier_of(mesh), result.settings.node) as door:
        step_of_shapes(mesh, result)
    return door.of(mesh.get_rank())


def train(mesh: mf.Mesh, result: mf.Preflight, make: Callable[[], torch.nn.Module], data: torch.Tensor) -> None:
    """One step of a real module under `fully_shard`, with Muon over all its blocks in one exchange each way."""
    settings = result.settings
    placements = mf.Placements(tuple(range(mesh.ndim)), *[list(settings.placements)] * 3)
    apply, params = mf.fully_shard(make(), mesh, placements, context=result.context)
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
