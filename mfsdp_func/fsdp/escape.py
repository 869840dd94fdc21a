"""Finding tensors that pass a unit's borders unseen: their gradients would silently be zero."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_REMEDY = (
    "Units run as one operation, differentiated with respect to their parameters and the tensors among their arguments,"
    " so this one's gradient would silently be zero."
)


class Escape(RuntimeError):
    """A tensor entered or left a unit other than as an argument or a result."""


def run_watched(
    label: str,
    run: Callable[[list[list[torch.Tensor]], list[torch.Tensor]], list[torch.Tensor]],
    params: Sequence[Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """``run(params, inputs)``, watched: slower, and with the memory of one unit's graph. Results are new tensors.

    Raises:
        Escape: if the unit computes with a differentiable tensor from elsewhere, or leaves one behind.
    """
    fresh = [[_leaf(param) for param in group] for group in params]
    arguments = [_leaf(tensor) for tensor in inputs]
    watch = _Watch(label, [*(param for group in fresh for param in group), *arguments])
    try:
        with torch.enable_grad(), watch:
            outputs = run(fresh, arguments)
    except RuntimeError as error:
        if "leaf Variable that requires grad is being used in an in-place operation" in str(error):
            raise changed_in_place(label) from error
        raise
    # Without its graph, which keeps what it saved: what lives on now is held by somebody else.
    given = {id(tensor) for tensor in (*arguments, *(param for group in fresh for param in group))}
    results = [o.detach().clone() if o._is_view() or id(o) in given else o.detach() for o in outputs]
    del outputs, fresh, arguments
    kept = watch.alive()
    if kept:
        gc.collect()
        kept = watch.alive()
    if kept:
        raise Escape(
            f"unit {label!r} keeps a differentiable tensor of shape {kept[-1]} beyond its forward pass, in a"
            f" cache, a hook or an attribute. {_REMEDY} Switch that off (use_cache=False), detach the tensor,"
            " return it from the unit, or name smaller units: fully_shard(units=...)"
        )
    return results


def changed_in_place(label: str) -> Escape:
    """The error for a unit that writes into its arguments."""
    return Escape(
        f"unit {label!r} changes one of its arguments in place; its backward pass runs it again, on arguments that must"
        " be as they were. Write x = x + y instead of x += y there, or name smaller units: fully_shard(units=...)"
    )


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    leaf = tensor.detach()
    return leaf.requires_grad_() if tensor.is_floating_point() or tensor.is_complex() else leaf


class _Watch(TorchFunctionMode):
    """Knows every differentiable tensor made inside."""

    def __init__(self, label: str, leaves: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._label = label
        self._leaves = [weakref.ref(leaf) for leaf in leaves]
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._known = {id(leaf): ref for leaf, ref in zip(leaves, self._leaves, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") != "__get__":
            for tensor in _tensors((args, kwargs)):
                if self._is_foreign(tensor):
                    raise Escape(
                        f"unit {self._label!r} computes with a differentiable tensor of shape {tuple(tensor.shape)}"
                        f" that is neither its parameter nor among its arguments. {_REMEDY} Pass it as an argument,"
                        " detach it, or name a unit around both modules: fully_shard(units=...)"
                    )
        results = func(*args, **(kwargs or {}))
        for tensor in _tensors(results):
            if tensor.requires_grad and not self._knows(tensor):
                self._learn(tensor)
        return results

    def _knows(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(id(tensor))
        return known is not None and known() is tensor

    def _learn(self, tensor: torch.Tensor) -> None:
        self._known[id(tensor)] = weakref.ref(tensor)
        self._made.append(self._known[id(tensor)])

    def _is_foreign(self, tensor: torch.Tensor) -> bool:
        if _functorch.is_functorch_wrapped_tensor(tensor):
            return _functorch.peek_interpreter_stack() is None
        if not tensor.requires_grad or self._knows(tensor):
            return False
        if self._comes_from_leaves(tensor):  # by an operation that no function mode sees, as autograd.Function.apply
            self._learn(tensor)
            return False
        return True

    def _comes_from_leaves(self, tensor: torch.Tensor) -> bool:
        leaves = {id(leaf) for ref in self._leaves if (leaf := ref()) is not None}
        pending, seen = [tensor.grad_fn], set[object]()
        while pending:
            node = pending.pop()
            if node is None:
                return False
            if node in seen:
                continue
            seen.add(node)
            if (variable := getattr(node, "variable", None)) is not None and id(variable) not in leaves:
                return False
            pending += [after for after, _ in node.next_functions if after is not None]
        return True

    def alive(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors made inside that live on."""
        return [tuple(tensor.shape) for ref in self._made if (tensor := ref()) is not None]


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
