"""The pieces of an exchange between shards and owners, summed by pair of ranks: bytes and messages.

Rank = shard index here: every replica group does the same.
"""

from dataclasses import dataclass, replace

import torch

from mfsdp_func.effects.process_group import PROCESS_GROUPS
from mfsdp_func.plans.rank_view import RankView, Transfer, group_messages
from mfsdp_func.preflight.parts import Parts
from mfsdp_func.preflight.settings import Settings
from mfsdp_func.simulation.carrier import PACKING_NBYTES
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.ranges import Range


@dataclass(frozen=True, eq=False)
class Pieces:
    """Every pair of shard indices that exchanges something: vectors of one length, int64.

    Attributes:
        src: who sends.
        dst: who receives.
        nbytes: how much.
        messages: in how many messages.
    """

    src: torch.Tensor
    dst: torch.Tensor
    nbytes: torch.Tensor
    messages: torch.Tensor

    @property
    def transpose(self) -> "Pieces":
        """The way back: packing is the same from both ends."""
        return replace(self, src=self.dst, dst=self.src)


def exchange_pieces(parts: Parts) -> Pieces:
    """What one gather of all buffers together sends from holders to owners; the scatter sends the same back."""
    shards, itemsize = parts.settings.shards, parts.settings.travel_dtype.itemsize
    known: dict[int, tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]] = {}
    sources, targets, numels = [], [], []
    for part in parts.parts.values():
        if not part.owners:
            continue
        if id(part.fine) not in known:
            known[id(part.fine)] = _holders(part.fine, sorted(part.owners), shards)
        tensors, place, holders, held = known[id(part.fine)]
        owners = torch.tensor([part.owners[i] for i in tensors])[place]
        away = holders != owners
        sources.append(holders[away])
        targets.append(owners[away])
        numels.append(held[away])
    empty = torch.zeros(0, dtype=torch.int64)
    src, dst, numel = (torch.cat([empty, *vectors]) for vectors in (sources, targets, numels))
    pair, order = torch.sort(src * shards + dst, stable=True)  # within a pair, in the order of the plan
    numel = numel[order]
    pairs, counts = pair.unique_consecutive(return_counts=True)
    nbytes = torch.zeros_like(pairs).index_add_(0, torch.arange(len(pairs)).repeat_interleave(counts), numel * itemsize)
    return Pieces(pairs // shards, pairs % shards, nbytes, _messages(numel, counts, parts.settings))


def _holders(
    layout: GlobalLayout, tensors: list[int], shards: int
) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors; and for each part of one that a shard holds: its place among them, the shard, and elements."""
    found = [
        (place, k, part.numel)
        for place, i in enumerate(tensors)
        for k, part in layout.shards_of(i, Range(0, layout.tensor_numels[i]), shards)
    ]
    place, holders, numels = torch.tensor(found).T
    return tensors, place, holders, numels


def packing(settings: Settings) -> tuple[int, int]:
    """In elements that travel: from which size on pieces travel alone, and how large a packed message may be."""
    nbytes = PACKING_NBYTES if settings.carrier == "simulated" else PROCESS_GROUPS.packing(settings.ranks)
    direct, packed = (max(1, size // settings.travel_dtype.itemsize) for size in nbytes)
    return direct, packed


def _messages(numel: torch.Tensor, counts: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Messages of each pair, whose `counts` pieces stand side by side in `numel`."""
    limits = packing(settings)
    small = numel < limits[0]
    of_pair = torch.arange(len(counts)).repeat_interleave(counts)
    packs = torch.zeros_like(counts).index_add_(0, of_pair, small.long())
    messages = counts - packs + (packs > 0)
    size = torch.zeros_like(counts).index_add_(0, of_pair, numel * small)
    starts = counts.cumsum(0) - counts
    for n in ((packs > 1) & (size > limits[1])).nonzero().flatten().tolist():  # more than one packed message
        start, count = int(starts[n]), int(counts[n])
        transfers = tuple(Transfer(0, 0, 0, size) for size in numel[start : start + count].tolist())
        sends, _ = group_messages(RankView((), transfers, (), ()), *limits)
        messages[n] = len(sends)
    return messages
