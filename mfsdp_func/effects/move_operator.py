"""The operator that compiled code holds: a map behind a key, on whatever carrier serves the mesh at run time.

Every rank must run its calls in the order of its program, though the graphs of ranks differ and nobody may read a
result. Three things see to it, each where the others do not reach:

- An *ordered effect*: AOTAutograd threads a token through the calls, so that none is removed, runs twice, or changes
  between forward and backward.
- The link of the call before as an input (`after`): Inductor's scheduler, which torch's tokens do not bind (2.13),
  sees a data dependence.
- In a checkpointed region, results are kept: ranks would recompute different calls, each those that it needs itself.
"""

from collections.abc import Sequence

import torch
from torch.fx.node import has_side_effect
from torch.utils.checkpoint import CheckpointPolicy

from mfsdp_func.effects.torch_internals import keep_in_order, proxy_tracer
from mfsdp_func.plans.linear_map import LinearMap

LIBRARY = torch.library.Library("mfsdp_func", "DEF")
"""Holds `mfsdp_func::move`; `mfsdp_func.effects.move` implements it."""

LIBRARY.define(
    "move(Tensor[] inputs, Tensor link, Tensor? after, str key, ScalarType? dtype, bool forward, bool differentiated)"
    " -> Tensor[]",
    tags=torch.Tag.cudagraph_unsafe,  # a replayed graph would leave out what runs on the host
)

_MAPS: dict[str, LinearMap] = {}
"""Kept as long as the process: compiled code may hold any of the keys."""


def remember(linear: LinearMap) -> str:
    """The key of a map, under which `remembered` finds it and its transpose."""
    for value in (linear, linear.transpose):
        _MAPS[value.key] = value
    return linear.key


def remembered(key: str) -> LinearMap:
    """The map that was remembered under a key."""
    return _MAPS[key]


def _fake(
    inputs: list[torch.Tensor],
    link: torch.Tensor,
    after: torch.Tensor | None,
    key: str,
    dtype: torch.dtype | None,
    forward: bool,
    differentiated: bool,
) -> list[torch.Tensor]:
    linear = remembered(key)
    outputs = [link.new_empty((numel, *link.shape), dtype=dtype) for numel in linear.output_numels]
    return [torch.empty_like(link), *outputs]


torch.library.register_fake("mfsdp_func::move", _fake, lib=LIBRARY)
keep_in_order("mfsdp_func::move")
has_side_effect(torch.ops.mfsdp_func.move.default)


def call_operator(
    linear: LinearMap,
    inputs: Sequence[torch.Tensor],
    link: torch.Tensor,
    dtype: torch.dtype | None,
    forward: bool,
    differentiated: bool,
) -> list[torch.Tensor]:
    """Let what traces here see one call of the operator; returns ``[link, *outputs]``."""
    tracer = proxy_tracer()
    last_node = next(iter(reversed(tracer.graph.nodes)), None) if tracer else None
    results = torch.ops.mfsdp_func.move(
        list(inputs),
        link,
        getattr(tracer, "mfsdp_func_last_link", None),
        remember(linear),
        dtype,
        forward,
        differentiated,
    )
    if tracer:
        tracer.mfsdp_func_last_link = results[0]
        _keep_in_checkpoints(tracer.graph, last_node)
    return results


def _keep_in_checkpoints(graph: torch.fx.Graph, last_node: torch.fx.Node | None) -> None:
    """Mark the nodes after `last_node`, where they lie in a checkpointed region, as not to be recomputed."""
    for node in reversed(graph.nodes):
        if node is last_node:
            break
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
