"""The language of block specs: einops' patterns, and ``+`` for parts of an axis. Text to a syntax tree, no sizes."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import NamedTuple, TypeAlias

ELLIPSIS = "..."


class Axis(NamedTuple):
    """A named axis, or ``...``."""

    name: str


class Sum(NamedTuple):
    """Parts of an axis that lie one after the other: ``(q + k + v)``. `number` tells the sums of a spec apart."""

    number: int
    terms: tuple["Product", ...]


Factor: TypeAlias = Axis | Sum
Product: TypeAlias = tuple[Factor, ...]
"""Axes that one dim of a tensor is composed of, the slowest first; empty for a dim of size 1."""


class Pattern(NamedTuple):
    """One kind of block: the axes of each of its dims, which term of each sum it comes from, and which dim is a bare ``...``."""

    dims: tuple[tuple[str, ...], ...]
    choices: tuple[tuple[int, int], ...]
    spread: int | None = None

    @property
    def batch(self) -> frozenset[str]:
        """The axes that count blocks."""
        return frozenset(name for dim in self.dims[:-2] for name in dim)


_TOKEN = re.compile(r"\s*(?:([A-Za-z]\w*)|(1)(?!\d)|(\.\.\.)|([()+]))")


class Parsed(NamedTuple):
    """A spec: the axes of each dim of the parameter, and the kinds of blocks."""

    left: tuple[Product, ...]
    patterns: tuple[Pattern, ...]


@lru_cache(maxsize=4096)
def parse(spec: str) -> Parsed:
    """Read a spec, and refuse what is no bijection.

    Raises:
        TypeError: if it is no string.
        ValueError: see `mfsdp_func.optim.blocks.blocks`.
    """
    if not isinstance(spec, str):
        raise TypeError(f"blocks: a spec is a string, got {type(spec).__name__}")
    sides = spec.split("->")
    if len(sides) != 2:
        raise ValueError(f"blocks({spec!r}): expected 'parameter -> matrices', with one arrow")
    reader = _Reader(spec, sides[0])
    left = reader.side()
    if sum(name == ELLIPSIS for name in names_of(left)) != len(reader.spread) or len(reader.spread) > 1:
        raise ValueError(f"blocks({spec!r}): on the left, ... may stand once, outside of parentheses")
    parts = list(_parts(left))
    for _, names in parts:
        if doubled := {name for name in names if names.count(name) > 1}:
            raise ValueError(
                f"blocks({spec!r}): axis {min(doubled)!r} stands twice on the left, in one and the same part"
            )
    found: dict[int, Pattern] = {}
    order: list[Pattern] = []
    for text in sides[1].split("|"):
        reader = _Reader(spec, text)
        dims = reader.right()
        names = [name for dim in dims for name in dim]
        if len(dims) < 2 and ELLIPSIS not in names:
            raise ValueError(f"blocks({spec!r}): pattern {text.strip()!r} has {len(dims)} dims, a matrix has two")
        fitting = [n for n, part in enumerate(parts) if sorted(part[1]) == sorted(names)]
        if len(fitting) != 1:
            options = " or ".join(sorted({"{" + ", ".join(part[1]) + "}" for part in parts}))
            what = (
                "fits more than one part; name their axes differently" if fitting else f"must have the axes {options}"
            )
            raise ValueError(f"blocks({spec!r}): pattern {text.strip()!r} {what}")
        if fitting[0] in found:
            raise ValueError(f"blocks({spec!r}): pattern {text.strip()!r} takes a part that another one takes")
        found[fitting[0]] = Pattern(dims, parts[fitting[0]][0], next(iter(reader.spread), None))
        order.append(found[fitting[0]])
    if left_out := [part[1] for n, part in enumerate(parts) if n not in found]:
        raise ValueError(f"blocks({spec!r}): no pattern takes the part with the axes {', '.join(left_out[0])}")
    return Parsed(left, tuple(order))


def _parts(dims: Sequence[Product]) -> Iterator[tuple[tuple[tuple[int, int], ...], tuple[str, ...]]]:
    """Every way to take one term of each sum: the choices, and the names of axes that remain."""
    factors = [factor for dim in dims for factor in dim]
    at = next((n for n, factor in enumerate(factors) if isinstance(factor, Sum)), None)
    if at is None:
        yield (), tuple(factor.name for factor in factors if isinstance(factor, Axis))
        return
    chosen = factors[at]
    for term, product in enumerate(chosen.terms if isinstance(chosen, Sum) else ()):
        for choices, names in _parts([(*factors[:at], *product, *factors[at + 1 :])]):
            yield ((chosen.number, term), *choices) if isinstance(chosen, Sum) else choices, names


def names_of(dims: Sequence[Product]) -> list[str]:
    """All names, in order, also those in sums."""
    found: list[str] = []
    for factor in (factor for dim in dims for factor in dim):
        found += [factor.name] if isinstance(factor, Axis) else names_of(factor.terms)
    return found


class _Reader:
    """Reads one side of a spec, token by token."""

    def __init__(self, spec: str, text: str) -> None:
        self._spec, self._sums = spec, count()
        self._tokens: list[str] = []
        self.spread: list[int] = []
        """Which dims are a bare ``...``."""
        position, text = 0, text.strip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise self._error(
                    f"cannot read {text[position:].split()[0]!r}; expected names, 1, ..., parentheses or +"
                )
            self._tokens.append(match.group().strip())
            position = match.end()
        self._tokens.reverse()

    def _error(self, message: str) -> ValueError:
        return ValueError(f"blocks({self._spec!r}): {message}")

    def side(self) -> tuple[Product, ...]:
        """All dims of the left."""
        dims: list[Product] = []
        while self._tokens:
            if self._tokens[-1] == "+":
                raise self._error("write a sum in parentheses, '(a + b) m'")
            if self._tokens[-1] == ELLIPSIS:
                self.spread.append(len(dims))
            dims.append(self._factor())
        return tuple(dims)

    def right(self) -> tuple[tuple[str, ...], ...]:
        """All dims of one pattern of the right."""
        if "+" in self._tokens:
            raise self._error("the right has no sums: write one pattern for each part, separated by |")
        dims = self.side()
        return tuple(tuple(factor.name for factor in dim if isinstance(factor, Axis)) for dim in dims)

    def _factor(self) -> Product:
        token = self._tokens.pop()
        if token == "(":
            return self._inside()
        if token in (")", "+"):
            raise self._error(f"unexpected {token!r}")
        return () if token == "1" else (Axis(token),)

    def _inside(self) -> Product:
        """What stands in parentheses: one product, or a sum of several."""
        terms: list[list[Factor]] = [[]]
        empty = [True]
        while self._tokens and self._tokens[-1] != ")":
            if self._tokens[-1] == "+":
                self._tokens.pop()
                terms.append([])
                empty.append(True)
            else:
                terms[-1] += self._factor()
                empty[-1] = False
        if not self._tokens:
            raise self._error("a parenthesis is not closed")
        self._tokens.pop()
        if len(terms) == 1:
            return tuple(terms[0])
        if any(empty):
            raise self._error("a sum has an empty term")
        return (Sum(next(self._sums), tuple(map(tuple, terms))),)


def show_product(product: Sequence[Factor]) -> str:
    """As it was written, in quotes."""
    words = [f.name if isinstance(f, Axis) else f"({' + '.join(map(_show_term, f.terms))})" for f in product]
    return f"'{' '.join(words) or '1'}'"


def _show_term(product: Product) -> str:
    return show_product(product).strip("'")


def show_pattern(pattern: Pattern) -> str:
    """As it was written."""
    return " ".join(dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in pattern.dims)
