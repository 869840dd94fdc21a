"""Groups of every kind on one rank, what a gather and a scatter must give of them, and the list of cases."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import Replicate

DTYPES = (
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.complex64, torch.complex128),
)

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

    def of(self, dtype: torch.dtype | None) -> "Group":
        """The same group, whose ranks all know its dtype (or not)."""
        o = self.owners
        return Group(GroupOwnerLayout(o.mesh, o.layout, o.tensor_to_owner, o.placements, o.name, dtype))

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
