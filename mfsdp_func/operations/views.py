"""The tensors of buffers as a flat dict, and back: what functions of single tensors see."""

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch

from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.spec_facts import fact_of
from mfsdp_func.values.buffer_spec import held_tensors, logical_shapes, stored_pieces


def has_buffers(tree: Any) -> bool:
    """Whether `tree` is a buffer or a dict that holds one."""
    if isinstance(tree, DBuffer):
        return True
    return isinstance(tree, Mapping) and any(isinstance(leaf, DBuffer) for leaf in tree.values())


def buffers_in(tree: Any) -> Iterator[tuple[Callable[[int], Hashable], DBuffer]]:
    """The buffers of `tree`, each with the key that `tensors_of` gives to its tensor i."""
    if isinstance(tree, DBuffer):
        yield _index, tree
    elif isinstance(tree, Mapping):
        for name, leaf in tree.items():
            if isinstance(leaf, DBuffer):
                yield _pair(name), leaf


def _index(i: int) -> Hashable:
    return i


def _pair(name: Hashable) -> Callable[[int], Hashable]:
    return lambda i: (name, i)


def tensors_of(tree: Any) -> dict[Any, torch.Tensor]:
    """This rank's tensors: of a buffer by index, of a dict of buffers by pairs ``(name, index)``.

    Values of a dict that are no buffers keep their key. Of a buffer, parts that this rank holds are views of it.

    Raises:
        TypeError: on anything else.

    >>> from mfsdp_func import Mesh, RowAtomic, build_for_row_atomic
    >>> layout = build_for_row_atomic([(2, 2), (4,)], 1)
    >>> buffer = DBuffer.from_local(torch.arange(8), Mesh(1, rank=0), [RowAtomic()], layout)
    >>> {key: tensor.tolist() for key, tensor in tensors_of({"block": buffer}).items()}
    {('block', 0): [[0, 1], [2, 3]], ('block', 1): [4, 5, 6, 7]}
    """
    if isinstance(tree, DBuffer):
        return {**tree.tensor_views()}
    if not isinstance(tree, Mapping):
        raise TypeError(f"expected a DBuffer or a dict of tensors or DBuffers, got a {type(tree).__name__}")
    tensors: dict[Any, torch.Tensor] = {}
    for name, leaf in tree.items():
        if isinstance(leaf, DBuffer):
            for i, view in leaf.tensor_views().items():
                tensors[(name, i)] = view
        else:
            tensors[name] = leaf
    return tensors


def joined(tensors: Mapping[Any, torch.Tensor], like: Any) -> Any:
    """The inverse of `tensors_of`: new buffers that hold `tensors`, placed as those of `like`; padding is zero.

    Raises:
        KeyError: if a tensor that this rank holds is missing.
    """
    if isinstance(like, DBuffer):
        return _joined(like, [(i, i) for i in fact_of(held_tensors, like.spec)], tensors)
    result: dict[Any, Any] = {}
    for name, leaf in like.items():
        if isinstance(leaf, DBuffer):
            result[name] = _joined(leaf, [(i, (name, i)) for i in fact_of(held_tensors, leaf.spec)], tensors)
        else:
            result[name] = tensors[name]
    return result


def _joined(like: DBuffer, keys: list[tuple[int, Any]], tensors: Mapping[Any, torch.Tensor]) -> DBuffer:
    parts: dict[int, torch.Tensor] = {}
    for i, key in keys:
        if key not in tensors:
            raise KeyError(f"no result for tensor {key!r} of a buffer whose other tensors have one")
        parts[i] = tensors[key]
    example = next(iter(parts.values()), like.local_buffer)
    pieces = [
        example.new_zeros(numel) if i < 0 else parts[i].reshape(-1) for i, numel in fact_of(stored_pieces, like.spec)
    ]
    return DBuffer(like.spec, torch.cat(pieces) if pieces else like.local_buffer[:0].to(example.dtype))


def shapes_of(tree: Any) -> dict[Any, tuple[int, ...]]:
    """Full shapes by the keys of `tensors_of`: of all tensors of a buffer, also of those that this rank does not hold."""
    shapes: dict[Any, tuple[int, ...]] = {}
    for key, buffer in buffers_in(tree):
        for i, shape in enumerate(fact_of(logical_shapes, buffer.spec)):
            shapes[key(i)] = shape
    if isinstance(tree, Mapping):
        for name, leaf in tree.items():
            if not isinstance(leaf, DBuffer):
                shapes[name] = tuple(leaf.shape)
    return shapes
