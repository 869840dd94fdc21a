"""Buffers for tests: layouts of every kind, elements for every rank, and what each redistribution must give."""

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import Partial, Placement, Replicate, RowAtomic, TensorAtomic

SHAPES = ((5, 4), (2, 6), (3,), (0, 2), (7, 2))
KINDS = ("padded", "unpadded", "balanced", "tensor", "handmade")
MESHES: dict[int, tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]] = {
    1: (((1,), (0,)),),
    2: (((2,), (1, 0)),),
    4: (((4,), (2, 0, 3, 1)), ((2, 2), (3, 1, 0, 2))),
}
"""Number of ranks -> meshes: shape and ranks."""

SUM, AVG, FULL, ROWS = Partial("sum"), Partial("avg"), Replicate(), RowAtomic()


def layout_of(kind: str, count: int) -> mf.GlobalLayout:
    """Tensors of `SHAPES` over `count` segments."""
    if kind == "tensor":
        return mf.build_for_tensor_atomic(
            SHAPES, count, tensor_owners=[(3 * i + 1) % count for i in range(len(SHAPES))]
        )
    if kind == "handmade":  # gaps, another order, segments cut inside rows; the first and the last rank hold nothing
        starts = [max(0, k - 1) * 66 // max(1, count - 2) for k in range(count)]
        return mf.GlobalLayout(SHAPES, [20, 50, 44, 48, 3], 66, starts)
    builders = {
        "padded": mf.build_for_row_atomic,
        "unpadded": mf.build_for_row_atomic_unpadding,
        "balanced": mf.build_for_row_atomic_balanced,
    }
    return builders[kind](SHAPES, count)


def shard_of(kind: str) -> Placement:
    """The placement that goes with a layout."""
    return TensorAtomic() if kind == "tensor" else ROWS


def all_placements(ndim: int, shard: Placement) -> list[tuple[Placement, ...]]:
    """Every placements that a buffer can have: shards come last."""
    found = []
    for sharded in range(ndim + 1):
        prefixes = itertools.product((FULL, SUM, AVG), repeat=ndim - sharded)
        found += [(*prefix, *[shard] * sharded) for prefix in prefixes]
    return found


def is_reachable(old: Sequence[Placement], new: Sequence[Placement]) -> bool:
    """Whether the table has a way: nothing but itself becomes a pending sum."""
    return all(before == after or after != SUM for before, after in zip(old, new, strict=True))


@lru_cache(maxsize=1024)
def dense(layout: mf.GlobalLayout, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A whole buffer: random tensors, and NaN in every gap."""
    flat = torch.full((layout.size,), float("nan"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for offset, numel in zip(layout.tensor_to_offset, layout.tensor_numels, strict=True):
        flat[offset : offset + numel] = torch.randn(numel, generator=generator, dtype=torch.float64)
    return flat.to(dtype)


def seed_of(coordinate: Sequence[int], placements: Sequence[Placement]) -> int:
    """Ranks that differ on a `Partial` axis hold different terms of the sum; all others hold the same."""
    digits = [c if isinstance(p, Partial) else 0 for c, p in zip(coordinate, placements, strict=True)]
    return sum(digit * 10**n for n, digit in enumerate(digits))


def local_of(spec: mf.BufferSpec, flat: torch.Tensor) -> mf.DBuffer:
    """This rank's buffer of a whole one; what a layout stores behind a segment is NaN."""
    part = flat[spec.local_range.start : spec.local_range.end]
    behind = part.new_full((spec.local_numel - part.numel(),), float("nan") if part.is_floating_point() else 0)
    return mf.DBuffer.from_local(torch.cat([part, behind]), spec.mesh, spec.placements, spec.layout)


def source_of(
    mesh: Mesh, placements: Sequence[Placement], layout: mf.GlobalLayout, dtype: torch.dtype = torch.float64
) -> mf.DBuffer:
    """The buffer from which `expected_of` starts."""
    spec = mf.BufferSpec(mesh, placements, layout)
    return local_of(spec, dense(layout, seed_of(mesh.coordinate(), placements), dtype))


def expected_of(
    mesh: Mesh, old: Sequence[Placement], new: Sequence[Placement], layout: mf.GlobalLayout
) -> tuple[mf.DBuffer, bool]:
    """This rank's buffer after a redistribution, and whether elements were added: by dense arithmetic in float64."""
    reduced = [axis for axis, (a, b) in enumerate(zip(old, new, strict=True)) if isinstance(a, Partial) and a != b]
    terms, here = [], list(mesh.coordinate())
    for digits in itertools.product(*(range(mesh.shape[axis]) for axis in reduced)):
        for axis, digit in zip(reduced, digits, strict=True):
            here[axis] = digit
        terms.append(dense(layout, seed_of(here, old)))
    total = torch.stack(terms).sum(0)
    total = total / math.prod(mesh.shape[axis] for axis in reduced if old[axis] == AVG)
    return local_of(mf.BufferSpec(mesh, new, layout), total), bool(reduced)


def tensors_of(buffer: mf.DBuffer) -> torch.Tensor:
    """All elements of tensors that this rank holds, one after the other, found without the buffer's own methods."""
    mine, found = buffer.layout.get_local_range(buffer.mesh, buffer.placements), []
    for offset, numel in zip(buffer.layout.tensor_to_offset, buffer.layout.tensor_numels, strict=True):
        start, end = max(offset, mine.start), min(offset + numel, mine.end)
        found.append(buffer.local_buffer[start - mine.start : max(start, end) - mine.start])
    return torch.cat([buffer.local_buffer[:0], *found])
