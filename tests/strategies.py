"""Random meshes, layouts and owners, small enough to move real data through."""

import math
from dataclasses import dataclass

from hypothesis import strategies as st

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_balanced,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
)
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import BlockAtomic, Placement, Replicate, RowAtomic, TensorAtomic

KINDS = ("padded", "unpadded", "balanced", "tensor", "handmade")
"""The builders, and layouts that no builder makes: gaps, any tensor order, boundaries inside rows."""

ROW_BUILDERS = {
    "padded": build_for_row_atomic,
    "unpadded": build_for_row_atomic_unpadding,
    "balanced": build_for_row_atomic_balanced,
}

block_sizes = st.integers(1, 4)


@dataclass(frozen=True)
class Case:
    """A layout and the placement that goes with it on the axes that cut it."""

    layout: GlobalLayout
    placement: Placement
    kind: str


@st.composite
def shapes(draw: st.DrawFn, *, block_size: int = 1, max_rows: int = 6) -> tuple[int, ...]:
    """One to four dims; the rows, maybe none, are a multiple of `block_size`."""
    rows = block_size * draw(st.integers(0, max_rows))
    trailing = draw(st.one_of(st.tuples(st.integers(1, 5)), st.lists(st.integers(1, 4), max_size=3)))
    return (rows, *trailing)


def shape_lists(
    *, block_size: int = 1, max_rows: int = 6, max_tensors: int = 6, min_tensors: int = 0
) -> st.SearchStrategy[list[tuple[int, ...]]]:
    """Shapes of the tensors of one buffer."""
    return st.lists(shapes(block_size=block_size, max_rows=max_rows), min_size=min_tensors, max_size=max_tensors)


@st.composite
def meshes(
    draw: st.DrawFn, *, max_axes: int = 3, max_ranks: int = 12, min_ranks: int = 1, nobody: bool = False
) -> Mesh:
    """One to `max_axes` axes; any rank numbers in any order; this process is one of them, or `nobody`."""
    sizes = [draw(st.integers(min_ranks, max_ranks))]
    for _ in range(draw(st.integers(0, max_axes - 1))):
        sizes.append(draw(st.integers(1, max(1, max_ranks // math.prod(sizes)))))
    sizes = draw(st.permutations(sizes))
    count = math.prod(sizes)
    ranks = draw(
        st.one_of(
            st.permutations(range(count)),
            st.lists(st.integers(0, 40), min_size=count, max_size=count, unique=True),
        )
    )
    return Mesh(sizes, ranks=ranks, rank=None if nobody else draw(st.sampled_from(ranks)))


@st.composite
def handmade_layouts(draw: st.DrawFn, dp_size: int) -> GlobalLayout:
    """Tensors in any order with gaps between them, and boundaries anywhere."""
    given = draw(shape_lists())
    offsets, cursor = [0] * len(given), 0
    for i in draw(st.permutations(range(len(given)))):
        cursor += draw(st.integers(0, 5))
        offsets[i] = cursor
        cursor += math.prod(given[i])
    size = cursor + draw(st.integers(0, 5))
    places = draw(st.lists(st.integers(0, size), min_size=1, max_size=dp_size))  # few places make empty segments
    cuts = draw(st.lists(st.sampled_from(places), min_size=dp_size - 1, max_size=dp_size - 1))
    return GlobalLayout(given, offsets, size, [0, *sorted(cuts)])


@st.composite
def cases(draw: st.DrawFn, dp_size: int, *, kinds: tuple[str, ...] = KINDS) -> Case:
    """A layout of `dp_size` segments, of any of `kinds`."""
    kind = draw(st.sampled_from(kinds))
    if kind == "handmade":
        return Case(draw(handmade_layouts(dp_size)), RowAtomic(), kind)
    if kind == "tensor":
        given = draw(shape_lists())
        owners = draw(st.lists(st.integers(0, dp_size - 1), min_size=len(given), max_size=len(given)))
        return Case(build_for_tensor_atomic(given, dp_size, tensor_owners=owners), TensorAtomic(), kind)
    block_size = draw(block_sizes)
    layout = ROW_BUILDERS[kind](draw(shape_lists(block_size=block_size)), dp_size, block_size=block_size)
    return Case(layout, RowAtomic() if block_size == 1 else BlockAtomic(block_size), kind)


def layouts(dp_size: int, *, kinds: tuple[str, ...] = KINDS) -> st.SearchStrategy[GlobalLayout]:
    """See `cases`."""
    return cases(dp_size, kinds=kinds).map(lambda case: case.layout)


@st.composite
def owner_layouts(
    draw: st.DrawFn,
    *,
    mesh: st.SearchStrategy[Mesh] | None = None,
    kinds: tuple[str, ...] = KINDS,
    replicate: bool = True,
    holders_only: bool = False,
) -> GroupOwnerLayout:
    """Any subset of tensors, owned by any rank of the mesh, or only by ranks that hold a part.

    With `replicate`, some prefix of the mesh axes may be `Replicate()`. The layout has one segment per shard, or two.
    """
    value = draw(meshes() if mesh is None else mesh)
    prefix = draw(st.integers(0, value.ndim)) if replicate else 0
    count = math.prod(value.shape[prefix:])
    case = draw(cases(count * draw(st.sampled_from([1, 1, 1, 2])), kinds=kinds))
    placements = (Replicate(),) * prefix + (case.placement,) * (value.ndim - prefix)
    owners = {}
    for i, shape in enumerate(case.layout.tensor_shapes):
        candidates = list(value.ranks)
        if holders_only:
            part = case.layout.get_tensor_range(i)
            held = [(r, case.layout.get_rank_range(value, placements, r)) for r in value.ranks]
            candidates = [r for r, own in held if max(own.start, part.start) < min(own.end, part.end)]
        if candidates and (shape.numel() or not holders_only) and draw(st.integers(0, 3)):
            owners[i] = draw(st.sampled_from(candidates))
    return GroupOwnerLayout(value, case.layout, owners, placements, draw(st.sampled_from(["", "group"])))
