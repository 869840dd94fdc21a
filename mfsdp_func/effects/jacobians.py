"""Whole Jacobians, which go through one rank's elements alone, are refused where an exchange would mix ranks."""

import inspect
import sys
from functools import cache

import torch
from torch.autograd import functional as autograd_functional

from mfsdp_func.effects.torch_internals import traced_stack
from mfsdp_func.plans.linear_map import LinearMap


def refuse_jacobians(linear: LinearMap) -> None:
    """Refuse a call of the map inside `jacrev`, `jacfwd`, or their twins of `torch.autograd.functional`.

    Raises:
        RuntimeError: if one of them is around.
    """
    if found := _jacobian_around():
        raise RuntimeError(
            f"{linear.label}: {found} goes through the elements of this rank one by one, or as a batch, so that an exchange"
            " would mix the rows of different ranks; take vjp or jvp of one direction at a time, alike on all ranks"
        )


def _jacobian_around() -> str | None:
    """The innermost caller that takes a whole Jacobian."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    files = _jacobian_lines()
    while frame is not None:
        for name, span in files.get(frame.f_code.co_filename, {}).items():
            if frame.f_lineno in span:
                return name
        frame = frame.f_back
    # Dynamo runs no frames of the functions that it traces, but keeps a stack of its own.
    for traced in reversed(traced_stack()):
        for name, span in files.get(traced.filename, {}).items():
            if (traced.lineno or 0) in span:
                return name
    return None


@cache
def _jacobian_lines() -> dict[str, dict[str, range]]:
    """File -> name and lines of each function in it that takes whole Jacobians."""
    spans: dict[str, dict[str, range]] = {}
    for home, function in (
        ("torch.func", torch.func.jacrev),
        ("torch.func", torch.func.jacfwd),
        ("torch.autograd.functional", autograd_functional.jacobian),
        ("torch.autograd.functional", autograd_functional.hessian),
    ):
        source, start = inspect.getsourcelines(function)
        file = inspect.getfile(inspect.unwrap(function))
        spans.setdefault(file, {})[f"{home}.{function.__name__}"] = range(start, start + len(source))
    return spans
