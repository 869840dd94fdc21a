"""`apply` inside a compiled region: one call that Dynamo does not look into, and what it must know of the results.

Dynamo keeps the call as a node; AOTAutograd then traces through it, so that the compiled code holds every unit's
gather, computation and reduction, and in the backward pass gathers again. Dynamo guards on strings and tensors, and on
what `PlainState` tells of the modules.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.fsdp.guards import PlainState
from mfsdp_func.fsdp.replay import nothing_drawn
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.values.buffer_spec import BufferSpec

_MODULES: "WeakValueDictionary[str, Any]" = WeakValueDictionary()
_STRUCTURES: "dict[str, Structure]" = {}
_MAKERS: dict[str, tuple[Callable[..., Any], Any]] = {}
"""For nodes of registered types: what puts one together, and its context."""

Structure: TypeAlias = tuple[Any, ...]
"""A pytree of tensors as constants: ``(kind, keys, *children)``. Dynamo cannot guard on a `TreeSpec`."""


def register(key: str, module: object) -> None:
    """Let compiled code find a module by a key of its own."""
    _MODULES[key] = module


def call_in_graph(
    method: str,
    key: str,
    state: PlainState,
    buffers: Sequence[torch.Tensor],
    frozen: Mapping[str, DBuffer],
    trees: Sequence[Mapping[str, Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """What Dynamo traces of ``getattr(module, method)(*trees, *args, **kwargs)``.

    Args:
        method: name of the method that runs eagerly.
        key: of the module.
        state: of the module; Dynamo guards on what is asked about.
        buffers: the module's own buffers and the parameters that are not sharded, as inputs of the graph.
        frozen: the module's frozen parameters, likewise.
        trees: the arguments that are dicts of `DBuffer`s, and of tensors that stand for parameters that are not sharded.
        args: other arguments: tensors and constants, in tuples, lists and dicts.
        kwargs: likewise.
    """
    if state is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise TypeError("apply in a compiled region: nothing tells the module's state")
    given: list[Mapping[str, Any]] = [frozen, *trees]
    names = tuple([tuple(tree) for tree in given])
    specs = tuple([tuple([_spec_key(value) for value in tree.values()]) for tree in given])
    locals_ = [[v.local_buffer if isinstance(v, DBuffer) else v for v in tree.values()] for tree in given]
    leaves = list(_in_graph(method, key, names, specs, locals_, list(buffers), args, kwargs))
    return _rebuilt(_structure(method, key), leaves)


def _spec_key(value: DBuffer | torch.Tensor) -> str:
    return value.spec.key if isinstance(value, DBuffer) else ""


@torch.compiler.assume_constant_result
def _structure(method: str, key: str) -> Structure:
    # Dynamo has run the call on fake tensors just before.
    return _STRUCTURES[f"{method} {key}"]


def _describe(spec: pytree.TreeSpec) -> Structure:
    children = tuple(_describe(child) for child in spec.children())
    if spec.is_leaf():
        return ("leaf", ())
    if spec.type in (tuple, list):
        return (spec.type.__name__, (), *children)
    if spec.type is dict:
        return ("dict", tuple(spec.context), *children)
    name = f"{spec.type.__qualname__} {spec.context}"
    _MAKERS[name] = (pytree.SUPPORTED_NODES[spec.type].unflatten_fn, spec.context)
    return ("node", (name,), *children)


def _rebuilt(structure: Structure, leaves: list[torch.Tensor]) -> Any:
    kind, keys = structure[0], structure[1]
    if kind == "leaf":
        return leaves.pop(0)
    children = [_rebuilt(child, leaves) for child in structure[2:]]
    if kind == "list":
        return children
    if kind == "tuple":
        return tuple(children)
    if kind == "dict":
        return dict(zip(keys, children, strict=True))
    make, context = _MAKERS[keys[0]]
    return make(children, context)


@torch.compiler.allow_in_graph
def _in_graph(
    method: str,
    key: str,
    names: tuple[tuple[str, ...], ...],
    specs: tuple[tuple[str, ...], ...],
    locals_: list[list[torch.Tensor]],
    buffers: list[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    module = _MODULES[key]
    frozen, *trees = [
        {n: DBuffer(BufferSpec.from_key(s), t) if s else t for n, s, t in zip(*tree, strict=True)}
        for tree in zip(names, specs, locals_, strict=True)
    ]
    with module.traced(buffers, frozen), nothing_drawn("the module"):
        result = getattr(module, method)(*trees, *args, **kwargs)
    leaves, structure = pytree.tree_flatten(result)
    if wrong := [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, torch.Tensor)]:
        raise TypeError(
            f"apply in a compiled region: the module returns a {wrong[0]} besides tensors; return tensors, in tuples,"
            " lists, dicts or other pytrees"
        )
    _STRUCTURES[f"{method} {key}"] = _describe(structure)
    return tuple(leaves)
