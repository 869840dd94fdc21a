"""Blocks that are runs of memory, as a finer logical layout of the same flat buffer."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from weakref import WeakValueDictionary

import torch

from mfsdp_func.optim.block_split import Tree, leaves, pieces
from mfsdp_func.optim.blocks import Blocks, as_blocks
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.owner_planning import CostFn, GroupOwnerLayout, assign_owner_work, ns_cost_fn


@dataclass(frozen=True)
class BlockLayout:
    """A layout, and the finer one in which each block that is one run of memory is a tensor of its own.

    Both describe one buffer: sizes, segments and elements are the same, so that owners, costs, balance, plans and
    reports of the finer one are those of blocks. Tensors whose blocks are no such runs (columns), and those without a
    spec, are one tensor in both.

    Attributes:
        coarse: the layout of whole tensors.
        blocks: tensor index -> its spec, as pairs in ascending order.

    >>> from mfsdp_func.optim.blocks import blocks
    >>> layout = GlobalLayout([(6, 2), (2,)], [0, 12], 14, [0, 8])
    >>> fine = block_layout(layout, {0: blocks("(q + k) m -> q m | k m", q=4)})
    >>> fine.fine
    GlobalLayout([(4, 2), (2, 2), (2,)], [0, 8, 12], 14, [0, 8])
    >>> fine.parts_of(0), fine.parts_of(1)
    (range(0, 2), range(2, 3))
    """

    coarse: GlobalLayout
    blocks: tuple[tuple[int, Blocks], ...]
    key: str = field(init=False, compare=False, repr=False)
    """The value as a string: what compiled code guards on."""

    def __post_init__(self) -> None:
        words = f"{self.coarse.digest} {self.blocks}"
        object.__setattr__(self, "key", hashlib.sha256(words.encode()).hexdigest())
        object.__setattr__(self, "_canonical", _BY_KEY.setdefault(self.key, self))

    @staticmethod
    def from_key(key: str) -> "BlockLayout":
        """The living value with a given `key`."""
        return _BY_KEY[key]

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return BlockLayout, (self.coarse, self.blocks)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.coarse, self.blocks))

    @cached_property
    def fine(self) -> GlobalLayout:
        """The finer layout."""
        shapes, offsets = list[tuple[int, ...]](), list[int]()
        specs, coarse = dict(self.blocks), self.coarse
        for i, (shape, offset) in enumerate(zip(coarse.tensor_shapes, coarse.tensor_to_offset, strict=True)):
            for piece in pieces(specs[i], shape) if i in specs else ():
                shapes.append(tuple(piece.shape))
                offsets.append(offset + piece.offset)
            if i not in specs:
                shapes.append(tuple(shape))
                offsets.append(offset)
        equal = coarse.stores_equal_segments
        return GlobalLayout(shapes, offsets, coarse.size, coarse.rank_to_offset, stores_equal_segments=equal)

    @cached_property
    def _starts(self) -> tuple[int, ...]:
        specs, starts = dict(self.blocks), [0]
        for i, shape in enumerate(self.coarse.tensor_shapes):
            starts.append(starts[-1] + (len(pieces(specs[i], shape)) if i in specs else 1))
        return tuple(starts)

    def parts_of(self, tensor_index: int) -> range:
        """The tensors of `fine` that a tensor of `coarse` consists of, in memory order."""
        return range(self._starts[tensor_index], self._starts[tensor_index + 1])

    @cached_property
    def trees(self) -> dict[int, Tree]:
        """How the matrices of each tensor of `fine` are taken out of it; for those of tensors that have a spec."""
        return {
            j: piece.tree
            for i, spec in self.blocks
            for j, piece in zip(self.parts_of(i), pieces(spec, self.coarse.tensor_shapes[i]), strict=True)
        }

    def costs(self, cost_fn: CostFn | None = None) -> dict[int, float]:
        """The work of each tensor of `fine` that has a spec: the sum of that of its matrices.

        Args:
            cost_fn: the work of one matrix of a shape; by default ``ns_cost_fn()``.
        """
        return {j: tree_cost(tree, cost_fn) for j, tree in self.trees.items()}


def tree_cost(tree: Tree, cost_fn: CostFn | None = None) -> float:
    """The work of all matrices of a tree."""
    function = cost_fn or ns_cost_fn()
    return sum(leaf.count * function(torch.Size(leaf.matrix)) for leaf in leaves(tree))


@lru_cache(maxsize=1024)
def _block_layout(coarse: GlobalLayout, given: tuple[tuple[int, Blocks], ...]) -> BlockLayout:
    return BlockLayout(coarse, given)


def block_layout(layout: GlobalLayout, given: Mapping[int, Blocks | str]) -> BlockLayout:
    """See `BlockLayout`; equal values are one object.

    Args:
        layout: of whole tensors, in their logical shapes.
        given: tensor index -> block spec.

    Raises:
        IndexError: if there is no such tensor.
        ValueError: if a spec does not fit its tensor; see `mfsdp_func.optim.blocks.resolve`.
    """
    for i, spec in given.items():
        shape = layout.tensor_shapes[i] if layout.get_tensor_range(i) else ()
        pieces(as_blocks(spec), shape)
    return _block_layout(layout, tuple((i, as_blocks(given[i])) for i in sorted(given)))


def owners_of_blocks(
    owner_layout: GroupOwnerLayout, given: Mapping[int, Blocks | str], cost_fn: CostFn | None = None
) -> GroupOwnerLayout:
    """The owners of blocks, from those of whole tensors: an owner layout of the finer layout.

    A tensor that is one run keeps its owner. The blocks of the others are assigned by `assign_owner_work`: each to a
    rank that holds a part of it, so that a block on one rank needs no message.

    Args:
        owner_layout: which tensors take part, and who owns them.
        given: block specs of some of them; see `block_layout`.
        cost_fn: the work of one matrix of a shape.
    """
    return _owners_of_blocks(owner_layout, tuple(sorted((i, as_blocks(spec)) for i, spec in given.items())), cost_fn)


@lru_cache(maxsize=1024)
def _owners_of_blocks(
    owners: GroupOwnerLayout, given: tuple[tuple[int, Blocks], ...], cost_fn: CostFn | None
) -> GroupOwnerLayout:
    specs = {i: spec for i, spec in given if i in owners.tensor_to_owner}
    finer = block_layout(owners.layout, specs)
    chosen: dict[int, int] = {}
    cut: list[int] = []
    for i, owner in owners.tensor_to_owner.items():
        parts = finer.parts_of(i)
        if len(parts) == 1:
            chosen[parts[0]] = owner
        else:
            cut += parts
    costs = finer.costs(cost_fn)
    chosen |= assign_owner_work(finer.fine, owners.mesh, cut, costs, placements=owners.placements)
    return GroupOwnerLayout(owners.mesh, finer.fine, chosen, owners.placements, owners.name, owners.dtype)


# Equal values share one canonical object, which each of them keeps alive, so that a key can be resolved.
_BY_KEY: WeakValueDictionary[str, BlockLayout] = WeakValueDictionary()
