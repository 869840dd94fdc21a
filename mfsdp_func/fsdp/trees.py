"""Arguments and results of modules as trees: tensors out, others in, in whatever people pass around."""

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_SINGLE = frozenset([torch.Tensor, nn.Parameter])
_FLAT = _SINGLE | {type(None), bool, int, float, str, torch.dtype, torch.device}


def _first(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0]


def is_flat(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether there is nothing among arguments but tensors and constants."""
    return _FLAT.issuperset(map(type, (*args, *kwargs.values())))


def flat_leaves(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """`tensor_leaves` of ``(args, kwargs)`` that are flat."""
    leaves, count = [*args, *kwargs.values()], len(args)

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        return tuple(filled[:count]), dict(zip(kwargs, filled[count:], strict=True))

    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)], rebuild


def flat_substituted(args: tuple[Any, ...], kwargs: Mapping[str, Any], inner: Mapping[int, torch.Tensor]) -> Any:
    """``(args, kwargs)`` that are flat with other tensors; see `substituted`."""
    values = kwargs.values()
    return (*map(inner.get, map(id, args), args),), dict(
        zip(kwargs, map(inner.get, map(id, values), values), strict=True)
    )


def tensor_leaves(
    tree: Any, opaque: Container[int] = ()
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors of a tree, and what puts others in their places.

    Args:
        tree: of whatever pytree knows, and of dataclasses.
        opaque: ids of objects that are left as they are.
    """
    if type(tree) in _SINGLE:
        return [tree], _first

    def is_leaf(node: Any) -> bool:
        return id(node) in opaque or _is_record(node)

    leaves, spec = pytree.tree_flatten(tree, is_leaf=is_leaf)
    found: list[torch.Tensor] = []
    fills: list[tuple[int, int, Callable[[Sequence[torch.Tensor]], Any] | None]] = []
    others: list[Any] = []  # a template keeps no tensor alive
    for n, leaf in enumerate(leaves):
        others.append(None if isinstance(leaf, torch.Tensor) else leaf)
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
            fills.append((n, 1, None))
        elif _is_record(leaf) and id(leaf) not in opaque:
            inner, rebuild = _record_leaves(leaf, opaque)
            found += inner
            fills.append((n, len(inner), rebuild))
            others[n] = None

    def rebuild_all(tensors: Sequence[torch.Tensor]) -> Any:
        filled, at = list(others), 0
        for n, count, inner in fills:
            filled[n] = tensors[at] if inner is None else inner(tensors[at : at + count])
            at += count
        return pytree.tree_unflatten(filled, spec)

    return found, rebuild_all


def _is_record(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, type) and type(node) not in pytree.SUPPORTED_NODES


def _fields(record: Any) -> dict[str, Any]:
    return {
        field.name: getattr(record, field.name) for field in dataclasses.fields(record) if hasattr(record, field.name)
    }


def _record_leaves(
    record: Any, opaque: Container[int]
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    values = _fields(record)
    found, rebuild_values = tensor_leaves(values, opaque)
    if not found:
        return [], lambda _: record
    empty = copy.copy(record)
    for name in values:
        object.__setattr__(empty, name, None)

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        made = copy.copy(empty)
        for name, value in rebuild_values(tensors).items():
            object.__setattr__(made, name, value)
        return made

    return found, rebuild


@contextmanager
def substituted(tree: Any, inner: Mapping[int, torch.Tensor]) -> Generator[Any, None, None]:
    """The tree with other tensors, in its own lists, dicts and records, so that what is written into them stays.

    Args:
        tree: see `tensor_leaves`.
        inner: id of a tensor -> the one that stands in its place inside.
    """
    undo: list[Callable[[], None]] = []
    try:
        yield _substitute(tree, inner, undo)
    finally:
        for step in reversed(undo):
            step()


def _substitute(node: Any, inner: Mapping[int, torch.Tensor], undo: list[Callable[[], None]]) -> Any:
    if isinstance(node, torch.Tensor):
        return inner.get(id(node), node)
    if type(node) is tuple:
        items = [_substitute(item, inner, undo) for item in node]
        return tuple(items) if any(a is not b for a, b in zip(items, node, strict=True)) else node
    if type(node) is list:
        pairs = [(item, _substitute(item, inner, undo)) for item in node]
        if any(old is not new for old, new in pairs):
            node[:] = [new for _, new in pairs]
            back = {id(new): old for old, new in pairs if old is not new}
            undo.append(lambda: node.__setitem__(slice(None), [back.get(id(item), item) for item in node]))
        return node
    if type(node) in (dict, OrderedDict, defaultdict):
        changed = {k: (v, new) for k, v in node.items() if (new := _substitute(v, inner, undo)) is not v}
        if changed:
            node.update({key: new for key, (_, new) in changed.items()})
            back = {id(new): old for old, new in changed.values()}
            undo.append(lambda: node.update({k: back[id(v)] for k, v in node.items() if id(v) in back}))
        return node
    if _is_record(node):
        values = _fields(node)
        changed = {k: (v, new) for k, v in values.items() if (new := _substitute(v, inner, undo)) is not v}
        return _substitute_in_record(node, changed, undo) if changed else node
    if type(node) in pytree.SUPPORTED_NODES:
        found, rebuild = tensor_leaves(node)
        if any(id(tensor) in inner for tensor in found):
            return rebuild([inner.get(id(tensor), tensor) for tensor in found])
    return node


def _substitute_in_record(record: Any, changed: Mapping[str, tuple[Any, Any]], undo: list[Callable[[], None]]) -> Any:
    frozen = record.__dataclass_params__.frozen
    made = copy.copy(record) if frozen else record
    for name, (_, new) in changed.items():
        object.__setattr__(made, name, new)
    if not frozen:

        def back() -> None:
            for name, (old, new) in changed.items():
                if getattr(record, name, None) is new:
                    object.__setattr__(record, name, old)

        undo.append(back)
    return made


def containers_of(tree: Any) -> set[int]:
    """The ids of all lists, dicts and records in a tree."""
    found, pending = set[int](), [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, (list, tuple)):
            pending += node
        elif isinstance(node, dict):
            pending += node.values()
        elif _is_record(node):
            pending += _fields(node).values()
        if isinstance(node, (list, dict)) or _is_record(node):
            found.add(id(node))
    return found
