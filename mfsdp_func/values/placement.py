"""How one mesh axis cuts a flat buffer: PyTorch's placements, and three `Shard(0)` subclasses that are values.

======== ============= ====================
from     to            `DBuffer` operation
======== ============= ====================
sharded  `Replicate`   `allgather`
`Partial` sharded      `reduce_scatter`
`Partial` `Replicate`  `allreduce`
`Replicate` sharded    `view` (local)
======== ============= ====================
"""

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from mfsdp_func.values.value import as_int

MeshAxis: TypeAlias = str | int


class ShardLayout(enum.Enum):
    """How the rows of a `RowAtomic` or `BlockAtomic` group are cut into one segment per rank."""

    PADDED = "padded"
    """Equal segments; every boundary is a multiple of every row size, so padding grows with their LCM."""
    UNPADDED = "unpadded"
    """No padding; each segment ends at the row boundary nearest to an even split, so segments are unequal."""
    BALANCED = "balanced"
    """Equal *stored* segments: cut at row boundaries so that the largest is the least possible, padded at the ends."""


def check_shard_layout(where: str, shard_layout: object) -> None:
    """Raise a `TypeError`, with the member that was meant, if `shard_layout` is no `ShardLayout`."""
    if isinstance(shard_layout, ShardLayout):
        return
    meant = [str(member) for member in ShardLayout if str(shard_layout).lower() in (member.value, str(member).lower())]
    raise TypeError(
        f"{where}: shard_layout must be a ShardLayout, got {shard_layout!r}; use"
        f" {' or '.join(meant or map(str, ShardLayout))}"
    )


class _FlatShard(Shard):
    """A `Shard(0)` of one flat buffer that is equal only to its own class and values, and cannot be changed."""

    def __init__(self) -> None:
        Shard.__init__(self, 0)  # pyright: ignore[reportCallIssue]  # bound in C++, its stub has no argument

    def _values(self) -> tuple[object, ...]:
        return ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FlatShard) and type(self) is type(other) and self._values() == other._values()

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((type(self).__qualname__, self._values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._values()))})"

    def __str__(self) -> str:
        return repr(self)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), self._values()

    def __copy__(self) -> "_FlatShard":
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "_FlatShard":
        return self

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: cannot delete {name!r}")


class RowAtomic(_FlatShard):
    """A shard of the flat buffer that never splits a row (an index of dim 0)."""


class BlockAtomic(_FlatShard):
    """A shard of the flat buffer that never splits `block_size` consecutive rows.

    Raises:
        TypeError: if `block_size` is not an int.
        ValueError: if `block_size` is not positive.
    """

    block_size: int

    def __init__(self, block_size: int) -> None:
        rows = as_int("BlockAtomic: block_size", block_size)
        if rows <= 0:
            raise ValueError(f"BlockAtomic: block_size must be positive, got {rows}")
        super().__init__()
        object.__setattr__(self, "block_size", rows)

    def _values(self) -> tuple[object, ...]:
        return (self.block_size,)


class TensorAtomic(_FlatShard):
    """A shard of the flat buffer that never splits a tensor; who owns which is in the layout's offsets."""


@dataclass(frozen=True)
class Placements:
    """One placement per data-parallel mesh axis, for each of the three roles of a parameter group.

    Attributes:
        dp_axes: the data-parallel mesh axes, outermost first, by name or by index.
        parameter: placements of the parameters that compute reads.
        gradient: placements of the reduced gradients.
        optimizer: placements of the main weights and the optimizer state.

    Raises:
        ValueError: if a role has another number of placements than there are axes, or an axis stands twice.
        TypeError: if an entry is not a placement, or an axis is neither a name nor an integer.

    >>> Placements(("dp",), [RowAtomic()], [RowAtomic()], [RowAtomic()]).parameter
    (RowAtomic(),)
    """

    dp_axes: tuple[MeshAxis, ...]
    parameter: tuple[Placement, ...]
    gradient: tuple[Placement, ...]
    optimizer: tuple[Placement, ...]

    def __init__(
        self,
        dp_axes: Iterable[MeshAxis] | MeshAxis,
        parameter: Iterable[Placement] | Placement,
        gradient: Iterable[Placement] | Placement,
        optimizer: Iterable[Placement] | Placement,
    ) -> None:
        given_axes = (dp_axes,) if isinstance(dp_axes, (str, int)) else tuple(dp_axes)
        axes = tuple(a if isinstance(a, str) else as_int("Placements: an axis that is no name", a) for a in given_axes)
        if not axes or len(set(axes)) != len(axes):
            raise ValueError(f"Placements: dp_axes must name at least one axis and each only once, got {axes}")
        object.__setattr__(self, "dp_axes", axes)
        for role, given in (("parameter", parameter), ("gradient", gradient), ("optimizer", optimizer)):
            placements = (given,) if isinstance(given, (Placement, type)) else tuple(given)
            if len(placements) != len(axes):
                raise ValueError(
                    f"Placements: {role} has {len(placements)} placements {placements} for {len(axes)} axes {axes};"
                    " give one placement per axis of dp_axes"
                )
            for placement in placements:
                _check_placement(f"Placements: {role}", placement)
            object.__setattr__(self, role, placements)


def _check_placement(where: str, placement: object) -> None:
    if isinstance(placement, type) and issubclass(placement, Placement):
        argument = "block_size" if placement is BlockAtomic else ""
        raise TypeError(
            f"{where} holds the class {placement.__name__}; give an instance: {placement.__name__}({argument})"
        )
    if not isinstance(placement, Placement):
        raise TypeError(f"{where} must hold placements, such as RowAtomic() or Replicate(), got {placement!r}")


def is_flat_shard(placement: Placement) -> bool:
    """Whether `placement` cuts the flat buffer: `RowAtomic`, `BlockAtomic` or `TensorAtomic`."""
    return isinstance(placement, _FlatShard)


def changed_mesh_axis(old_placements: Iterable[Placement], new_placements: Iterable[Placement]) -> int | None:
    """The index of the one mesh axis whose placement differs; None where none does.

    Raises:
        ValueError: if the two have different lengths.
        NotImplementedError: if two or more axes differ; do one change after another (`redistribute` does).

    >>> changed_mesh_axis([Replicate(), RowAtomic()], [Replicate(), Replicate()])
    1
    """
    old, new = tuple(old_placements), tuple(new_placements)
    if len(old) != len(new):
        raise ValueError(f"changed_mesh_axis: {len(old)} placements {old} against {len(new)} {new}; give one per axis")
    changed = [axis for axis, (before, after) in enumerate(zip(old, new, strict=True)) if before != after]
    if len(changed) > 1:
        names = ", ".join(f"axis {axis} ({old[axis]} -> {new[axis]})" for axis in changed)
        raise NotImplementedError(f"changed_mesh_axis: at most one axis may change, got {names}; change one at a time")
    return changed[0] if changed else None


def shard_axes(placements: Sequence[Placement]) -> tuple[int, ...]:
    """The mesh axes that cut the buffer, in mesh order."""
    return tuple(axis for axis, placement in enumerate(placements) if isinstance(placement, Shard))


__all__ = [
    "BlockAtomic",
    "MeshAxis",
    "Partial",
    "Placement",
    "Placements",
    "Replicate",
    "RowAtomic",
    "Shard",
    "ShardLayout",
    "TensorAtomic",
    "changed_mesh_axis",
    "is_flat_shard",
    "shard_axes",
]
