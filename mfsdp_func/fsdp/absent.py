"""What stands in a module where a parameter is not gathered: it has a shape, a dtype and a device, and no values."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.fsdp.torch_internals import plain_subclass, torch_functions_of_subclasses_off

_METHODS = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "is_inference",
    "get_device",
    "__repr__",
    "__hash__",
}
_PROPERTIES = {
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "itemsize",
    "requires_grad",
    "is_leaf",
    "grad",
    "grad_fn",
    "is_meta",
    "is_cpu",
    "is_cuda",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "_backward_hooks",
    "_post_accumulate_grad_hooks",
}


class AbsentParameter(torch.Tensor):
    """A parameter without memory: it can be looked at, and raises whatever else is done with it.

    Attributes:
        parameter_name: its qualified name.
        unit_name: the unit that gathers it.
        find: gives the parameter while it is gathered, to those who have this in a list or an attribute of their own.
    """

    _is_param = True  # for isinstance(..., nn.Parameter)
    parameter_name: str
    unit_name: str = ""
    find: Callable[[str], torch.Tensor | None] | None = None

    @classmethod
    def of(cls, name: str, param: torch.Tensor, device: torch.device) -> "AbsentParameter":
        """In the place of `param`."""
        return cls._made(
            name, torch.zeros((), dtype=param.dtype, device=device).expand(param.shape), param.requires_grad
        )

    def train(self, trainable: bool) -> None:
        """Look as parameters do that are trained, or not."""
        with torch_functions_of_subclasses_off():
            self.requires_grad_(trainable)

    @classmethod
    def _made(cls, name: str, value: torch.Tensor, requires_grad: bool) -> "AbsentParameter":
        differentiable = value.is_floating_point() or value.is_complex()
        absent = plain_subclass(cls, value, requires_grad and differentiable)
        absent.parameter_name = name
        return absent

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"AbsentParameter({self.parameter_name}, absent, {tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, object]) -> "AbsentParameter":
        value = torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)
        copied = self._made(self.parameter_name, value, self.requires_grad)
        copied.unit_name = self.unit_name
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name in _METHODS or (name == "__get__" and getattr(func.__self__, "__name__", "") in _PROPERTIES):
            with torch_functions_of_subclasses_off():
                return func(*args, **kwargs)
        met = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, AbsentParameter)]
        found = {id(param): param.find(param.parameter_name) for param in met if param.find is not None}
        if met and all(found.get(id(param)) is not None for param in met):
            args, kwargs = pytree.tree_map_only(AbsentParameter, lambda param: found[id(param)], (args, kwargs))
            return func(*args, **kwargs)
        names = ", ".join(sorted({param.parameter_name for param in met}))
        units = ", ".join(sorted({repr(param.unit_name or "the root") for param in met}))
        what = getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name
        raise RuntimeError(
            f"parameter {names} was used outside of the unit that owns it (by {what}): it is gathered only while unit"
            f" {units} runs. Name one module around all its uses in fully_shard(units=...), or give the other user a"
            " module of its own that shares the Parameter (as a tied head does)"
        )
