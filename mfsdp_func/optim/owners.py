"""Functions of whole tensors, applied to row shards: computed by the owners, of one group or of many at once."""

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeAlias

import torch

from mfsdp_func.effects.token import After, Token
from mfsdp_func.operations.gather_scatter import gather, gather_coalesced, scatter, scatter_coalesced
from mfsdp_func.values.owner_planning import GroupOwnerLayout

Owners: TypeAlias = GroupOwnerLayout | Mapping[Hashable, GroupOwnerLayout]
"""Who computes what: of one group, whose tensors go by index; or of several groups of one mesh by name, whose tensors
go by pairs ``(name, index)``.
"""


def map_on_owners(
    function: Callable[[dict[Any, torch.Tensor]], dict[Any, torch.Tensor]],
    shards: Mapping[Any, torch.Tensor],
    *,
    owner_layout: Owners,
    dtype: torch.dtype | None = None,
    after: After = (),
) -> tuple[dict[Any, torch.Tensor], Token]:
    """Apply a function of whole tensors to row shards: `gather`, `function` on each owner, `scatter`.

    Several groups move in one exchange each way (`gather_coalesced`), and `function` is called once, with the tensors
    of all of them; `mfsdp_func.operations.pipeline` goes through groups one by one, in less memory.

    Args:
        function: tensor index (or pair, see `Owners`) -> full tensor, of the tensors that a rank owns, to results of as
            many elements; called on every rank, with an empty dict where it owns nothing.
        shards: see `gather`.
        owner_layout: who computes what.
        dtype: of `shards` and results, see `gather`.
        after: tokens of operations to start after.

    Returns:
        This rank's part of every result that it holds, and the token of the scatter, which continues the gather's link.

    Raises:
        KeyError, ValueError, TypeError: see `gather`; with several groups, keys that are not such pairs are not read.

    >>> from mfsdp_func import Mesh, build_for_row_atomic
    >>> owners = GroupOwnerLayout(Mesh(1, rank=0), build_for_row_atomic([(2, 2)], 1), {0: 0})
    >>> transpose = lambda full: {i: matrix.T for i, matrix in full.items()}
    >>> parts, _ = map_on_owners(transpose, {0: torch.arange(4)}, owner_layout=owners)
    >>> parts[0]
    tensor([[0, 2],
            [1, 3]])
    >>> both = {"first": owners, "second": owners}
    >>> parts, _ = map_on_owners(transpose, {(name, 0): torch.arange(4) for name in both}, owner_layout=both)
    >>> sorted(parts)
    [('first', 0), ('second', 0)]
    """
    if isinstance(owner_layout, GroupOwnerLayout):
        full, token = gather(shards, owner_layout=owner_layout, dtype=dtype, after=after)
        return scatter(function(full), owner_layout=owner_layout, dtype=dtype, after=token)
    layouts = list(owner_layout.values())
    sources = _split(owner_layout, shards)
    groups, token = gather_coalesced(sources, owner_layouts=layouts, dtype=dtype, after=after)
    computed = _split(owner_layout, function(_paired(owner_layout, groups)))
    parts, token = scatter_coalesced(computed, owner_layouts=layouts, dtype=dtype, after=token)
    return _paired(owner_layout, parts), token


def owned_shapes(owner_layout: Owners) -> dict[Any, torch.Size]:
    """Logical shapes of the participating tensors, by index or pair; see `Owners`.

    Raises:
        ValueError: if there is no group.
    """
    if not owner_layout:
        raise ValueError("owner_layout: no group was given; give at least one")
    if isinstance(owner_layout, GroupOwnerLayout):
        return {i: owner_layout.layout.tensor_shapes[i] for i in owner_layout.tensor_to_owner}
    return {
        (name, i): owners.layout.tensor_shapes[i]
        for name, owners in owner_layout.items()
        for i in owners.tensor_to_owner
    }


def _split(names: Iterable[Hashable], tensors: Mapping[Any, torch.Tensor]) -> list[dict[int, torch.Tensor]]:
    """The tensors of each group; others are left out, as `gather` never reads them."""
    groups: dict[Hashable, dict[int, torch.Tensor]] = {name: {} for name in names}
    for key, tensor in tensors.items():
        if isinstance(key, tuple) and len(key) == 2 and key[0] in groups:
            groups[key[0]][key[1]] = tensor
    return list(groups.values())


def _paired(
    names: Iterable[Hashable], groups: Iterable[Mapping[int, torch.Tensor]]
) -> dict[tuple[Hashable, int], torch.Tensor]:
    return {(name, i): tensor for name, group in zip(names, groups, strict=True) for i, tensor in group.items()}
