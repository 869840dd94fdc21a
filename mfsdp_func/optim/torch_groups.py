"""What a parameter group of a `TorchOptimizer` is to its transformation."""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch.distributed.tensor import DTensor

from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.views import has_buffers
from mfsdp_func.optim.facts import NOWHERE, Where
from mfsdp_func.optim.masks import covers
from mfsdp_func.optim.transformation import GradientTransformation
from mfsdp_func.values.buffer_spec import BufferSpec, is_first_replica
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.ranges import Range, intersect_ranges

Make: TypeAlias = Callable[..., GradientTransformation[Any]]
"""Makes a transformation from its learning rate and settings: `adamw`, or ``partial(muon, owner_layout=owners)``."""

GroupParams: TypeAlias = DBuffer | Mapping[Any, torch.Tensor | DBuffer] | Iterable[torch.Tensor]
"""The parameters of a group: a flat buffer; tensors (or shards), or buffers, by key; or tensors of keys 0, 1, ..."""

OWN_SETTINGS = frozenset({"params", "lr", "transformation", "tensors", "param_names", "initial_lr", "name"})
"""What a group may have beside the settings of its transformation."""

COMPLAINT = "give each parameter group a function from a 0-D learning rate to a transformation, such as optim.adamw"


class Place(NamedTuple):
    """Of which tensor a shard is a part."""

    shape: torch.Size
    part: Range
    writes: bool


@dataclass(frozen=True)
class Group:
    """A parameter group. All tensors stay the same objects, and change in place.

    Attributes:
        make: see `Make`.
        rate: what holds the learning rate: 0-D, float64.
        keys: of the parameters.
        specs: for each of them, what its buffer is; None for a tensor.
        paired: whether tensors of a buffer go by ``(key, index)``; else by index.
        only: the tensors that the group trains; None for all.
        settings: names that `make` knows.
        where: where tensors lie, as far as the transformation knows.
        state: of the transformation, where what the host counts is a 0-D tensor on the CPU.
        counts: which leaves of the state these are.
    """

    make: Make
    rate: torch.Tensor
    keys: tuple[Hashable, ...]
    specs: tuple[BufferSpec | None, ...]
    paired: bool
    only: frozenset[Any] | None
    settings: frozenset[str]
    where: Where = NOWHERE
    state: Any = None
    counts: tuple[int, ...] = ()

    def places(self) -> dict[Hashable, tuple[int, int | None]]:
        """Key of each tensor that this rank holds -> number of its parameter, and index in its buffer."""
        found: dict[Hashable, tuple[int, int | None]] = {}
        for n, (key, spec) in enumerate(zip(self.keys, self.specs, strict=True)):
            if spec is None:
                found[key] = n, None
            else:
                for i, _ in spec.layout.tensors_in(spec.local_range):
                    found[(key, i) if self.paired else i] = n, i
        return {key: place for key, place in found.items() if self.only is None or covers(self.only, key)}

    def owner_layouts(self) -> dict[Any, GroupOwnerLayout]:
        """Those that the transformation knows, by name; a single one under None."""
        found: dict[Any, GroupOwnerLayout] = {}
        for owners in self.where.owners:
            found |= {None: owners} if isinstance(owners, GroupOwnerLayout) else dict(owners)
        return found

    def place_of(self, key: Hashable) -> Place | None:
        """Where a bare shard lies, if the transformation's owner layout tells."""
        split: Any = key if isinstance(key, tuple) and len(key) == 2 else (None, key)
        name, i = split
        owners = self.owner_layouts().get(name)
        if owners is None or owners.mesh.rank is None or i not in owners.tensor_to_owner:
            return None
        whole = owners.layout.get_tensor_range(i)
        part = intersect_ranges(whole, owners.layout.get_local_range(owners.mesh, owners.placements))
        writes = is_first_replica(owners.mesh, owners.placements)
        held = Range(part.start - whole.start, part.numel) if part.numel else Range(0, 0)
        return Place(owners.layout.tensor_shapes[i], held, writes)

    def tensors(self, locals_: list[torch.Tensor]) -> dict[Hashable, torch.Tensor]:
        """This rank's tensors by key, as views of one local tensor per parameter."""
        found: dict[Hashable, torch.Tensor] = {}
        for key, spec, local in zip(self.keys, self.specs, locals_, strict=True):
            if spec is None:
                found[key] = local
            else:
                for i, view in DBuffer(spec, local).tensor_views().items():
                    found[(key, i) if self.paired else i] = view
        return {key: one for key, one in found.items() if self.only is None or covers(self.only, key)}


def settings_of(make: Make) -> dict[str, Any]:
    """The settings that a function knows beside its learning rate, with their defaults."""
    try:
        parameters = list(inspect.signature(make).parameters.values())
    except (TypeError, ValueError):
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    first = next((p.name for p in parameters if p.kind != inspect.Parameter.KEYWORD_ONLY), None)
    return {p.name: p.default for p in parameters if p.kind in kinds and p.name != first}


def is_plain(value: Any) -> bool:
    """Whether a default belongs into a group's dict, where users and checkpoints see it: numbers, words, tuples of them."""
    if isinstance(value, tuple):
        return all(is_plain(one) for one in value)  # pyright: ignore[reportUnknownVariableType]
    return isinstance(value, bool | int | float | str)


def refuse_unknown(make: Make, known: Mapping[str, Any], group: Mapping[str, Any]) -> None:
    """Refuse settings that would be dropped.

    Raises:
        ValueError: naming them, and those that are known.
    """
    unknown = sorted(set(group) - set(known) - OWN_SETTINGS)
    if unknown:
        name = getattr(make, "__name__", None) or getattr(getattr(make, "func", None), "__name__", repr(make))
        raise ValueError(
            f"TorchOptimizer: a parameter group sets {', '.join(unknown)}, which its transformation {name} does not know; it"
            f" knows {', '.join(['lr', *known])}. {_remedy(unknown[0], name, known)}"
        )


def _remedy(setting: str, name: str, known: Mapping[str, Any]) -> str:
    if close := get_close_matches(setting, ["lr", *known], 1):
        return f"Did you mean {close[0]}?"
    if name == "<lambda>":
        return (
            "Give a function that takes it, such as functools.partial(optim.muon, owner_layout=owners), instead of a lambda"
            " of the learning rate alone"
        )
    return "Leave it out, or give a transformation that takes it"


def as_groups(params: GroupParams | Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One dict per group."""
    if isinstance(params, (DBuffer, Mapping, torch.Tensor)):
        return [{"params": params}]
    listed: list[Any] = list(params)
    if listed and all(isinstance(group, Mapping) for group in listed):
        return [dict(group) for group in listed]
    return [{"params": listed}]


def by_key(given: GroupParams) -> dict[Hashable, torch.Tensor | DBuffer]:
    """Parameters and buffers by key."""
    if isinstance(given, DBuffer):
        return {"local_buffer": given}
    if isinstance(given, Mapping):
        return {**given}
    listed: list[Any] = [given] if isinstance(given, torch.Tensor) else list(given)
    pairs: Any = listed if listed and isinstance(listed[0], tuple) else enumerate(listed)
    return dict[Hashable, Any](pairs)


def parameter_of(leaf: torch.Tensor | DBuffer) -> torch.Tensor:
    """What torch optimizes: of a buffer, its local buffer, which then requires gradients."""
    if isinstance(leaf, DBuffer):
        local = leaf.local_buffer
        return local if local.requires_grad or not local.is_leaf else local.requires_grad_()
    return leaf


def refuse_shards(
    transformation: GradientTransformation[Any], made: Group, params: Mapping[Hashable, torch.Tensor]
) -> None:
    """Refuse shards where the transformation needs whole tensors.

    Raises:
        ValueError: naming the first.
    """
    if not transformation.whole:
        return
    named, tensors = list(params.values()), made.tensors([local_of(param) for param in params.values()])
    for key, (n, i) in made.places().items():
        if transformation.whole is not True and not covers(transformation.whole, key):
            continue
        spec = made.specs[n]
        whole = named[n].shape if spec is None or i is None else spec.layout.tensor_shapes[i]
        if tensors[key].shape != whole:
            raise ValueError(
                f"TorchOptimizer: tensor {key!r} is a shard of shape {tuple(tensors[key].shape)} of {tuple(whole)}, but its"
                " transformation needs whole tensors; give muon an owner layout:"
                " functools.partial(muon, owner_layout=owners)"
            )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a parameter on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def is_buffered(given: GroupParams) -> bool:
    """Whether a group is a dict that holds buffers."""
    return isinstance(given, Mapping) and has_buffers(cast("Mapping[Any, Any]", given))
