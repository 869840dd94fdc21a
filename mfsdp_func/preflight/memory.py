"""What every rank stores, by kind, at the moments of a step that need most: in the backward pass and in the optimizer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mfsdp_func.preflight.activations import Activations
from mfsdp_func.preflight.parts import Part, Parts, stored_sizes
from mfsdp_func.preflight.passes import fullest_moment

MOMENTS = {
    "backward": "in the backward pass",
    "exchange": "while matrices are with their owners",
    "update": "when the updates are there",
}
KINDS = (
    "parameters",
    "gradients",
    "optimizer state",
    "gathered units",
    "gradients of a unit",
    "activations",
    "exchange",
    "new values",
)

_ADAMW_TENSORS = 4
"""How many tensors of its size live beside the new state while AdamW computes the update of one."""


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of every rank.

    Attributes:
        moments: "backward", "exchange" (with owners), "update" -> kind of `KINDS` -> bytes of each rank, int64.
        in_place: the same of ``.backward()`` and a step that writes into parameters and state, as `TorchOptimizer` does.
    """

    moments: Mapping[str, Mapping[str, torch.Tensor]]
    in_place: Mapping[str, Mapping[str, torch.Tensor]]

    def total(self, moment: str, *, in_place: bool = False) -> torch.Tensor:
        """Bytes of each rank at a moment."""
        return torch.stack(list((self.in_place if in_place else self.moments)[moment].values())).sum(0)

    def peak(self, *, in_place: bool = False) -> torch.Tensor:
        """The larger of the moments, for each rank."""
        chosen = self.in_place if in_place else self.moments
        return torch.stack([self.total(moment, in_place=in_place) for moment in chosen]).amax(0)

    def worst(self, *, in_place: bool = False) -> tuple[str, int]:
        """The moment and the rank that need most."""
        chosen = self.in_place if in_place else self.moments
        totals = {moment: self.total(moment, in_place=in_place) for moment in chosen}
        moment = max(totals, key=lambda name: int(totals[name].max()))
        return moment, int(totals[moment].argmax())


def memory_of(parts: Parts, activations: Activations | None) -> Memory:
    """See the module."""
    settings = parts.settings
    shard = torch.arange(settings.world) % settings.shards
    zeros = torch.zeros(settings.shards, dtype=torch.int64)
    stored, trained, muon, adamw = zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone()
    for part, times in _alike(parts):
        sizes = stored_sizes(part)
        stored += sizes * times
        if part.group.trainable:
            trained += sizes * times
            for i in range(len(part.layout.tensor_shapes)):
                (muon if i in part.muon else adamw).add_(_held(part, i), alpha=times)
    itemsize, travel = settings.dtype.itemsize, settings.travel_dtype.itemsize
    params, state = stored * itemsize, (muon + 2 * adamw) * itemsize
    at_rest = {"parameters": params, "gradients": trained * itemsize, "optimizer state": state}
    owned, newton_schulz = owned_nbytes(parts)
    copied = muon * travel if settings.travel_dtype != settings.dtype else zeros
    # Running means and mixtures are there; shards in the travelling dtype go to owners, and whole matrices come; or
    # results have come back, and are made shards of the main dtype again.
    with_owners = 2 * muon * itemsize + copied
    gathered = with_owners + owned + newton_schulz
    scattered = with_owners + muon * (travel + itemsize)
    exchange = {**at_rest, "exchange": torch.maximum(gathered, scattered)}
    # Updates of all tensors beside the new state: while AdamW computes with a tensor, or scales all of its own; then as
    # buffers once more, or written into one parameter after the other.
    new, largest, of_adamw = 2 * muon + 2 * adamw, *_largest(parts)
    scaled = torch.maximum(_ADAMW_TENSORS * of_adamw, 2 * adamw)
    functional = {**at_rest, "new values": (new + torch.maximum(scaled, adamw + trained)) * itemsize}
    in_place = {**at_rest, "new values": (new + torch.maximum(scaled, adamw + largest)) * itemsize}

    def over_ranks(kinds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {kind: by_shard[shard] for kind, by_shard in kinds.items()}

    def passes(functional: bool) -> dict[str, torch.Tensor]:
        moment = fullest_moment(parts, activations, functional=functional)
        return {
            "parameters": params,
            "gradients": moment.done,
            "optimizer state": state,
            "gathered units": zeros + moment.gathered,
            "gradients of a unit": zeros + moment.gradients,
            "activations": zeros + moment.activations,
        }

    moments = {"backward": passes(True), "exchange": exchange, "update": functional}
    others = {"backward": passes(False), "exchange": exchange, "update": in_place}
    return Memory(
        {name: over_ranks(kinds) for name, kinds in moments.items()},
        {name: over_ranks(kinds) for name, kinds in others.items()},
    )


def _alike(parts: Parts) -> list[tuple[Part, int]]:
    found: dict[object, tuple[Part, int]] = {}
    for part in parts.parts.values():
        key = id(part.layout), part.muon, part.group.trainable
        found[key] = (part, found.get(key, (part, 0))[1] + 1)
    return list(found.values())


def _held(part: Part, tensor: int) -> torch.Tensor:
    """Elements of a tensor that each shard holds."""
    layout = part.layout
    starts = torch.tensor(layout.rank_to_offset)
    ends = torch.tensor([*layout.rank_to_offset[1:], layout.size])
    whole = layout.get_tensor_range(tensor)
    return (ends.clamp(max=whole.end) - starts.clamp(min=whole.start)).clamp(min=0)


def _largest(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements of the largest tensor that each shard holds a part of: of all that are trained, and of AdamW's."""
    largest, of_adamw = torch.zeros(2, parts.settings.shards, dtype=torch.int64)
    for part, _ in _alike(parts):
        for i in range(len(part.layout.tensor_shapes) if part.group.trainable else 0):
            largest = torch.maximum(largest, _held(part, i))
            if i not in part.muon:
                of_adamw = torch.maximum(of_adamw, _held(part, i))
    return largest, of_adamw


def owned_nbytes(parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of whole matrices on each owner, and what computing with them needs beside them at most."""
    itemsize = parts.settings.travel_dtype.itemsize
    owned = torch.zeros(parts.settings.shards, dtype=torch.int64)
    alike: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in range(parts.settings.shards)]
    joined = [0] * parts.settings.shards
    for part in parts.parts.values():
        for i, owner in part.owners.items():
            owned[owner] += part.fine.tensor_numels[i] * itemsize
            for count, shape in part.matrices[i]:
                times, members = alike[owner].get(shape, (0, 0))
                alike[owner][shape] = times + count, members + 1
            if len(part.matrices[i]) > 1:
                joined[owner] += part.fine.tensor_numels[i] * itemsize
    peaks = [_newton_schulz(shapes, itemsize, more) for shapes, more in zip(alike, joined, strict=True)]
    return owned, torch.tensor(peaks)


def _newton_schulz(shapes: Mapping[tuple[int, int], tuple[int, int]], itemsize: int, joined: int) -> int:
    """Shape by shape, matrices side by side, beside the results of shapes before; at the end, kinds are joined again."""
    results = peak = 0
    for (m, n), (count, members) in shapes.items():
        stack = count * m * n * itemsize
        products = 2 * count * min(m, n) ** 2 * itemsize
        peak = max(peak, results + (3 if members > 1 else 2) * stack + products)
        results += stack
    return max(peak, results + joined)
