"""Where a value stands in a state, as words joined by dots."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils import _pytree as pytree


def parents_of(path: Sequence[Any], names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """What a path stands below, with the parameters that go by these names there."""
    fields = [key for key in path if isinstance(key, pytree.GetAttrKey)]
    if not fields:
        return
    prefix = ".".join(word_of(key) for key in path[: path.index(fields[0])])
    suffix = "." + ".".join(map(word_of, fields))
    yield prefix, [name.removesuffix(suffix) for name in names if name.endswith(suffix)]


def join_path(path: Sequence[Any], param: str) -> str:
    """Keys and positions, then the parameter, then fields."""
    keys = [word_of(key) for key in path if not isinstance(key, pytree.GetAttrKey)]
    fields = [word_of(key) for key in path if isinstance(key, pytree.GetAttrKey)]
    return ".".join(word for word in (*keys, param, *fields) if word) or "state"


def word_of(key: Any) -> str:
    """One key, position or field."""
    if isinstance(key, pytree.MappingKey):
        return str(key.key)
    if isinstance(key, pytree.SequenceKey):
        return str(key.idx)
    return str(key.name)
