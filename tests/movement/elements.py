"""Cases: which elements arrive, of every layout, dtype, shape and owner."""

import itertools
from typing import Any

import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import Replicate, RowAtomic
from tests.movement.groups import (
    DTYPES,
    Group,
    Run,
    Tensors,
    assert_close,
    assert_same,
    bits,
    case,
    gather_only,
    groups_for,
    mix_rows,
    normal,
    one_group,
    owner_compute,
    scatter_only,
)


@case
def round_trip(mesh: Mesh, run: Run) -> Any:
    """`scatter(gather(x)) == x`, for layouts and owners of all kinds."""
    results = {}
    for name, group in groups_for(mesh).items():
        group = group.of(torch.float32)
        full = group.fill()
        gathered = run(gather_only(group), group.shards(full))
        assert_same(gathered, group.full(full), f"{name}: gather")
        parts = run(scatter_only(group), gathered)
        assert_same(parts, group.parts(full), f"{name}: scatter")
        results[name] = gathered, parts
    return results


@case(compiled=True)
def round_trip_in_one_function(mesh: Mesh, run: Run) -> Any:
    results = {}
    for name, group in itertools.islice(groups_for(mesh).items(), 0, None, 4):

        def there_and_back(source: Tensors, group: Group = group) -> tuple[Tensors, Tensors]:
            gathered, token = group.gather(source, dtype=torch.float32)
            return gathered, group.scatter(gathered, after=token)[0]

        full = group.fill()
        results[name] = run(there_and_back, group.shards(full))
        assert_same(results[name], (group.full(full), group.parts(full)), name)
    return results


@case
def every_dtype(mesh: Mesh, run: Run) -> Any:
    group, results = groups_for(mesh)["padded rotated"], {}
    for dtype in DTYPES:
        group = group.of(dtype)
        full = group.fill(dtype)
        gathered = run(gather_only(group), group.shards(full))
        assert_same(gathered, group.full(full), str(dtype))
        results[str(dtype)] = run(scatter_only(group), gathered)
        assert_same(results[str(dtype)], group.parts(full), str(dtype))
    return results


@case(compiled=True)
def some_dtypes(mesh: Mesh, run: Run) -> Any:
    group, results = groups_for(mesh)["unpadded rotated"], {}
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        full = group.fill(dtype)

        def there_and_back(source: Tensors, dtype: torch.dtype = dtype) -> Tensors:
            gathered, token = group.gather(source, dtype=dtype)
            return group.scatter(gathered, after=token)[0]

        results[str(dtype)] = run(there_and_back, group.shards(full))
        assert_same(results[str(dtype)], group.parts(full), str(dtype))
    return results


@case
def lazily_conjugated_and_negated(mesh: Mesh, run: Run) -> Any:
    group, results = groups_for(mesh)["unpadded balanced"], []
    for dtype, negated_dtype in ((torch.complex64, torch.float32), (torch.complex128, torch.float64)):
        full = {i: torch.complex(normal(s, i), normal(s, i + 9)).to(dtype) for i, s in enumerate(group.shapes)}
        group = group.of(dtype)
        conjugated = {i: tensor.conj() for i, tensor in group.shards(full).items()}
        assert all(tensor.is_conj() for tensor in conjugated.values())
        gathered = run(gather_only(group), conjugated)
        assert_same(gathered, group.full({i: tensor.conj() for i, tensor in full.items()}))
        assert not any(tensor.is_conj() for tensor in gathered.values())
        parts = run(scatter_only(group), {i: tensor.conj() for i, tensor in gathered.items()})
        assert_same(parts, group.parts(full))
        negated = {i: tensor.imag for i, tensor in conjugated.items()}
        assert all(tensor.is_neg() for tensor in negated.values())
        imaginary = run(gather_only(group.of(negated_dtype)), negated)
        assert_same(imaginary, group.full({i: -tensor.imag for i, tensor in full.items()}))
        results.append((gathered, parts, imaginary))
    return results


@case(compiled=True)
def gather_change_scatter(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full = group.normal()
    step = owner_compute(group, dtype=torch.float64)
    parts = run(step, group.shards(full))
    assert_close(parts, group.parts({i: mix_rows(full[i]) for i in group.owners.tensor_to_owner}))
    assert_same(run(step, group.shards(full)), parts, "run twice")
    return parts


@case
def shards_of_any_shape_and_strides(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh).of(torch.float32)
    full = group.fill()

    def strided(flat: torch.Tensor) -> torch.Tensor:
        spread = torch.empty(flat.numel(), 3)
        spread[:, 1] = flat
        return spread[:, 1]

    def transposed(flat: torch.Tensor) -> torch.Tensor:
        rows = next(d for d in (3, 2, 1) if flat.numel() % d == 0)
        return flat.view(rows, -1).t().contiguous().t()

    results = []
    for change in (strided, transposed, lambda flat: flat.view(1, -1, 1)):
        source = {i: change(flat) for i, flat in group.shards(full).items()}
        gathered = run(gather_only(group), source)
        assert_same(gathered, group.full(full))
        parts = run(scatter_only(group), {i: change(tensor.reshape(-1)) for i, tensor in gathered.items()})
        assert_same(parts, group.parts(full))
        results.append((gathered, parts))
    return results


@case(compiled=True)
def parts_in_rows_or_flat_alike_on_all_ranks(mesh: Mesh, run: Run) -> Any:
    """One boundary inside a row makes all parts of that tensor flat, those of ranks that begin with a row too."""
    results = []
    for starts, flat in (([0, 7, 16], {0}), ([0, 16, 16], set()), ([0, 6, 15], {1}), ([0, 7, 21], {0, 2})):
        boundaries = (starts + [24] * mesh.size())[: mesh.size()]
        layout = mf.GlobalLayout([(4, 3), (4, 2), (2, 2)], [0, 12, 20], 24, boundaries)
        group = Group(GroupOwnerLayout(mesh, layout, {0: mesh.ranks[-1], 1: mesh.ranks[0], 2: mesh.ranks[-1]}))
        full = group.fill()
        gathered = run(gather_only(group, dtype=torch.float32), group.shards(full))
        parts = run(scatter_only(group, dtype=torch.float32), gathered)
        assert_same(parts, group.parts(full))
        if mesh.size() > 2:
            assert {i for i, part in parts.items() if part.dim() == 1} <= flat
            assert {i for i, part in parts.items() if part.dim() == 2}.isdisjoint(flat)
        results.append(parts)
    return results


@case(compiled=True)
def replica_groups(mesh: Mesh, run: Run) -> Any:
    """Each replica group moves its own data; an owner stands for its shard coordinates."""
    results = []
    for axis in range(mesh.ndim):
        placements = [Replicate()] * mesh.ndim
        if mesh.ndim > 1:
            placements[axis] = RowAtomic()
        count = mesh.size(axis) if mesh.ndim > 1 else 1
        layout = mf.build_for_row_atomic_unpadding([(5, 4), (2, 6), (3,)], count)
        owners = {0: mesh.ranks[-1], 1: mesh.ranks[0], 2: mesh.ranks[-1]}
        group = Group(GroupOwnerLayout(mesh, layout, owners, placements, name="replicas"))
        replica = sum(digit * 10**n for n, digit in enumerate(mesh.coordinate()) if n != axis or mesh.ndim == 1)
        full = {i: tensor + 1000 * replica for i, tensor in group.normal().items()}
        gathered = run(gather_only(group, dtype=torch.float64), group.shards(full))
        parts = run(scatter_only(group, dtype=torch.float64), gathered)
        assert_same((gathered, parts), (group.full(full), group.parts(full)))
        results.append((gathered, parts))
    return results


@case(compiled=True)
def without_own_parts(mesh: Mesh, run: Run) -> Any:
    results = {}
    for name in ("unpadded balanced", "unpadded one", "tensor balanced", "handmade rotated"):
        group = groups_for(mesh)[name]
        full = group.fill()
        scatter = scatter_only(group, include_own=False, dtype=torch.float32)
        results[name] = run(scatter, group.full(full))
        assert_same(results[name], group.parts(full, include_own=False), name)
    return results


@case(compiled=True)
def tensors_without_rows(mesh: Mesh, run: Run) -> Any:
    """A given owner gets an empty tensor, in its shape and dtype; the other ranks need not know of it."""
    results = []
    for shapes, owners in (
        ([(0, 4), (4, 3), (0,)], {0: 1, 1: 0, 2: 0}),
        ([(4, 3), (0, 4)], {1: 0}),
        ([(0, 2)], {0: 1}),
    ):
        layout = mf.build_for_row_atomic(shapes, mesh.size())
        group = Group(GroupOwnerLayout(mesh, layout, {i: mesh.ranks[k % mesh.size()] for i, k in owners.items()}))
        full = group.fill(torch.bfloat16)
        gathered = run(gather_only(group, dtype=torch.bfloat16), group.shards(full))
        assert_same(gathered, group.full(full))
        parts = run(scatter_only(group, dtype=torch.bfloat16), gathered)
        assert_same(parts, group.parts(full))
        results.append((gathered, parts))
    return results


@case
def owners_that_hold_nothing(mesh: Mesh, run: Run) -> Any:
    """The last rank holds nothing and owns one tensor, or all; the call says the dtype, or the group does."""
    count, results = mesh.size(), []
    layout = mf.GlobalLayout([(4, 3), (2, 5)], [0, 12], 22, [0, *range(8, 6 + count), 22])
    for owners, dtype, said in itertools.product(
        ({0: 0, 1: count - 1}, {0: count - 1, 1: count - 1}),
        (torch.float64, torch.bfloat16, torch.uint8),
        (False, True),
    ):
        group = Group(GroupOwnerLayout(mesh, layout, {i: mesh.ranks[k] for i, k in owners.items()}))
        group = group.of(None if said else dtype)
        full = group.fill(dtype)
        keywords = {"dtype": dtype, "device": "cpu"} if said else {}
        gathered = run(gather_only(group, **keywords), group.shards(full))
        assert_same(gathered, group.full(full))
        parts = run(scatter_only(group, **keywords), gathered)
        assert_same(parts, group.parts(full))
        results.append((gathered, parts))
    return results


@case(compiled=True)
def owner_that_holds_nothing_says_the_dtype(mesh: Mesh, run: Run) -> Any:
    layout = mf.GlobalLayout([(4, 3), (2, 5)], [0, 12], 22, [0, *range(8, 6 + mesh.size()), 22])
    group = Group(GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0], 1: mesh.ranks[-1]}))
    full = group.normal()
    parts = run(owner_compute(group, dtype=torch.float64), group.shards(full))
    assert_close(parts, group.parts({i: mix_rows(tensor) for i, tensor in full.items()}))
    return parts


@case
def ranks_that_own_nothing_scatter_nothing(mesh: Mesh, run: Run) -> Any:
    """The group says the dtype; or the call does; or a token knows it."""
    group = one_group(mesh, owners={0: mesh.ranks[0], 1: mesh.ranks[0], 3: mesh.ranks[0]})
    results = []
    for dtype in (torch.float16, torch.complex128, torch.int8):
        full = group.fill(dtype)
        source = group.full(full)
        assert bool(source) == (mesh.rank == mesh.ranks[0])
        results += [run(scatter_only(group.of(dtype)), source), run(scatter_only(group, dtype=dtype), source)]
        gathered, token = group.gather(group.shards(full), dtype=dtype)
        results.append(group.scatter(gathered, after=token)[0])
        for parts in results[-3:]:
            assert_same(parts, group.parts(full))
    return results


@case
def rank_without_anything_to_do(mesh: Mesh, run: Run) -> Any:
    """The last rank neither holds nor owns; it calls all the same."""
    count, results = mesh.size(), []
    layout = mf.GlobalLayout([(4, 3), (2, 5)], [0, 12], 22, [0, *range(8, 6 + count), 22])
    group = Group(GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0], 1: mesh.ranks[0]}, dtype=torch.float32))
    for _ in range(2):
        full = group.fill()
        gathered = run(gather_only(group), group.shards(full))
        parts = run(scatter_only(group), gathered)
        if mesh.rank == mesh.ranks[-1] and count > 1:
            assert (gathered, parts) == ({}, {})
        assert_same((gathered, parts), (group.full(full), group.parts(full)))
        results.append(parts)
    return results


@case(compiled=True)
def group_without_tensors(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh, owners={})
    assert run(gather_only(group), group.shards(group.fill())) == {}
    assert run(scatter_only(group), {}) == {}
    empty = Group(GroupOwnerLayout(mesh, mf.build_for_row_atomic([], mesh.size()), {}))
    assert run(gather_only(empty), {}) == {}
    return run(scatter_only(empty), {})


@case
def large_and_many_small_pieces(mesh: Mesh, run: Run) -> Any:
    """More packed messages per pair than may be in flight, and pieces beyond every threshold."""
    shapes = [(100, 257)] * 70 + [(1000, 300), (3, 5), (2000, 300)]
    layout = mf.build_for_row_atomic_unpadding(shapes, mesh.size())
    owners = {i: mesh.ranks[-1 - i % min(2, mesh.size())] for i in range(len(shapes))}
    group = Group(GroupOwnerLayout(mesh, layout, owners, name="large", dtype=torch.float32))
    full = group.fill()
    source = group.shards(full)
    results = []
    for async_op in (False, True):
        gathered, token = group.gather(source, async_op=async_op)
        token.wait()
        assert_same(gathered, group.full(full))
        parts, token = group.scatter(gathered, async_op=async_op)
        token.wait()
        assert_same(parts, group.parts(full))
        results.append(sum(int(bits(part).long().sum()) for part in parts.values()))
    return results
