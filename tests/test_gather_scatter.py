"""The contract of `gather` and `scatter`: one list of cases, run over simulated, real and compiled carriers.

A case runs on every rank, checks its results against dense tensors, and returns what all carriers must agree on.
"""

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.func import grad, grad_and_value, jvp, vjp, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh, as_mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import Replicate, RowAtomic
from tests import strategies
from tests.spawn import RankPool

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex64, torch.complex128),
)

# torch's forward mode scripts a few decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

Tensors = dict[int, torch.Tensor]
Run = Callable[..., Any]
"""``run(function, *args)`` calls a function: as it is, or compiled."""


# Data, and what it must become.


def random_bits(shape: torch.Size, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bits that the dtype can hold: NaNs, infinities and negative zeros too."""
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (shape.numel() * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return ((raw & 1).bool() if dtype == torch.bool else raw.view(dtype)).view(shape)


def normal(shape: torch.Size, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def assert_same(actual: Any, expected: Any, where: str = "") -> None:
    """The same structure, types, shapes, dtypes and bits."""
    assert type(actual) is type(expected), f"{where}: {type(actual)} is not {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert actual.shape == expected.shape, f"{where}: {actual.shape} is not {expected.shape}"
        assert actual.dtype == expected.dtype, f"{where}: {actual.dtype} is not {expected.dtype}"
        assert torch.equal(bits(actual), bits(expected)), f"{where}: {actual} is not {expected}"
    elif isinstance(expected, dict):
        assert list(actual) == list(expected), f"{where}: {list(actual)} is not {list(expected)}"
        for key in expected:
            assert_same(actual[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), f"{where}: {len(actual)} is not {len(expected)}"
        for number, pair in enumerate(zip(actual, expected, strict=True)):
            assert_same(*pair, f"{where}[{number}]")
    else:
        assert actual == expected, f"{where}: {actual} is not {expected}"


def assert_close(actual: Tensors, expected: Tensors) -> None:
    """Equal up to the rounding of another order of float64 operations."""
    assert list(actual) == list(expected), f"{list(actual)} is not {list(expected)}"
    for i, tensor in expected.items():
        torch.testing.assert_close(
            actual[i], tensor, rtol=1e-10, atol=1e-10, msg=lambda text, i=i: f"tensor {i}: {text}"
        )


class Group(NamedTuple):
    """A group on one rank, with functions that cut full tensors as this rank must see them."""

    owners: GroupOwnerLayout

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return self.owners.layout.tensor_shapes

    def spans(self) -> dict[int, tuple[int, int]]:
        """Tensor -> the elements that this rank holds."""
        layout, mesh = self.owners.layout, self.owners.mesh
        local = layout.get_local_range(mesh, self.owners.placements)
        spans = {}
        for i, shape in enumerate(self.shapes):
            start = layout.tensor_to_offset[i]
            low, high = max(local.start - start, 0), min(local.end - start, shape.numel())
            if low < high:
                spans[i] = (low, high)
        return spans

    def shards(self, full: Mapping[int, torch.Tensor]) -> Tensors:
        """This rank's flat shards of all tensors that it holds, participating or not."""
        return {i: full[i].reshape(-1)[low:high].clone() for i, (low, high) in self.spans().items() if i in full}

    def owned(self) -> list[int]:
        mesh, placements = self.owners.mesh, self.owners.placements
        axes = [axis for axis, placement in enumerate(placements) if not isinstance(placement, Replicate)]
        mine = mesh.coordinate()
        return [
            i
            for i, owner in self.owners.tensor_to_owner.items()
            if all(mesh.coordinate(owner)[axis] == mine[axis] for axis in axes)
        ]

    def full(self, full: Mapping[int, torch.Tensor]) -> Tensors:
        """What a gather must give: the full tensors that this rank owns."""
        return {i: full[i] for i in self.owned()}

    def parts(self, full: Mapping[int, torch.Tensor], *, include_own: bool = True) -> Tensors:
        """What a scatter must give: this rank's parts, in rows where no rank's boundary splits one."""
        layout, mesh = self.owners.layout, self.owners.mesh
        parts: Tensors = {}
        for i, (low, high) in self.spans().items():
            if i in self.owners.tensor_to_owner and (include_own or i not in self.owned()):
                row = self.shapes[i][1:].numel()
                ranges = [layout.get_rank_range(mesh, self.owners.placements, rank) for rank in mesh.ranks]
                start, end = layout.tensor_to_offset[i], layout.tensor_to_offset[i] + self.shapes[i].numel()
                inside = [edge - start for held in ranges for edge in (held.start, held.end) if start < edge < end]
                split = any(edge % row for edge in inside)
                parts[i] = full[i].reshape(-1)[low:high].clone()
                if not split:
                    parts[i] = parts[i].view(-1, *self.shapes[i][1:])
        return parts

    def gather(self, source: Mapping[int, torch.Tensor], **keywords: Any) -> tuple[Tensors, mf.Token]:
        return mf.gather(source, owner_layout=self.owners, **keywords)

    def scatter(self, source: Mapping[int, torch.Tensor], **keywords: Any) -> tuple[Tensors, mf.Token]:
        return mf.scatter(source, owner_layout=self.owners, **keywords)

    def fill(self, dtype: torch.dtype = torch.float32) -> Tensors:
        return {i: random_bits(shape, dtype, i) for i, shape in enumerate(self.shapes)}

    def normal(self) -> Tensors:
        return {i: normal(shape, i) for i, shape in enumerate(self.shapes)}


MIXED = [(5, 4), (2, 6), (3,), (6, 2), (4, 1, 3)]


def layouts_for(count: int) -> dict[str, mf.GlobalLayout]:
    """One layout of each kind."""
    size = 80
    return {
        "padded": mf.build_for_row_atomic(MIXED, count),
        "blocks": mf.build_for_row_atomic([(4, 4), (2, 6), (8,)], count, block_size=2),
        "unpadded": mf.build_for_row_atomic_unpadding(MIXED, count),
        "tensor": mf.build_for_tensor_atomic(MIXED, count, tensor_owners=[i % count for i in (1, 0, 1, 3, 5)]),
        # gaps, buffer order unlike tensor order, boundaries inside rows, an empty rank
        "handmade": mf.GlobalLayout(
            MIXED, [1, 65, 23, 50, 30], size, [0, *(7 + 13 * k for k in range(1, count - 1)), size]
        ),
    }


def owners_for(layout: mf.GlobalLayout, mesh: Mesh) -> dict[str, dict[int, int]]:
    """Balanced owners, one owner of everything, and owners that may hold nothing."""
    every = range(len(layout.tensor_shapes))
    return {
        "balanced": mf.assign_owner_work(layout, mesh, every),
        "one": dict.fromkeys(every, mesh.ranks[-1]),
        "rotated": {i: mesh.ranks[(i + 1) % mesh.size()] for i in every if i != 2},
    }


def groups_for(mesh: Mesh) -> dict[str, Group]:
    return {
        f"{kind} {who}": Group(GroupOwnerLayout(mesh, layout, owners, name=f"{kind} {who}"))
        for kind, layout in layouts_for(mesh.size()).items()
        for who, owners in owners_for(layout, mesh).items()
    }


def one_group(mesh: Mesh, shapes: Any = ((5, 4), (2, 6), (3,), (6, 2)), **owners: Any) -> Group:
    """Unpadded, with an owner for every tensor but the one of one dim; the last rank of four owns nothing."""
    layout = mf.build_for_row_atomic_unpadding(shapes, mesh.size())
    to_owner = {i: mesh.ranks[(i + 1) % min(3, mesh.size())] for i, shape in enumerate(shapes) if len(shape) > 1}
    return Group(GroupOwnerLayout(mesh, layout, owners.get("owners", to_owner), name="group"))


# The cases.


class Case(NamedTuple):
    function: Callable[[Mesh, Run], Any]
    compiled: bool


CASES: dict[str, Case] = {}


def case(function: Callable[[Mesh, Run], Any] | None = None, *, compiled: bool = False) -> Any:
    if function is None:
        return partial(case, compiled=compiled)
    CASES[function.__name__] = Case(function, compiled)
    return function


def gather_only(group: Group, **keywords: Any) -> Callable[[Tensors], Tensors]:
    return lambda source: group.gather(source, **keywords)[0]


def scatter_only(group: Group, **keywords: Any) -> Callable[[Tensors], Tensors]:
    return lambda source: group.scatter(source, **keywords)[0]


@case
def round_trip(mesh: Mesh, run: Run) -> Any:
    """`scatter(gather(x)) == x`, for layouts and owners of all kinds."""
    results = {}
    for name, group in groups_for(mesh).items():
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
    for dtype in (torch.complex64, torch.complex128):
        full = {i: torch.complex(normal(s, i), normal(s, i + 9)).to(dtype) for i, s in enumerate(group.shapes)}
        conjugated = {i: tensor.conj() for i, tensor in group.shards(full).items()}
        assert all(tensor.is_conj() for tensor in conjugated.values())
        gathered = run(gather_only(group), conjugated)
        assert_same(gathered, group.full({i: tensor.conj() for i, tensor in full.items()}))
        assert not any(tensor.is_conj() for tensor in gathered.values())
        parts = run(scatter_only(group), {i: tensor.conj() for i, tensor in gathered.items()})
        assert_same(parts, group.parts(full))
        negated = {i: tensor.imag for i, tensor in conjugated.items()}
        assert all(tensor.is_neg() for tensor in negated.values())
        imaginary = run(gather_only(group), negated)
        assert_same(imaginary, group.full({i: -tensor.imag for i, tensor in full.items()}))
        results.append((gathered, parts, imaginary))
    return results


def mix_rows(tensor: torch.Tensor) -> torch.Tensor:
    """What needs the whole matrix: every element of the result depends on every row."""
    matrix = tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())
    return (0.3 * matrix @ (matrix.T @ matrix) - matrix).reshape(tensor.shape)


def owner_compute(group: Group, *, dtype: torch.dtype | None = None) -> Callable[[Tensors], Tensors]:
    return lambda source: linked_owner_compute(group, source, dtype=dtype)[0]


def linked_owner_compute(
    group: Group, source: Tensors, *, dtype: torch.dtype | None = None, after: Any = ()
) -> tuple[Tensors, mf.Token]:
    full, token = group.gather(source, dtype=dtype, after=after)
    return group.scatter({i: mix_rows(tensor) for i, tensor in full.items()}, after=token)


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
    group = one_group(mesh)
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
    """The last rank holds nothing and owns one tensor, or all; nobody says the dtype, or the owner does."""
    count, results = mesh.size(), []
    layout = mf.GlobalLayout([(4, 3), (2, 5)], [0, 12], 22, [0, *range(8, 6 + count), 22])
    for owners, dtype, said in itertools.product(
        ({0: 0, 1: count - 1}, {0: count - 1, 1: count - 1}),
        (torch.float64, torch.bfloat16, torch.uint8),
        (False, True),
    ):
        group = Group(GroupOwnerLayout(mesh, layout, {i: mesh.ranks[k] for i, k in owners.items()}))
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
    """They call with an empty dict and say no dtype; and with the dtype; and with a token that knows it."""
    group = one_group(mesh, owners={0: mesh.ranks[0], 1: mesh.ranks[0], 3: mesh.ranks[0]})
    results = []
    for dtype in (torch.float16, torch.complex128, torch.int8):
        full = group.fill(dtype)
        source = group.full(full)
        assert bool(source) == (mesh.rank == mesh.ranks[0])
        results += [run(scatter_only(group, **keywords), source) for keywords in ({}, {"dtype": dtype})]
        gathered, token = group.gather(group.shards(full))
        results.append(group.scatter(gathered, after=token)[0])
        for parts in results[-3:]:
            assert_same(parts, group.parts(full))
    return results


@case
def rank_without_anything_to_do(mesh: Mesh, run: Run) -> Any:
    """The last rank neither holds nor owns; it calls all the same."""
    count, results = mesh.size(), []
    layout = mf.GlobalLayout([(4, 3), (2, 5)], [0, 12], 22, [0, *range(8, 6 + count), 22])
    group = Group(GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0], 1: mesh.ranks[0]}))
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


class Junk:
    """An object that may not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"an entry that takes no part was read: {name}")


class Watched(Mapping[int, Any]):
    """A dict that remembers which entries were read."""

    def __init__(self, entries: dict[int, Any]) -> None:
        self.entries, self.read = entries, set[int]()

    def __getitem__(self, key: int) -> Any:
        self.read.add(key)
        return self.entries[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@case
def entries_that_take_no_part_are_not_read(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full, spans, taking_part = group.fill(), group.spans(), set(group.owners.tensor_to_owner)
    needed = group.shards({i: full[i] for i in taking_part})
    source = Watched({99: Junk(), -1: Junk(), 2: Junk()} | {i: needed.get(i, Junk()) for i in taking_part})
    gathered = run(gather_only(group), source)
    assert source.read == set(spans) & taking_part
    assert_same(gathered, group.full(full))
    results = Watched({7: Junk(), 2: Junk()} | {i: gathered.get(i, Junk()) for i in taking_part})
    parts = run(scatter_only(group), results)
    assert results.read == set(gathered)
    assert_same(parts, group.parts(full))
    # An entry of another dtype that takes no part, first in the dict.
    source = {2: torch.zeros(3, dtype=torch.int8)} | needed
    assert_same(run(gather_only(group), source), gathered)
    return gathered, parts


@case
def order_of_the_dict_does_not_matter(mesh: Mesh, run: Run) -> Any:
    shapes = [(3, 2)] * 9
    group = one_group(mesh, shapes)
    full = group.fill()
    shuffle = random.Random(mesh.get_rank())
    results = []
    for _ in range(3):
        source = list(group.shards(full).items())
        shuffle.shuffle(source)
        gathered = run(gather_only(group), dict(source))
        assert list(gathered) == sorted(gathered)
        assert_same(gathered, group.full(full))
        owned = list(gathered.items())
        shuffle.shuffle(owned)
        parts = run(scatter_only(group), dict(owned))
        assert list(parts) == sorted(parts)
        assert_same(parts, group.parts(full))
        results.append((gathered, parts))
    return results


def memory_of(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes() * bool(tensor.numel()))


def assert_apart(results: Tensors, inputs: Tensors) -> None:
    """No result shares an element with an input or with another result."""
    spans = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in results.values()]
    for one, other in itertools.combinations(spans, 2):
        assert one.stop <= other.start or other.stop <= one.start, "results overlap"
    for one, other in itertools.product(spans, map(memory_of, inputs.values())):
        assert one.stop <= other.start or other.stop <= one.start, "a result lies in an input"


@case
def inputs_stay_and_results_are_new_memory(mesh: Mesh, run: Run) -> Any:
    results = {}
    for name in ("padded balanced", "unpadded rotated", "tensor balanced", "tensor one"):
        group = groups_for(mesh)[name]
        full = group.fill()
        for function, source in ((gather_only, group.shards(full)), (scatter_only, group.full(full))):
            before = {i: tensor.clone() for i, tensor in source.items()}
            result = run(function(group), source)
            assert result is not source
            assert_same(source, before, name)
            assert_apart(result, source)
            results[name, function.__name__] = {i: tensor.clone() for i, tensor in result.items()}
            for number, tensor in enumerate(result.values()):  # each may be written without a trace elsewhere
                tensor.fill_(number)
            for number, tensor in enumerate(result.values()):
                assert torch.equal(tensor, torch.full_like(tensor, number)), name
            assert_same(source, before, name)
    return results


@case
def large_and_many_small_pieces(mesh: Mesh, run: Run) -> Any:
    """More packed messages per pair than may be in flight, and pieces beyond every threshold."""
    shapes = [(100, 257)] * 70 + [(1000, 300), (3, 5), (2000, 300)]
    layout = mf.build_for_row_atomic_unpadding(shapes, mesh.size())
    owners = {i: mesh.ranks[-1 - i % min(2, mesh.size())] for i in range(len(shapes))}
    group = Group(GroupOwnerLayout(mesh, layout, owners, name="large"))
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


@case
def several_in_flight(mesh: Mesh, run: Run) -> Any:
    groups = [one_group(mesh), *list(groups_for(mesh).values())[::3]]
    fulls = [{i: tensor + n for i, tensor in group.normal().items()} for n, group in enumerate(groups)]
    pairs = [group.gather(group.shards(full), async_op=True) for group, full in zip(groups, fulls, strict=True)]
    meanwhile = torch.ones(50, 50) @ torch.ones(50, 50)
    scattered = []
    for n, (group, full, (gathered, token)) in enumerate(zip(groups, fulls, pairs, strict=True)):
        if n % 2:  # waited for, or handed on
            token.wait()
            token.wait()
            assert_same(gathered, group.full(full), f"group {n}")
            scattered.append(group.scatter(gathered, async_op=True))
        else:
            scattered.append(group.scatter(gathered, after=[token], async_op=True))
    for group, full, (parts, token) in zip(groups, fulls, scattered, strict=True):
        for _ in range(3):
            token.wait()
        assert_same(parts, group.parts(full))
    assert float(meanwhile[0, 0]) == 50
    return [parts for parts, _ in scattered]


@case
def tokens_order_calls_of_other_groups(mesh: Mesh, run: Run) -> Any:
    first, second = one_group(mesh), groups_for(mesh)["handmade rotated"]
    one, two = first.normal(), second.fill(torch.int32)
    gathered, token = first.gather(first.shards(one), async_op=True)
    others, late = second.gather(second.shards(two), after=token)
    assert_same(gathered, first.full(one))  # `after` waited for it
    assert_same(others, second.full(two))
    late.wait()
    third, last = first.gather(first.shards(one), after=(token, late), async_op=True)
    last.wait()
    assert_same(third, gathered)
    return gathered, others


@case
def tokens_and_inputs_may_be_dropped(mesh: Mesh, run: Run) -> Any:
    """A sender that forgets everything right away, and reuses memory, still sends the right bits."""
    layout = mf.build_for_row_atomic_unpadding([(600, 500), (3, 500), (400, 500)], mesh.size())
    group = Group(GroupOwnerLayout(mesh, layout, dict.fromkeys(range(3), mesh.ranks[0]), name="dropped"))
    full = group.fill()
    source = group.shards(full)
    if mesh.rank == mesh.ranks[0]:
        time.sleep(0.2)
    gathered, token = group.gather(source, async_op=True)
    if mesh.rank != mesh.ranks[0]:
        assert gathered == {}
        source.clear()
        del token, gathered
        for _ in range(5):  # what was freed would be written over here
            torch.full((300_000,), 7.0)
        return {}
    token.wait()
    assert_same(gathered, group.full(full))
    return {i: bits(tensor).long().sum() for i, tensor in gathered.items()}


@case
def forgetting_the_token_is_harmless_by_default(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full = group.fill()
    gathered = group.gather(group.shards(full))[0]
    assert_same(gathered, group.full(full))
    return group.scatter(gathered)[0]


@case
def in_place(mesh: Mesh, run: Run) -> Any:
    """Destinations keep identity, shape and strides; what is not this rank's to fill stays as it was."""
    group, results = one_group(mesh), []
    full = group.fill()
    for strided in (False, True):

        def destination(shape: torch.Size, strided: bool = strided) -> torch.Tensor:
            return torch.full((2, *shape), -5.0).movedim(0, -1)[..., 0] if strided else torch.full(shape, -5.0)

        into = {i: destination(shape) for i, shape in enumerate(group.shapes)}
        before = {i: (id(tensor), tensor.shape, tensor.stride(), tensor.data_ptr()) for i, tensor in into.items()}
        assert mf.inplace.gather(group.shards(full), into, owner_layout=group.owners) is None
        owned = group.full(full)
        untouched = torch.full((), -5.0)
        assert_same(
            {i: t.contiguous() for i, t in into.items()},
            {i: owned.get(i, untouched.expand(shape).contiguous()) for i, shape in enumerate(group.shapes)},
        )
        back = {i: destination(tensor.shape) for i, tensor in group.parts(full).items()}
        mf.inplace.scatter(into, back, owner_layout=group.owners)
        elsewhere = group.parts(full, include_own=False)
        assert_same(
            {i: t.contiguous() for i, t in back.items()},
            {i: elsewhere.get(i, untouched.expand(t.shape).contiguous()) for i, t in back.items()},
        )
        after = {i: (id(tensor), tensor.shape, tensor.stride(), tensor.data_ptr()) for i, tensor in into.items()}
        assert after == before
        results.append((into, back))
    return results


# Gradients: the objective is the sum over ranks of their losses.


def weights(group: Group) -> Tensors:
    return {i: normal(shape, 100 + i) for i, shape in enumerate(group.shapes)}


def inputs_for(group: Group, full: Tensors) -> Tensors:
    return group.shards({i: full[i] for i in group.owners.tensor_to_owner})


def loss_of(group: Group, *, after: Callable[[Tensors], Any] = lambda _: ()) -> Callable[[Tensors], torch.Tensor]:
    weight = group.parts(weights(group))

    def loss(source: Tensors) -> torch.Tensor:
        parts, token = linked_owner_compute(group, source, dtype=torch.float64, after=after(source))
        total = token.link.double()
        for i, part in parts.items():
            total = total + (weight[i] * part).sum()
        return total

    return loss


def dense_loss(group: Group) -> Callable[[Tensors], torch.Tensor]:
    weight = weights(group)
    return lambda full: sum((weight[i] * mix_rows(full[i])).sum() for i in group.owners.tensor_to_owner)


def dense_inputs(group: Group, full: Tensors) -> Tensors:
    return {i: full[i] for i in group.owners.tensor_to_owner}


def like(parts: Tensors, source: Tensors) -> Tensors:
    return {i: parts[i].reshape(source[i].shape) for i in source}


@case(compiled=True)
def func_grad(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full = group.normal()
    source = inputs_for(group, full)
    wanted = group.parts(grad(dense_loss(group))(dense_inputs(group, full)))
    gradient = run(grad(loss_of(group)), source)
    assert_close(gradient, like(wanted, source))
    return gradient


@case
def func_grad_and_value(mesh: Mesh, run: Run) -> Any:
    group = groups_for(mesh)["unpadded rotated"]
    full = group.normal()
    source = inputs_for(group, full)
    wanted = group.parts(grad(dense_loss(group))(dense_inputs(group, full)))
    gradient, value = run(grad_and_value(loss_of(group, after=linked)), source)
    assert_close(gradient, like(wanted, source))
    return gradient, value


def linked(source: Tensors) -> Any:
    return (
        mf.Token.linked_to(torch.zeros((), requires_grad=True)) if not source else mf.Token.linked_to(*source.values())
    )


@case(compiled=True)
def func_vjp(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full = group.normal()
    source, cotangents = inputs_for(group, full), group.parts(weights(group))
    step = owner_compute(group, dtype=torch.float64)

    def pull_back(source: Tensors, cotangents: Tensors) -> tuple[Tensors, Tensors]:
        parts, pull = vjp(step, source)
        return parts, pull(cotangents)[0]

    parts, gradient = run(pull_back, source, cotangents)
    assert_close(parts, group.parts({i: mix_rows(tensor) for i, tensor in dense_inputs(group, full).items()}))
    assert_close(gradient, like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source))
    return parts, gradient


@case(compiled=True)
def func_jvp(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full, directions = group.normal(), weights(group)
    step = owner_compute(group, dtype=torch.float64)

    def push_forward(source: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors]:
        return jvp(step, (source,), (tangents,))

    _, tangents = run(push_forward, inputs_for(group, full), inputs_for(group, directions))
    dense = {i: jvp(mix_rows, (full[i],), (directions[i],))[1] for i in group.owners.tensor_to_owner}
    assert_close(tangents, group.parts(dense))
    return tangents


@case(compiled=True)
def func_vmap(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    fulls = [{i: tensor * k for i, tensor in group.normal().items()} for k in (1.0, -2.0, 0.5)]
    batched = stack([inputs_for(group, full) for full in fulls])
    parts = run(vmap(owner_compute(group, dtype=torch.float64)), batched)
    wanted = [group.parts({i: mix_rows(t) for i, t in dense_inputs(group, full).items()}) for full in fulls]
    assert_close(parts, stack(wanted))
    return parts


def stack(dicts: list[Tensors], dim: int = 0) -> Tensors:
    return {i: torch.stack([tensors[i] for tensors in dicts], dim) for i in dicts[0]}


@case
def func_vmap_over_other_dims(mesh: Mesh, run: Run) -> Any:
    """Batched along the last dim in and out, and where one entry of the dict is not batched at all."""
    group = one_group(mesh)
    fulls = [{i: tensor * k for i, tensor in group.normal().items()} for k in (1.0, 3.0)]
    step = owner_compute(group, dtype=torch.float64)
    wanted = [group.parts({i: mix_rows(t) for i, t in dense_inputs(group, full).items()}) for full in fulls]
    parts = vmap(step, in_dims=-1, out_dims=1)(stack([inputs_for(group, full) for full in fulls], -1))
    assert_close(parts, stack(wanted, 1))
    mixed = stack([inputs_for(group, full) for full in fulls])
    dims = dict.fromkeys(mixed, 0)
    if 0 in mixed:
        mixed[0], dims[0] = mixed[0][0], None
    if any(dim == 0 for dim in dims.values()):
        partly = vmap(step, in_dims=(dims,))(mixed)
        for i, tensor in partly.items():
            expected = stack([wanted[0], wanted[0]])[i] if i == 0 else stack(wanted)[i]
            torch.testing.assert_close(tensor, expected)
    else:
        vmap(lambda _: (step(mixed), torch.zeros(()))[1])(torch.zeros(2))
    return parts


@case
def func_vmap_of_grad(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    fulls = [{i: tensor * k for i, tensor in group.normal().items()} for k in (1.0, -2.0, 0.5)]
    gradient = vmap(grad(loss_of(group)))(stack([inputs_for(group, full) for full in fulls]))
    wanted = [like(group.parts(grad(dense_loss(group))(dense_inputs(group, f))), inputs_for(group, f)) for f in fulls]
    assert_close(gradient, stack(wanted))
    return gradient


@case
def func_grad_of_vmap(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    fulls = [{i: tensor * k for i, tensor in group.normal().items()} for k in (1.0, -2.0, 0.5)]
    batched = stack([inputs_for(group, full) for full in fulls])
    gradient = grad(lambda source: vmap(loss_of(group))(source).sum())(batched)
    wanted = [like(group.parts(grad(dense_loss(group))(dense_inputs(group, f))), inputs_for(group, f)) for f in fulls]
    assert_close(gradient, stack(wanted))
    return gradient


@case
def func_second_derivatives(mesh: Mesh, run: Run) -> Any:
    """grad of grad, and jvp of grad: a product with the Hessian of the sum over ranks."""
    group = one_group(mesh)
    full, directions = group.normal(), weights(group)
    source, tangents = inputs_for(group, full), inputs_for(group, directions)
    loss = loss_of(group)
    dense = jvp(grad(dense_loss(group)), (dense_inputs(group, full),), (dense_inputs(group, directions),))[1]
    forward_over_reverse = jvp(grad(loss), (source,), (tangents,))[1]
    assert_close(forward_over_reverse, like(group.parts(dense), source))

    def along(values: Tensors) -> torch.Tensor:
        gradient = grad(loss)(values)
        return sum((gradient[i] * tangents[i]).sum() for i in gradient)

    reverse_over_reverse = grad(along)(source)
    assert_close(reverse_over_reverse, like(group.parts(dense), source))
    return forward_over_reverse, reverse_over_reverse


@case
def backward(mesh: Mesh, run: Run) -> Any:
    """Leaves that require grad; twice, so that gradients add up."""
    group = one_group(mesh)
    full = group.normal()
    source = {i: tensor.requires_grad_() for i, tensor in inputs_for(group, full).items()}
    loss = loss_of(group)
    loss(source).backward()
    once = {i: tensor.grad.clone() for i, tensor in source.items()}
    assert_close(once, like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source))
    loss(source).backward()
    assert_same({i: tensor.grad for i, tensor in source.items()}, {i: 2 * tensor for i, tensor in once.items()})
    assert all(tensor.is_leaf for tensor in source.values())
    return once


@case
def backward_through_one_operation(mesh: Mesh, run: Run) -> Any:
    """Each operation alone is linear, with the other's pieces as its transpose; `include_own` too."""
    group, results = groups_for(mesh)["unpadded balanced"], []
    full, weight = group.normal(), weights(group)
    source = {i: tensor.requires_grad_() for i, tensor in group.shards(full).items()}
    gathered, token = group.gather(source)
    total = token.link.double() + sum((weight[i] * tensor).sum() for i, tensor in gathered.items())
    total.backward()
    gradient = {i: tensor.grad for i, tensor in source.items()}
    assert_close(gradient, group.shards(weight))
    results.append(gradient)
    for include_own in (True, False):
        owned = {i: tensor.clone().requires_grad_() for i, tensor in group.full(full).items()}
        after = mf.Token.linked_to(*(owned.values() or [torch.zeros((), requires_grad=True)]))
        parts, token = group.scatter(owned, include_own=include_own, after=after)
        weighted = group.parts(weight)
        (token.link.double() + sum((weighted[i] * part).sum() for i, part in parts.items())).backward()
        expected = {i: weight[i].clone() for i in owned}
        if not include_own:
            for i, (low, high) in group.spans().items():
                if i in expected:
                    expected[i].view(-1)[low:high] = 0
        assert_close({i: tensor.grad for i, tensor in owned.items()}, expected)
        results.append({i: tensor.grad for i, tensor in owned.items()})
    return results


@case
def gradients_through_an_owner_that_holds_nothing(mesh: Mesh, run: Run) -> Any:
    """It has no tensor to differentiate: its call is linked to something else that it differentiates."""
    layout = mf.GlobalLayout([(4, 3), (2, 5)], [0, 12], 22, [0, *range(8, 6 + mesh.size()), 22])
    group = Group(GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0], 1: mesh.ranks[-1]}))
    full = group.normal()
    source = inputs_for(group, full)
    wanted = like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source)

    def loss(source: Tensors, other: torch.Tensor) -> torch.Tensor:
        return loss_of(group, after=lambda _: mf.Token.linked_to(other))(source)

    gradient, zero = grad(loss, argnums=(0, 1))(source, torch.ones(3))
    assert_close(gradient, wanted)
    assert torch.equal(zero, torch.zeros(3))
    leaf = torch.ones(3, requires_grad=True)
    leaves = {i: tensor.clone().requires_grad_() for i, tensor in source.items()}
    loss(leaves, leaf).backward()
    assert_same({i: tensor.grad for i, tensor in leaves.items()}, gradient)
    return gradient


@case
def shards_that_require_grad(mesh: Mesh, run: Run) -> Any:
    """The same bits with grad mode on, off, and in inference mode; results require grad only where they must."""
    group = one_group(mesh)
    full = group.fill()
    source = {i: tensor.requires_grad_() for i, tensor in inputs_for(group, full).items()}
    gathered, token = group.gather(source)
    parts, _ = group.scatter(gathered, after=token)
    assert all(tensor.requires_grad for tensor in (*gathered.values(), *parts.values()))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            plain = group.gather(source)[0]
            assert not any(tensor.requires_grad for tensor in plain.values())
            assert_same(plain, group.full(full))
            again = group.scatter(plain)[0]
            assert_same(again, group.parts(full))
    assert_same({i: tensor.detach() for i, tensor in parts.items()}, group.parts(full))
    return {i: tensor.detach() for i, tensor in parts.items()}


@case
def asynchronous_gradients(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full, weight = group.normal(), group.parts(weights(one_group(mesh)))
    source = {i: tensor.requires_grad_() for i, tensor in inputs_for(group, full).items()}
    gathered, token = group.gather(source, async_op=True)
    token.wait()
    parts, last = group.scatter({i: mix_rows(t) for i, t in gathered.items()}, after=token, async_op=True)
    last.wait()
    (last.link.double() + sum((weight[i] * part).sum() for i, part in parts.items())).backward()
    gradient = {i: tensor.grad for i, tensor in source.items()}
    assert_close(gradient, like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source))
    return gradient


# Carriers.


def plain(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def compiled(backend: str) -> Run:
    def run(function: Callable[..., Any], *args: Any) -> Any:
        return torch.compile(function, fullgraph=True, backend=backend)(*args)

    return run


MeshFacts = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and ranks."""

TWO: MeshFacts = ((2,), (1, 0))
FOUR: tuple[MeshFacts, ...] = (((4,), (2, 0, 3, 1)), ((2, 2), (3, 1, 0, 2)))
MESHES: tuple[MeshFacts, ...] = (((1,), (5,)), TWO, ((3,), (4, 1, 7)), *FOUR, ((2, 1, 3), (9, 0, 3, 4, 1, 7)))


def name_of(mesh: MeshFacts) -> str:
    return "x".join(map(str, mesh[0])) + ":" + ",".join(map(str, mesh[1]))


def mesh_of(rank: int, facts: MeshFacts, kind: str) -> Mesh:
    """The mesh on a real rank, as a value or from a `DeviceMesh`."""
    shape, ranks = facts
    if kind == "DeviceMesh":
        return as_mesh(DeviceMesh("cpu", torch.tensor(ranks).view(shape)))
    return Mesh(shape, ranks=ranks, rank=rank)


def run_case(rank: int, name: str, facts: MeshFacts, kind: str, run: str, check: bool) -> Any:
    """On a real rank: one case, where the mesh has this rank."""
    mesh = mesh_of(rank, facts, kind)
    if rank not in mesh:
        return None
    with mf.agreement_check(check):
        return as_bytes(CASES[name].function(mesh, plain if run == "plain" else compiled(run)))


def as_bytes(results: Any) -> Any:
    """Results with every tensor as its dtype, shape and bytes: cheap to send between processes, in any dtype."""
    return pytree.tree_map_only(
        torch.Tensor, lambda t: (str(t.dtype), tuple(t.shape), bits(t).numpy().tobytes()), results
    )


def simulated(name: str, facts: MeshFacts, *, poison: bool = False) -> dict[int, Any]:
    program = partial(CASES[name].function, run=plain)
    return as_bytes(mf.simulate(program, facts[0], ranks=facts[1], poison=poison).results)


remembered = lru_cache(maxsize=None)(simulated)


def on_real_ranks(pool: RankPool, name: str, facts: MeshFacts, kind: str, run: str, check: bool) -> dict[int, Any]:
    results = pool.run(run_case, name, facts, kind, run, check, timeout=120)
    return {rank: results[rank] for rank in facts[1]}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_simulated(name: str, mesh: MeshFacts) -> None:
    assert_same(simulated(name, mesh), remembered(name, mesh), "a second run")


@pytest.mark.parametrize("name", CASES)
def test_simulated_with_poison(name: str) -> None:
    if name == "tokens_and_inputs_may_be_dropped":
        with pytest.raises(mf.SimulationError, match="rank 0 never waited for the token of gather 'dropped'"):
            simulated(name, TWO, poison=True)
    else:
        assert_same(simulated(name, TWO, poison=True), remembered(name, TWO))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_two_processes(name: str, check: bool, ranks2: RankPool) -> None:
    kind = "DeviceMesh" if check else "Mesh"
    assert_same(on_real_ranks(ranks2, name, TWO, kind, "plain", check), remembered(name, TWO))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", FOUR, ids=name_of)
def test_four_processes(name: str, mesh: MeshFacts, ranks4: RankPool) -> None:
    assert_same(on_real_ranks(ranks4, name, mesh, "DeviceMesh", "plain", False), remembered(name, mesh))


@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compiled])
def test_compiled(name: str, ranks2: RankPool) -> None:
    assert_same(on_real_ranks(ranks2, name, TWO, "Mesh", "aot_eager", False), remembered(name, TWO))


@pytest.mark.distributed
def test_compiled_step_with_inductor(ranks2: RankPool) -> None:
    on_real_ranks(ranks2, "gather_change_scatter", TWO, "Mesh", "inductor", False)


SUB_MESHES: tuple[MeshFacts, ...] = (((2,), (1, 3)), ((3,), (3, 0, 2)))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["round_trip", "gather_change_scatter", "several_in_flight", "backward"])
@pytest.mark.parametrize("kind", ["Mesh", "DeviceMesh"])
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_sub_meshes_of_four_processes(name: str, kind: str, check: bool, ranks4: RankPool) -> None:
    for mesh in SUB_MESHES:
        assert_same(on_real_ranks(ranks4, name, mesh, kind, "plain", check), remembered(name, mesh))


# Examples that are documentation.


def gather_what_ranks_fill(mesh: Mesh) -> list[float]:
    """Every rank fills its rows of an (8, 4) tensor with its number; the first column of the tensor, on its owner."""
    layout = mf.build_for_row_atomic([(8, 4)], mesh.size())
    owners = GroupOwnerLayout(mesh, layout, {0: mesh.ranks[2]})
    shard = torch.full((8 // mesh.size(), 4), float(mesh.get_rank()))
    full, _ = mf.gather({0: shard}, owner_layout=owners)
    return full[0][:, 0].tolist() if full else []


def gather_what_real_ranks_fill(rank: int, facts: MeshFacts) -> list[float]:
    return gather_what_ranks_fill(mesh_of(rank, facts, "DeviceMesh"))


BUFFER_ORDERS = [(((2, 2), (3, 1, 0, 2)), (3, 0, 1, 2)), (((4,), (2, 0, 3, 1)), (2, 0, 3, 1))]


@pytest.mark.parametrize(("mesh", "order"), BUFFER_ORDERS)
def test_rows_come_in_buffer_order(mesh: MeshFacts, order: tuple[int, ...]) -> None:
    results = mf.simulate(gather_what_ranks_fill, mesh[0], ranks=mesh[1]).results
    assert results[mesh[1][2]] == [float(rank) for rank in order for _ in range(2)]


@pytest.mark.distributed
@pytest.mark.parametrize(("mesh", "order"), BUFFER_ORDERS)
def test_rows_come_in_buffer_order_on_real_ranks(mesh: MeshFacts, order: tuple[int, ...], ranks4: RankPool) -> None:
    results = ranks4.run(gather_what_real_ranks_fill, mesh)
    assert results[mesh[1][2]] == [float(rank) for rank in order for _ in range(2)]
    assert sum(map(len, results)) == 8


def test_one_rank_needs_no_process_group() -> None:
    for name in CASES:
        results = as_bytes(CASES[name].function(Mesh(1, ranks=(5,), rank=5), plain))
        assert_same(results, remembered(name, MESHES[0])[5], name)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_token_keeps_no_memory_once_it_was_waited_for(async_op: bool) -> None:
    def program(mesh: Mesh) -> None:
        group = one_group(mesh)
        source = group.shards(group.fill())
        gathered, token = group.gather(source, async_op=async_op)
        token.wait()
        memory = [StorageWeakRef(t.untyped_storage()) for t in (*source.values(), *gathered.values())]
        source.clear()
        gathered.clear()
        assert all(one.expired() for one in memory)
        assert token.link.item() == 0

    mf.simulate(program, 2)


# The law over random layouts, meshes and owners.


def round_trip_of(mesh: Mesh, owners: GroupOwnerLayout, dtype: torch.dtype, said: bool) -> Any:
    """`scatter(gather(x)) == x`, bitwise, on this rank of a random case."""
    group = Group(GroupOwnerLayout(mesh, owners.layout, owners.tensor_to_owner, owners.placements, owners.name))
    full = group.fill(dtype)
    keywords = {"dtype": dtype} if said else {}
    source = group.shards(full)
    gathered, token = group.gather(source, **keywords)
    wanted = group.full(full)
    if not said:  # a tensor without rows, on a rank that meets no element, has no dtype to be in
        for i in wanted:
            wanted[i] = wanted[i] if wanted[i].numel() else gathered[i]
    assert_same(gathered, wanted, "gather")
    parts, _ = group.scatter(gathered, after=token, **keywords)
    assert_same(parts, group.parts(full), "scatter")
    without, _ = group.scatter(gathered, include_own=False, **keywords)
    assert_same(without, group.parts(full, include_own=False), "scatter without own parts")
    return as_bytes((gathered, parts))


@given(strategies.owner_layouts(), st.sampled_from(DTYPES), st.booleans())
def test_round_trip_law(owners: GroupOwnerLayout, dtype: torch.dtype, said: bool) -> None:
    mesh = owners.mesh
    mf.simulate(lambda mesh: round_trip_of(mesh, owners, dtype, said), mesh.shape, ranks=mesh.ranks)


def round_trip_on_rank(rank: int, owners: GroupOwnerLayout, dtype: torch.dtype, said: bool) -> Any:
    mesh = owners.mesh.with_rank(rank)
    return round_trip_of(mesh, owners, dtype, said) if rank in mesh else None


@st.composite
def meshes_of_four(draw: st.DrawFn) -> Mesh:
    shape = draw(st.sampled_from([(4,), (2, 2), (3,), (2,), (1, 2, 2), (2, 1), (1,)]))
    return Mesh(shape, ranks=draw(st.permutations(range(4)))[: torch.Size(shape).numel()])


@pytest.mark.distributed
@settings(max_examples=30)
@given(owners=strategies.owner_layouts(mesh=meshes_of_four()), dtype=st.sampled_from(DTYPES), said=st.booleans())
def test_round_trip_law_on_real_ranks(
    ranks4: RankPool, owners: GroupOwnerLayout, dtype: torch.dtype, said: bool
) -> None:
    results = ranks4.run(round_trip_on_rank, owners, dtype, said, group_timeout=10)
    mesh = owners.mesh
    expected = mf.simulate(lambda mesh: round_trip_of(mesh, owners, dtype, said), mesh.shape, ranks=mesh.ranks).results
    assert_same({rank: results[rank] for rank in mesh.ranks}, expected)


def gradients_of(mesh: Mesh, owners: GroupOwnerLayout) -> None:
    """The gradient of the sum over ranks of their losses is that of the dense function."""
    group = Group(GroupOwnerLayout(mesh, owners.layout, owners.tensor_to_owner, owners.placements, owners.name))
    full = group.normal()
    source = inputs_for(group, full)
    link = torch.zeros((), requires_grad=True)

    def loss(source: Tensors, link: torch.Tensor) -> torch.Tensor:
        return loss_of(group, after=lambda _: mf.Token.linked_to(link))(source)

    gradient, zero = grad(loss, argnums=(0, 1))(source, link.detach())
    wanted = like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source) if source else {}
    assert_close(gradient, wanted)
    assert float(zero) == 0
    leaves = {i: tensor.clone().requires_grad_() for i, tensor in source.items()}
    loss(leaves, link).backward()
    assert_same({i: tensor.grad for i, tensor in leaves.items()}, gradient)


@settings(max_examples=50)
@given(strategies.owner_layouts(replicate=False))
def test_gradients_are_those_of_the_dense_function(owners: GroupOwnerLayout) -> None:
    if any(owners.layout.tensor_shapes[i].numel() for i in owners.tensor_to_owner):
        mesh = owners.mesh
        mf.simulate(lambda mesh: gradients_of(mesh, owners), mesh.shape, ranks=mesh.ranks)


# Compiled regions.


def repeat_compiled_step(rank: int) -> tuple[int, list[bool]]:
    from torch._dynamo.testing import CompileCounterWithBackend

    mesh = Mesh(2, rank=rank)
    counter = CompileCounterWithBackend("aot_eager")

    @partial(torch.compile, fullgraph=True, backend=counter)
    def step(group: Group, source: Tensors) -> Tensors:
        return linked_owner_compute(group, source, dtype=torch.float64)[0]

    right = []
    for k in range(3):
        group = one_group(mesh)  # an equal value, not the same object
        full = {i: tensor * k for i, tensor in group.normal().items()}
        parts = step(group, group.shards(full))
        torch.testing.assert_close(parts, group.parts({i: mix_rows(full[i]) for i in (0, 1, 3)}))
        right.append(True)
    return counter.frame_count, right


@pytest.mark.distributed
def test_equal_owners_do_not_recompile(ranks2: RankPool) -> None:
    assert ranks2.run(repeat_compiled_step) == [(1, [True] * 3)] * 2


@pytest.mark.slow
@settings(max_examples=2000)
@given(strategies.owner_layouts(), st.sampled_from(DTYPES), st.booleans())
def test_round_trip_law_at_length(owners: GroupOwnerLayout, dtype: torch.dtype, said: bool) -> None:
    test_round_trip_law.hypothesis.inner_test(owners, dtype, said)
