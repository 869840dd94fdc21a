"""What every rank stores, by kind, at the two moments of a step that need most: in the backward pass and in the optimizer."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from mfsdp_func.preflight.activations import Activations
from mfsdp_func.preflight.parts import Part, Parts

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


@dataclass(frozen=True, eq=False)
class Memory:
    """Bytes of every rank.

    Attributes:
        moments: "backward", "optimizer" -> kind of `KINDS` -> bytes of each rank, int64.
        in_place: the same in a step that writes into parameters and state, as `TorchOptimizer` does.
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

    def over_ranks(by_shard: torch.Tensor) -> torch.Tensor:
        return by_shard[shard]

    zeros = torch.zeros(settings.shards, dtype=torch.int64)
    stored, trained, muon, adamw = zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone()
    for part, times in _alike(parts):
        sizes = _sizes(part)
        stored += sizes * times
        if part.group.trainable:
            trained += sizes * times
            for i in range(len(part.layout.tensor_shapes)):
                (muon if i in part.muon else adamw).add_(_held(part, i), alpha=times)
    itemsize = settings.dtype.itemsize
    params, grads = over_ranks(stored * itemsize), over_ranks(trained * itemsize)
    state = over_ranks((muon + 2 * adamw) * itemsize)
    nothing = over_ranks(zeros)
    done, gathered, unit, kept = _passes(parts, activations)
    backward = {
        "parameters": params,
        "gradients": over_ranks(_stored(parts, done) * itemsize),
        "optimizer state": state,
        "gathered units": nothing + gathered,
        "gradients of a unit": nothing + unit,
        "activations": nothing + kept,
    }
    owned = zeros.clone()
    for part in parts.parts.values():
        for i, owner in part.owners.items():
            owned[owner] += part.fine.tensor_numels[i]
    travel = settings.travel_dtype.itemsize
    workspace = _workspace(parts)
    # Whole matrices on their owner, results, what Newton-Schulz needs, and a copy of the shards in the travelling dtype.
    copied = muon * travel if settings.travel_dtype != settings.dtype else zeros
    exchange = over_ranks(owned * travel + workspace + copied)
    at_rest = {"parameters": params, "gradients": grads, "optimizer state": state}
    mixtures = over_ranks(muon * itemsize)
    functional = {
        **at_rest,
        "exchange": exchange + mixtures,
        "new values": over_ranks(muon * itemsize),
    }
    end = {**at_rest, "new values": over_ranks((3 * muon + 4 * adamw) * itemsize)}
    in_place = {**at_rest, "exchange": exchange + mixtures, "new values": over_ranks(muon * itemsize)}
    moments = {"backward": backward, "optimizer": functional, "new values": end}
    return Memory(moments, {"backward": backward, "optimizer": in_place})


def _stored(parts: Parts, keys: Iterable[str]) -> torch.Tensor:
    """Elements of buffers on each shard."""
    chosen = [parts.parts[key] for key in keys if parts.parts[key].group.trainable]
    return sum((_sizes(part) for part in chosen), torch.zeros(parts.settings.shards, dtype=torch.int64))


def _alike(parts: Parts) -> list[tuple[Part, int]]:
    found: dict[object, tuple[Part, int]] = {}
    for part in parts.parts.values():
        key = id(part.layout), part.muon, part.group.trainable
        found[key] = (part, found.get(key, (part, 0))[1] + 1)
    return list(found.values())


def _sizes(part: Part) -> torch.Tensor:
    layout = part.layout
    sizes = torch.tensor([*layout.rank_to_offset[1:], layout.size]) - torch.tensor(layout.rank_to_offset)
    return sizes.max().expand_as(sizes).clone() if layout.stores_equal_segments else sizes


def _held(part: Part, tensor: int) -> torch.Tensor:
    """Elements of a tensor that each shard holds."""
    layout = part.layout
    starts = torch.tensor(layout.rank_to_offset)
    ends = torch.tensor([*layout.rank_to_offset[1:], layout.size])
    whole = layout.get_tensor_range(tensor)
    return (ends.clamp(max=whole.end) - starts.clamp(min=whole.start)).clamp(min=0)


def _passes(parts: Parts, activations: Activations | None) -> tuple[list[str], int, int, int]:
    """At the fullest moment of the passes: buffers whose gradients are there; bytes gathered, of a unit's gradients, kept."""
    settings = parts.settings
    order = [unit for unit in parts.model.units if not unit.held]
    held = sum(_whole(parts, key) for unit in parts.model.units if unit.held for key in unit.groups)
    whole = [sum(_whole(parts, key) for key in unit.groups) for unit in order]
    kept = [activations.by_unit.get(unit.name, 0) if activations else 0 for unit in order]
    left = activations.nbytes if activations else 0
    best, where, shards = (0, 0, 0, 0), len(order), settings.shards
    done = 0
    for k in reversed(range(len(order))):
        gathered = held + whole[k] + (whole[k - 1] if k else 0)
        numbers = (
            gathered * settings.gather_dtype.itemsize,
            whole[k] * (settings.gather_dtype.itemsize + settings.gradient_dtype.itemsize),
            left,
            done // shards * settings.dtype.itemsize,
        )
        if sum(numbers) > sum(best):
            best, where = numbers, k
        left -= kept[k]
        done += whole[k]
    keys = dict.fromkeys(key for unit in order[where + 1 :] for key in unit.groups)
    return list(keys), *best[:3]


def _whole(parts: Parts, key: str) -> int:
    return parts.parts[key].layout.size


def _workspace(parts: Parts) -> torch.Tensor:
    """Bytes of Newton-Schulz on each owner: equal shapes run stacked, beside the results of shapes done before."""
    owned = torch.zeros(parts.settings.shards, dtype=torch.int64)
    alike: dict[tuple[int, torch.Size], int] = {}
    for part in parts.parts.values():
        for i, owner in part.owners.items():
            shape = part.fine.tensor_shapes[i]
            alike[owner, shape] = alike.get((owner, shape), 0) + 1
    most = torch.zeros(parts.settings.shards, dtype=torch.int64)
    for (owner, shape), count in alike.items():
        m, n = sorted((shape[0], shape[1:].numel()))
        itemsize = parts.settings.travel_dtype.itemsize
        owned[owner] += count * m * n * itemsize
        most[owner] = max(int(most[owner]), count * (2 * m * n + 2 * m * m) * itemsize)
    return owned + most
