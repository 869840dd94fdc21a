"""What is asked: the mesh, how parameters lie on it, who owns what, and in which dtypes. A value, and a command line."""

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args

import torch

from mfsdp_func.fsdp.context import FsdpContext
from mfsdp_func.optim.routed import BYTE_COST
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import Placement, Replicate, RowAtomic, ShardLayout, check_shard_layout

Owning: TypeAlias = Literal["planned", "per group", "round robin"]
"""Owners chosen over all groups together (as `optim.from_route` does), group by group among the holders
(`assign_owner_work`), or in turn."""

Optimizing: TypeAlias = Literal["muon", "adamw"]
"""Muon for the matrices of blocks with AdamW for the rest, or AdamW for all."""

Carrying: TypeAlias = Literal["process group", "gloo", "simulated"]
"""Whose messages are counted: those of `torch.distributed` with NCCL (packed for its links, native collectives where they
serve), those with gloo, whose all-gathers are messages straight to each receiver, or those of `simulate`, whose trace packs
otherwise and whose collectives all go straight."""


@dataclass(frozen=True)
class Settings:
    """What a run is started with, as far as it decides bytes and memory.

    Attributes:
        mesh: number of ranks along each axis. The last axis shards, those before it replicate (HSDP).
        node: global rank r is on node ``r // node``.
        layout: how rows are cut; see `ShardLayout`.
        owners: see `Owning`.
        optimizer: see `Optimizing`.
        dtype: of the main weights and the optimizer's state.
        param_dtype: in which units gather and compute; None for `dtype`.
        reduce_dtype: in which gradients are averaged; None for `param_dtype`.
        travel_dtype: in which matrices travel to their owners (``ns_dtype`` of Muon).
        finer_rows: patterns of names of parameters that are laid out by their last dim; the default is that of
            `FsdpContext`, whose names they become in `Preflight.context`.
        recompute: whether units run again in the backward pass and keep no activations (``FsdpContext(recompute=True)``).
        byte_cost: see `balance_owner_work`; only for planned owners. The default is that of `optim.from_route`.
        near_nodes: whether owners are planned with a higher price on bytes between nodes, which `optim.from_route`, knowing
            no nodes, does not do.
        batch: (sequences, tokens of each) of one rank in one step; None to leave activations and compute out.
        hardware: name of an entry of the hardware table.
        carrier: see `Carrying`.

    Raises:
        ValueError: on values that make no sense, with what is expected.

    >>> Settings((2, 4), node=4).world, Settings((2, 4)).shards
    (8, 4)
    """

    mesh: tuple[int, ...]
    node: int = 8
    layout: ShardLayout = ShardLayout.PADDED
    owners: Owning = "planned"
    optimizer: Optimizing = "muon"
    dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    travel_dtype: torch.dtype = torch.bfloat16
    finer_rows: tuple[str, ...] = tuple(FsdpContext().finer_rows)
    recompute: bool = False
    byte_cost: float = BYTE_COST
    near_nodes: bool = False
    batch: tuple[int, int] | None = None
    hardware: str = "h100"
    carrier: Carrying = "process group"

    def __post_init__(self) -> None:
        check_shard_layout("preflight", self.layout)
        _check_one_of("owners", self.owners, get_args(Owning))
        _check_one_of("optimizer", self.optimizer, get_args(Optimizing))
        _check_one_of("carrier", self.carrier, get_args(Carrying))
        sizes: Sequence[Any] = (*self.mesh, self.node, *(self.batch or ()))
        if not self.mesh or any(not isinstance(size, int) or isinstance(size, bool) or size < 1 for size in sizes):
            raise ValueError(
                f"preflight: mesh, node and batch must be positive whole numbers, got {self.mesh}, {self.node} and"
                f" {self.batch}"
            )
        if self.batch is not None and len(self.batch) != 2:
            raise ValueError(f"preflight: batch must be (sequences, tokens of each), got {self.batch}")
        if not (math.isfinite(self.byte_cost) and self.byte_cost >= 0):
            raise ValueError(f"preflight: byte_cost must be a number >= 0, got {self.byte_cost}")
        if isinstance(self.finer_rows, str) or not all(isinstance(pattern, str) for pattern in self.finer_rows):
            raise ValueError(f"preflight: finer_rows must be several patterns of names, got {self.finer_rows!r}")
        for name in ("dtype", "param_dtype", "reduce_dtype", "travel_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(f"preflight: {name} must be a floating-point torch.dtype, got {value!r}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh)

    @property
    def shards(self) -> int:
        """Number of ranks that share one copy of a buffer."""
        return self.mesh[-1]

    @property
    def ranks(self) -> Mesh:
        """The mesh as a value that is nobody's."""
        return Mesh(self.mesh)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Of main weights, gradients and optimizer state."""
        return (*[Replicate()] * (len(self.mesh) - 1), RowAtomic())

    @property
    def gather_dtype(self) -> torch.dtype:
        """In which units gather their parameters."""
        return self.param_dtype or self.dtype

    @property
    def gradient_dtype(self) -> torch.dtype:
        """In which gradients are averaged."""
        return self.reduce_dtype or self.gather_dtype

    def but(self, **changes: Any) -> "Settings":
        """The same with other values."""
        return replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        """Every setting as JSON has it."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}

    def options(self) -> str:
        """The settings that are not the default, as options of the command."""
        words = ["--mesh", "x".join(map(str, self.mesh))]
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, bool):
                words.append("--" + field.name.replace("_", "-"))
            elif field.name == "finer_rows":
                words += [word for pattern in value for word in ("--finer-rows", pattern)]
            else:
                plain = _plain(value)
                word = "x".join(map(str, plain)) if isinstance(plain, list) else str(plain)
                words += ["--" + field.name.replace("_", "-"), word]
        return shlex.join(words)


def _check_one_of(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise ValueError(f"preflight: {name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def _plain(value: Any) -> Any:
    if isinstance(value, ShardLayout):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return list(value) if isinstance(value, tuple) else value
