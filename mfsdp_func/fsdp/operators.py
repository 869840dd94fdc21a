"""Operators of compiled units."""

from collections.abc import Sequence

import torch

# Compilers like to put off additions until somebody needs the sum, and keep all terms until then: full parameters too.
_LIBRARY = torch.library.Library("mfsdp_func", "FRAGMENT")
_LIBRARY.define("unit_boundary(Tensor[] tensors) -> Tensor[]")


def _copies(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


_LIBRARY.impl("unit_boundary", _copies, "CompositeExplicitAutograd")
torch.library.register_fake("mfsdp_func::unit_boundary", _copies, lib=_LIBRARY)


def unit_boundary(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tensors as copies that a compiler must have made before it goes on."""
    return tuple(torch.ops.mfsdp_func.unit_boundary(list(tensors)))
