"""The device mesh as a value: axis names, the grid of global ranks, and which of them this process is."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, Protocol, TypeAlias, runtime_checkable

from mfsdp_func.values.value import THIS_RANK_ONLY, Value, as_int, as_ints

Nested: TypeAlias = "int | tuple[Nested, ...]"


@runtime_checkable
class MeshLike(Protocol):
    """What may stand in for a `Mesh`: a torch `DeviceMesh`, or any object with these four."""

    @property
    def mesh(self) -> object:
        """The grid of global ranks: a tensor or array with `tolist`, or nested sequences."""
        ...

    @property
    def ndim(self) -> int:
        """Number of axes."""
        ...

    def size(self, mesh_dim: int | None = None) -> int:
        """Number of ranks along one axis, or of all ranks."""
        ...

    def get_rank(self) -> int:
        """The global rank of this process."""
        ...


@dataclass(frozen=True, init=False, eq=False, repr=False)
class Mesh(Value):
    """An immutable grid of global process ranks with named axes, the outermost first.

    A mesh with ``rank=None`` plans without being anybody (no process group, no hardware). Equality takes part in
    "who am I"; `digest`, which ranks compare with one another, does not.

    Args:
        shape: number of ranks along each axis; all positive.
        axis_names: one name per axis; by default ``axis0, axis1, ...``.
        ranks: the global ranks in row-major order, each once; by default ``0, 1, 2, ...``.
        rank: the global rank of this process, which may lie outside the mesh; None for nobody.

    Raises:
        ValueError: if the three contradict one another.
        TypeError: on sizes or ranks that are no integers.

    >>> mesh = Mesh((2, 2), ranks=(3, 1, 0, 2), rank=0)
    >>> mesh.coordinate(), mesh.axis_ranks(1), mesh.size()
    ((1, 0), (0, 2), 4)
    """

    shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    ranks: tuple[int, ...]
    rank: int | None = field(metadata=THIS_RANK_ONLY)

    def __init__(
        self,
        shape: Iterable[int] | int,
        axis_names: Iterable[str] | None = None,
        ranks: Iterable[int] | None = None,
        rank: int | None = None,
    ) -> None:
        sizes = as_ints("Mesh: shape", shape if isinstance(shape, Iterable) else (shape,))
        if not sizes or min(sizes) < 1:
            raise ValueError(f"Mesh: shape must hold positive sizes, got {sizes}")
        grid = tuple(range(math.prod(sizes))) if ranks is None else as_ints("Mesh: ranks", ranks)
        if len(grid) != math.prod(sizes) or len(set(grid)) != len(grid) or min(grid) < 0:
            raise ValueError(f"Mesh: shape {sizes} needs {math.prod(sizes)} different ranks >= 0, got {grid}")
        names = tuple(f"axis{i}" for i in range(len(sizes))) if axis_names is None else tuple(axis_names)
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise ValueError(f"Mesh: shape {sizes} needs {len(sizes)} different axis names, got {names}")
        for name, value in (
            ("shape", sizes),
            ("axis_names", names),
            ("ranks", grid),
            ("rank", None if rank is None else as_int("Mesh: rank", rank)),
        ):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in zip(self.axis_names, self.shape, strict=True))
        return f"Mesh({axes}, ranks={self.ranks}, rank={self.rank})"

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    @property
    def mesh(self) -> Nested:
        """The grid of global ranks as nested tuples, outermost axis first."""
        grid: Sequence[Nested] = self.ranks
        for size in reversed(self.shape[1:]):
            grid = [tuple(grid[i : i + size]) for i in range(0, len(grid), size)]
        return tuple(grid)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def size(self, mesh_dim: int | None = None) -> int:
        """Number of ranks along one axis, or of all ranks."""
        return len(self.ranks) if mesh_dim is None else self.shape[mesh_dim]

    def get_rank(self) -> int:
        """The global rank of this process.

        Raises:
            ValueError: if the mesh was built for nobody.
        """
        if self.rank is None:
            raise ValueError(f"{self}: this mesh is nobody's; give it a rank with mesh.with_rank(rank)")
        return self.rank

    def with_rank(self, rank: int | None) -> "Mesh":
        """The same mesh as another process sees it."""
        who = None if rank is None else as_int("Mesh: rank", rank)
        seen = object.__new__(Mesh)
        vars(seen).update(shape=self.shape, axis_names=self.axis_names, ranks=self.ranks, rank=who)
        vars(seen).update(digest=self.digest, _position=self._position)  # which tell nothing of the rank
        return seen

    def __contains__(self, rank: object) -> bool:
        return rank in self._position

    def axis_index(self, axis: str | int) -> int:
        """The position of an axis given by name or (possibly negative) index.

        Raises:
            ValueError: if there is no such axis.
            TypeError: if it is neither a name nor an integer.
        """
        if isinstance(axis, str):
            if axis in self.axis_names:
                return self.axis_names.index(axis)
        elif -self.ndim <= as_int("a mesh axis that is no name", axis) < self.ndim:
            return axis % self.ndim
        raise ValueError(f"{self} has no axis {axis!r}; its axes are {self.axis_names}")

    def coordinate(self, rank: int | None = None) -> tuple[int, ...]:
        """The position of `rank` (default: this process) along every axis.

        Raises:
            ValueError: if the rank is not in the mesh.
        """
        who = self.get_rank() if rank is None else rank
        if who not in self._position:
            raise ValueError(f"rank {who} is not in {self}; only the mesh's own ranks take part in its operations")
        position = self._position[who]
        coordinate: list[int] = []
        for size in reversed(self.shape):
            position, digit = divmod(position, size)
            coordinate.append(digit)
        return tuple(reversed(coordinate))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The global rank at a coordinate."""
        position = 0
        for digit, size in zip(coordinate, self.shape, strict=True):
            position = position * size + digit
        return self.ranks[position]

    def axis_ranks(self, axis: str | int, rank: int | None = None) -> tuple[int, ...]:
        """The ranks on the line along `axis` through `rank` (default: this process), in mesh order."""
        index, here = self.axis_index(axis), list(self.coordinate(rank))
        return tuple(self.rank_at([*here[:index], digit, *here[index + 1 :]]) for digit in range(self.shape[index]))

    def shard_ranks(self, axes: Sequence[int], rank: int | None = None) -> tuple[int, ...]:
        """The ranks that share one copy of a buffer cut along `axes`, in buffer order.

        The innermost of `axes` is the most significant digit of the shard index; the coordinates on all other axes
        are those of `rank` (default: this process; any rank where the mesh is nobody's and every axis is cut).

        >>> Mesh((2, 2), ranks=(3, 1, 0, 2)).shard_ranks((0, 1))
        (3, 0, 1, 2)
        """
        if rank is None and len(axes) == self.ndim:
            rank = self.ranks[0]
        here = [0 if axis in axes else digit for axis, digit in enumerate(self.coordinate(rank))]
        return _shard_ranks(self.shape, self.ranks, tuple(sorted(axes, reverse=True)), tuple(here))

    def shard_count(self, axes: Sequence[int]) -> int:
        """Number of shards of a buffer that `axes` cut."""
        return math.prod(self.shape[axis] for axis in axes)

    def shard_index(self, axes: Sequence[int], rank: int | None = None) -> int:
        """The position of `rank` (default: this process) in buffer order when `axes` cut the buffer."""
        coordinate, index = self.coordinate(rank), 0
        for axis in sorted(axes, reverse=True):
            index = index * self.shape[axis] + coordinate[axis]
        return index


@lru_cache(maxsize=1024)
def _shard_ranks(
    shape: tuple[int, ...], ranks: tuple[int, ...], axes: tuple[int, ...], origin: tuple[int, ...]
) -> tuple[int, ...]:
    """The ranks at all coordinates along `axes`, the first of which is the most significant digit, from `origin` on."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    start = sum(digit * stride for digit, stride in zip(origin, strides, strict=True))
    steps = [range(0, shape[axis] * strides[axis], strides[axis]) for axis in axes]
    return tuple([ranks[start + sum(offsets)] for offsets in product(*steps)])


def as_mesh(mesh: "Mesh | MeshLike") -> Mesh:
    """The value behind a torch `DeviceMesh` or any object with `mesh`, `ndim`, `size` and `get_rank`.

    Raises:
        TypeError: if something is missing.
        ValueError: if `ndim` or `size()` contradicts the grid.
    """
    if isinstance(mesh, Mesh):
        return mesh
    missing = [name for name in ("mesh", "ndim", "size", "get_rank") if not hasattr(mesh, name)]
    if missing:
        raise TypeError(f"expected a Mesh, a DeviceMesh or the like, got {mesh!r} without {', '.join(missing)}")
    grid = mesh.mesh
    flat: list[Any] = [grid.tolist() if hasattr(grid, "tolist") else grid]  # pyright: ignore[reportAttributeAccessIssue]
    shape: list[int] = []
    while flat and isinstance(flat[0], (list, tuple)):
        shape.append(len(flat[0]))
        flat = [item for row in flat for item in row]
    if len(shape) != mesh.ndim or len(flat) != mesh.size():
        raise ValueError(f"{mesh!r}: a grid of shape {shape} contradicts ndim {mesh.ndim} and size {mesh.size()}")
    value = Mesh(shape, getattr(mesh, "mesh_dim_names", None), flat, mesh.get_rank())
    if groups := _group_names(mesh):
        set_group_names(value, groups)
    return value


def containing_mesh(meshes: Iterable[Mesh]) -> Mesh | None:
    """The one of `meshes` that contains the ranks of all others, the same on all its ranks; None where there is none.

    >>> containing_mesh([Mesh(2, ranks=(0, 2)), Mesh((2, 2))])
    Mesh(axis0=2, axis1=2, ranks=(0, 1, 2, 3), rank=None)
    """
    distinct = sorted(dict.fromkeys(meshes), key=lambda mesh: (-mesh.size(), mesh.ndim, mesh.axis_names, mesh.ranks))
    if not distinct or not all(set(mesh.ranks) <= set(distinct[0].ranks) for mesh in distinct):
        return None
    return distinct[0]


def group_names(mesh: Mesh) -> tuple[str, ...]:
    """Names of the process groups of a mesh, one per axis through this rank; none where it came from no `DeviceMesh`.

    Groups are no part of the value: equal meshes share those of the `DeviceMesh` that was converted last.
    """
    return _GROUPS.get(mesh.identity, ())


def set_group_names(mesh: Mesh, names: tuple[str, ...]) -> None:
    """Let the process groups of these names serve a mesh; see `group_names`."""
    _GROUPS[mesh.identity] = names


_GROUPS: dict[str, tuple[str, ...]] = {}


def _group_names(mesh: object) -> tuple[str, ...]:
    get_group = getattr(mesh, "get_group", None)
    coordinate = getattr(mesh, "get_coordinate", lambda: None)()
    if get_group is None or coordinate is None:
        return ()
    try:
        return tuple(get_group(axis).group_name for axis in range(len(coordinate)))
    except RuntimeError:
        return ()  # a DeviceMesh without process groups still plans
