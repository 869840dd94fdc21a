"""What all values share: equality, a hash, a digest that ranks compare, pickling, another rank's view; and integers.

A value is a frozen dataclass, and its fields are all there is to it. Ranks agree on its *digest*; what differs between
them, above all which rank "this process" is, is marked `THIS_RANK_ONLY` and takes part in equality alone.
"""

import hashlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import Field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar
from weakref import WeakValueDictionary

import torch

THIS_RANK_ONLY = {"this rank only": True}
"""Metadata of a field that may differ between ranks which agree: part of equality, not of the digest."""
LABEL = {"label": True}
"""Metadata of a field that only labels the value; with ``compare=False``."""
UNGUARDED_LABEL = {"unguarded label": True}
"""Likewise; no part of the `key` on which compiled code guards."""


class Value:
    """The base of all values; subclasses are decorated with ``@dataclass(frozen=True, eq=False)``.

    Two values are equal where their classes and fields are (labels left out). Copies are the value itself; pickling
    keeps the fields, and nothing that was derived from them.
    """

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @cached_property
    def digest(self) -> str:
        """A hash of all that ranks must agree on, the same in every process."""
        agreed = [f.name for f in self.__dataclass_fields__.values() if f.compare and not f.metadata]
        words = [type(self).__name__, *(_words(getattr(self, name)) for name in agreed)]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()

    @cached_property
    def place(self) -> str:
        """What tells this rank's view of the value from another rank's; empty where there is nothing."""
        own: list[str] = []
        for f in self.__dataclass_fields__.values():
            fact = getattr(self, f.name)
            if f.compare and f.metadata:
                own.append(_words(fact))
            elif f.compare and isinstance(fact, Value) and fact.place:
                own.append(fact.place)
        return "/".join(own)

    @cached_property
    def identity(self) -> str:
        """The value as a string: equal for equal values, in every process."""
        return f"{self.digest}/{self.place}"

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """What others have found out about this value, and keep with it; no part of it."""
        return {}

    def __eq__(self, other: object) -> bool:
        return self is other or (type(self) is type(other) and self.identity == other.identity)  # pyright: ignore[reportAttributeAccessIssue]

    def __hash__(self) -> int:
        return hash(self.identity)

    def __copy__(self) -> "Value":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "Value":
        return self

    def __getstate__(self) -> dict[str, object]:
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: dict(fact) if isinstance(fact, Mapping) else fact for name, fact in state.items()}  # pyright: ignore[reportUnknownArgumentType]

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, fact in state.items():
            vars(self)[name] = MappingProxyType(fact) if isinstance(fact, Mapping) else fact  # pyright: ignore[reportUnknownArgumentType]


PlacedType = TypeVar("PlacedType", bound="PlacedValue")


class PlacedValue(Value):
    """A value over a mesh, as one of its ranks sees it."""

    mesh: Any

    def with_rank(self: PlacedType, rank: int | None) -> PlacedType:
        """The same value as another rank sees it: the remedy for one that was pickled on another process."""
        seen = object.__new__(type(self))
        seen.__setstate__(self.__getstate__() | {"mesh": self.mesh.with_rank(rank)})
        return seen


KeyedType = TypeVar("KeyedType", bound="KeyedValue")


class KeyedValue(PlacedValue):
    """A value on which compiled code guards by one string, its `key`, from which the value is found again."""

    key: str
    """The value with its labels as a string. Set when the value is made: an attribute that Dynamo can guard."""

    _canonical: "KeyedValue"

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """See `Value.memo`; shared by all values of one key."""
        return {} if self._canonical is self else self._canonical.memo

    def _register(self) -> None:
        labels = [getattr(self, f.name) for f in self.__dataclass_fields__.values() if "label" in f.metadata]
        key = "/".join([type(self).__name__, self.identity, *labels])
        object.__setattr__(self, "key", key)
        object.__setattr__(self, "_canonical", _BY_KEY.setdefault(key, self))

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._register()

    @classmethod
    def from_key(cls: type[KeyedType], key: str) -> KeyedType:
        """The living value with a given `key`."""
        return _BY_KEY[key]  # pyright: ignore[reportReturnType]


# Equal values share one canonical object, which each of them keeps alive, so that a key can be resolved.
_BY_KEY: WeakValueDictionary[str, KeyedValue] = WeakValueDictionary()


def _words(fact: object) -> str:
    """A text of a fact that is the same in every process."""
    if isinstance(fact, Value):
        return fact.digest
    if isinstance(fact, Mapping):
        return _words(tuple(fact.items()))  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    if isinstance(fact, torch.Size):
        return repr(tuple(fact))
    if isinstance(fact, tuple):
        kinds = {*map(type, fact)}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if kinds == {torch.Size}:
            return repr([*map(tuple, fact)])  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        if not kinds <= {int, str}:
            return f"({', '.join(map(_words, fact))})"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    return repr(fact)


def as_int(what: str, value: object) -> int:
    """An integer that a caller gave: an `int`, or what stands for one exactly; never a bool or a float.

    Raises:
        TypeError: naming `what`, on anything else.

    >>> as_int("size", torch.tensor(3))
    3
    """
    if type(value) is int:
        return value
    truth = isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool
    if not truth and hasattr(value, "__index__"):
        try:
            return operator.index(value)  # pyright: ignore[reportArgumentType]
        except TypeError:
            pass
    raise TypeError(f"{what} must be an int, got {value!r} of type {type(value).__name__}")


def as_ints(what: str, values: Iterable[object]) -> tuple[int, ...]:
    """Each of `values` as `as_int` takes it.

    Raises:
        TypeError: naming `what` and the position, see `as_int`; or if `values` are no iterable.
    """
    if not isinstance(values, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{what} must be integers, got {values!r}")
    given = tuple(values)
    if {*map(type, given)} <= {int}:
        return given  # pyright: ignore[reportReturnType]
    return tuple(as_int(f"{what}[{n}]", value) for n, value in enumerate(given))


def as_shape(what: str, shape: Iterable[object]) -> torch.Size:
    """The shape of a tensor; see `as_ints`."""
    return shape if isinstance(shape, torch.Size) else torch.Size(as_ints(what, shape))
