"""Finding tensors that pass a unit's borders unseen: their gradients would silently be zero."""

import bisect
import gc
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from itertools import compress
from operator import attrgetter, gt
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from mfsdp_func.effects.torch_internals import is_transformed, unwrapped
from mfsdp_func.fsdp.torch_internals import is_wrapped, storage_of, storages_of

_GRAD_FN = attrgetter("grad_fn")

_REMEDY = (
    "Units run as one operation, differentiated with respect to their parameters and the tensors among their arguments,"
    " so this one's gradient would silently be zero."
)
_HARMLESS = {"requires_grad_", "retain_grad", "detach_"}
_IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__imatmul__"}


class Escape(RuntimeError):
    """A tensor entered or left a unit other than as an argument or a result."""


def changed_in_place(label: str) -> Escape:
    """The error for a unit that writes into its arguments."""
    return Escape(
        f"unit {label!r} changes one of its arguments in place; its backward pass needs them as they were. Write x = x +"
        " y instead of x += y there, or name smaller units: fully_shard(units=...)"
    )


def written(label: str, names: Iterable[str], operator: str = "") -> RuntimeError:
    """The error for a unit that writes into its parameters."""
    by = f" by {operator}" if operator else ""
    return RuntimeError(
        f"unit {label!r} writes into its parameter {', '.join(map(repr, names))}{by} in its forward pass: it holds a"
        " gathered copy there, and the write would be lost. Leave that out (max_norm of an embedding, clamping), and"
        " change the sharded parameters between the steps instead"
    )


class Writes(TorchFunctionMode):
    """Raises where an operator writes into a parameter, also through `data`, which no counter tells.

    Args:
        label: the unit's name.
        names: of its parameters.
        params: they themselves.
    """

    def __init__(self, label: str, names: Sequence[str], params: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._label = label
        self._params = params
        self._names = names
        self._storages = {*storages_of(params)}
        self._by_id = dict(zip(map(id, params), names, strict=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._check_written(getattr(func, "__name__", ""), args)
        return func(*args, **(kwargs or {}))

    def _check_written(self, name: str, args: tuple[Any, ...]) -> None:
        writes = (name[-1:] == "_" and name[-2:] != "__" and name not in _HARMLESS) or name in _IN_PLACE
        if writes and args and isinstance(args[0], torch.Tensor):
            owner = self._by_id.get(id(args[0])) or self._owner(unwrapped(args[0]))
            if owner is not None:
                raise written(self._label, [owner], name)

    def _owner(self, tensor: torch.Tensor) -> str | None:
        """The parameter in whose memory a tensor lies."""
        if storage_of(tensor) not in self._storages:
            return None
        pairs = zip(self._names, self._params, strict=True)
        starts = sorted((param.data_ptr(), name) for name, param in pairs if param.numel())
        return starts[max(bisect.bisect_right(starts, (tensor.data_ptr(), "\uffff")) - 1, 0)][1] if starts else None


class Watch(Writes):
    """Knows every tensor made inside that is differentiable, or an alias of a parameter.

    Args:
        label: the unit's name.
        names: of its parameters.
        params: they themselves.
        inputs: the unit's differentiable arguments.
    """

    def __init__(
        self, label: str, names: Sequence[str], params: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(label, names, params)
        self._own = {*self._by_id, *map(id, inputs)}
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        # Parameters themselves may be kept too. Their nodes in the graph count as one reference.
        self._counts = [*map((1).__add__, map(sys.getrefcount, params))]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            results = func(*args, **(kwargs or {}))
        else:
            for value in args:
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, torch.Tensor) and is_wrapped(item) and not is_transformed():
                        raise self.foreign(item)
            self._check_written(name, args)
            results = func(*args, **(kwargs or {}))
        if isinstance(results, torch.Tensor):
            self._learn(results)
        elif isinstance(results, (list, tuple)):
            for result in results:
                if isinstance(result, torch.Tensor):
                    self._learn(result)
        return results

    def _learn(self, tensor: torch.Tensor) -> None:
        if is_wrapped(tensor):
            return
        if id(tensor) not in self._own and (tensor.requires_grad or storage_of(tensor) in self._storages):
            self._made[id(tensor)] = weakref.ref(tensor)

    def foreign(self, tensor: torch.Tensor) -> Escape:
        """The error for a differentiable tensor from elsewhere."""
        return Escape(
            f"unit {self._label!r} computes with a differentiable tensor of shape {tuple(tensor.shape)} that is neither"
            f" its parameter nor among its arguments. {_REMEDY} Pass it as an argument, detach it, or name a unit around"
            " both modules: fully_shard(units=...)"
        )

    def check_graph(self, outputs: Sequence[torch.Tensor]) -> None:
        """Look for leaves of the outputs' graph that came from elsewhere.

        Raises:
            Escape: if there is one.
        """
        seen = {*map(_GRAD_FN, outputs)} - {None}
        pending: list[Any] = [*seen]
        while pending:
            node = pending.pop()
            variable = node.variable if type(node).__name__ == "AccumulateGrad" else None
            if variable is not None and id(variable) not in self._own and not self._knows(variable):
                raise self.foreign(variable)
            for after, _ in node.next_functions:
                if after is not None and after not in seen:
                    seen.add(after)
                    pending.append(after)

    def _knows(self, tensor: torch.Tensor) -> bool:
        ref = self._made.get(id(tensor))
        return ref is not None and ref() is tensor

    def check_alive(self) -> None:
        """Look for what lives on, once the unit has run and its results have been let go.

        Raises:
            Escape: if Python still reaches a differentiable tensor made inside, or an alias of a parameter.
        """
        if not self._alive():
            return
        gc.collect()
        kept, ignored = self._alive(), [self, self._params, *self._params]
        for tensor in kept:
            if not _is_reachable(tensor, [kept, *ignored]):
                continue
            name = self._owner(tensor)
            what = f"an alias of its parameter {name!r}" if name else "a differentiable tensor"
            raise Escape(
                f"unit {self._label!r} keeps {what} of shape {tuple(tensor.shape)} beyond its forward pass, in a cache, a"
                f" hook or an attribute. {_REMEDY} Switch that off (use_cache=False), detach the tensor"
                f"{' and clone it' if name else ''}, return it from the unit, or name smaller units:"
                " fully_shard(units=...)"
            )

    def _alive(self) -> list[torch.Tensor]:
        kept = [*map(gt, map(sys.getrefcount, self._params), self._counts)]
        found = [tensor for ref in self._made.values() if (tensor := ref()) is not None]
        found += compress(self._params, kept)
        return [tensor for tensor in found if tensor.numel()] if found else []


def _named_by_callers() -> set[int]:
    """The ids of what running functions have as local variables, other than those that run units."""
    found, frame = set[int](), sys._getframe()
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("mfsdp_func.fsdp."):
            found.update(map(id, frame.f_locals.values()))
        frame = frame.f_back
    return found


def _is_reachable(tensor: torch.Tensor, mine: Sequence[object]) -> bool:
    """Whether a tensor lives because of Python, and not because autograd's graph has it (in a context or a closure)."""
    seen = {id(mine), *map(id, mine)}
    named = _named_by_callers()
    level: list[object] = [tensor]
    for _ in range(32):
        found = gc.get_referrers(*level)
        seen.add(id(level))
        new = [
            referrer
            for referrer in found
            if id(referrer) not in seen and referrer is not found and not isinstance(referrer, types.FrameType)
        ]
        if not new:
            return False
        roots = any(isinstance(r, (nn.Module, types.ModuleType, type)) or id(r) in named for r in new)
        if len(new) > 100 or roots:
            return True
        seen.update(map(id, new))
        level = new
        del found, new
    return True
