"""Facts about a `BufferSpec`, computed where they are asked for, and constants where `torch.compile` traces.

Compiled code guards on the key of the spec alone. In a constant a `Collective` is the key that `remember` gives, and a
`BufferSpec` a name that `spec_of` resolves.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from mfsdp_func.effects.here import check_place
from mfsdp_func.effects.move_operator import remember
from mfsdp_func.plans import redistribution
from mfsdp_func.plans.collective import Collective
from mfsdp_func.values import buffer_spec
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.ranges import Range

Fact = TypeVar("Fact")
Args = ParamSpec("Args")

_SPECS = SimpleNamespace()


def fact_of(
    function: Callable[Concatenate[BufferSpec, Args], Fact], spec: BufferSpec, *args: Args.args, **kwargs: Args.kwargs
) -> Fact:
    """``function(spec, *args)``, for a function of `values.buffer_spec` or `plans.redistribution`; errors are its own."""
    if torch.compiler.is_compiling():
        fact, error, text = _constant(function.__name__, spec.key, *args, **kwargs)
        if error is not None:
            raise _ERRORS[error](text)
        return fact
    check_place(spec.mesh, "DBuffer")
    if kwargs:
        return function(spec, *args, **kwargs)
    asked = function, args  # found without the hash and the comparison of the whole spec
    if asked not in spec.memo:
        spec.memo[asked] = function(spec, *args, **kwargs)
    return spec.memo[asked]


_ERRORS = {error.__name__: error for error in (IndexError, NotImplementedError, TypeError, ValueError)}


@torch.compiler.assume_constant_result
def _constant(name: str, key: str, *args: object, **kwargs: object) -> tuple[Any, str | None, str]:
    # Dynamo takes what is raised here for an error of its own, what is raised in code that it traces for the caller's.
    try:
        return _named(_named_function(name)(BufferSpec.from_key(key), *args, **kwargs)), None, ""
    except tuple(_ERRORS.values()) as error:
        return None, type(error).__name__, str(error)


def _named_function(name: str) -> Callable[..., Any]:
    return getattr(redistribution, name, None) or getattr(buffer_spec, name)


def _named(fact: Any) -> Any:
    if isinstance(fact, Collective):
        return remember(fact)
    if isinstance(fact, BufferSpec):
        return name_spec(fact)
    if isinstance(fact, tuple) and not isinstance(fact, Range):
        return tuple(map(_named, fact))
    return fact


def spec_of(fact: BufferSpec | str) -> BufferSpec:
    """The spec that a fact holds."""
    # An attribute of a global has a source, so that Dynamo can guard what is done with it; a constant has none.
    return getattr(_SPECS, fact) if isinstance(fact, str) else fact


def name_spec(spec: BufferSpec) -> str:
    """A constant that `spec_of` resolves, for functions that run while tracing."""
    setattr(_SPECS, f"spec_{spec.key}", spec)
    return f"spec_{spec.key}"
