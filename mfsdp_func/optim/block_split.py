"""Block specs applied: tensors split into matrices and joined again, and the pieces that lie in one run of memory."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch
from einops import rearrange

from mfsdp_func.optim.block_language import Axis, Factor, Pattern, Product, Sum
from mfsdp_func.optim.blocks import Blocks, Resolved, resolve


class Leaf(NamedTuple):
    """All blocks of one kind: einops patterns from how they are stored to ``(..., m, n)``, and back."""

    kind: int
    split: str
    join: str
    sizes: tuple[tuple[str, int], ...]
    count: int
    matrix: tuple[int, int]


class Cut(NamedTuple):
    """Parts of one dim: einops patterns that lay the dim bare and hide it again, and its cut."""

    split: str
    join: str
    sizes: tuple[tuple[str, int], ...]
    dim: int
    lengths: tuple[int, ...]
    parts: tuple["Tree", ...]


Tree: TypeAlias = Leaf | Cut
"""How a tensor is split: as a value."""

_Kinds: TypeAlias = list[tuple[int, Pattern]]


class Piece(NamedTuple):
    """A part of a parameter that lies in one run of memory and holds whole blocks.

    Attributes:
        offset: of its first element in the parameter.
        shape: in which it is stored.
        tree: how its blocks are taken out of it.
    """

    offset: int
    shape: torch.Size
    tree: Tree


class _Run(NamedTuple):
    """A `Piece` before its tree is built: what its dims consist of, and its kinds of blocks."""

    offset: int
    dims: tuple[Product, ...]
    kinds: _Kinds


def split_blocks(tensor: torch.Tensor, spec: Blocks) -> tuple[torch.Tensor, ...]:
    """The blocks of a whole parameter: for each kind, in the order of the spec, a tensor ``(..., m, n)``.

    Differentiable; the results may be views.

    Raises:
        ValueError: see `mfsdp_func.optim.blocks.resolve`.

    >>> from mfsdp_func.optim.blocks import blocks
    >>> weight = torch.arange(12).view(2, 6)
    >>> q, kv = split_blocks(weight, blocks("m (q + h d) -> m q | h d m", q=2, h=2))
    >>> q.tolist(), kv[0].tolist()
    ([[0, 1], [6, 7]], [[2, 8], [3, 9]])
    """
    return split_tree(tensor, block_tree(spec, tensor.shape))


def join_blocks(parts: Sequence[torch.Tensor], spec: Blocks, shape: Sequence[int]) -> torch.Tensor:
    """The inverse of `split_blocks`: the parameter of a given shape, of its blocks.

    Raises:
        ValueError: see `mfsdp_func.optim.blocks.resolve`.

    >>> from mfsdp_func.optim.blocks import blocks
    >>> spec, weight = blocks("(a + b) m -> a m | m b", a=1), torch.arange(12).view(4, 3)
    >>> torch.equal(join_blocks(split_blocks(weight, spec), spec, (4, 3)), weight)
    True
    """
    return join_tree(parts, block_tree(spec, shape))


def split_tree(tensor: torch.Tensor, tree: Tree) -> tuple[torch.Tensor, ...]:
    """`split_blocks`, for a tree; kinds in ascending order."""
    found = dict(_split(tensor, tree))
    return tuple(found[kind] for kind in sorted(found))


def _split(tensor: torch.Tensor, tree: Tree) -> Iterator[tuple[int, torch.Tensor]]:
    laid = rearrange(tensor, tree.split, **dict(tree.sizes))
    if isinstance(tree, Leaf):
        yield tree.kind, laid
        return
    for part, inner in zip(laid.split(tree.lengths, tree.dim), tree.parts, strict=True):
        yield from _split(part, inner)


def join_tree(parts: Sequence[torch.Tensor], tree: Tree) -> torch.Tensor:
    """`join_blocks`, for a tree."""
    return _join(dict(zip([leaf.kind for leaf in leaves(tree)], parts, strict=True)), tree)


def _join(parts: dict[int, torch.Tensor], tree: Tree) -> torch.Tensor:
    sizes = dict(tree.sizes)
    if isinstance(tree, Leaf):
        return rearrange(parts[tree.kind], tree.join, **sizes)
    return rearrange(torch.cat([_join(parts, inner) for inner in tree.parts], tree.dim), tree.join, **sizes)


def leaves(tree: Tree) -> list[Leaf]:
    """The kinds of blocks of a tree, ascending."""
    if isinstance(tree, Leaf):
        return [tree]
    return sorted((leaf for part in tree.parts for leaf in leaves(part)), key=lambda leaf: leaf.kind)


def block_tree(spec: Blocks, shape: Sequence[int]) -> Tree:
    """How a whole parameter is split; for 2-D ones and ``m n -> m n``, into itself."""
    return _whole_tree(spec, tuple(shape))


def matrices(tree: Tree) -> tuple[tuple[int, tuple[int, int]], ...]:
    """Of each kind, how many matrices of which shape."""
    return tuple((leaf.count, leaf.matrix) for leaf in leaves(tree))


def pieces(spec: Blocks, shape: Sequence[int]) -> tuple[Piece, ...]:
    """A parameter in as many runs of memory as hold whole blocks, in memory order; one where blocks are no such runs.

    Leading axes that count blocks, and leading parts, are peeled off until the next axis belongs to a matrix.

    >>> from mfsdp_func.optim.blocks import blocks
    >>> spec = blocks("(g (q + kv) d) m -> (g q) d m | (g kv) d m", kv=1, d=4, g=2)
    >>> [(piece.offset, tuple(piece.shape)) for piece in pieces(spec, (24, 5))]
    [(0, (4, 5)), (20, (4, 5)), (40, (4, 5)), (60, (4, 5)), (80, (4, 5)), (100, (4, 5))]
    >>> [tuple(piece.shape) for piece in pieces(blocks("m (h d) -> h m d", h=2), (6, 8))]
    [(6, 8)]
    """
    return _pieces(spec, tuple(shape))


@lru_cache(maxsize=4096)
def _whole_tree(spec: Blocks, shape: tuple[int, ...]) -> Tree:
    resolved = resolve(spec, shape)
    return _build(resolved, resolved.left, list(enumerate(resolved.patterns)))


@lru_cache(maxsize=4096)
def _pieces(spec: Blocks, shape: tuple[int, ...]) -> tuple[Piece, ...]:
    resolved = resolve(spec, shape)
    return tuple(_piece(resolved, run) for run in _runs(spec, shape))


def row_numel(spec: Blocks, shape: Sequence[int], number: int) -> int:
    """Elements of a piece for one step along its first axis: where it may be cut, so that blocks of their own remain."""
    resolved, run = resolve(spec, shape), _runs(spec, tuple(shape))[number]
    return _numel(resolved, [run.dims[0][1:], *run.dims[1:]])


def part_of_piece(spec: Blocks, shape: Sequence[int], number: int, numel: int) -> Piece:
    """A part of a piece as a parameter of its own: its blocks are what the part has of those of the piece.

    Args:
        spec: of the parameter.
        shape: of the parameter.
        number: of the piece.
        numel: elements of the part, which starts and ends at a multiple of `row_numel`.

    >>> from mfsdp_func.optim.blocks import blocks
    >>> part = part_of_piece(blocks("m (q + k) -> m q | m k", q=2), (8, 5), 0, 15)
    >>> tuple(part.shape), matrices(part.tree)
    ((3, 5), ((1, (3, 2)), (1, (3, 3))))
    """
    resolved, run = resolve(spec, shape), _runs(spec, tuple(shape))[number]
    head, sizes = run.dims[0][0], dict(resolved.sizes)
    if isinstance(head, Axis):
        sizes[head.name] = numel // row_numel(spec, shape, number)
    return _piece(resolved._replace(sizes=sizes), run)


@lru_cache(maxsize=4096)
def _runs(spec: Blocks, shape: tuple[int, ...]) -> tuple[_Run, ...]:
    resolved = resolve(spec, shape)
    return tuple(_peel(resolved, resolved.left, list(enumerate(resolved.patterns)), 0))


def _piece(resolved: Resolved, run: _Run) -> Piece:
    shape = torch.Size(resolved.size(dim) for dim in run.dims)
    return Piece(run.offset, shape, _build(resolved, run.dims, run.kinds))


def _peel(resolved: Resolved, dims: Sequence[Product], kinds: _Kinds, offset: int) -> Iterator[_Run]:
    (first, *rest), head = dims, dims[0][0] if dims[0] else None
    if head is None and len(dims) > 1:
        yield from _peel(resolved, rest, kinds, offset)
    elif isinstance(head, Sum):
        for n, term in enumerate(head.terms):
            inner = [(*term, *first[1:]), *rest]
            yield from _peel(resolved, inner, _chosen(kinds, head, n), offset)
            offset += _numel(resolved, inner)
    elif head is not None and all(head.name in pattern.batch for _, pattern in kinds):
        inner = [first[1:], *rest]
        left = [(kind, _without(pattern, head.name)) for kind, pattern in kinds]
        found, step = list(_peel(resolved, inner, left, 0)), _numel(resolved, inner)
        for n in range(resolved.sizes[head.name]):
            yield from (run._replace(offset=offset + n * step + run.offset) for run in found)
    else:
        yield _Run(offset, tuple(dims), kinds)


def _numel(resolved: Resolved, dims: Sequence[Product]) -> int:
    return resolved.size([factor for dim in dims for factor in dim])


def _chosen(kinds: _Kinds, chosen: Sum, term: int) -> _Kinds:
    return [(kind, pattern) for kind, pattern in kinds if (chosen.number, term) in pattern.choices]


def _without(pattern: Pattern, name: str) -> Pattern:
    dims = tuple(tuple(other for other in dim if other != name) for dim in pattern.dims)
    return Pattern((*(dim for dim in dims[:-2] if dim), *dims[-2:]), pattern.choices)


def _build(resolved: Resolved, dims: Sequence[Product], kinds: _Kinds) -> Tree:
    factors: list[Factor] = [factor for dim in dims for factor in dim]
    names = {n: _name(resolved, factor, n) for n, factor in enumerate(factors)}
    sizes = tuple((names[n], resolved.size([factor])) for n, factor in enumerate(factors))
    numbers = iter(range(len(factors)))
    stored = " ".join(f"({' '.join(names[next(numbers)] for _ in dim)})" for dim in dims)
    at = next((n for n, factor in enumerate(factors) if isinstance(factor, Sum)), None)
    if at is None:
        ((kind, pattern),) = kinds
        written = " ".join(f"({' '.join(dim)})" for dim in pattern.dims)
        both = f"{stored} -> {written}", f"{written} -> {stored}"
        return Leaf(kind, *both, sizes, resolved.count(pattern), resolved.matrix(pattern))
    bare, chosen = " ".join(names.values()), factors[at]
    parts: list[Tree] = []
    lengths: list[int] = []
    for n, term in enumerate(chosen.terms if isinstance(chosen, Sum) else ()):
        inner: list[Product] = [(factor,) for factor in factors]
        inner[at] = term
        parts.append(_build(resolved, inner, _chosen(kinds, chosen, n) if isinstance(chosen, Sum) else kinds))
        lengths.append(resolved.size(term))
    return Cut(f"{stored} -> {bare}", f"{bare} -> {stored}", sizes, at, tuple(lengths), tuple(parts))


def _name(resolved: Resolved, factor: Factor, number: int) -> str:
    if isinstance(factor, Axis):
        return factor.name
    name = f"sum{number}"
    while name in resolved.sizes:
        name += "x"
    return name
