"""Who computes which tensor: costs, a balanced choice of owners, and the mapping that `gather` and `scatter` follow."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

import torch

from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh
from mfsdp_func.values.placement import Placement, Replicate, RowAtomic, Shard
from mfsdp_func.values.value import LABEL, KeyedValue, as_int, as_ints

CostFn: TypeAlias = Callable[[torch.Size], float]
"""The work of one tensor, from its full shape: a finite number >= 0 in any unit."""

Costs: TypeAlias = CostFn | Mapping[int, float]
"""A function of the shape, or tensor index -> cost, where tensors of one shape differ."""


def ns_cost_fn(num_ns_steps: int = 5, *, batch_of_matrices: bool = False) -> CostFn:
    """The floating-point operations of `num_ns_steps` quintic Newton-Schulz steps on a tensor seen as a matrix.

    The matrix is ``(shape[0], shape[1:].numel())``, or with `batch_of_matrices` there are ``shape[:-2].numel()`` of
    the last two dims (for block specs, see `mfsdp_func.optim.BlockLayout.costs`). Let m be its shorter and n its longer
    side. One step forms ``A = X Xᵀ`` (2m²n), ``A A`` (2m³) and ``(b A + c A A) X`` (2m²n), with 3m² + 2mn element-wise
    operations for the two polynomials, so that the cost is ``num_ns_steps * (4m²n + 2m³ + 3m² + 2mn)``.

    Raises:
        ValueError: if `num_ns_steps` is negative.
        TypeError: if it is no integer.

    >>> ns_cost_fn(1)(torch.Size([2, 3]))
    88
    >>> ns_cost_fn(1, batch_of_matrices=True)(torch.Size([4, 2, 3]))
    352
    """
    if as_int("ns_cost_fn: num_ns_steps", num_ns_steps) < 0:
        raise ValueError(f"ns_cost_fn: num_ns_steps must not be negative, got {num_ns_steps}")

    def cost(shape: torch.Size) -> int:
        batch = math.prod(shape[:-2]) if batch_of_matrices else 1
        m, n = sorted(shape[-2:]) if batch_of_matrices else sorted((shape[0], math.prod(shape[1:])))
        return batch * num_ns_steps * (4 * m * m * n + 2 * m**3 + 3 * m * m + 2 * m * n)

    return cost


def tensor_costs(layout: GlobalLayout, tensor_indices: Iterable[int], cost_fn: Costs | None) -> dict[int, float]:
    """The cost of each tensor, asked once per distinct shape, or told by index.

    Raises:
        IndexError: if an index is not one of the layout's.
        KeyError: if costs are told by index, and one is missing.
        ValueError: if a cost is negative or not finite.
    """
    if isinstance(cost_fn, Mapping):
        return _told_costs(layout, tensor_indices, cost_fn)
    function = cost_fn or ns_cost_fn()
    by_shape: dict[torch.Size, float] = {}
    costs: dict[int, float] = {}
    for i in tensor_indices:
        layout.get_tensor_range(i)
        shape = layout.tensor_shapes[i]
        if shape not in by_shape:
            cost = function(shape)
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(
                    f"cost_fn returned {cost} for tensor {i} {tuple(shape)}; a cost is a finite number >= 0"
                )
            by_shape[shape] = cost
        costs[i] = by_shape[shape]
    return costs


def _told_costs(layout: GlobalLayout, tensor_indices: Iterable[int], told: Mapping[int, float]) -> dict[int, float]:
    costs: dict[int, float] = {}
    for i in tensor_indices:
        layout.get_tensor_range(i)
        if i not in told:
            raise KeyError(f"costs by tensor index have none for tensor {i}; give one for each tensor to assign")
        if not (math.isfinite(told[i]) and told[i] >= 0):
            raise ValueError(f"the cost of tensor {i} is {told[i]}; a cost is a finite number >= 0")
        costs[i] = told[i]
    return costs


def assign_owner_work(
    layout: GlobalLayout,
    mesh: Mesh | MeshLike,
    tensor_indices: Iterable[int],
    cost_fn: Costs | None = None,
    *,
    placements: Sequence[Placement] | None = None,
) -> dict[int, int]:
    """Choose an owner for each tensor among the ranks that hold a part of it, so that work is even and little moves.

    Tensors with a single holder stay there. Then boundary tensors go, in descending cost, each to its least loaded
    holder; ties, of tensors and of holders, go to the first in buffer order. The result is the same on every rank:
    where an axis replicates, owners are named by the replica group of the mesh's first rank.

    Args:
        layout: the buffer.
        mesh: the ranks that share it.
        tensor_indices: the tensors to assign, each once.
        cost_fn: the work of a tensor, by its shape or by its index; by default ``ns_cost_fn()``.
        placements: one per mesh axis; by default every axis cuts the buffer.

    Returns:
        Tensor index -> global rank of the owner, in ascending order of the index.

    Raises:
        ValueError: if nobody holds a tensor (it has no rows), an index stands twice, or a cost is refused.
        IndexError: if an index is not one of the layout's.
    """
    value, indices = as_mesh(mesh), as_ints("assign_owner_work: tensor_indices", tensor_indices)
    axes = layout.check_placements(value, _all_sharded(value) if placements is None else tuple(placements))
    ranks = value.shard_ranks(axes, value.ranks[0])
    costs = tensor_costs(layout, indices, cost_fn)
    if len(costs) != len(indices):
        raise ValueError("assign_owner_work: tensor_indices holds an index more than once")
    load, owners = [0.0] * len(ranks), dict[int, int]()
    boundary: list[tuple[int, list[int]]] = []
    for i in sorted(indices, key=layout.tensor_to_offset.__getitem__):
        held = layout.holders_of(i, len(ranks))
        if not held:
            raise ValueError(
                f"assign_owner_work: nobody holds tensor {i} {tuple(layout.tensor_shapes[i])};"
                " leave out tensors without rows"
            )
        if len(held) == 1:
            owners[i] = held[0]
            load[owners[i]] += costs[i]
        else:
            boundary.append((i, held))
    for i, holders in sorted(boundary, key=lambda item: -costs[item[0]]):
        owners[i] = min(holders, key=load.__getitem__)
        load[owners[i]] += costs[i]
    return {i: ranks[owners[i]] for i in sorted(owners)}


def _all_sharded(mesh: Mesh) -> tuple[Placement, ...]:
    return (RowAtomic(),) * mesh.ndim


def has_matrix_dims(param: torch.Tensor) -> bool:
    """The default choice of what matrix optimizers handle: two or more dims."""
    return param.ndim >= 2


@dataclass(frozen=True, init=False, eq=False, repr=False)
class GroupOwnerLayout(KeyedValue):
    """Which rank owns which tensor of one flat buffer: all that `gather` and `scatter` need to know.

    An owner may hold no part of its tensor. Where an axis of `placements` says `Replicate()`, each replica group
    gathers and scatters within itself, and an owner rank stands for its shard coordinates: the rank with the same
    ones owns in every replica group.

    Args:
        mesh: the ranks that share the buffer.
        layout: where tensors and segments lie.
        tensor_to_owner: tensor index -> global rank; tensors without an entry take no part.
        placements: one per mesh axis, `Replicate()` or a shard; by default every axis cuts the buffer.
        name: a label for errors and the agreement check; no part of the value.
        dtype: of the elements that move, unless a call says another: a rank that holds none of them takes it from here,
            and a tensor of another dtype is an error. None where calls say it.

    Raises:
        ValueError: if an index or an owner does not exist, or `placements` do not fit or are broken by the layout.
        TypeError: if an index or an owner is no integer, or `dtype` is no `torch.dtype`.

    >>> from mfsdp_func.values.layout_builder import build_for_row_atomic
    >>> GroupOwnerLayout(Mesh(2), build_for_row_atomic([(4, 2), (2, 2)], 2), {1: 0, 0: 1})
    GroupOwnerLayout({0: 1, 1: 0}, placements=(RowAtomic(),), mesh=Mesh(axis0=2, ranks=(0, 1), rank=None))
    """

    mesh: Mesh
    layout: GlobalLayout
    tensor_to_owner: Mapping[int, int]
    placements: tuple[Placement, ...]
    dtype: torch.dtype | None
    name: str = field(compare=False, metadata=LABEL)

    def __init__(
        self,
        mesh: Mesh | MeshLike,
        layout: GlobalLayout,
        tensor_to_owner: Mapping[int, int],
        placements: Sequence[Placement] | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
    ) -> None:
        if torch.compiler.is_dynamo_compiling():
            raise RuntimeError(
                f"{_called(name)}: made inside a compiled region, which could not tell it from equal ones;"
                " make it before and pass it in"
            )
        value = as_mesh(mesh)
        chosen = _all_sharded(value) if placements is None else tuple(placements)
        for placement in chosen:
            if not (isinstance(placement, Replicate) or (isinstance(placement, Shard) and placement.dim == 0)):
                raise ValueError(f"{_called(name)}: placements must be Replicate() or a shard, got {placement!r}")
        layout.check_unbroken(value, chosen)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise TypeError(f"{_called(name)}: dtype must be a torch.dtype or None, got {dtype!r}")
        owners: dict[int, int] = {}
        for index, given in tensor_to_owner.items():
            i = as_int(f"{_called(name)}: a tensor index", index)
            owner = owners[i] = as_int(f"{_called(name)}: the owner of tensor {i}", given)
            if not 0 <= i < len(layout.tensor_shapes):
                raise ValueError(
                    f"{_called(name)}: tensor index {i} is given owner {owner}, but the layout has tensors"
                    f" 0..{len(layout.tensor_shapes) - 1}"
                )
            if owner not in value:
                raise ValueError(
                    f"{_called(name)}: tensor {i} is given owner {owner}, which is not in {value};"
                    " owners are global ranks of the mesh"
                )
        object.__setattr__(self, "mesh", value)
        object.__setattr__(self, "layout", layout)
        object.__setattr__(self, "tensor_to_owner", MappingProxyType(dict(sorted(owners.items()))))
        object.__setattr__(self, "placements", chosen)
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "name", name)
        self._register()

    @classmethod
    def from_params(
        cls,
        mesh: Mesh | MeshLike,
        layout: GlobalLayout,
        params: Iterable[torch.Tensor] | Mapping[str, torch.Tensor] | None = None,
        *,
        predicate: Callable[[torch.Tensor], bool] = has_matrix_dims,
        cost_fn: CostFn | None = None,
        placements: Sequence[Placement] | None = None,
        name: str = "",
        dtype: torch.dtype | None = None,
    ) -> "GroupOwnerLayout":
        """Select tensors by a predicate and let `assign_owner_work` choose their owners.

        Args:
            mesh: the ranks that share the buffer.
            layout: where tensors and segments lie.
            params: one tensor per tensor of the layout, in its order, of the logical shapes (any device, meta too);
                by default meta tensors of the layout's shapes.
            predicate: which of them take part; by default those of two or more dims. Tensors without rows are skipped.
            cost_fn: see `assign_owner_work`.
            placements: see `GroupOwnerLayout`.
            name: see `GroupOwnerLayout`.
            dtype: likewise.

        Raises:
            ValueError: if `params` do not have the layout's shapes, or see `assign_owner_work`.
        """
        if params is None:
            given = [torch.empty(shape, device="meta") for shape in layout.tensor_shapes]
        else:
            given = list(params.values() if isinstance(params, Mapping) else params)
        shapes = [param.shape for param in given]
        if shapes != list(layout.tensor_shapes):
            raise ValueError(
                f"{_called(name)}: params have shapes {list(map(tuple, shapes))}, the layout has"
                f" {list(map(tuple, layout.tensor_shapes))}; give the full shapes in the layout's order"
            )
        chosen = [i for i, param in enumerate(given) if param.numel() and predicate(param)]
        owners = assign_owner_work(layout, mesh, chosen, cost_fn, placements=placements)
        return cls(mesh, layout, owners, placements, name, dtype)

    def __repr__(self) -> str:
        owners: object = dict(self.tensor_to_owner)
        if len(self.tensor_to_owner) > 32:
            owners = f"{len(self.tensor_to_owner)} tensors"
        dtype = f", dtype={self.dtype}" if self.dtype else ""
        name = f", name={self.name!r}" if self.name else ""
        return f"GroupOwnerLayout({owners}, placements={self.placements}, mesh={self.mesh}{name}{dtype})"


def _called(name: str) -> str:
    """How errors call an owner layout."""
    return f"GroupOwnerLayout {name!r}" if name else "GroupOwnerLayout"
