"""What all ranks must know alike before they clip, skip or count: one all-reduce of two numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from mfsdp_func.effects.groups import flat_mesh, number_of_ranks
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.norm import filled_parts, mesh_facts, mesh_of_all, power_of, sum_spec, summed_over
from mfsdp_func.operations.spec_facts import fact_of, name_spec, spec_of
from mfsdp_func.optim.owners import Owners
from mfsdp_func.values.buffer_spec import BufferSpec, counts_once, is_first_replica
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout

Count = float | torch.Tensor


class Facts(NamedTuple):
    """What is true of the gradients of all ranks together. The same on every rank; on the device of the gradients."""

    squares: torch.Tensor
    """Sum of the squares of all elements, each counted once: 0-D, float64. NaN where one of them is not finite."""
    count: torch.Tensor
    """Sum of what the ranks gave as ``count``: 0-D, float64."""

    @property
    def norm(self) -> torch.Tensor:
        """The norm of all gradients as of one long vector: 0-D, float64. NaN where an element is not finite."""
        return self.squares.sqrt()

    @property
    def finite(self) -> torch.Tensor:
        """Whether no element is infinite or NaN: 0-D, bool."""
        return self.squares.isnan().logical_not()

    def scaled(self, factor: torch.Tensor) -> "Facts":
        """The facts of the gradients times `factor`."""
        return Facts(self.squares * factor.double().square(), self.count)


class Where(NamedTuple):
    """Where tensors of a dict lie, as far as a transformation or its caller can tell."""

    owners: tuple[Owners, ...] = ()
    """Owner layouts: their keys are shards of their buffers."""
    specs: tuple[tuple[Any, BufferSpec], ...] = ()
    """Buffers of which the dict holds tensors, by name; see `mfsdp_func.operations.views.tensors_of`."""
    mesh: Mesh | None = None
    """The ranks that decide together, as a caller said."""

    def __add__(self, other: "Where") -> "Where":  # pyright: ignore[reportIncompatibleMethodOverride]
        """What both know.

        Raises:
            ValueError: if both name ranks, and not the same.
        """
        if self.mesh is not None and other.mesh is not None and self.mesh != other.mesh:
            raise ValueError(f"one decision for all ranks is made over one mesh, got {self.mesh} and {other.mesh}")
        mesh = other.mesh if self.mesh is None else self.mesh
        return Where(self.owners + other.owners, self.specs + other.specs, mesh)


NOWHERE = Where()


class Needs(NamedTuple):
    """What a transformation needs beside gradients, state and parameters, and what it tells those after it."""

    facts: bool = False
    """Its update takes ``facts=``, ``count=`` and ``where=``, and computes the facts where it gets none."""
    count: bool = False
    """Its update takes ``count=`` and ``where=``."""
    where: Where = NOWHERE
    """Where its tensors lie."""
    factor: Callable[[Facts], torch.Tensor] | None = None
    """For one that multiplies all gradients by one number: that number."""
    host_count: bool = False
    """Whether its state holds a count that the host knows, which no tensor can select."""


def facts_of(updates: Any, where: Where, count: Count | None = None) -> Facts:
    """The facts of `updates`: one all-reduce of 16 bytes, by every rank, also by those that hold nothing.

    It runs over the smallest of the meshes that contains all others: those of buffers, of owner layouts, of
    ``where.mesh``. (On a mesh of several axes, over the default process group if it has the same ranks; else over one
    axis after the other.)

    Args:
        updates: a pytree of tensors and buffers.
        where: what is known of them.
        count: this rank's number of samples, tokens or the like.

    Raises:
        ValueError: if there are several ranks and nothing tells which of them decide together, or how a tensor lies.
        TypeError: on integers.
    """
    local = local_facts(updates, where)
    zero = local.squares
    counted = torch.zeros_like(zero) if count is None else torch.zeros_like(zero) + count
    numbers = over_all_ranks(torch.stack([zero, counted.reshape(())]), local.specs, where, local.plain)
    return Facts(numbers[0], numbers[1])


class LocalFacts(NamedTuple):
    """What one rank finds in its own gradients."""

    squares: torch.Tensor
    """Its part of `Facts.squares`."""
    specs: tuple[BufferSpec, ...]
    """Of buffers among the gradients."""
    plain: bool
    """Whether there are plain tensors."""


def local_facts(updates: Any, where: Where, power: float = 2.0) -> LocalFacts:
    """This rank's part of the facts; with another `power` than 2, of that norm (the largest element for infinity)."""
    once, plain = _Once(where), False
    parts: list[tuple[bool, torch.Tensor]] = []
    specs: list[BufferSpec] = []
    for key, leaf in _leaves(updates):
        if isinstance(leaf, DBuffer):
            specs.append(leaf.spec)
            first = fact_of(counts_once, leaf.spec)
            parts += [(first, part) for part in filled_parts(leaf)]
        else:
            plain = True
            parts.append((once.of(key), leaf))
    device = parts[0][1].device if parts else None
    zero = torch.zeros((), dtype=torch.float64, device=device)
    squares = [zero]
    for first, part in parts:
        if not (part.is_floating_point() or part.is_complex()):
            raise TypeError(f"gradients must be floating-point numbers, got a tensor of {part.dtype}")
        if not part.numel():
            continue
        square = power_of(part, power).to(device)
        finite = square.isfinite()
        if part.dtype in (torch.float64, torch.complex128):  # whose squares may overflow where the elements are finite
            finite = part.isfinite().all().to(device)
        squares.append(torch.where(finite, square if first else zero, torch.nan))
    stacked = torch.stack(squares)
    return LocalFacts(stacked.max() if math.isinf(power) else stacked.sum(), tuple(specs), plain)


def over_all_ranks(numbers: torch.Tensor, specs: Sequence[BufferSpec], where: Where, plain: bool) -> torch.Tensor:
    """The sums of 1-D `numbers`, at most two, over the ranks that decide together; see `facts_of`."""
    spec = reduction(specs, where, plain)
    if spec is None:
        return numbers
    padded = torch.cat([numbers, numbers.new_zeros(2 - numbers.numel())]) if numbers.numel() < 2 else numbers
    return summed_over(spec, padded)[: numbers.numel()]


def _leaves(tree: Any, key: Any = None) -> list[tuple[Any, Any]]:
    """Tensors and buffers, each with its key in the innermost dict."""
    if isinstance(tree, torch.Tensor | DBuffer):
        return [(key, tree)]
    leaves: list[tuple[Any, Any]] = []
    if isinstance(tree, Mapping):
        for inner, value in tree.items():
            leaves += _leaves(value, inner)
    elif isinstance(tree, list | tuple):
        for inner in tree:
            leaves += _leaves(inner, key)
    elif tree is not None:
        raise TypeError(
            f"gradients must be tensors or DBuffers in dicts, lists and tuples, got a {type(tree).__name__}"
        )
    return leaves


class _Once:
    """Whether this rank is the one among its replicas whose elements count, by key of the tensor."""

    def __init__(self, where: Where) -> None:
        self.buffers: dict[Any, bool] = {}
        for owners in where.owners:
            if isinstance(owners, GroupOwnerLayout):
                self.buffers[None] = _owner_counts(owners.key)
            else:
                for name, layout in owners.items():
                    self.buffers[name] = _owner_counts(layout.key)
        for name, spec in where.specs:
            self.buffers[name] = fact_of(counts_once, spec)

    def of(self, key: Any) -> bool:
        if isinstance(key, tuple) and len(key) == 2 and key[0] in self.buffers:
            return self.buffers[key[0]]
        if isinstance(key, int) and None in self.buffers:
            return self.buffers[None]
        return True


@torch.compiler.assume_constant_result
def _owner_counts(key: str) -> bool:
    owners = GroupOwnerLayout.from_key(key)
    return is_first_replica(owners.mesh, owners.placements)


def reduction(specs: Sequence[BufferSpec], where: Where, plain: bool) -> BufferSpec | None:
    """The sum that makes the facts; None where this process decides alone."""
    keys = [spec.key for spec in specs] + [spec.key for _, spec in where.specs]
    layouts: list[str] = []
    for owners in where.owners:
        if isinstance(owners, GroupOwnerLayout):
            layouts.append(owners.key)
        else:
            layouts += [layout.key for layout in owners.values()]
    given = None if where.mesh is None else mesh_facts(where.mesh)
    name, error = _chosen(tuple(sorted(set(keys))), tuple(sorted(set(layouts))), given, plain)
    if error:
        raise ValueError(error)
    return None if name is None else spec_of(name)


@torch.compiler.assume_constant_result
def _chosen(
    specs: tuple[str, ...], layouts: tuple[str, ...], given: tuple[Any, ...] | None, plain: bool
) -> tuple[str | None, str]:
    """The name of the spec, or an error's text: what is raised here, Dynamo takes for an error of its own."""
    meshes = [BufferSpec.from_key(key).mesh for key in specs]
    meshes += [GroupOwnerLayout.from_key(key).mesh for key in layouts]
    mesh = None if given is None else Mesh(*given)
    if mesh is None and not meshes:
        if number_of_ranks() == 1:
            return None, ""
        what = "gradients are plain tensors, which do not tell" if plain else "there are no gradients here to tell"
        return None, (
            f"one decision for all ranks: {number_of_ranks()} ranks run this program, and {what} which of them hold parts"
            " of one model. Give mesh= (the ranks whose parts are different; mesh=mf.Mesh(1, ranks=[rank], rank=rank)"
            " where every rank holds all of it), an owner layout, or DBuffers"
        )
    try:
        chosen = flat_mesh(mesh_of_all("one decision for all ranks", meshes, mesh))
        if chosen.size() == 1:
            return None, ""
        return name_spec(sum_spec(chosen, 2)), ""
    except ValueError as error:
        return None, str(error)
