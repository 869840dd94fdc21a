"""What lives in a forward and backward pass, moment by moment: gathered units, activations, gradients on their way.

The moments are those of `UnitCall.backward`: a unit is gathered, with the next one ahead of it; it is differentiated,
which frees its activations while its gradients come; its parameters go; its gradients become one flat buffer; that is
averaged, and its shard stays. What differs is the way of differentiating: `torch.func.grad` keeps the arguments of units
and the cotangents of their results until the end, for derivatives beyond the first; ``.backward()`` lets go of them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from mfsdp_func.preflight.activations import Activations, OfUnit
from mfsdp_func.preflight.parts import Part, Parts, stored_sizes


@dataclass(frozen=True, eq=False)
class Moment:
    """Bytes at one moment of a pass, besides parameters and state; those of shards as a vector over shards, int64.

    Attributes:
        done: of gradients that have been averaged.
        gathered: of whole buffers.
        gradients: of a unit's gradients, before they are averaged.
        activations: of what is kept for the rest of the pass, and of what the unit computes with.
    """

    done: torch.Tensor
    gathered: int = 0
    gradients: int = 0
    activations: int = 0

    @property
    def nbytes(self) -> int:
        """All of it, on the shard that has most."""
        return int(self.done.max()) + self.gathered + self.gradients + self.activations


@dataclass
class _Walk:
    """A backward pass on its way through the calls of units."""

    parts: Parts
    functional: bool
    averaged: dict[str, Part] = field(default_factory=dict)
    done: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.done = torch.zeros(self.parts.settings.shards, dtype=torch.int64)

    def whole(self, keys: Sequence[str], itemsize: int) -> int:
        """Bytes of gathered buffers."""
        return sum(self.parts.parts[key].layout.size for key in keys) * itemsize

    def trained(self, keys: Sequence[str]) -> list[Part]:
        """The buffers among them that have gradients."""
        return [part for key in keys if (part := self.parts.parts[key]).group.trainable]

    def average(self, keys: Sequence[str]) -> None:
        """Shards of their gradients stay, once, however often they are used."""
        for key in keys:
            part = self.parts.parts[key]
            if part.group.trainable and key not in self.averaged:
                self.averaged[key] = part
                self.done = self.done + stored_sizes(part) * self.parts.settings.dtype.itemsize


def fullest_moment(parts: Parts, activations: Activations | None, *, functional: bool) -> Moment:
    """The moment of a pass that needs most.

    Args:
        parts: the buffers.
        activations: of a batch; None leaves them out.
        functional: whether `torch.func.grad` differentiates, or ``.backward()``.
    """
    return max(_moments(parts, activations, functional), key=lambda moment: moment.nbytes)


def _moments(parts: Parts, activations: Activations | None, functional: bool) -> Iterator[Moment]:
    groups = {unit.name: unit.groups for unit in parts.model.units if not unit.held}
    calls = activations.units if activations else tuple(OfUnit(name, 0, 0, 0, 0) for name in groups)
    held_keys = [key for unit in parts.model.units if unit.held for key in unit.groups]
    walk, itemsize = _Walk(parts, functional), parts.settings.gather_dtype.itemsize
    held = walk.whole(held_keys, itemsize)
    outside, again = (activations.outside, activations.again) if activations else (0, 0)
    # A unit that runs again keeps its arguments, and has the rest while it is at work.
    kept = [call.inputs if parts.settings.recompute else call.kept for call in calls]
    left = sum(kept)
    last = calls[-1].outputs if calls else 0
    yield Moment(walk.done, held, 0, left + outside + max(again, last) + last)
    carried = outside + again if functional else 0
    for k in reversed(range(len(calls))):
        call, keys = calls[k], groups[calls[k].name]
        ahead = held + (walk.whole(groups[calls[k - 1].name], itemsize) if k else 0)
        left -= kept[k]
        now = left + carried + call.outputs * (2 if parts.settings.recompute else 1)  # cotangents; results again
        yield from _of_unit(walk, keys, call, ahead, now)
        walk.average(keys)
        if functional:
            carried += call.outputs + call.inputs
    if held_keys:
        yield from _of_unit(walk, held_keys, OfUnit("", 0, 0, 0, 0), 0, carried)
        walk.average(held_keys)
    yield Moment(walk.done, 0, 0, carried)


def _of_unit(walk: _Walk, keys: Sequence[str], call: OfUnit, ahead: int, now: int) -> Iterator[Moment]:
    """Moments of one call of a unit: differentiated, flattened, averaged."""
    settings = walk.parts.settings
    itemsize, reduced = settings.gather_dtype.itemsize, settings.gradient_dtype.itemsize
    trained = walk.trained(keys)
    gradients = sum(part.layout.size for part in trained) * itemsize
    whole = walk.whole(keys, itemsize)
    # Activations go while gradients come. At first there is one gradient, and the operation at work holds about two
    # tensors of the largest kind.
    first = max((numel for part in trained for numel in part.layout.tensor_numels), default=0) * itemsize
    yield Moment(walk.done, ahead + whole, first, now + call.kept + 2 * call.largest)
    yield Moment(walk.done, ahead + whole, gradients, now + call.inputs)
    flat = shards = 0
    for part in trained:
        size = part.layout.size
        cast = size * reduced if reduced != itemsize else 0
        flat += size * reduced
        yield Moment(walk.done, ahead, gradients + cast + flat, now + call.inputs)
        gradients -= size * itemsize
        shards += int(stored_sizes(part).max()) * settings.dtype.itemsize
    yield Moment(walk.done, ahead, flat + shards, now + call.inputs)
