"""What each operation of a step sends: bytes, messages and peers of every rank, inside a node and between nodes.

An exchange between shards and owners is counted piece by piece, as its plan has them; a collective by its schedule.
Everything is a vector over ranks: no loop goes over ranks times tensors.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mfsdp_func.plans.collective import Kind
from mfsdp_func.preflight.parts import Part, Parts
from mfsdp_func.preflight.pieces import Pieces, exchange_pieces
from mfsdp_func.preflight.settings import Settings

LINKS = ("inside a node", "between nodes")
_BINS = 256


@dataclass(frozen=True, eq=False)
class Operation:
    """One kind of communication of a step, all its calls together.

    Attributes:
        name: what it is for.
        label: how the trace of a simulated run begins to call it.
        calls: how often each rank calls it in a step.
        schedule: how elements travel: "pieces" straight from holder to owner, "direct" from each rank of a line to each
            other, or "ring" from each rank of a line to the next.
        sent: bytes that each rank sends, by `LINKS`: of shape (2, ranks), int64. So are the three that follow.
        received: bytes that each rank receives.
        sent_messages: messages that each rank sends.
        received_messages: messages that each rank receives.
        peers: number of different ranks that each rank exchanges elements with.
        heat: bytes from bin to bin of neighbouring ranks, of shape (bins, bins) with at most 256 bins.
    """

    name: str
    label: str
    calls: int
    schedule: str
    sent: torch.Tensor
    received: torch.Tensor
    sent_messages: torch.Tensor
    received_messages: torch.Tensor
    peers: torch.Tensor
    heat: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks send together."""
        return int(self.sent.sum())

    @property
    def between(self) -> float:
        """The share of them that leaves a node."""
        return int(self.sent[1].sum()) / self.nbytes if self.nbytes else 0.0

    @property
    def busiest(self) -> int:
        """Bytes of the rank that sends or receives most."""
        return int(torch.maximum(self.sent.sum(0), self.received.sum(0)).max())

    @property
    def messages(self) -> int:
        """Messages of all ranks together."""
        return int(self.sent_messages.sum())


def operations_of(parts: Parts) -> tuple[Operation, ...]:
    """All communication of one training step: forward, backward, optimizer. What moves nothing is left out."""
    settings = parts.settings
    last = len(settings.mesh) - 1
    uses, again = used_parts(parts), used_parts(parts, again=True)
    trained = [part for part in uses if part.group.trainable]
    itemsize, halfsize = settings.gather_dtype.itemsize, settings.gradient_dtype.itemsize
    found = [
        _collective(settings, "gather for forward", "allgather", last, uses, itemsize),
        _collective(settings, "gather for backward", "allgather", last, again, itemsize),
        _collective(settings, "reduce gradients", "reduce_scatter", last, trained, halfsize),
        *(
            _collective(
                settings, f"reduce over replicas{f' (axis {axis})' * (last > 1)}", "allreduce", axis, trained, halfsize
            )
            for axis in reversed(range(last))
        ),
    ]
    pieces = exchange_pieces(parts)
    found += [_exchange(settings, "gather", pieces), _exchange(settings, "scatter", pieces.transpose)]
    return tuple(operation for operation in found if operation is not None and operation.nbytes)


def used_parts(parts: Parts, *, again: bool = False) -> list[Part]:
    """The buffers that a pass gathers, as often as it does; held units keep theirs for the backward pass (`again`)."""
    units = [unit for unit in parts.model.units if not (again and unit.held)]
    return [parts.parts[key] for unit in units for key in unit.groups]


def _nodes(settings: Settings) -> torch.Tensor:
    return torch.arange(settings.world) // settings.node


def bin_of(settings: Settings) -> torch.Tensor:
    """The bin of each rank in a heat map."""
    return torch.arange(settings.world) * min(_BINS, settings.world) // settings.world


def _heat(settings: Settings, src: torch.Tensor, dst: torch.Tensor, nbytes: torch.Tensor) -> torch.Tensor:
    bins, count = bin_of(settings), min(_BINS, settings.world)
    flat = torch.zeros(count * count, dtype=torch.int64)
    return flat.index_add_(0, bins[src] * count + bins[dst], nbytes).view(count, count)


# Collectives


class _Lines:
    """The lines of ranks along one axis, and sums over them."""

    def __init__(self, settings: Settings, axis: int) -> None:
        self.settings, self.axis, self.size = settings, axis, settings.mesh[axis]
        grid = torch.arange(settings.world).view(settings.mesh).movedim(axis, -1).reshape(-1, self.size)
        self.grid = grid
        line = torch.empty(settings.world, dtype=torch.int64)
        self.position = torch.empty(settings.world, dtype=torch.int64)
        line[grid] = torch.arange(len(grid))[:, None].expand_as(grid)
        self.position[grid] = torch.arange(self.size)[None, :].expand_as(grid)
        node = _nodes(settings)
        self._line, self._here = line, line * (int(node.max()) + 1) + node
        self.next = torch.empty(settings.world, dtype=torch.int64)
        self.next[grid] = grid.roll(-1, 1)

    def label(self, kind: Kind) -> str:
        """How traces call a collective along this axis."""
        return f"{kind} over {self.settings.ranks.axis_names[self.axis]!r}"

    def others(self, values: torch.Tensor) -> torch.Tensor:
        """For each rank, the sum over the other ranks of its line: of those on its node, and of those on others."""
        same = torch.zeros(int(self._here.max()) + 1, dtype=torch.int64).index_add_(0, self._here, values)[self._here]
        whole = torch.zeros(len(self.grid), dtype=torch.int64).index_add_(0, self._line, values)[self._line]
        return torch.stack([same - values, whole - same])

    def pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Every pair of different ranks of one line."""
        src = self.grid[:, :, None].expand(-1, -1, self.size).reshape(-1)
        dst = self.grid[:, None, :].expand(-1, self.size, -1).reshape(-1)
        different = src != dst
        return src[different], dst[different]


def _collective(
    settings: Settings, name: str, kind: Kind, axis: int, uses: Sequence[Part], itemsize: int
) -> Operation | None:
    """Collectives of one kind over all buffers of `uses`, along one axis."""
    if settings.mesh[axis] == 1 or not uses:
        return None
    lines = _Lines(settings, axis)
    shard = torch.arange(settings.world) % settings.shards  # the last axis shards
    segments, filled = torch.zeros(2, settings.world, dtype=torch.int64)
    native = settings.carrier == "process group" or (settings.carrier == "gloo" and kind != "allgather")
    for part, _ in _counted(uses):
        sizes = _segment_sizes(part)
        equal = part.layout.stores_equal_segments or bool((sizes == sizes[0]).all())
        native = native and (equal or kind == "allreduce")
    for part, times in _counted(uses):
        sizes = _segment_sizes(part)
        if kind == "allreduce":
            held = sizes[shard] if not part.layout.stores_equal_segments else sizes.max().expand(settings.world)
            mine = _even_part(held, lines.position, lines.size)
        else:
            mine = (sizes.max().expand_as(sizes) if native else sizes)[shard]
        segments += mine * (itemsize * times)
        filled += (mine > 0) * times
    if native:
        return _ring(lines, name, kind, len(uses), segments * (2 if kind == "allreduce" else 1))
    return _direct(lines, name, kind, len(uses), segments, filled)


def _counted(uses: Iterable[Part]) -> list[tuple[Part, int]]:
    """Each layout once, and how often it is used."""
    found: dict[int, tuple[Part, int]] = {}
    for part in uses:
        first, times = found.get(id(part.layout), (part, 0))
        found[id(part.layout)] = (first, times + 1)
    return list(found.values())


def _segment_sizes(part: Part) -> torch.Tensor:
    layout = part.layout
    return torch.tensor([*layout.rank_to_offset[1:], layout.size]) - torch.tensor(layout.rank_to_offset)


def _even_part(held: torch.Tensor, position: torch.Tensor, ranks: int) -> torch.Tensor:
    """The elements that the rank at a position adds up, where a line shares out the elements that each of it holds."""
    return (position + 1) * held // ranks - position * held // ranks


def _direct(
    lines: _Lines, name: str, kind: Kind, calls: int, segments: torch.Tensor, filled: torch.Tensor
) -> Operation:
    """Each rank sends to each other of its line: its own segment (all-gather), or the other's (reduce-scatter)."""
    count = lines.others(torch.ones_like(segments))
    own, others = (segments * count, filled * count), (lines.others(segments), lines.others(filled))
    src, dst = lines.pairs()
    if kind == "allgather":
        (sent, sends), (received, receives), nbytes = own, others, segments[src]
    elif kind == "reduce_scatter":
        (sent, sends), (received, receives), nbytes = others, own, segments[dst]
    else:
        sent = received = own[0] + others[0]
        sends = receives = own[1] + others[1]
        nbytes = segments[src] + segments[dst]
    peers = torch.where(filled > 0, count.sum(0), lines.others((filled > 0).long()).sum(0))
    heat = _heat(lines.settings, src, dst, nbytes)
    return Operation(name, lines.label(kind), calls, "direct", sent, received, sends, receives, peers, heat)


def _ring(lines: _Lines, name: str, kind: Kind, calls: int, segments: torch.Tensor) -> Operation:
    """Each rank sends to the next of its line, once less than the line has ranks (twice that for an all-reduce)."""
    me, node = torch.arange(lines.settings.world), _nodes(lines.settings)
    last = torch.empty_like(lines.next)
    last[lines.next] = me
    nbytes = segments * (lines.size - 1)
    messages = torch.full_like(segments, calls * (lines.size - 1) * (2 if kind == "allreduce" else 1))

    def by_link(peer: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        near = node == node[peer]
        return torch.stack([values * near, values * ~near])

    peers = torch.full_like(segments, min(2, lines.size - 1))
    return Operation(
        name,
        lines.label(kind),
        calls,
        "ring",
        by_link(lines.next, nbytes),
        by_link(last, nbytes[last]),
        by_link(lines.next, messages),
        by_link(last, messages[last]),
        peers,
        _heat(lines.settings, me, lines.next, nbytes),
    )


# Exchanges


def _exchange(settings: Settings, label: str, pieces: Pieces) -> Operation | None:
    """An exchange in every replica group, from the pairs of shard indices that exchange something."""
    if not len(pieces.src):
        return None
    world, node = settings.world, _nodes(settings)
    sums = torch.zeros(2, 2, 2, world, dtype=torch.int64)  # (bytes or messages, sent or received, link, rank)
    peers = torch.zeros(world, dtype=torch.int64)
    of_shard = _peers_of_shards(pieces, settings.shards)
    heat = torch.zeros(min(_BINS, world), min(_BINS, world), dtype=torch.int64)
    for first in range(0, world, settings.shards):
        src, dst = pieces.src + first, pieces.dst + first
        far = (node[src] != node[dst]).long()
        for n, values in enumerate((pieces.nbytes, pieces.messages)):
            for side, rank in enumerate((src, dst)):
                sums[n, side].view(-1).index_add_(0, far * world + rank, values)
        peers[first : first + settings.shards] = of_shard
        heat += _heat(settings, src, dst, pieces.nbytes)
    (sent, received), (sends, receives) = sums
    return Operation(f"optimizer {label}", label, 1, "pieces", sent, received, sends, receives, peers, heat)


def _peers_of_shards(pieces: Pieces, shards: int) -> torch.Tensor:
    both = torch.cat([pieces.src * shards + pieces.dst, pieces.dst * shards + pieces.src]).unique()
    return torch.bincount(both // shards, minlength=shards)
