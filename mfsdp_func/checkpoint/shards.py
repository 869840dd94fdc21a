"""Bare shards with the layout and the names that they lack."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.values.owner_planning import GroupOwnerLayout


@dataclass(frozen=True)
class Shards:
    """This rank's shards of the tensors of flat buffers, by tensor index: what `optim` takes, and keeps as its state.

    A pytree whose children are the tensors. Where shards lie is told by the layout; which rank owns what counts for
    `owned` alone.

    Args:
        tensors: tensor index -> this rank's part, in any shape; of several groups, ``(group, index)``. What this rank
            holds no element of may be left out. Values may be pytrees of tensors, whose paths become fields.
        owner_layout: mesh, layout and placements; of several groups, a mapping of them by name.
        names: the parameter of each tensor: a sequence, or a mapping by index; of several groups, a mapping of those.
        owned: every tensor is whole, of any shape, and lies on its owner alone (preconditioners). Keys may have one part
            more: the number of a piece of the tensor, which may have another owner.

    Raises:
        CheckpointError: without names, or with too few.

    >>> import torch
    >>> from mfsdp_func import Mesh, build_for_row_atomic
    >>> owners = GroupOwnerLayout(Mesh(1, rank=0), build_for_row_atomic([(2, 2)], 1), {0: 0})
    >>> Shards({0: torch.zeros(2, 2)}, owners, ["wq.weight"]).name_of(None, 0)
    'wq.weight'
    """

    tensors: Mapping[Any, Any]
    owner_layout: GroupOwnerLayout | Mapping[Any, GroupOwnerLayout]
    names: Any = None
    owned: bool = False

    def __post_init__(self) -> None:
        for group, owners in self.groups().items():
            given = self.names if isinstance(self.owner_layout, GroupOwnerLayout) else (self.names or {}).get(group)
            if given is None or isinstance(given, str):
                raise CheckpointError(
                    f"Shards: no names for the {len(owners.layout.tensor_shapes)} tensors of group {owners.name!r}; shards"
                    " know their index alone, which other layouts have not: give names=, the parameter of each tensor"
                )
            if not isinstance(given, Mapping) and len(given) != len(owners.layout.tensor_shapes):
                raise CheckpointError(
                    f"Shards: {len(given)} names for the {len(owners.layout.tensor_shapes)} tensors of group"
                    f" {owners.name!r}; give one each"
                )

    def groups(self) -> dict[Any, GroupOwnerLayout]:
        """The owner layouts by group; a single one under None."""
        if isinstance(self.owner_layout, GroupOwnerLayout):
            return {None: self.owner_layout}
        return dict(self.owner_layout)

    def split(self, key: Hashable) -> tuple[Any, ...]:
        """The group and the index that a key of `tensors` means; of a piece that an owner holds, its number, too."""
        single = isinstance(self.owner_layout, GroupOwnerLayout)
        found: tuple[Any, ...] = key if isinstance(key, tuple) else (key,)
        found = (None, *found) if single else found
        if len(found) not in ((2, 3) if self.owned else (2,)):
            expected = "an index" if single else "a pair (group, index), as shards of several groups have"
            raise CheckpointError(f"Shards: key {key!r} is not {expected}")
        return found

    def key(self, group: Any, index: int) -> Hashable:
        """The inverse of `split`."""
        return index if isinstance(self.owner_layout, GroupOwnerLayout) else (group, index)

    def name_of(self, group: Any, index: int) -> str:
        """The parameter of a tensor.

        Raises:
            CheckpointError: if it has none.
        """
        given: Sequence[str] | Mapping[int, str]
        given = self.names if isinstance(self.owner_layout, GroupOwnerLayout) else self.names[group]
        try:
            return given[index]
        except (KeyError, IndexError):
            raise CheckpointError(f"Shards: tensor {index} of group {group!r} has no name; give it one") from None


def _flatten(shards: Shards) -> tuple[list[Any], tuple[Any, ...]]:
    return list(shards.tensors.values()), (tuple(shards.tensors), shards.owner_layout, shards.names, shards.owned)


def _unflatten(children: Any, context: Any) -> Shards:
    keys, owner_layout, names, owned = context
    made = object.__new__(Shards)  # no checks: transforms put placeholders of all kinds here
    for field, value in zip(
        ("tensors", "owner_layout", "names", "owned"),
        (dict(zip(keys, children, strict=True)), owner_layout, names, owned),
        strict=True,
    ):
        object.__setattr__(made, field, value)
    return made


def _flatten_with_keys(shards: Shards) -> tuple[list[tuple[Any, Any]], Any]:
    return [(pytree.MappingKey(key), value) for key, value in shards.tensors.items()], _flatten(shards)[1]


pytree.register_pytree_node(
    Shards,
    _flatten,
    _unflatten,
    serialized_type_name="mfsdp_func.checkpoint.Shards",
    flatten_with_keys_fn=_flatten_with_keys,  # pyright: ignore[reportArgumentType]
)
