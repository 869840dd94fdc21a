"""The norm of all that several buffers hold together: padding left out, replicas counted once."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import Partial, Replicate, shard_axes


def global_norm(buffers: Any, *, deterministic: bool = False) -> torch.Tensor:
    """The square root of the sum of squares of all tensors in `buffers`, the same on every rank.

    Every rank of the buffers' meshes calls; one all-reduce of one element per sharded axis of each distinct way to
    shard. Padding is not read, so a NaN there does no harm; one in a tensor is a NaN in the result.

    Args:
        buffers: a `DBuffer`, or any pytree of them, such as the gradients of `torch.func.grad`; sharded or replicated.
        deterministic: add in the order of the mesh axes, bitwise alike on every carrier and at any number of runs.

    Returns:
        0-D, on the device of the first buffer; float64 if any buffer is, else float32. Zero where there is no buffer.

    Raises:
        TypeError: on a leaf that is no `DBuffer`, or one of integers.
        ValueError: on a `Partial` placement.

    >>> from mfsdp_func import RowAtomic, build_for_row_atomic_unpadding, simulate
    >>> layout = build_for_row_atomic_unpadding([(3,), (2,)], 2)
    >>> def program(mesh):
    ...     tensors = [torch.full((3,), 2.0), torch.full((2,), 1.0)]
    ...     return global_norm(DBuffer.distribute_tensors(tensors, mesh, [RowAtomic()], layout)).item() ** 2
    >>> [round(square, 4) for square in simulate(program, 2).results.values()]
    [14.0, 14.0]
    """
    leaves = pytree.tree_leaves(buffers, is_leaf=lambda leaf: isinstance(leaf, DBuffer))
    for leaf in leaves:
        _check(leaf)
    wide = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
    dtype = torch.float64 if wide else torch.float32
    groups: dict[tuple[Mesh, tuple[int, ...]], list[torch.Tensor]] = {}
    for leaf in leaves:
        parts = groups.setdefault((leaf.mesh, shard_axes(leaf.placements)), [])
        parts += [_square(leaf.local_buffer[span.start : span.end], dtype) for span in leaf.spec.filled]
    device = leaves[0].local_buffer.device if leaves else None
    total = torch.zeros((), dtype=dtype, device=device)
    for (mesh, axes), parts in groups.items():
        local = torch.stack([part.to(device) for part in parts]).sum() if parts else torch.zeros_like(total)
        total = total + _sum_over(mesh, axes, local, deterministic)
    return total.sqrt()


def _check(leaf: object) -> None:
    if not isinstance(leaf, DBuffer):
        raise TypeError(f"global_norm: expected DBuffers, got a {type(leaf).__name__}")
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        raise TypeError(f"global_norm: {leaf} holds no floating-point numbers; cast it first")
    if any(isinstance(placement, Partial) for placement in leaf.placements):
        raise ValueError(f"global_norm: {leaf} is not summed yet; reduce_scatter or allreduce its Partial axes first")


def _square(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    real = torch.view_as_real(part) if part.is_complex() else part
    return torch.linalg.vector_norm(real, dtype=dtype).square()


def _sum_over(mesh: Mesh, axes: tuple[int, ...], local: torch.Tensor, deterministic: bool) -> torch.Tensor:
    """The sum of one number per shard: the ranks of one copy of a buffer add theirs, other axes hold the same."""
    one = GlobalLayout([(1,)], [0], 1, [0])
    placements = [Partial("sum") if axis in axes else Replicate() for axis in range(mesh.ndim)]
    numbers = DBuffer.from_local(local.reshape(1), mesh, placements, one)
    return numbers.redistribute([Replicate()] * mesh.ndim, deterministic=deterministic).local_buffer[0]
