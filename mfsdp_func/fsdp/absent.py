"""What stands in a module where a parameter is not gathered: it has a shape, a dtype and a device, and no values."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

_LOOKS = {
    "__get__",
    "size",
    "dim",
    "numel",
    "is_floating_point",
    "is_complex",
    "element_size",
    "ndimension",
    "__repr__",
}


class AbsentParameter(torch.Tensor):
    """A parameter without memory, which raises when it is computed with."""

    parameter_name: str

    @classmethod
    def of(cls, name: str, param: torch.Tensor, device: torch.device) -> "AbsentParameter":
        """In the place of `param`."""
        value = torch.zeros((), dtype=param.dtype, device=device).expand(param.shape)
        absent = torch.Tensor._make_subclass(cls, value, param.requires_grad and param.is_floating_point())
        absent.parameter_name = name
        return absent

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"AbsentParameter({self.parameter_name}, {tuple(self.shape)})"

    def __deepcopy__(self, memo: dict[int, object]) -> "AbsentParameter":
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        names = [value.parameter_name for value in args if isinstance(value, AbsentParameter)]
        raise RuntimeError(
            f"parameter {', '.join(names) or '(in a list)'} was used outside of the unit that owns it, where it is not"
            " gathered; name a module around all its uses in fully_shard(units=...)"
        )


def copy_without_parameters(module: nn.Module, device: torch.device) -> nn.Module:
    """A deep copy of a module, buffers included, with `AbsentParameter`s in the place of parameters."""
    for name, sub in module.named_modules():
        if isinstance(sub, FSDPModule):
            raise TypeError(
                f"fully_shard: module {name!r} is sharded by torch.distributed.fsdp already, and cannot be copied; pass"
                " a module that is not (on the meta device will do), and these values by"
                " apply.from_dtensors(dict(module.named_parameters()))"
            )
    memo: dict[int, Any] = {}
    for name, param in module.named_parameters():
        memo[id(param)] = AbsentParameter.of(name, param, device)
    return copy.deepcopy(module, memo)
