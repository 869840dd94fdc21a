"""Block specs: which parts of a parameter are matrices of their own, written in einops' language with ``+``.

A spec is a value of text and sizes; `resolve` checks it against the global shape of a parameter. No tensors here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import NamedTuple

from mfsdp_func.optim.block_language import (
    ELLIPSIS,
    Axis,
    Factor,
    Pattern,
    Product,
    names_of,
    parse,
    show_pattern,
    show_product,
)


@dataclass(frozen=True, repr=False)
class Blocks:
    """What `blocks` returns: a spec and the sizes of some of its axes. Printable, hashable, comparable."""

    spec: str
    sizes: tuple[tuple[str, int], ...]

    def __repr__(self) -> str:
        return f"blocks({', '.join([repr(self.spec), *(f'{name}={size}' for name, size in self.sizes)])})"

    def __str__(self) -> str:
        return " ".join([self.spec, *(f"{name}={size}" for name, size in self.sizes)])


def blocks(spec: str, **sizes: int) -> Blocks:
    """Say which parts of a parameter are matrices of their own: heads, projections, experts, halves of an axis.

    The language is that of einops, and ``+`` for parts of an axis that lie one after the other, on any axis, nested.
    Left stands the parameter, as it is stored; right, one pattern for each kind of block, separated by ``|``: its last
    two dims are the matrix, the others count matrices. A pattern takes one term of each sum, every part is taken
    once, and nothing is repeated or left out: splitting is a bijection.

    ================================================================ ===================================================
    spec                                                             blocks
    ================================================================ ===================================================
    ``(q + k + v) m -> q m | k m | v m``                             a fused QKV of unequal parts
    ``(g (q + k + v) d) m -> (g q) d m | (g k) d m | (g v) d m``     in groups, per head of `d` rows
    ``(g (q + k + v) d) m -> (g q d) m | (g k d) m | (g v d) m``     in groups, per projection
    ``m (q + k + v) -> m q | m k | m v``                             parts are columns; ``-> q m | ...`` transposes
    ``e (a + b) i -> e a i | e b i``                                 gate and up of every expert
    ``o i kh kw -> o (i kh kw)``                                     a convolution
    ``m (h d) -> h m d``                                             heads of columns
    ================================================================ ===================================================

    Args:
        spec: see above; names as in Python, ``1`` for a dim of size 1, ``...`` for any number of dims.
        sizes: of axes; one unknown axis of each dim (one unknown term of each sum) follows from the shape.

    Returns:
        A value; the functions of `mfsdp_func.optim.block_split` apply it.

    Raises:
        ValueError: on a spec that is no such bijection, or a size that is not positive or of no axis.

    >>> blocks("(q + k + v) m -> q m | k m | v m", k=8, v=8)
    blocks('(q + k + v) m -> q m | k m | v m', k=8, v=8)
    """
    parse(spec)
    value = Blocks(" ".join(spec.split()), tuple(sorted(sizes.items())))
    known = set(names_of(parse(spec).left))
    for name, size in sizes.items():
        if name not in known:
            raise ValueError(f"{value!r}: a size is given for {name!r}, which is no axis on the left")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{value!r}: the size of {name!r} must be a positive int, got {size!r}")
    return value


def as_blocks(given: Blocks | str) -> Blocks:
    """A spec without sizes may be given as its text.

    Raises:
        TypeError: on something else.
        ValueError: see `blocks`.
    """
    if isinstance(given, str):
        return blocks(given)
    if not isinstance(given, Blocks):
        raise TypeError(f"expected a block spec, optim.blocks(...) or its text, got {type(given).__name__}")
    return given


class Resolved(NamedTuple):
    """A spec for one shape: ``...`` written out, and the size of every axis known."""

    left: tuple[Product, ...]
    patterns: tuple[Pattern, ...]
    sizes: Mapping[str, int]

    def size(self, product: Sequence[Factor]) -> int:
        """Number of elements along axes."""
        return math.prod(
            self.sizes[factor.name] if isinstance(factor, Axis) else sum(map(self.size, factor.terms))
            for factor in product
        )

    def matrix(self, pattern: Pattern) -> tuple[int, int]:
        """The shape of the matrices of one kind."""
        m, n = (math.prod(self.sizes[name] for name in dim) for dim in pattern.dims[-2:])
        return m, n

    def count(self, pattern: Pattern) -> int:
        """How many matrices there are of one kind."""
        return math.prod(self.sizes[name] for dim in pattern.dims[:-2] for name in dim)


def resolve(spec: Blocks, shape: Sequence[int]) -> Resolved:
    """Check a spec against the global shape of a parameter, and find the sizes of all its axes.

    Raises:
        ValueError: if dims or sizes do not fit, or do not follow from what is given.
    """
    return _resolve(spec, tuple(shape))


@lru_cache(maxsize=4096)
def _resolve(spec: Blocks, shape: tuple[int, ...]) -> Resolved:
    parsed = parse(spec.spec)
    sizes = dict(spec.sizes)
    where = f"{spec!r} for a parameter of shape {shape}"
    left, patterns = parsed.left, parsed.patterns
    if (Axis(ELLIPSIS),) in left:
        at, extra = left.index((Axis(ELLIPSIS),)), len(shape) - len(left) + 1
        if extra < 0:
            raise ValueError(f"{where}: the left has at least {len(left) - 1} dims, the parameter {len(shape)}")
        taken = set(names_of(left))
        names = (name for name in (f"dim{n}" for n in count()) if name not in taken)
        fresh = [next(names) for _ in range(extra)]
        left = (*left[:at], *((Axis(name),) for name in fresh), *left[at + 1 :])
        patterns = tuple(_expand(pattern, fresh) for pattern in patterns)
        for pattern in patterns:
            if len(pattern.dims) < 2:
                raise ValueError(f"{where}: pattern {show_pattern(pattern)!r} has no two dims for a matrix")
    if len(left) != len(shape):
        raise ValueError(f"{where}: the left has {len(left)} dims, the parameter {len(shape)}; write one for each dim")
    pending = list(range(len(shape)))
    while pending:
        before = len(pending), len(sizes)
        pending = [dim for dim in pending if not _solve(left[dim], shape[dim], sizes, f"{where}, dim {dim}")]
        if (len(pending), len(sizes)) == before:
            unknown = sorted({name for dim in pending for name in names_of(left[dim : dim + 1]) if name not in sizes})
            raise ValueError(
                f"{where}: the sizes of {', '.join(map(repr, unknown))} do not follow from the shape; give all but one"
                f" of them, as in blocks(..., {unknown[0]}=...)"
            )
    return Resolved(left, patterns, sizes)


def _solve(product: Sequence[Factor], total: int, sizes: dict[str, int], where: str) -> bool:
    """Find the one size that is unknown, if it is one; say whether all of them are known now."""
    known = [_known(factor, sizes) for factor in product]
    unknown = [factor for factor, size in zip(product, known, strict=True) if size is None]
    rest = math.prod(size for size in known if size is not None)
    if not unknown:
        if rest != total:
            raise ValueError(f"{where}: {show_product(product)} is {rest}, the parameter has {total}")
        return True
    if len(unknown) > 1:
        return False
    if not rest or total % rest:
        raise ValueError(f"{where}: {total} is no multiple of {rest}, what is known of {show_product(product)}")
    total //= rest
    (factor,) = unknown
    if isinstance(factor, Axis):
        sizes[factor.name] = total
        return True
    terms = [(term, _known_product(term, sizes)) for term in factor.terms]
    missing = [term for term, size in terms if size is None]
    total -= sum(size for _, size in terms if size is not None)
    if len(missing) > 1:
        return False
    if total < 0:
        raise ValueError(f"{where}: the known parts of {show_product([factor])} are {-total} too many")
    return _solve(missing[0], total, sizes, where) and _known(factor, sizes) is not None


def _known(factor: Factor, sizes: Mapping[str, int]) -> int | None:
    if isinstance(factor, Axis):
        return sizes.get(factor.name)
    found = [_known_product(term, sizes) for term in factor.terms]
    return None if None in found else sum(size for size in found if size is not None)


def _known_product(product: Product, sizes: Mapping[str, int]) -> int | None:
    found = [_known(factor, sizes) for factor in product]
    return None if None in found else math.prod(size for size in found if size is not None)


def _expand(pattern: Pattern, fresh: Sequence[str]) -> Pattern:
    dims: list[tuple[str, ...]] = []
    for n, dim in enumerate(pattern.dims):
        if n == pattern.spread:
            dims += [(name,) for name in fresh]
        else:
            dims.append(tuple(new for name in dim for new in (fresh if name == ELLIPSIS else (name,))))
    return Pattern(tuple(dims), pattern.choices)
