"""A module's copy without its parameters: nothing that was set on the module is dropped without a word."""

import copy
import functools
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mfsdp_func.fsdp.absent import AbsentParameter
from mfsdp_func.fsdp.torch_internals import is_compiled


def copy_without_parameters(module: nn.Module, device: torch.device, ignored: Collection[str] = ()) -> nn.Module:
    """A deep copy of a module, buffers included, with `AbsentParameter`s in the place of parameters but for `ignored`.

    Functions set on modules (attributes, hooks) that refer to the module or its parameters by closures are copied too.

    Raises:
        TypeError: on what cannot be copied: a module that is sharded by FSDP2, scripted, or compiled; a parameter with
            tensor hooks; a function that refers to the module by a global name.
    """
    for name, sub in module.named_modules():
        _check_module(name, sub)
    for name, param in module.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise TypeError(
                f"fully_shard: parameter {name!r} has tensor hooks, which would never run: a sharded parameter's gradient"
                " is that of its buffer. Remove them, and change the gradients that torch.func.grad or backward() gives"
            )
    memo: dict[int, Any] = {}
    for name, param in module.named_parameters():
        memo[id(param)] = AbsentParameter.of(name, param, device)
    for param in map(module.get_parameter, ignored):
        value = param.detach().clone() if param.is_meta else param.detach().to(device, copy=True)
        memo[id(param)] = nn.Parameter(value, param.requires_grad)
    own = {id(sub): name for name, sub in module.named_modules()}
    own |= {id(param): name for name, param in module.named_parameters()}
    replaced = _replace_functions(module, own, memo)
    copied = copy.deepcopy(module, memo)
    for cell, value in replaced.cells:
        cell.cell_contents = copy.deepcopy(value, memo)
    for made, function in replaced.functions:
        made.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        made.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
    return copied


class _Replaced(NamedTuple):
    """Cells and what belongs in them; functions and those whose defaults they get."""

    cells: list[tuple[types.CellType, Any]]
    functions: list[tuple[types.FunctionType, types.FunctionType]]


def _check_module(name: str, sub: nn.Module) -> None:
    where = f"fully_shard: module {name!r}"
    if isinstance(sub, FSDPModule):
        raise TypeError(
            f"{where} is sharded by torch.distributed.fsdp already, and cannot be copied; pass a module that is not (on"
            " the meta device will do), and these values by apply.from_dtensors(dict(module.named_parameters()))"
        )
    for leaf, value in sub.__dict__.items():
        if isinstance(value, torch.Tensor) and value.grad_fn is not None:
            raise TypeError(
                f"{where} keeps a differentiable tensor as {leaf!r}, which cannot be copied; detach it, and use"
                " torch.nn.utils.parametrizations in the place of the old weight_norm and spectral_norm"
            )
    if isinstance(sub, torch.jit.ScriptModule):
        raise TypeError(
            f"{where} is scripted, so that its parameters cannot be taken out; pass the module that was scripted"
        )
    if is_compiled(sub):
        raise TypeError(
            f"{where} is compiled, which its copy would not be; shard it uncompiled, and compile the step,"
            " torch.compile(step, fullgraph=True), or the units, FsdpContext(compile=True)"
        )


def _replace_functions(module: nn.Module, own: Mapping[int, str], memo: dict[int, Any]) -> _Replaced:
    """Put copies of functions whose closures or defaults hold the module into `memo`, still empty."""
    cells: dict[int, tuple[types.CellType, Any]] = {}
    replaced = _Replaced([], [])
    for name, sub in module.named_modules():
        for function in _functions(list(sub.__dict__.values()), set()):
            used = set(function.__code__.co_names)
            for wanted in used:
                if id(function.__globals__.get(wanted)) in own:
                    raise TypeError(
                        f"fully_shard: {function.__qualname__!r}, set on module {name!r}, refers to the module by the"
                        f" global name {wanted!r}: its copy would use the original's parameters; make it a method, or"
                        " pass the module to it"
                    )
            if id(function) in memo or not any(_holds(value, own) for value in _closed_over(function)):
                continue
            for cell in function.__closure__ or ():
                if id(cell) not in cells:
                    cells[id(cell)] = (types.CellType(), _contents(cell))
            closure = tuple(cells[id(cell)][0] for cell in function.__closure__ or ())
            made = types.FunctionType(
                function.__code__, function.__globals__, function.__name__, function.__defaults__, closure
            )
            made.__dict__.update(function.__dict__)
            replaced.functions.append((made, function))
            memo[id(function)] = made
            memo.setdefault(id(memo), []).append(function)
    replaced.cells.extend(cells.values())
    return replaced


def _functions(values: list[Any], seen: set[int]) -> Iterator[types.FunctionType]:
    """The functions among attributes: in containers and partials too, and in other functions' closures."""
    pending = list(values)
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            yield value
            pending += _closed_over(value)
        elif isinstance(value, functools.partial):
            pending += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, Mapping):
            pending += list(value.values())
        elif isinstance(value, (list, tuple, set)):
            pending += list(value)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a name that is not bound yet
        return None


def _closed_over(function: types.FunctionType) -> list[Any]:
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*map(_contents, function.__closure__ or ()), *defaults]


def _holds(value: Any, own: Mapping[int, str], depth: int = 4) -> bool:
    """Whether a value is, or holds, a module or a parameter of `own`."""
    if id(value) in own:
        return True
    if depth == 0:
        return False
    if isinstance(value, types.MethodType):
        return _holds(value.__self__, own, depth - 1)
    if isinstance(value, types.FunctionType):
        return any(_holds(inner, own, depth - 1) for inner in _closed_over(value))
    if isinstance(value, functools.partial):
        return any(_holds(inner, own, depth - 1) for inner in (value.func, *value.args, *value.keywords.values()))
    if isinstance(value, Mapping):
        return any(_holds(inner, own, depth - 1) for inner in value.values())
    if isinstance(value, (list, tuple, set)):
        return any(_holds(inner, own, depth - 1) for inner in value)
    return False
