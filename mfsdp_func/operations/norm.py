"""The norm of all that several buffers hold together: padding left out, replicas counted once."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.effects.groups import flat_mesh
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.spec_facts import fact_of, name_spec, spec_of
from mfsdp_func.values.buffer_spec import BufferSpec, filled_ranges, has_partial, is_first_replica
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import build_for_row_atomic
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh, containing_mesh
from mfsdp_func.values.placement import Partial, Replicate, RowAtomic, shard_axes


def global_norm(
    buffers: Any, *, ord: float = 2.0, mesh: Mesh | MeshLike | None = None, deterministic: bool = False
) -> torch.Tensor:
    """The norm of all tensors in `buffers` as of one long vector, the same on every rank.

    Every rank of the buffers' meshes calls; a rank that holds nothing too. One number of each rank is reduced: over the
    axes that shard, where all buffers lie alike; else over all ranks of that mesh which contains the others. Along an
    axis that a buffer's mesh lacks, other ranks hold other data (give the axis `Replicate` where they hold the same).
    Padding is not read, so a NaN there does no harm; one in a tensor is a NaN in the result.

    Args:
        buffers: a `DBuffer`, or any pytree of them, such as the gradients of `torch.func.grad`; sharded or replicated.
        ord: the norm ``(Σ |x|^ord)^(1/ord)``, or ``math.inf`` for the largest element.
        mesh: the ranks over which to reduce, where the meshes of the buffers do not tell.
        deterministic: add in the order of the mesh axes, bitwise alike on every carrier and at any number of runs.

    Returns:
        0-D, on the device of the first buffer; float64 if any buffer is, else float32. Zero where there is no buffer.

    Raises:
        TypeError: on a leaf that is no `DBuffer`, or one of integers.
        ValueError: on a `Partial` placement, an `ord` that is not positive, or meshes none of which contains all others.

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
    if not ord > 0:
        raise ValueError(f"global_norm: ord must be a positive number or math.inf, got {ord}")
    if not leaves and mesh is None:
        return torch.zeros(())
    wide = any(leaf.dtype in (torch.float64, torch.complex128) for leaf in leaves)
    dtype = torch.float64 if wide else torch.float32
    device = leaves[0].local_buffer.device if leaves else None
    given = None if mesh is None else as_mesh(mesh)
    keys, ranks = [leaf.spec.key for leaf in leaves], None if given is None else mesh_facts(given)
    name, counted, error = _reduction(tuple(keys), ranks, math.isinf(ord))
    if error:
        raise ValueError(error)
    parts = [torch.zeros((), dtype=torch.float64, device=device)]
    for leaf, is_counted in zip(leaves, counted, strict=True):
        if is_counted:
            parts += [power_of(part, ord).to(device) for part in filled_parts(leaf)]
    if math.isinf(ord):
        return largest_over(spec_of(name), torch.stack(parts).max()).to(dtype)
    total = summed_over(spec_of(name), torch.stack(parts).sum().reshape(1), deterministic)[0]
    return root_of(total, ord).to(dtype)


def mesh_facts(mesh: Mesh) -> tuple[Any, ...]:
    """The fields of a mesh: constants, where `torch.compile` traces."""
    return mesh.shape, mesh.axis_names, mesh.ranks, mesh.rank


@torch.compiler.assume_constant_result
def _reduction(
    keys: tuple[str, ...], given: tuple[Any, ...] | None, largest: bool
) -> tuple[str, tuple[bool, ...], str]:
    """The name of the spec over which buffers are reduced, which of them count here, and an error's text."""
    specs = [BufferSpec.from_key(key) for key in keys]
    alike = {(spec.mesh, shard_axes(spec.placements)) for spec in specs}
    if given is None and len(alike) == 1:
        # The axes that replicate are not reduced at all, so every rank counts.
        ((chosen, axes),) = alike
        counted = (True,) * len(specs)
    else:
        try:
            chosen = flat_mesh(
                mesh_of_all("global_norm", [s.mesh for s in specs], None if given is None else Mesh(*given))
            )
        except ValueError as error:
            return "", (), str(error)
        axes = tuple(range(chosen.ndim))
        counted = tuple(is_first_replica(spec.mesh, spec.placements) for spec in specs)
    spec = one_each_spec(chosen, axes) if largest else sum_spec(chosen, 1, axes)
    return name_spec(spec), counted, ""


def root_of(power: torch.Tensor, ord: float) -> torch.Tensor:
    """``power ** (1 / ord)``, whose derivative at zero is zero, as that of `torch.linalg.vector_norm`; not NaN."""
    zero = power == 0
    positive = torch.where(zero, 1.0, power)
    return torch.where(zero, power, positive.sqrt() if ord == 2 else positive ** (1 / ord))


def power_of(part: torch.Tensor, ord: float = 2.0) -> torch.Tensor:
    """The sum of the powers of absolute values, or (for infinity) the largest: 0-D, float64."""
    if part.is_complex():
        part = torch.view_as_real(part) if ord == 2 else part.abs()
    norm = torch.linalg.vector_norm(part, ord, dtype=torch.float64)
    return norm.square() if ord == 2 else norm if math.isinf(ord) else norm**ord


def filled_parts(buffer: DBuffer) -> list[torch.Tensor]:
    """Views of all elements of the local buffer that belong to tensors, in as few pieces as hold them."""
    return [buffer.local_buffer[part.start : part.end] for part in fact_of(filled_ranges, buffer.spec)]


def mesh_of_all(label: str, meshes: Iterable[Mesh], given: Mesh | MeshLike | None) -> Mesh:
    """The ranks over which something of all of `meshes` is reduced.

    Raises:
        ValueError: if there is no mesh that contains all others, or the given one does not.
    """
    listed = list(meshes)
    chosen = containing_mesh(listed) if given is None else as_mesh(given)
    if chosen is None:
        raise ValueError(
            f"{label}: none of the meshes {', '.join(map(str, dict.fromkeys(listed)))} contains all others, so ranks would"
            " disagree; give mesh=, a mesh of all ranks that take part"
        )
    for mesh in listed:
        if not set(mesh.ranks) <= set(chosen.ranks):
            raise ValueError(f"{label}: mesh={chosen} lacks ranks of {mesh}; give a mesh of all ranks that take part")
    return chosen


def sum_spec(mesh: Mesh, numel: int, axes: tuple[int, ...] | None = None) -> BufferSpec:
    """A buffer of some numbers that are to be summed over all axes, or over `axes`, of a mesh."""
    placements = [Partial("sum") if axes is None or axis in axes else Replicate() for axis in range(mesh.ndim)]
    return BufferSpec(mesh, placements, GlobalLayout([(numel,)], [0], numel, [0]))


def summed_over(spec: BufferSpec, numbers: torch.Tensor, deterministic: bool = False) -> torch.Tensor:
    """The sums of 1-D `numbers` over the ranks, as `sum_spec` says: one all-reduce per axis."""
    whole = tuple(Replicate() for _ in spec.placements)
    return DBuffer(spec, numbers).redistribute(whole, deterministic=deterministic).local_buffer


def one_each_spec(mesh: Mesh, axes: tuple[int, ...]) -> BufferSpec:
    """A buffer of one number of each rank along `axes`, the last ones of a mesh."""
    count = math.prod(mesh.size(axis) for axis in axes)
    placements = [RowAtomic() if axis in axes else Replicate() for axis in range(mesh.ndim)]
    return BufferSpec(mesh, placements, build_for_row_atomic([(count,)], count))


def largest_over(spec: BufferSpec, number: torch.Tensor) -> torch.Tensor:
    """The largest of the ranks' 0-D numbers, as `one_each_spec` says: one all-gather per axis. NaN is larger than all."""
    whole = tuple([Replicate() for _ in spec.placements])
    return DBuffer(spec, number.reshape(1)).redistribute(whole).local_buffer.max()


def _check(leaf: object) -> None:
    if not isinstance(leaf, DBuffer):
        raise TypeError(f"global_norm: expected DBuffers, got a {type(leaf).__name__}")
    if not (leaf.dtype.is_floating_point or leaf.dtype.is_complex):
        raise TypeError(f"global_norm: {leaf} holds no floating-point numbers; cast it first")
    if fact_of(has_partial, leaf.spec):
        raise ValueError(f"global_norm: {leaf} is not summed yet; reduce_scatter or allreduce its Partial axes first")
