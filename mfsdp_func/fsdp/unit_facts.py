"""What is known of one call of a unit, before it runs and after."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from mfsdp_func.fsdp.graph import UnitGraph
from mfsdp_func.fsdp.replay import Ambient

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Params: TypeAlias = Sequence[Sequence[torch.Tensor]]
"""The parameters of each group."""


class Parts(NamedTuple):
    """The tensors of a call of a unit, by what they are."""

    shards: Tensors
    accumulators: Tensors
    sources: Tensors
    inputs: Tensors


@dataclass(frozen=True)
class Wanted:
    """What a call is differentiated by, by whatever transform; known before it runs.

    Attributes:
        groups: which groups' gradients may be asked for.
        inputs: which inputs'.
        transformed: whether a transform of `torch.func` asks.
    """

    groups: tuple[bool, ...]
    inputs: tuple[bool, ...]
    transformed: bool


@dataclass(frozen=True)
class Asked:
    """What a backward pass is asked for.

    Attributes:
        groups: which groups' gradients.
        inputs: which inputs' gradients.
        outputs: which outputs have a cotangent.
        wanted: what may be asked for.
    """

    groups: tuple[bool, ...]
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    wanted: Wanted


class Learned(NamedTuple):
    """What the first run of a unit tells.

    Attributes:
        ambient: what it ran under.
        outputs: of each tensor output, whether its dtype has gradients.
        carries: of each, whether it depends on anything that is differentiated.
        sums: of each, the sum and the sum of magnitudes, by which a second run is told from the first; none where no
            second run is planned.
        graph: what it has built; None where it is not kept, and after the backward pass.
        checked: whether it was watched, and nothing has passed the unit's borders unseen.
    """

    ambient: Ambient
    outputs: tuple[bool, ...]
    carries: tuple[bool, ...]
    sums: tuple[torch.Tensor, ...] = ()
    graph: UnitGraph | None = None
    checked: bool = False


def floats_of(tensors: Sequence[torch.Tensor]) -> Tensors:
    """Those that can be differentiated."""
    return tuple(tensor for tensor in tensors if is_differentiable(tensor))


def differentiable(tensors: Sequence[torch.Tensor]) -> tuple[bool, ...]:
    """`is_differentiable` of each."""
    return (*map(operator.or_, map(torch.Tensor.is_floating_point, tensors), map(torch.Tensor.is_complex, tensors)),)


def is_differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor's dtype has gradients."""
    return tensor.is_floating_point() or tensor.is_complex()
