"""What one rank must know to work on blocks: arithmetic, done once, and constants where `torch.compile` traces."""

import math
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch

from mfsdp_func.optim.block_layout import BlockLayout, block_layout, owners_of_blocks
from mfsdp_func.optim.block_split import Cut, Leaf, Tree, block_tree
from mfsdp_func.optim.blocks import Blocks
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import shard_axes
from mfsdp_func.values.ranges import intersect_ranges

ONE_MATRIX = "m ... -> m (...)"
"""A tensor as one matrix: dim 0 against all others."""

BATCH_OF_MATRICES = "... m n -> ... m n"
"""A tensor as a batch of its last two dims."""

Spec: TypeAlias = tuple[str, tuple[tuple[str, int], ...]]
"""A block spec as plain constants."""


class Part(NamedTuple):
    """Elements of one tensor of the finer layout, as they lie in a shard (or in a whole tensor).

    Attributes:
        key: of the tensor, as the owners of blocks call it.
        tensor: its index in its group.
        start: of the elements in the flat shard.
        numel: how many.
        offset: of the elements in the tensor.
        shape: of the tensor, as it is stored.
        tree: how its matrices are taken out of it.
    """

    key: Any
    tensor: int
    start: int
    numel: int
    offset: int
    shape: tuple[int, ...]
    tree: Tree

    def of(self, key: Any) -> "Part":
        """The same under another key."""
        return Part(key, self.tensor, self.start, self.numel, self.offset, self.shape, self.tree)

    def taken_from(self, shard: torch.Tensor) -> torch.Tensor:
        """The elements: in the tensor's own shape where it is all of them, else flat."""
        flat = shard
        if self.numel != shard.numel():
            flat = shard.reshape(-1)[self.start : self.start + self.numel]
        return flat.reshape(self.shape if self.numel == math.prod(self.shape) else (self.numel,))


class GroupFacts(NamedTuple):
    """Owners of the blocks of one group; the parts of each shard, by index; the trees of the blocks that this rank owns."""

    owners: GroupOwnerLayout
    parts: dict[int, tuple[Part, ...]]
    trees: dict[int, Tree]


def group_facts(
    owners: GroupOwnerLayout, specs: dict[int, Spec], finer: BlockLayout | None, default: Spec
) -> GroupFacts:
    """The facts of this rank.

    Args:
        owners: of whole tensors; of the finer layout where `finer` is given.
        specs: of some tensors that take part; their blocks get owners of their own.
        finer: the finer layout.
        default: the spec of all other tensors, which are not cut.

    Raises:
        ValueError: see `mfsdp_func.optim.block_work.BlockWork`.
    """
    args = owners.key, tuple(sorted(specs.items())), None if finer is None else finer.key, default
    if not torch.compiler.is_compiling():
        return _facts(*args)
    name, parts, trees, error = _constant(*args)
    if error:
        raise ValueError(error)
    rebuilt = {i: tuple([_part(fields) for fields in some]) for i, some in parts}
    return GroupFacts(getattr(_OWNERS, name), rebuilt, {j: _tree(tree) for j, tree in trees})


def whole_part(key: Any, spec: Spec, shape: tuple[int, ...], is_default: bool) -> Part:
    """A whole tensor as its one part.

    Raises:
        ValueError: if it has fewer than two dims, and no spec of its own; or the spec does not fit.
    """
    shape = tuple([int(size) for size in shape])
    if is_default:
        _check_dims(key, shape)
    if torch.compiler.is_compiling():
        tree, error = _constant_tree(spec, shape)
        if error:
            raise ValueError(error)
        tree = _tree(tree)
    else:
        tree = block_tree(Blocks(*spec), shape)
    return Part(key, 0, 0, math.prod(shape), 0, shape, tree)


_OWNERS = SimpleNamespace()
"""Owner layouts as attributes of a global: that gives them a source, on which compiled code can guard."""


@lru_cache(maxsize=1024)
def _facts(key: str, specs: tuple[tuple[int, Spec], ...], finer_key: str | None, default: Spec) -> GroupFacts:
    given = GroupOwnerLayout.from_key(key)
    named = {i: Blocks(*spec) for i, spec in specs}
    if finer_key is not None:
        finer, owners = BlockLayout.from_key(finer_key), given
        if owners.layout != finer.fine:
            raise ValueError(
                f"muon: blocks is a finer layout of {len(finer.fine.tensor_shapes)} tensors, but the owner layout"
                f" {owners.name!r} is of another layout; make it of BlockLayout.fine"
            )
    else:
        for i, spec in named.items():
            block_tree(spec, given.layout.tensor_shapes[i])
        finer, owners = block_layout(given.layout, named), owners_of_blocks(given, named)
    return GroupFacts(owners, _parts(finer, owners, default), _owned_trees(finer, owners, default))


def _taking_part(finer: BlockLayout, owners: GroupOwnerLayout) -> list[int]:
    found: list[int] = []
    for i in range(len(finer.coarse.tensor_shapes)):
        own = [j in owners.tensor_to_owner for j in finer.parts_of(i)]
        if any(own) and not all(own):
            raise ValueError(
                f"muon: tensor {i} of {owners.name!r} has {len(own)} blocks, of which {sum(own)} have an owner; give all"
                " of them one, or none"
            )
        if all(own):
            found.append(i)
    return found


def _tree_of(finer: BlockLayout, j: int, default: Spec) -> Tree:
    if j in finer.trees:
        return finer.trees[j]
    shape = finer.fine.tensor_shapes[j]
    _check_dims(j, shape)
    return block_tree(Blocks(*default), shape)


def _parts(finer: BlockLayout, owners: GroupOwnerLayout, default: Spec) -> dict[int, tuple[Part, ...]]:
    mesh, layout = owners.mesh, finer.fine
    held = None if mesh.rank is None else layout.get_rank_range(mesh, owners.placements, mesh.rank)
    found: dict[int, tuple[Part, ...]] = {}
    for i in _taking_part(finer, owners):
        parts: list[Part] = []
        cursor = 0
        for j in finer.parts_of(i):
            whole, tree = layout.get_tensor_range(j), _tree_of(finer, j, default)
            met = whole if held is None else intersect_ranges(whole, held)
            if met.numel:
                shape = tuple(layout.tensor_shapes[j])
                parts.append(Part(j, j, cursor, met.numel, met.start - whole.start, shape, tree))
                cursor += met.numel
        found[i] = tuple(parts)
    return found


def _owned_trees(finer: BlockLayout, owners: GroupOwnerLayout, default: Spec) -> dict[int, Tree]:
    mesh, axes = owners.mesh, shard_axes(owners.placements)
    me = None if mesh.rank is None else mesh.shard_index(axes, mesh.rank)
    return {
        j: _tree_of(finer, j, default)
        for j, owner in owners.tensor_to_owner.items()
        if me is None or mesh.shard_index(axes, owner) == me
    }


def _check_dims(key: object, shape: tuple[int, ...]) -> None:
    if len(shape) < 2:
        raise ValueError(
            f"muon: tensor {key!r} {tuple(shape)} is no matrix;"
            " leave it to adamw (see partition), and out of the owner layout"
        )


# Inside a compiled region: plain tuples, which need no guards.


@torch.compiler.assume_constant_result
def _constant(
    key: str, specs: tuple[tuple[int, Spec], ...], finer_key: str | None, default: Spec
) -> tuple[str, Any, Any, str]:
    try:
        facts = _facts(key, specs, finer_key, default)
    except ValueError as error:
        return "", (), (), str(error)
    name = f"owners_{abs(hash(facts.owners.key))}"
    setattr(_OWNERS, name, facts.owners)
    parts = tuple((i, tuple((*part[:-1], _plain(part.tree)) for part in some)) for i, some in facts.parts.items())
    return name, parts, tuple((j, _plain(tree)) for j, tree in facts.trees.items()), ""


@torch.compiler.assume_constant_result
def _constant_tree(spec: Spec, shape: tuple[int, ...]) -> tuple[Any, str]:
    try:
        return _plain(block_tree(Blocks(*spec), shape)), ""
    except ValueError as error:
        return None, str(error)


def _plain(tree: Tree) -> tuple[Any, ...]:
    if isinstance(tree, Leaf):
        return tuple(tree)
    return (*tree[:-1], tuple(map(_plain, tree.parts)))


def _tree(plain: tuple[Any, ...]) -> Tree:
    if isinstance(plain[0], int):
        return Leaf(*plain)
    split, join, sizes, dim, lengths, parts = plain
    return Cut(split, join, sizes, dim, lengths, tuple([_tree(part) for part in parts]))


def _part(plain: tuple[Any, ...]) -> Part:
    key, tensor, start, numel, offset, shape, tree = plain
    return Part(key, tensor, start, numel, offset, shape, _tree(tree))
