"""A function of matrices applied to tensors by blocks: whole, or as shards by way of the owners of the blocks."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from mfsdp_func.effects.here import carrier_of
from mfsdp_func.optim.block_facts import BATCH_OF_MATRICES, ONE_MATRIX, Part, Spec, group_facts, whole_part
from mfsdp_func.optim.block_layout import BlockLayout
from mfsdp_func.optim.block_split import Tree, join_tree, leaves, split_tree
from mfsdp_func.optim.blocks import Blocks, as_blocks
from mfsdp_func.optim.newton_schulz import default_dtype
from mfsdp_func.optim.orthogonal import Orthogonalize, normalize_rows
from mfsdp_func.optim.owners import Owners, map_on_owners, owned_shapes
from mfsdp_func.optim.transformation import device_of
from mfsdp_func.values.owner_planning import GroupOwnerLayout

AnyBlocks: TypeAlias = "Blocks | str | BlockLayout | Mapping[Any, Blocks | str | BlockLayout] | None"
"""What is a matrix: one block spec for all tensors; a spec for some of them, by key; or the finer layout (of each group, by
name) of which the owner layout already is.
"""

AdjustLr: TypeAlias = Literal["original", "match_rms_adamw", "spectral", "none"] | Callable[[int, int], float]
"""What an update is multiplied with, for an m x n matrix.

- "original": ``sqrt(max(1, m / n))``; K. Jordan et al., "Muon", 2024.
- "match_rms_adamw": ``0.2 * sqrt(max(m, n))``; J. Liu et al., "Muon is Scalable for LLM Training", arXiv 2502.16982.
- "spectral": ``sqrt(m / n)``; G. Yang, J. Simon, J. Bernstein, "A Spectral Condition for Feature Learning", arXiv
  2310.17813.
- "none": 1.
- a function of m and n.
"""

_RATIOS: dict[str, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
    "spectral": lambda m, n: math.sqrt(m / n),
    "none": lambda m, n: 1.0,
}


def ratio_fn(adjust_lr_fn: AdjustLr) -> Callable[[int, int], float]:
    """The function that a name of `AdjustLr` stands for.

    Raises:
        ValueError: on an unknown name.
    """
    if callable(adjust_lr_fn):
        return adjust_lr_fn
    if adjust_lr_fn not in _RATIOS:
        raise ValueError(
            f"muon: adjust_lr_fn must be one of original, match_rms_adamw, got {adjust_lr_fn!r} (or spectral, none, or a"
            " function of m and n)"
        )
    return _RATIOS[adjust_lr_fn]


class BlockWork:
    """What is a matrix, who computes it, and how shards are taken apart and put together again.

    Args:
        owner_layout: of whole tensors, or of the finer layouts that `given` has; None where tensors are whole.
        given: see `AnyBlocks`.
        batch_of_matrices: how tensors of more than two dims are seen that no spec is given for.
        local: what a rank holds of a block is taken for a block, which it computes itself: nothing moves.

    Raises:
        ValueError: if a tensor that takes part has fewer than two dims and no spec, a spec does not fit its tensor, or is
            given for a tensor that takes no part; or with `local`, a rank's part is no block.
    """

    def __init__(
        self, owner_layout: Owners | None, given: AnyBlocks, batch_of_matrices: bool, local: bool = False
    ) -> None:
        self.local = local
        self.default: Spec = (BATCH_OF_MATRICES if batch_of_matrices else ONE_MATRIX, ())
        self.given = given
        self.owners: Owners | None = None
        self.parts: dict[Any, tuple[Part, ...]] = {}
        self.trees: dict[Any, Tree] = {}
        self.row_keys: dict[Any, Any] = {}
        if owner_layout is None:
            return
        single = isinstance(owner_layout, GroupOwnerLayout)
        groups: dict[Any, GroupOwnerLayout] = {None: owner_layout} if single else dict(owner_layout)
        if not groups:
            owned_shapes(owner_layout)  # raises
        _check_keys(given, groups)
        chosen: dict[Any, GroupOwnerLayout] = {}
        for name, owners in groups.items():
            specs, finer = _of_group(given, name, owners)
            chosen[name], parts, owned = group_facts(owners, specs, finer, self.default, local)
            for i, some in parts.items():
                self.parts[_key(name, i)] = tuple([part.of(_key(name, part.tensor)) for part in some])
            for j, (tree, i, n) in owned.items():
                self.trees[_key(name, j)] = tree
                self.row_keys[_key(name, j)] = (i, n) if name is None else (name, i, n)
        self.owners = chosen[None] if single else chosen

    def takes_part(self, key: Any) -> bool:
        """Whether a tensor is one of those that owners (or all) compute."""
        return self.owners is None or key in self.parts

    def parts_of(self, key: Any, shape: Sequence[int]) -> tuple[Part, ...]:
        """A shard, or without owners a whole tensor, in its parts.

        Raises:
            ValueError: of whole tensors, if it is no matrix; see the class.
        """
        if self.owners is not None:
            return self.parts[key]
        spec = self.default
        if isinstance(self.given, Mapping):
            if key in self.given:
                spec = _spec(self.given[key])
        elif self.given is not None:
            spec = _spec(self.given)
        return (whole_part(key, spec, tuple(shape), spec is self.default),)

    def run(
        self,
        function: Orthogonalize,
        tensors: Mapping[Any, torch.Tensor],
        ratio: Callable[[int, int], float],
        *,
        stack: bool,
        dtype: torch.dtype | None = None,
        row_squares: Mapping[Any, torch.Tensor] | None = None,
        row_beta: float | torch.Tensor | None = None,
    ) -> tuple[dict[Any, torch.Tensor], dict[Any, torch.Tensor]]:
        """`function` of every matrix, times the ratio of its shape. With `row_squares`, rows are normalised between.

        Args:
            function: see `Orthogonalize`.
            tensors: shards of all tensors that take part and are held, or whole tensors.
            ratio: see `AdjustLr`.
            stack: whether equal matrices are handed over side by side.
            dtype: in which shards travel to the owners and back; by default bfloat16 on CUDA, else their own.
            row_squares: see `first_row_squares`.
            row_beta: see `normalize_rows`; None leaves rows as they are.

        Returns:
            For each of `tensors`, its result in its shape and dtype; and the new `row_squares`.
        """
        means: dict[Any, torch.Tensor] = {**(row_squares or {})}

        def on_whole(whole: Mapping[Any, torch.Tensor], trees: Mapping[Any, Tree]) -> dict[Any, torch.Tensor]:
            if row_beta is None:
                return by_matrices(function, whole, trees, stack)

            def normalized(key: Any, parts: list[torch.Tensor], beta: Any = row_beta) -> list[torch.Tensor]:
                parts, means[self.row_key(key)] = _rows_normalized(parts, means[self.row_key(key)], beta)
                return parts

            return by_matrices(function, whole, trees, stack, normalized)

        taken = {key: self.parts_of(key, tensor.shape) for key, tensor in tensors.items()}
        apart: dict[Any, torch.Tensor] = {}
        stays = self.owners is None or self.local
        for key, parts in taken.items():
            tensor = tensors[key]
            travelling = tensor if stays else tensor.to(dtype or default_dtype(tensor))
            for part in parts:
                apart[part.key] = part.taken_from(travelling)
        if self.owners is None or self.local:
            results = on_whole(apart, {part.key: part.tree for parts in taken.values() for part in parts})
        else:
            results, _ = map_on_owners(
                lambda whole: on_whole(whole, self.trees),
                apart,
                owner_layout=self.owners,
                dtype=dtype or next(map(default_dtype, tensors.values()), None) or _dtype_without_shards(self.owners),
            )
        return {key: _together(tensors[key], parts, results, ratio) for key, parts in taken.items()}, means

    def first_row_squares(self, params: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Zeros: for each tensor of the finer layout that this rank owns, a number per row of all of its matrices.

        See `row_key` for keys.
        """
        if self.owners is None:
            trees = {key: self.parts_of(key, param.shape)[0].tree for key, param in params.items()}
            device = device_of(params)
        else:
            trees, device = self.trees, _device_of(self.owners)
        dtype = torch.promote_types(next((param.dtype for param in params.values()), torch.float32), torch.float32)
        rows = {key: sum(leaf.count * leaf.matrix[0] for leaf in leaves(tree)) for key, tree in trees.items()}
        return {self.row_key(key): torch.zeros(count, dtype=dtype, device=device) for key, count in rows.items()}

    def row_key(self, key: Any) -> Any:
        """A tensor of the finer layout in `row_squares`: ``(index, number)`` or ``(group, index, number)`` of the parameter.

        `number` counts the pieces of the parameter. Of whole tensors, their own key, or with 0 as the number if it is one
        of a buffer.
        """
        if self.owners is None:
            return (*key, 0) if isinstance(key, tuple) else key
        return self.row_keys[key]


def _dtype_without_shards(owner_layout: Owners) -> torch.dtype | None:
    """In which dtype shards travel, on a rank that has none; None leaves it to the groups."""
    return torch.bfloat16 if _device_of(owner_layout).type == "cuda" else None


def _device_of(owner_layout: Owners) -> torch.device:
    group = owner_layout if isinstance(owner_layout, GroupOwnerLayout) else next(iter(owner_layout.values()))
    return carrier_of(group.mesh).device(group.mesh)


def by_matrices(
    function: Orthogonalize,
    whole: Mapping[Any, torch.Tensor],
    trees: Mapping[Any, Tree],
    stack: bool,
    then: Callable[[Any, list[torch.Tensor]], list[torch.Tensor]] | None = None,
) -> dict[Any, torch.Tensor]:
    """A function of every matrix of whole tensors: once per shape, on all of that shape side by side, or one by one.

    `then` gets the key and the results of each tensor, by kind of block.
    """
    split = {key: split_tree(tensor, trees[key]) for key, tensor in whole.items()}
    matrices = {(key, n): part for key, parts in split.items() for n, part in enumerate(parts)}
    run = _run_stacked if stack else _run_one_by_one
    results = run(function, matrices)
    joined: dict[Any, torch.Tensor] = {}
    for key, parts in split.items():
        found = [results[key, n] for n in range(len(parts))]
        joined[key] = join_tree(found if then is None else then(key, found), trees[key])
    return joined


def _rows_normalized(
    parts: list[torch.Tensor], second: torch.Tensor, beta: float | torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """`normalize_rows` of each kind of block; `second` is flat, kind after kind."""
    shapes = [(*part.shape[:-1], 1) for part in parts]
    olds = second.split([math.prod(shape) for shape in shapes])
    found = [
        normalize_rows(part, old.reshape(shape), beta) for part, old, shape in zip(parts, olds, shapes, strict=True)
    ]
    return [part for part, _ in found], torch.cat([new.reshape(-1) for _, new in found])


def _run_one_by_one(function: Orthogonalize, matrices: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    results: dict[Any, torch.Tensor] = {}
    for key, batch in matrices.items():
        if batch.dim() == 2:
            results[key] = function(batch.contiguous())
        elif not batch.numel():
            results[key] = batch
        else:
            each = [function(matrix.contiguous()) for matrix in batch.reshape(-1, *batch.shape[-2:]).unbind()]
            results[key] = torch.stack(each).reshape(batch.shape)
    return results


def _run_stacked(function: Orthogonalize, matrices: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
    groups: dict[tuple[int, ...], list[Any]] = {}
    for key, batch in matrices.items():
        groups.setdefault(tuple(batch.shape[-2:]), []).append(key)
    results: dict[Any, torch.Tensor] = {}
    for shape, members in groups.items():
        if len(members) == 1:
            results[members[0]] = function(matrices[members[0]].contiguous())
            continue
        stacks = [matrices[key].reshape(-1, *shape) for key in members]
        parts = function(torch.cat(stacks)).split([stack.shape[0] for stack in stacks])
        for key, part in zip(members, parts, strict=True):
            results[key] = part.reshape(matrices[key].shape)
    return results


def _together(
    shard: torch.Tensor,
    parts: Sequence[Part],
    results: Mapping[Any, torch.Tensor],
    ratio: Callable[[int, int], float],
) -> torch.Tensor:
    """The results of the parts of a shard, scaled, in the shard's shape and dtype."""
    pieces = [_scaled(results[part.key].reshape(-1).to(shard.dtype), part, ratio) for part in parts]
    if not pieces:  # a rank's empty shard takes no part in the exchange
        return shard
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).reshape(shard.shape)


def _scaled(flat: torch.Tensor, part: Part, ratio: Callable[[int, int], float]) -> torch.Tensor:
    ratios = [ratio(*leaf.matrix) if leaf.count and min(leaf.matrix) else 1.0 for leaf in leaves(part.tree)]
    if all(number == ratios[0] for number in ratios):
        return flat * ratios[0]
    wide = torch.promote_types(flat.dtype, torch.float32)
    shapes = split_tree(flat.new_empty((), dtype=wide).expand(part.shape), part.tree)
    spread = [torch.full_like(kind, number) for kind, number in zip(shapes, ratios, strict=True)]
    factors = join_tree(spread, part.tree).reshape(-1)[part.offset : part.offset + part.numel]
    return (flat * factors).to(flat.dtype)


def _key(name: Any, i: int) -> Any:
    return i if name is None else (name, i)


def _spec(given: Blocks | str | BlockLayout) -> Spec:
    if isinstance(given, BlockLayout):
        raise ValueError("muon: a finer layout as blocks goes with an owner layout; give block specs instead")
    spec = as_blocks(given)
    return spec.spec, spec.sizes


def _of_group(given: AnyBlocks, name: Any, owners: GroupOwnerLayout) -> tuple[dict[int, Spec], BlockLayout | None]:
    if given is None:
        return {}, None
    if isinstance(given, BlockLayout):
        return {}, given
    if not isinstance(given, Mapping):
        return {i: _spec(given) for i in owners.tensor_to_owner}, None
    whole = given.get(name)
    if isinstance(whole, BlockLayout):
        return {}, whole
    return {i: _spec(given[_key(name, i)]) for i in owners.tensor_to_owner if _key(name, i) in given}, None


def _check_keys(given: AnyBlocks, groups: Mapping[Any, GroupOwnerLayout]) -> None:
    if not isinstance(given, Mapping):
        return
    known = {_key(name, i) for name, owners in groups.items() for i in owners.tensor_to_owner}
    for key, spec in given.items():
        if (key not in known) if not isinstance(spec, BlockLayout) else (key not in groups):
            raise ValueError(
                f"muon: blocks has a spec for {key!r}, which takes no part; keys are those of parameters that the owner"
                " layout assigns"
            )
