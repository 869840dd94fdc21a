"""Choices of `fully_shard` that are not placements."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from mfsdp_func.values.placement import ShardLayout, check_shard_layout


@dataclass(frozen=True)
class FsdpContext:
    """How `fully_shard` lays parameters out, and how units run. Frozen.

    Attributes:
        parameter_to_owner: for `TensorAtomic`: parameter, or its qualified name -> global rank that owns it whole.
        shard_layout: how the rows of each buffer are cut; see `ShardLayout`. `PADDED` is the default because its
            segments join without a copy, and the widths of most models divide one another, so that it hardly pads.
            Where they do not, `BALANCED` is the better choice: never more than a row of padding per rank, for one more
            copy of each gathered buffer.
        max_padding: a buffer that would store more than this many times what equal segments must store at least is
            refused, with figures, instead of laid out; ``math.inf`` for no limit.
        finer_rows: names of parameters laid out by their last dim, as ``(prod(shape[:-1]), shape[-1])``: for few and
            huge rows, as experts have. Costs nothing. The layout keeps the parameter's own shape, so that optimizers see
            it whatever its rows are; a rank's part is flat where it ends inside an index of dim 0.
        param_dtype: dtype in which parameters are gathered and units compute; None for the main weights' own.
        reduce_dtype: dtype in which gradients are averaged; None for `param_dtype`.
        output_dtype: dtype of the floating-point results of `apply`; None to leave them.
        cast_forward_inputs: cast floating-point inputs of each unit to `param_dtype`.
        deterministic: average gradients by a fold in rank order; see `reduce_scatter`.
        recompute: names of units that keep no activations, and run again in the backward pass; True for all. Gives the same
            numbers where a unit draws from the global generators of torch, Python and NumPy alone.
        compile: names of units whose forward is compiled, each for itself, as `torch.nn.Module.compile` does for the blocks of
            an FSDP2 model; True for all. Equal units are compiled once, whatever the depth. The first call of each runs
            as it is, watched for tensors that enter or leave unseen, which compiled code does not show. In a compiled
            region around `apply`, under `vmap`, in forward mode and for derivatives beyond the first it is not used, and
            in the latter three a unit may not draw random numbers.
        compile_options: keywords of `torch.compile` for these units.
        ignored: names of parameters that stay whole on every rank, each with the rank's own value, in
            `ShardedModule.ignored_params`. As in FSDP2, their gradients are this rank's own, and nobody averages them.
        prefetch: in eager mode, gather the next unit's parameters while this unit computes.
        init: gives the values of the parameters that a module owns directly, where they are on the meta device; called
            as ``init(name, module)`` with empty parameters on `device`. By default ``module.reset_parameters()``.
        seed: of the random state during `init`, alike on all ranks.
        device: where parameters live; None for where the module's are (for meta ones: where the mesh communicates).
    """

    parameter_to_owner: Mapping[str | nn.Parameter, int] | None = None
    shard_layout: ShardLayout = ShardLayout.PADDED
    max_padding: float = 4.0
    finer_rows: frozenset[str] = frozenset()
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    deterministic: bool = False
    recompute: bool | frozenset[str] | tuple[str, ...] = False
    compile: bool | frozenset[str] | tuple[str, ...] = False
    compile_options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ignored: frozenset[str] | tuple[str, ...] = ()
    prefetch: bool = True
    init: Callable[[str, nn.Module], None] | None = field(default=None)
    seed: int = 0
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        check_shard_layout("FsdpContext", self.shard_layout)
        limit: object = self.max_padding
        if not isinstance(limit, (int, float)) or isinstance(limit, bool) or math.isnan(limit) or limit < 1:
            raise ValueError(f"FsdpContext: max_padding must be a number of at least 1, got {limit!r}")
