"""Which parameter gets what: a decision for every parameter of a model as one printable value."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import nn

from mfsdp_func.optim.block_facts import ONE_MATRIX
from mfsdp_func.optim.block_split import block_tree, matrices
from mfsdp_func.optim.block_work import AdjustLr, ratio_fn
from mfsdp_func.optim.blocks import Blocks, as_blocks, blocks
from mfsdp_func.optim.route_rules import Facts, decide, facts_of_module, facts_of_shapes

Choice: TypeAlias = "Blocks | str | None"
"""What a name pattern asks for: "adamw"; "muon" (as one matrix); or a block spec, for Muon by blocks."""


class RouteLine(NamedTuple):
    """One parameter.

    Attributes:
        name: its first name.
        shape: its full shape.
        optimizer: "muon", "adamw", or "frozen", which gets none.
        blocks: for Muon, which parts are matrices.
        factors: for Muon, what the learning rate is multiplied with, for each kind of matrix.
        why: in words.
    """

    name: str
    shape: torch.Size
    optimizer: Literal["muon", "adamw", "frozen"]
    blocks: Blocks | None
    factors: tuple[float, ...]
    why: str


@dataclass(frozen=True)
class Route:
    """What `route` returns: a line per parameter, in module order. Print it to see a table."""

    lines: tuple[RouteLine, ...]
    adjust_lr_fn: AdjustLr = "original"

    def __getitem__(self, name: str) -> RouteLine:
        """The line of one parameter.

        Raises:
            KeyError: if there is none of that name.
        """
        for line in self.lines:
            if line.name == name:
                return line
        raise KeyError(f"route: no parameter {name!r}; see Route.lines")

    def override(self, choices: Mapping[str, Choice]) -> "Route":
        """Another route, in which the parameters whose names match a pattern get something else; the last match counts.

        Args:
            choices: pattern (`fnmatch`: ``*`` also matches dots) -> see `Choice`.

        Raises:
            ValueError: if a pattern matches no parameter that is trained, or a spec does not fit one that it matches.
        """
        lines = list(self.lines)
        for pattern, choice in choices.items():
            found = [n for n, line in enumerate(lines) if fnmatchcase(line.name, pattern)]
            found = [n for n in found if lines[n].optimizer != "frozen"]
            if not found:
                raise ValueError(
                    f"route: pattern {pattern!r} matches no parameter that is trained; names are such as"
                    f" {[line.name for line in lines[:3]]}"
                )
            for n in found:
                lines[n] = self._chosen(lines[n], pattern, choice)
        return replace(self, lines=tuple(lines))

    def _chosen(self, line: RouteLine, pattern: str, choice: Choice) -> RouteLine:
        if choice == "adamw" or choice is None:
            return RouteLine(line.name, line.shape, "adamw", None, (), f"asked for by {pattern!r}")
        spec = blocks(ONE_MATRIX) if choice == "muon" else as_blocks(choice)
        return _muon_line(line.name, line.shape, spec, f"asked for by {pattern!r}", self.adjust_lr_fn)

    def __str__(self) -> str:
        rows = [("parameter", "shape", "optimizer", "blocks", "rate times", "why")]
        for line in self.lines:
            shape = " x ".join(map(str, line.shape)) or "scalar"
            factors = ", ".join(f"{factor:.3g}" for factor in line.factors)
            spec = "" if line.blocks is None else str(line.blocks)
            rows.append((line.name, shape, line.optimizer, spec, factors, line.why))
        return as_table(rows)

    def summary(self) -> str:
        """The table with one line for all layers that are alike: numbers in names become ``*``."""
        met: dict[tuple[object, ...], list[RouteLine]] = {}
        for line in self.lines:
            name = ".".join("*" if word.isdecimal() else word for word in line.name.split("."))
            met.setdefault((name, *line[1:]), []).append(line._replace(name=name))
        return str(replace(self, lines=tuple(lines[0] for lines in met.values())))


def as_table(rows: Sequence[Sequence[str]]) -> str:
    """Columns side by side, the first row above a rule."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def route(
    module_or_shapes: nn.Module | Mapping[str, Iterable[int]],
    overrides: Mapping[str, Choice] | None = None,
    *,
    adjust_lr_fn: AdjustLr = "original",
) -> Route:
    """Decide for every parameter of a model: Muon or AdamW, by which blocks, and why.

    Muon trains the matrices of the repeated blocks; embeddings, heads, norms, biases and what is no matrix
    (depthwise convolutions, tables of numbers per channel) go to AdamW; so does what lies outside of the blocks. Experts
    are a batch of matrices; fused projections (QKV, gate and up) are taken apart where the module says how it is fused.
    Source of the division: K. Jordan et al., "Muon", 2024.

    Args:
        module_or_shapes: a module, on the meta device too; or name -> full shape, where names alone decide.
        overrides: see `Route.override`.
        adjust_lr_fn: see `mfsdp_func.optim.block_work.AdjustLr`.

    Raises:
        ValueError: see `Route.override`.

    >>> layer = {"norm.weight": (8,), "up.weight": (32, 8)}
    >>> shapes = {"embed.weight": (100, 8), **{f"layers.0.{name}": shape for name, shape in layer.items()}}
    >>> print(route(shapes))
    parameter             shape    optimizer  blocks            rate times  why
    --------------------  -------  ---------  ----------------  ----------  -----------------
    embed.weight          100 x 8  adamw                                    embedding
    layers.0.norm.weight  8        adamw                                    norm
    layers.0.up.weight    32 x 8   muon       m ... -> m (...)  2           matrix of a block
    """
    read = facts_of_module if isinstance(module_or_shapes, nn.Module) else facts_of_shapes
    facts = read(module_or_shapes)  # pyright: ignore[reportArgumentType]
    found = Route(tuple(_line(fact, adjust_lr_fn) for fact in facts), adjust_lr_fn)
    return found.override(overrides or {})


def _line(fact: Facts, adjust_lr_fn: AdjustLr) -> RouteLine:
    spec, why = decide(fact)
    if not fact.trainable:
        return RouteLine(fact.name, fact.shape, "frozen", None, (), "not trained")
    if spec is None:
        return RouteLine(fact.name, fact.shape, "adamw", None, (), why)
    return _muon_line(fact.name, fact.shape, spec, why, adjust_lr_fn)


def _muon_line(name: str, shape: torch.Size, spec: Blocks, why: str, adjust_lr_fn: AdjustLr) -> RouteLine:
    try:
        kinds = matrices(block_tree(spec, shape))
    except ValueError as error:
        error.add_note(f"for parameter {name!r}")
        raise
    ratio = ratio_fn(adjust_lr_fn)
    return RouteLine(name, shape, "muon", spec, tuple(ratio(*matrix) for _, matrix in kinds), why)
