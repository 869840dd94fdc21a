"""From shapes to plans: the layout of every buffer, the matrices that have owners, and who owns them."""

import fnmatch
import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from mfsdp_func.fsdp.context import FsdpContext
from mfsdp_func.fsdp.grouping import Group
from mfsdp_func.optim.block_facts import BATCH_OF_MATRICES
from mfsdp_func.optim.block_layout import BlockLayout, block_layout
from mfsdp_func.optim.block_split import matrices
from mfsdp_func.optim.blocks import Blocks
from mfsdp_func.optim.route import Choice, route
from mfsdp_func.preflight.models import ModelShapes
from mfsdp_func.preflight.settings import Settings
from mfsdp_func.values.balance import Trade, WorkGroup, balance_owner_work
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import build_row_atomic_layout
from mfsdp_func.values.load_bound import load_lower_bound
from mfsdp_func.values.owner_planning import assign_owner_work
from mfsdp_func.values.padding import PaddingReport, PaddingWarning, finer_view, padding_report


class Part(NamedTuple):
    """One buffer: how it lies, and what of it has owners.

    Attributes:
        group: its parameters.
        layout: of whole parameters.
        padding: what it stores against what it needs.
        fine: the layout whose tensors are the matrices that have owners (and all that has none).
        costs: tensor of `fine` -> work of its owner, in floating-point operations.
        owners: tensor of `fine` -> shard index of its owner.
        matrices: tensor of `fine` that has an owner -> how many matrices of which shapes it consists of, kind by kind.
        muon: parameters (tensors of `layout`) that Muon updates; AdamW does the others.
    """

    group: Group
    layout: GlobalLayout
    padding: PaddingReport
    fine: GlobalLayout
    costs: Mapping[int, float]
    owners: Mapping[int, int]
    matrices: Mapping[int, tuple[tuple[int, tuple[int, int]], ...]]
    muon: frozenset[int]


@dataclass(frozen=True, eq=False)
class Parts:
    """All buffers of a model under some settings."""

    model: ModelShapes
    settings: Settings
    parts: Mapping[str, Part]
    trade: Trade | None
    """What `balance_owner_work` says; None where it did not choose."""

    @cached_property
    def loads(self) -> tuple[float, ...]:
        """Work of each shard index: floating-point operations of one optimizer step."""
        loads = [0.0] * self.settings.shards
        for part in self.parts.values():
            for i, owner in part.owners.items():
                loads[owner] += part.costs[i]
        return tuple(loads)

    @cached_property
    def load_bound(self) -> float:
        """No choice of owners has a smaller largest load."""
        costs = [part.costs[i] for part in self.parts.values() for i in part.owners]
        return load_lower_bound(costs, self.settings.shards)

    @property
    def matrices(self) -> int:
        """Number of tensors that have owners."""
        return sum(len(part.owners) for part in self.parts.values())


def lay_out(model: ModelShapes, settings: Settings, choices: Mapping[str, Choice] | None = None) -> Parts:
    """Lay every buffer out and choose owners, as `fully_shard` and `optim.from_route` do.

    Args:
        model: the shapes.
        settings: how.
        choices: name pattern -> what its parameters get; see `Route.override`.

    Raises:
        ValueError: where a layout is refused (see `FsdpContext.max_padding`), or a choice does not fit.
    """
    layouts: dict[object, tuple[GlobalLayout, PaddingReport]] = {}
    finer_names = finer_rows(model, settings)
    found: dict[str, tuple[GlobalLayout, PaddingReport, BlockLayout, frozenset[int]]] = {}
    specs = _specs(model, settings, choices or {})
    for key, group in model.groups.items():
        shapes = tuple(entry.shape or torch.Size([1]) for entry in group.entries)
        marks = tuple(entry.name in finer_names for entry in group.entries)
        if (shapes, marks) not in layouts:
            layouts[shapes, marks] = _layout(group, shapes, marks, settings)
        layout, report = layouts[shapes, marks]
        chosen = {i: specs[entry.name] for i, entry in enumerate(group.entries) if entry.name in specs}
        found[key] = (layout, report, block_layout(layout, chosen), frozenset(chosen))
    costs: dict[int, dict[int, float]] = {}
    kinds: dict[int, dict[int, tuple[tuple[int, tuple[int, int]], ...]]] = {}
    for _, _, finer, _ in found.values():
        if id(finer) not in costs:
            costs[id(finer)] = finer.costs()
            kinds[id(finer)] = {i: matrices(tree) for i, tree in finer.trees.items()}
    owners, trade = _owners([(finer.fine, costs[id(finer)]) for _, _, finer, _ in found.values()], settings)
    parts = {
        key: Part(model.groups[key], layout, report, finer.fine, costs[id(finer)], owned, kinds[id(finer)], muon)
        for (key, (layout, report, finer, muon)), owned in zip(found.items(), owners, strict=True)
    }
    return Parts(model, settings, parts, trade)


def stored_sizes(part: Part) -> torch.Tensor:
    """Elements that each shard of a buffer stores."""
    layout = part.layout
    sizes = torch.tensor([*layout.rank_to_offset[1:], layout.size]) - torch.tensor(layout.rank_to_offset)
    return sizes.max().expand_as(sizes).clone() if layout.stores_equal_segments else sizes


def _specs(model: ModelShapes, settings: Settings, choices: Mapping[str, Choice]) -> dict[str, Blocks]:
    """The parameters that Muon trains, and which parts of them are matrices: as `optim.route` decides."""
    if settings.optimizer != "muon":
        return {}
    if model.module is not None:
        chosen = route(model.module, choices)
    else:
        entries = [entry for group in model.groups.values() for entry in group.entries]
        plain = {e.name: BATCH_OF_MATRICES if len(e.shape) == 3 else "muon" for e in entries if len(e.shape) > 1}
        chosen = route({e.name: e.shape for e in entries}, {**dict.fromkeys(plain, "adamw"), **plain, **choices})
    return {line.name: line.blocks for line in chosen.lines if line.optimizer == "muon" and line.blocks is not None}


def finer_rows(model: ModelShapes, settings: Settings) -> frozenset[str]:
    """Names of the parameters that are laid out by their last dim.

    Raises:
        ValueError: if a pattern matches none.
    """
    names = [entry.name for group in model.groups.values() for entry in group.entries]
    found: set[str] = set()
    for pattern in settings.finer_rows:
        if not (matched := fnmatch.filter(names, pattern)):
            raise ValueError(f"preflight: finer_rows {pattern!r} matches no parameter; the first is {names[0]!r}")
        found.update(matched)
    return frozenset(found)


def _layout(
    group: Group, shapes: Sequence[torch.Size], marks: Sequence[bool], settings: Settings
) -> tuple[GlobalLayout, PaddingReport]:
    rows = [finer_view(shape) if mark else shape for shape, mark in zip(shapes, marks, strict=True)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddingWarning)  # the report has the figures
        try:
            limit = FsdpContext().max_padding
            cut = build_row_atomic_layout(rows, settings.shards, shard_layout=settings.layout, max_padding=limit)
        except ValueError as error:
            names = [entry.name for entry in group.entries]
            raise ValueError(f"preflight: group {group.key!r} of {', '.join(names[:8])}: {error}") from error
    equal = cut.stores_equal_segments
    layout = GlobalLayout(shapes, cut.tensor_to_offset, cut.size, cut.rank_to_offset, stores_equal_segments=equal)
    return layout, padding_report(cut)


def _owners(
    groups: Sequence[tuple[GlobalLayout, dict[int, float]]], settings: Settings
) -> tuple[list[dict[int, int]], Trade | None]:
    """For each group, tensor -> shard index; and the balance, where there is one."""
    if not any(costs for _, costs in groups):
        return [{} for _ in groups], None
    mesh, placements = settings.ranks, settings.placements
    axes = (mesh.ndim - 1,)
    shard_of = {rank: k for k, rank in enumerate(mesh.shard_ranks(axes, 0))}
    trade: Trade | None = None
    if settings.owners == "planned":
        balance = balance_owner_work(
            [WorkGroup(fine, mesh, list(costs), placements) for fine, costs in groups],
            [costs for _, costs in groups],
            byte_cost=settings.byte_cost,
            ranks_per_node=settings.node if settings.near_nodes else None,
        )
        owners, trade = [dict(mapping) for mapping in balance.owners], balance.trade
    elif settings.owners == "per group":
        known: dict[int, dict[int, int]] = {}
        for fine, costs in groups:
            if id(fine) not in known:
                known[id(fine)] = assign_owner_work(fine, mesh, list(costs), costs, placements=placements)
        owners = [known[id(fine)] for fine, _ in groups]
    else:
        turns = itertools.cycle(shard_of)
        owners = [{i: next(turns) for i in sorted(costs)} for _, costs in groups]
    return [{i: shard_of[rank] for i, rank in sorted(mapping.items())} for mapping in owners], trade
