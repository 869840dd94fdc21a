"""A route carried out: one transformation for the buffers of `fully_shard`, its matrices balanced over all of them."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias, cast

import torch

from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.optim.adamw import adamw as make_adamw
from mfsdp_func.optim.block_layout import BlockLayout, block_layout
from mfsdp_func.optim.masks import partition
from mfsdp_func.optim.muon import muon as make_muon
from mfsdp_func.optim.route import Choice, Route
from mfsdp_func.optim.transformation import GradientTransformation, LearningRate
from mfsdp_func.values.balance import Trade, WorkGroup, balance_owner_work
from mfsdp_func.values.buffer_spec import BufferSpec
from mfsdp_func.values.owner_planning import GroupOwnerLayout, assign_owner_work
from mfsdp_func.values.placement import TensorAtomic

Names: TypeAlias = Mapping[str, Any]
"""Group key -> names of its parameters by index: ``apply.names``."""

Chosen: TypeAlias = LearningRate | Mapping[str, Any] | Callable[..., GradientTransformation[Any]]
"""How a transformation is made: from a learning rate (a number, a tensor, a schedule), from a dict of all its arguments, or
by a function that takes ``owner_layout=`` and ``blocks=``, as ``functools.partial(optim.muon, 0.02, momentum=0.9)``.
"""

BYTE_COST = 1000.0
"""Floating-point operations that a rank could do while it sends one byte to another of its node.

For the accelerators of the pre-flight check's hardware table, half of the peak over the bandwidth inside a node is 520 to
1,460 (A100 to MI300X; H100 1,100). Between nodes it is about 6,000 to 22,500, for gloo on a laptop's cores about 33.
"""


@dataclass(frozen=True)
class RoutePlan:
    """A route bound to buffers: which tensor goes where, and who owns which block. Made once, used in every step.

    Attributes:
        route: the decisions.
        owners: for each group with matrices, who owns its blocks: an owner layout of the finer layout.
        finer: for each of them, the finer layout.
        adamw_keys: group and index of every tensor that AdamW trains.
        muon_keys: of those that Muon trains.
        trade: how even the work is, and what moves; None where nothing was left to choose.
    """

    route: Route
    owners: Mapping[str, GroupOwnerLayout]
    finer: Mapping[str, BlockLayout]
    adamw_keys: frozenset[tuple[str, int]]
    muon_keys: frozenset[tuple[str, int]]
    trade: Trade | None

    def transformation(self, *, muon: Chosen | None = None, adamw: Chosen | None = None) -> GradientTransformation[Any]:
        """One transformation for dicts of buffers; see `from_route`."""
        parts: list[tuple[frozenset[Any], GradientTransformation[Any]]] = []
        if self.muon_keys:
            options = {"owner_layout": self.owners, "blocks": self.finer}
            parts.append((self.muon_keys, _made("muon", muon, make_muon, options, self.route)))
        if self.adamw_keys:
            parts.append((self.adamw_keys, _made("adamw", adamw, make_adamw, {}, self.route)))
        return partition(*parts)


def from_route(
    route: Route,
    params: Mapping[str, DBuffer],
    *,
    muon: Chosen | None = None,
    adamw: Chosen | None = None,
    blocks: Mapping[str, Choice] | None = None,
    names: Names | None = None,
    byte_cost: float = BYTE_COST,
) -> GradientTransformation[Any]:
    """One transformation for the dict of buffers that `fully_shard` returns, each parameter as the route says.

    The blocks of all buffers are given owners together, so that work is even, and Muon moves them in one exchange each
    way. On axes that replicate, each replica group works within itself. Where a placement is `TensorAtomic`, the owners
    that the buffers have are kept.

        apply, params = mf.fully_shard(model, mesh, placements)
        optimizer = optim.from_route(optim.route(model), params, muon=0.02, adamw=3e-4)
        state = optimizer.init(params)
        ...
        updates, state = optimizer.update(gradients, state, params)
        params = optim.apply_updates(params, updates)

    Args:
        route: see `mfsdp_func.optim.route`.
        params: group -> buffer.
        muon: how Muon is made; see `Chosen`. Needed where the route names it.
        adamw: likewise.
        blocks: name pattern -> block spec, over what the route says; see `Route.override`.
        names: ``apply.names``. Only needed where parameters were frozen or thawed after the route was made, or names do
            not tell to which buffer they belong.
        byte_cost: the work that a rank could do while it sends one byte: the more, the less owners move and the less even
            their work is. ``mfsdp_func.preflight(byte_cost=)`` shows what comes of it.

    Raises:
        ValueError: if a parameter has no line in the route or a line no parameter, a pattern matches nothing, or an
            optimizer that the route names is not given.
        TypeError: if `muon` or `adamw` is none of `Chosen`.
    """
    plan = plan_route(route, params, blocks=blocks, names=names, byte_cost=byte_cost)
    return plan.transformation(muon=muon, adamw=adamw)


def plan_route(
    route: Route,
    params: Mapping[str, DBuffer],
    *,
    blocks: Mapping[str, Choice] | None = None,
    names: Names | None = None,
    byte_cost: float = BYTE_COST,
) -> RoutePlan:
    """What `from_route` works out before it knows optimizers: for code that makes these anew in every step.

    As `TorchOptimizer` does: ``lambda lr: plan.transformation(muon=partial(optim.muon, lr), adamw=0.01 * lr)``.
    Args and errors: see `from_route`.
    """
    specs = tuple((key, buffer.spec) for key, buffer in params.items())
    told = None if names is None else tuple((key, tuple(map(str, names[key]))) for key, _ in specs)
    dtypes = tuple(buffer.dtype for buffer in params.values())
    return _planned(route.override(blocks or {}), specs, dtypes, told, byte_cost)


@lru_cache(maxsize=64)
def _planned(
    route: Route,
    specs: tuple[tuple[str, BufferSpec], ...],
    dtypes: tuple[torch.dtype, ...],
    told: tuple[tuple[str, tuple[str, ...]], ...] | None,
    byte_cost: float,
) -> RoutePlan:
    places = names_of_groups(route, dict(specs)) if told is None else dict(told)
    lines = {line.name: line for line in route.lines}
    muon: set[tuple[str, int]] = set()
    adamw: set[tuple[str, int]] = set()
    finer: dict[str, BlockLayout] = {}
    for key, spec in specs:
        chosen: dict[int, Any] = {}
        for i, (name, shape) in enumerate(zip(places[key], spec.layout.tensor_shapes, strict=True)):
            if name not in lines:
                raise ValueError(f"from_route: parameter {name!r} of group {key!r} has no line in the route")
            line = lines.pop(name)
            if (line.shape or torch.Size([1])) != shape:
                raise ValueError(
                    f"from_route: parameter {name!r} is {tuple(line.shape)} in the route, but tensor {i} of group"
                    f" {key!r} is {tuple(shape)}; make the route of the module that was sharded"
                )
            if line.optimizer == "frozen":
                raise ValueError(f"from_route: parameter {name!r} was frozen when the route was made; make it again")
            if line.blocks is not None and shape.numel():
                chosen[i] = line.blocks
            (muon if i in chosen else adamw).add((key, i))
        if chosen:
            finer[key] = block_layout(spec.layout, chosen)
    if left := [name for name, line in lines.items() if line.optimizer != "frozen"]:
        raise ValueError(
            f"from_route: no buffer holds parameter {left[0]!r} ({len(left)} missing in all); give all buffers that"
            " fully_shard returned, and the route of the same module"
        )
    named = dict(specs)
    owners, trade = _owners(finer, named, dict(zip(named, dtypes, strict=True)), byte_cost)
    return RoutePlan(route, owners, finer, frozenset(adamw), frozenset(muon), trade)


def _owners(
    finer: Mapping[str, BlockLayout],
    specs: Mapping[str, BufferSpec],
    dtypes: Mapping[str, torch.dtype],
    byte_cost: float,
) -> tuple[dict[str, GroupOwnerLayout], Trade | None]:
    costs = {key: layout.costs() for key, layout in finer.items()}
    if any(isinstance(placement, TensorAtomic) for key in finer for placement in specs[key].placements):
        chosen = [
            assign_owner_work(layout.fine, specs[key].mesh, costs[key], costs[key], placements=specs[key].placements)
            for key, layout in finer.items()
        ]
        trade = None
    else:
        work = [
            WorkGroup(layout.fine, specs[key].mesh, costs[key], specs[key].placements) for key, layout in finer.items()
        ]
        chosen, trade, _ = balance_owner_work(work, list(costs.values()), byte_cost=byte_cost)
    owners = {
        key: GroupOwnerLayout(
            specs[key].mesh, finer[key].fine, owner, specs[key].placements, key or "root", dtype=dtypes[key]
        )
        for key, owner in zip(finer, chosen, strict=True)
    }
    return owners, trade if finer else None


def names_of_groups(route: Route, specs: Mapping[str, BufferSpec]) -> dict[str, tuple[str, ...]]:
    """The parameters of each group, found by their names: those of the unit whose name is the longest prefix.

    Raises:
        ValueError: if they are not as many as the group has tensors, or not of their shapes.
    """
    units = {key: "" if key.split(":")[0] == "root" else key.split(":")[0] for key in specs}
    found: dict[str, list[str]] = {key: [] for key in specs}
    for line in route.lines:
        if line.optimizer == "frozen":
            continue
        inside = [key for key, unit in units.items() if not unit or line.name.startswith(f"{unit}.")]
        if inside:
            longest = max(len(units[key]) for key in inside)
            (first, *others) = [key for key in inside if len(units[key]) == longest]
            if others:
                raise ValueError(
                    f"from_route: groups {[first, *others]} may all hold parameter {line.name!r}; give names=apply.names"
                )
            found[first].append(line.name)
    for key, names in found.items():
        shapes = [route[name].shape or torch.Size([1]) for name in names]
        if shapes != list(specs[key].layout.tensor_shapes):
            raise ValueError(
                f"from_route: group {key!r} has tensors {list(map(tuple, specs[key].layout.tensor_shapes))}, but the"
                f" route's parameters of that name are {names}; give names=apply.names"
            )
    return {key: tuple(names) for key, names in found.items()}


def _made(
    label: str, chosen: Chosen | None, make: Callable[..., Any], options: Mapping[str, Any], route: Route
) -> GradientTransformation[Any]:
    if chosen is None:
        raise ValueError(f"from_route: the route names {label}; give {label}= a learning rate, or how it is made")
    if isinstance(chosen, GradientTransformation):
        if not options:
            return cast("GradientTransformation[Any]", chosen)
        raise TypeError(
            f"from_route: {label}= is a finished transformation, which cannot be given owners; give"
            " functools.partial(optim.muon, ...)"
        )
    defaults = {"adjust_lr_fn": route.adjust_lr_fn} if options else {}
    if isinstance(chosen, Mapping):
        return make(**{**defaults, **chosen, **options})
    if isinstance(chosen, int | float | torch.Tensor):
        return make(chosen, **defaults, **options)
    if not callable(chosen):
        raise TypeError(f"from_route: {label}= must be a learning rate, a dict or a function, got {chosen!r}")
    if not options:
        return make(chosen) if _needs_argument(chosen) else cast("Callable[[], Any]", chosen)()
    if "owner_layout" in inspect.signature(chosen).parameters or _takes_anything(chosen):
        return cast("Callable[..., Any]", chosen)(**options)
    return make(chosen, **defaults, **options)


def _needs_argument(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters.values()
    return any(p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _takes_anything(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())
