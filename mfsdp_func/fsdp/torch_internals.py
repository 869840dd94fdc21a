"""What torch keeps private and units need: each name once, what it is for, and which test fails when it changes.

All of them are there from torch 2.11 to 2.13. Tests are in ``tests/test_torch_internals.py``, unless a file is named. What
other rooms need of the kind is in `mfsdp_func.effects.torch_internals`.

- Saved-tensor hooks inside of transforms and traces: ``_saved_tensors_hooks_get_disabled_error_message``,
  ``_saved_tensors_hooks_enable``, ``_saved_tensors_hooks_disable``, ``_saved_tensors_hooks_set_tracing``. Test:
  `test_hooks_allowed`.
- The caller's own hooks: ``_top_saved_tensors_default_hooks``. Test: `test_hooks_above`.
- Whether a backward pass keeps its graph: ``_get_current_graph_task_keep_graph``; which node runs:
  ``torch._C._current_autograd_node``. Test: `test_the_backward_pass_that_runs`.
- Tensors of transforms: ``_functorch.is_functorch_wrapped_tensor``, ``is_batchedtensor``, ``get_unwrapped``. Test:
  `test_wrapped`.
- What tells a tensor's memory: ``UntypedStorage._cdata``. Test: `test_storage_of`.
- What tells that a tensor was written into: ``Tensor._version``. Test: `test_version_of`.
- A tensor that is the negative of its memory: ``torch._neg_view``. Test: `test_negative_views`.
- A subclass without its own ``__torch_function__``: ``torch._C.DisableTorchFunctionSubclass``; the subclass itself:
  ``Tensor._make_subclass``. Test: `test_an_absent_parameter_never_reads_as_numbers` of ``tests/test_fsdp_once.py``.
- Tensors without values: ``torch._subclasses.fake_tensor.FakeTensor``. Test: `test_fake_tensors`.
- A guard of compiled code by a function of one's own (tried on 2.13 alone): ``torch._opaque_base.OpaqueBase``,
  ``torch._library.opaque_object.register_opaque_type``. Test: `test_guards_of_ones_own`.
- Modules that are compiled: ``torch._dynamo.eval_frame.OptimizedModule``, ``Module._compiled_call_impl``. Test:
  `test_what_cannot_be_copied_is_refused_by_name` of ``tests/test_fsdp_once.py``.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._dynamo.eval_frame import OptimizedModule
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase as Guarded
from torch._subclasses.fake_tensor import FakeTensor

_autograd: Any = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]

_VERSION, _LAYOUT, _CDATA = attrgetter("_version"), attrgetter("layout"), attrgetter("_cdata")

# Autograd.


@contextmanager
def hooks_allowed() -> Generator[None, None, None]:
    """Saved-tensor hooks count, also inside of `torch.func` transforms and traces."""
    message = _autograd._saved_tensors_hooks_get_disabled_error_message()
    tracing = _autograd._saved_tensors_hooks_set_tracing(False)
    if message is not None:
        _autograd._saved_tensors_hooks_enable()
    try:
        yield
    finally:
        _autograd._saved_tensors_hooks_set_tracing(tracing)
        if message is not None:
            _autograd._saved_tensors_hooks_disable(message)


def hooks_above() -> Any:
    """The innermost pair of saved-tensor hooks that is active; None if none is."""
    return _autograd._top_saved_tensors_default_hooks(True)


def keeps_graph() -> bool:
    """Whether the backward pass that runs now keeps its graph."""
    return _autograd._get_current_graph_task_keep_graph()


def current_node() -> Any:
    """The node of autograd's graph that runs now; None outside of a backward pass."""
    return torch._C._current_autograd_node()


# Tensors.


is_wrapped: Callable[[torch.Tensor], bool] = _functorch.is_functorch_wrapped_tensor
"""Whether a tensor belongs to a transform."""
is_batched: Callable[[torch.Tensor], bool] = _functorch.is_batchedtensor
"""Whether `vmap` maps over a tensor."""
inner_of: Callable[[torch.Tensor], torch.Tensor] = _functorch.get_unwrapped
"""A transform's tensor as the next transform outside has it."""


def storage_of(tensor: torch.Tensor) -> int:
    """What tells a tensor's memory; 0 where it has none of the usual kind."""
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


def storages_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`storage_of` of each."""
    if {torch.strided}.issuperset(map(_LAYOUT, tensors)):
        return [*map(_CDATA, map(torch.Tensor.untyped_storage, tensors))]
    return [storage_of(tensor) for tensor in tensors]


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written into; tensors made in inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`version_of` of each."""
    if any(map(torch.Tensor.is_inference, tensors)):
        return [version_of(tensor) for tensor in tensors]
    return [*map(_VERSION, tensors)]


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same memory whose values are its negatives."""
    return torch._neg_view(tensor)


def is_any_fake(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of the tensors has no values, because a compiler looks on."""
    return FakeTensor in {*map(type, tensors)}


def plain_subclass(cls: type[torch.Tensor], value: torch.Tensor, requires_grad: bool) -> Any:
    """A tensor of a subclass, with the memory of `value`."""
    return torch.Tensor._make_subclass(cls, value, requires_grad)


def torch_functions_of_subclasses_off() -> AbstractContextManager[Any]:
    """Run functions on subclasses as on tensors."""
    return torch._C.DisableTorchFunctionSubclass()


# Modules.


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is one that `torch.compile` made, or `Module.compile` changed."""
    return isinstance(module, OptimizedModule) or module._compiled_call_impl is not None


def guard_on_facts(kind: type[Guarded], facts: Callable[[Any], Any]) -> None:
    """Let compiled code that meets an object of a kind compare ``facts(object)`` at every call: another is compiled anew."""
    register_opaque_type(kind, typ="reference", guard_fn=facts)
