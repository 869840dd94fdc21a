"""What torch keeps private and this library needs: each name once, what it is for, and which test fails when it changes.

All of them are there from torch 2.11 to 2.13. Tests named without a file are in ``tests/test_torch_internals.py``.

- Is a `torch.func` transform active? ``_functorch.peek_interpreter_stack``; forward-mode differentiation?
  ``forward_ad._current_level``; a tracer? ``_get_current_dispatch_mode_stack`` and ``mode._mode_key``; any dispatch
  mode? ``torch._C._len_torch_dispatch_stack``. Test: `test_who_looks_on`.
- Which transforms, from the outermost inwards: ``pyfunctorch.retrieve_all_functorch_interpreters``. Test:
  `test_active_transforms`.
- To run something outside of all transforms: ``pyfunctorch.temporarily_clear_interpreter_stack``. Test:
  `test_outside_transforms`.
- Outer tangents inside a jvp rule: ``forward_ad._set_fwd_grad_enabled``. Test: the nests of ``tests/test_corners.py``.
- A tensor with a batch dim on each `vmap` level: ``_functorch._add_batch_dim``. Test: `test_batched_zero`.
- The plain tensor inside a transform's: ``_functorch.is_functorch_wrapped_tensor``, ``get_unwrapped``. Test:
  `test_unwrapped`.
- Where in the program Dynamo is: ``torch._guards.TracingContext.extract_stack``. Test: the refused cells of
  ``tests/composition/test_matrix.py``.
- An operator whose calls keep their order: ``torch._higher_order_ops.effects._register_effectful_op``; the graph that is
  being traced: ``proxy_tensor.get_proxy_mode``. Test: ``tests/composition/test_order.py``.
- A process group by its name: ``distributed_c10d._resolve_process_group``. Test: ``tests/test_dtensor.py``.
- Which devices a process group serves: ``ProcessGroup._device_types``; after how many seconds it gives up:
  ``ProcessGroup._get_backend`` and ``options._timeout``. Test: ``test_what_is_known_of_a_group`` of
  ``tests/test_faults_real.py``.

State that simulated ranks must each have for themselves is in `mfsdp_func.simulation.rank_state`, and what simulated process
groups take the place of in `mfsdp_func.simulation.torch_distributed`.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar
from traceback import StackSummary
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._functorch import pyfunctorch
from torch._guards import TracingContext
from torch._higher_order_ops import effects
from torch.autograd import forward_ad
from torch.distributed import distributed_c10d
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch

# Who is looking on?


def is_transformed() -> bool:
    """Whether a `torch.func` transform is active."""
    return _functorch.peek_interpreter_stack() is not None


def is_traced() -> bool:
    """Whether a tracer looks on (AOTAutograd, `make_fx`, fake tensors): what happens now is not what will run."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()  # pyright: ignore[reportPrivateUsage]
    return bool(modes) and any(getattr(mode, "_mode_key", None) is not None for mode in modes)


RECORDERS: ContextVar[int] = ContextVar("mfsdp_func_recorders", default=0)
"""Number of dispatch modes of this thread that only record what runs: for them, what runs must be what runs without."""


def is_watched() -> bool:
    """Whether any dispatch mode is active, but for those that only record: a tracer, or one that watches operators."""
    return torch._C._len_torch_dispatch_stack() > RECORDERS.get()  # pyright: ignore[reportPrivateUsage]


def is_untransformed() -> bool:
    """Whether no transform, no forward-mode differentiation and no tracer is active (a mode that only watches may be)."""
    return (
        _functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
        and not (is_watched() and is_traced())
    )


def is_alone() -> bool:
    """Whether nothing looks on, but modes that only record: no transform, no forward-mode differentiation."""
    return (
        torch._C._len_torch_dispatch_stack() <= RECORDERS.get()  # pyright: ignore[reportPrivateUsage]
        and _functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0  # pyright: ignore[reportPrivateUsage]
    )


def active_transforms() -> list[str]:
    """Names of the active `torch.func` transforms, the outermost first: "Grad", "Jvp", "Vmap", "Functionalize"."""
    return [interpreter.key().name for interpreter in pyfunctorch.retrieve_all_functorch_interpreters()]


# Through transforms.


def outside_transforms() -> AbstractContextManager[Any]:
    """Run what is inside as if no `torch.func` transform were active."""
    return pyfunctorch.temporarily_clear_interpreter_stack()


def forward_mode_allowed() -> AbstractContextManager[Any]:
    """Inside a jvp rule, where torch disables forward mode for plain operators: let these have outer tangents."""
    return forward_ad._set_fwd_grad_enabled(True)  # pyright: ignore[reportPrivateUsage]


def batched_zero(device: torch.device) -> torch.Tensor | None:
    """A 0-D zero that has a batch dim on every active `vmap` level; None where there is no such level."""
    if not is_transformed():
        return None
    interpreters = pyfunctorch.retrieve_all_functorch_interpreters()
    levels = [level for level in interpreters if isinstance(level, pyfunctorch.VmapInterpreter)]
    if not levels:
        return None
    with outside_transforms():  # else the zero itself would belong to the innermost level
        zero = torch.zeros([level.batch_size() for level in levels], device=device)
        for level in levels:
            zero = _functorch._add_batch_dim(zero, 0, level.level())  # pyright: ignore[reportPrivateUsage]
    return zero


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor inside those that transforms have wrapped around it."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


# In compiled code.


def traced_stack() -> StackSummary:
    """Where in the program Dynamo is: it runs no frames of the functions that it traces, but keeps a stack of its own."""
    return TracingContext.extract_stack()


def keep_in_order(operator: str) -> None:
    """Let calls of an operator keep the program's order, each run once: AOTAutograd threads a token through them."""
    effects._register_effectful_op(operator, effects._EffectType.ORDERED)  # pyright: ignore[reportPrivateUsage]


def proxy_tracer() -> Any:
    """The tracer whose graph records what happens now; None where there is none."""
    mode = proxy_tensor.get_proxy_mode()
    return None if mode is None else mode.tracer


# Process groups.


def process_group_named(name: str) -> dist.ProcessGroup | None:
    """The process group of a name; None where there is none (any more)."""
    try:
        return distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportPrivateUsage, reportArgumentType]
    except (RuntimeError, LookupError):
        return None


def device_types_of(group: dist.ProcessGroup) -> set[str]:
    """The types of devices whose tensors a group carries."""
    return {device.type for device in group._device_types}  # pyright: ignore[reportPrivateUsage]


def name_of(group: dist.ProcessGroup) -> str:
    """What a group is called: by whoever made it, or by its number."""
    return getattr(group, "group_desc", "") or group.group_name


def timeout_of(group: dist.ProcessGroup) -> float | None:
    """After how many seconds a group gives up, as it is set now; None where that is not known."""
    try:
        backend = group._get_backend(group._device_types[0])  # pyright: ignore[reportPrivateUsage]
        return backend.options._timeout.total_seconds()  # pyright: ignore[reportPrivateUsage]
    except (AttributeError, IndexError, RuntimeError):
        return None
