"""What one rank must know to work on blocks: arithmetic, done once, and constants where `torch.compile` traces."""

import math
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch

from mfsdp_func.optim.block_layout import BlockLayout, block_layout, owners_of_blocks
from mfsdp_func.optim.block_split import Cut, Leaf, Tree, block_tree, part_of_piece, row_numel
from mfsdp_func.optim.blocks import Blocks
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import shard_axes
from mfsdp_func.values.ranges import Range, intersect_ranges

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


class OwnedPiece(NamedTuple):
    """A tensor of the finer layout that this rank owns: how its matrices are taken out of it, and what it is a piece of."""

    tree: Tree
    tensor: int
    number: int


class GroupFacts(NamedTuple):
    """Owners of the blocks of one group; the parts of each shard, by index; what this rank owns, by finer index."""

    owners: GroupOwnerLayout
    parts: dict[int, tuple[Part, ...]]
    owned: dict[int, OwnedPiece]


def group_facts(
    owners: GroupOwnerLayout, specs: dict[int, Spec], finer: BlockLayout | None, default: Spec, local: bool = False
) -> GroupFacts:
    """The facts of this rank.

    Args:
        owners: of whole tensors; of the finer layout where `finer` is given.
        specs: of some tensors that take part; their blocks get owners of their own.
        finer: the finer layout.
        default: the spec of all other tensors, which are not cut.
        local: whether each part stands for itself, as a tensor whose blocks are what this rank holds of the blocks.

    Raises:
        ValueError: see `mfsdp_func.optim.block_work.BlockWork`; with `local`, alike on all ranks, if a rank holds a part
            of a tensor that cuts inside its first axis.
    """
    args = owners.key, tuple(sorted(specs.items())), None if finer is None else finer.key, default, local
    if not torch.compiler.is_compiling():
        return _facts(*args)
    name, parts, owned, error = _constant(*args)
    if error:
        raise ValueError(error)
    rebuilt = {i: tuple([_part(fields) for fields in some]) for i, some in parts}
    return GroupFacts(getattr(_OWNERS, name), rebuilt, {j: OwnedPiece(_tree(tree), i, n) for j, (tree, i, n) in owned})


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
def _facts(
    key: str, specs: tuple[tuple[int, Spec], ...], finer_key: str | None, default: Spec, local: bool
) -> GroupFacts:
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
    parts = _parts(finer, owners, default)
    if local:
        _check_cuts(finer, owners, default)
        parts = {i: tuple([_local(finer, i, part, default) for part in some]) for i, some in parts.items()}
    return GroupFacts(owners, parts, _owned(finer, owners, default))


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


def _spec_of(finer: BlockLayout, i: int, j: int, default: Spec) -> tuple[Blocks, torch.Size, int]:
    """Spec and shape of the parameter of which `j` is a piece, and the number of the piece."""
    specs = dict(finer.blocks)
    if i in specs:
        return specs[i], finer.coarse.tensor_shapes[i], j - finer.parts_of(i).start
    return Blocks(*default), finer.fine.tensor_shapes[j], 0


def _local(finer: BlockLayout, i: int, part: Part, default: Spec) -> Part:
    piece = part_of_piece(*_spec_of(finer, i, part.tensor, default), part.numel)
    return part._replace(offset=0, shape=tuple(piece.shape), tree=piece.tree)


def _check_cuts(finer: BlockLayout, owners: GroupOwnerLayout, default: Spec) -> None:
    layout, count = finer.fine, owners.mesh.shard_count(shard_axes(owners.placements))
    of_coarse = {j: i for i in _taking_part(finer, owners) for j in finer.parts_of(i)}
    for k in range(count):
        for j, part in layout.tensors_in(Range(layout.get_segment(k, count).start, 1)):
            if j in of_coarse and part.start % (step := row_numel(*_spec_of(finer, of_coarse[j], j, default))):
                raise ValueError(
                    f"muon: period: tensor {of_coarse[j]} of {owners.name!r} is cut between ranks {part.start} elements into"
                    f" a block of shape {tuple(layout.tensor_shapes[j])}, which is no multiple of {step}, so that a rank's"
                    " part is no block of its own; cut the buffer by BlockAtomic, or give blocks= that are runs of rows"
                )


def _owned(finer: BlockLayout, owners: GroupOwnerLayout, default: Spec) -> dict[int, OwnedPiece]:
    mesh, axes = owners.mesh, shard_axes(owners.placements)
    me = None if mesh.rank is None else mesh.shard_index(axes, mesh.rank)
    return {
        j: OwnedPiece(_tree_of(finer, j, default), i, n)
        for i in _taking_part(finer, owners)
        for n, j in enumerate(finer.parts_of(i))
        if me is None or mesh.shard_index(axes, owners.tensor_to_owner[j]) == me
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
    key: str, specs: tuple[tuple[int, Spec], ...], finer_key: str | None, default: Spec, local: bool
) -> tuple[str, Any, Any, str]:
    try:
        facts = _facts(key, specs, finer_key, default, local)
    except ValueError as error:
        return "", (), (), str(error)
    name = f"owners_{abs(hash(facts.owners.key))}"
    setattr(_OWNERS, name, facts.owners)
    parts = tuple((i, tuple((*part[:-1], _plain(part.tree)) for part in some)) for i, some in facts.parts.items())
    return name, parts, tuple((j, (_plain(one.tree), *one[1:])) for j, one in facts.owned.items()), ""


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
