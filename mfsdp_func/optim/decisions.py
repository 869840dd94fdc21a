"""Transformations that decide for all ranks alike: clipping, skipping, counting, scaling of losses.

What depends on values is chosen by `torch.where`: no host waits for a device, and one graph serves both choices. All
ranks run all that is inside, whatever is chosen, so that owners and holders always meet.
"""

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.optim.facts import NOWHERE, Count, Facts, Needs, Where, facts_of
from mfsdp_func.optim.transformation import (
    GradientTransformation,
    device_of,
    run_part,
    select,
    unchanged,
)
from mfsdp_func.values.mesh import Mesh, MeshLike, as_mesh


class ClipState(NamedTuple):
    """State of `clip_by_global_norm`: nothing."""


class ApplyIfFiniteState(NamedTuple):
    """State of `apply_if_finite`. All but the last field: 0-D."""

    notfinite_count: torch.Tensor
    """Number of updates in a row, the last one included, whose gradients were not finite: int64."""
    last_finite: torch.Tensor
    """Whether the last gradients were finite: bool."""
    total_notfinite: torch.Tensor
    """Number of updates so far whose gradients were not finite: int64."""
    inner_state: Any
    """As the last update that was applied left it."""


class CountState(NamedTuple):
    """State of `divide_by_count`."""

    total: torch.Tensor
    """Sum of all counts of all ranks so far: 0-D, float64."""


class DynamicLossScaleState(NamedTuple):
    """State of `dynamic_loss_scale`. All but the last field: 0-D."""

    scale: torch.Tensor
    """What the loss of the next step is to be multiplied with: float64."""
    growth_tracker: torch.Tensor
    """Number of updates in a row whose gradients were finite: int64."""
    inner_state: Any
    """As the last update that was applied left it."""


def clip_by_global_norm(
    max_norm: float | torch.Tensor, *, mesh: Mesh | MeshLike | None = None
) -> GradientTransformation[ClipState]:
    """Where the norm of all updates of all ranks is not below `max_norm`, multiply them by ``max_norm / norm``.

    The norm is that of `mfsdp_func.global_norm`: replicas count once, padding never. It takes one all-reduce of 16
    bytes, which the parts of a `chain` share; see there. A NaN anywhere makes all updates NaN, as in Optax;
    `apply_if_finite` around the chain skips them.

    Args:
        max_norm: a positive number, or a 0-D tensor.
        mesh: the ranks that decide together. By default the smallest of the meshes (of buffers and owner layouts) that
            contains all others. Plain tensors are then parts of it that differ from rank to rank.

    Raises:
        ValueError: if `max_norm` is not positive; in `update`, see `mfsdp_func.optim.facts.facts_of`.

    >>> optimizer = clip_by_global_norm(1.0)
    >>> grads = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([4.0])}
    >>> optimizer.update(grads, optimizer.init(grads), grads)[0]
    {'w': tensor([0.6000, 0.0000]), 'b': tensor([0.8000])}
    """
    if not isinstance(max_norm, torch.Tensor) and not max_norm > 0:
        raise ValueError(f"clip_by_global_norm: max_norm must be a positive number, got {max_norm}")
    own = Where(mesh=None if mesh is None else as_mesh(mesh))

    def factor(facts: Facts) -> torch.Tensor:
        norm = facts.norm
        return torch.where(norm < max_norm, 1.0, max_norm / norm)

    def update(
        updates: Any,
        state: ClipState,
        params: Any,
        *,
        facts: Facts | None = None,
        count: Count | None = None,
        where: Where = NOWHERE,
    ) -> tuple[Any, ClipState]:
        norm = (facts_of(updates, own + where, count) if facts is None else facts).norm

        def clip(one: torch.Tensor) -> torch.Tensor:
            here = norm.to(one.device)
            return torch.where(here < max_norm, one, (one / here) * max_norm)

        return pytree.tree_map(clip, updates), state

    return GradientTransformation(lambda _: ClipState(), update, needs=Needs(facts=True, where=own, factor=factor))


def apply_if_finite(
    inner: GradientTransformation[Any], max_consecutive_errors: int = 5
) -> GradientTransformation[ApplyIfFiniteState]:
    """Skip updates whose gradients are not finite, on any rank: parameters and the state of `inner` stay, bit for bit.

    After `max_consecutive_errors` skips in a row updates pass again, as in Optax, so that a diverged run shows. The
    finding takes one all-reduce of 16 bytes, shared with `inner` where its first parts ask for facts too.

    Args:
        inner: what to skip.
        max_consecutive_errors: see above.

    Raises:
        ValueError: if `inner` counts on the host (`accumulate`), which no device can take back: put it outside.
    """
    _refuse_host_count("apply_if_finite", inner)
    needs = Needs(facts=True, where=inner.needs.where)

    def init(params: Any) -> ApplyIfFiniteState:
        zero = torch.zeros((), dtype=torch.int64, device=device_of(params))
        return ApplyIfFiniteState(zero, torch.ones_like(zero, dtype=torch.bool), zero.clone(), inner.init(params))

    def update(
        updates: Any,
        state: ApplyIfFiniteState,
        params: Any,
        *,
        facts: Facts | None = None,
        count: Count | None = None,
        where: Where = NOWHERE,
    ) -> tuple[Any, ApplyIfFiniteState]:
        known = where + needs.where
        facts = facts_of(updates, known, count) if facts is None else facts
        finite = facts.finite.to(state.last_finite.device)
        errors = torch.where(finite, 0, state.notfinite_count + 1)
        applied = finite | (errors > max_consecutive_errors)
        results, new = run_part(inner, updates, state.inner_state, params, facts, count, known)
        total = torch.where(finite, state.total_notfinite, state.total_notfinite + 1)
        kept = select(applied, new, state.inner_state)
        return select(applied, results, unchanged(results)), ApplyIfFiniteState(errors, finite, total, kept)

    return GradientTransformation(init, update, inner.whole, needs)


def divide_by_count(*, mesh: Mesh | MeshLike | None = None) -> GradientTransformation[CountState]:
    """Divide gradients by the number of samples, tokens or the like on all ranks, each of which hands its own to `update`.

    ``update(grads, state, params, count=tokens)``, with gradients of the *sum* of losses over all samples of all ranks.
    The counts travel with the other facts of the gradients, see `chain`.

    Args:
        mesh: see `clip_by_global_norm`.

    Raises:
        TypeError: in `update`, without ``count=``.
    """
    own = Where(mesh=None if mesh is None else as_mesh(mesh))

    def update(
        updates: Any,
        state: CountState,
        params: Any,
        *,
        facts: Facts | None = None,
        count: Count | None = None,
        where: Where = NOWHERE,
    ) -> tuple[Any, CountState]:
        if count is None:
            raise TypeError("divide_by_count: update needs count=, the number of samples or tokens of this rank")
        total = (facts_of(updates, own + where, count) if facts is None else facts).count
        divided = pytree.tree_map(lambda one: one / total.to(one.device), updates)
        return divided, CountState(state.total + total.to(state.total.device))

    def init(params: Any) -> CountState:
        return CountState(torch.zeros((), dtype=torch.float64, device=device_of(params)))

    needs = Needs(facts=True, where=own, factor=lambda facts: 1 / facts.count)
    return GradientTransformation(init, update, needs=needs)


def dynamic_loss_scale(
    inner: GradientTransformation[Any],
    *,
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
) -> GradientTransformation[DynamicLossScaleState]:
    """Take gradients of ``loss * state.scale``, hand them to `inner` unscaled, and find the largest scale that serves.

    Where a gradient of any rank is not finite, nothing is updated (bit for bit, as in `apply_if_finite`) and the scale
    is multiplied by `backoff_factor`; after `growth_interval` finite steps in a row, by `growth_factor`. The rule of
    `torch.amp.GradScaler`, without a host that waits. Gradients in halves are unscaled in float32.

    Args:
        inner: what to update with.
        init_scale: the first scale.
        growth_factor: at least 1.
        backoff_factor: in (0, 1).
        growth_interval: in steps.

    Raises:
        ValueError: on another number; see `apply_if_finite`.

    >>> from mfsdp_func.optim import adamw
    >>> optimizer = dynamic_loss_scale(adamw(0.1), init_scale=4.0)
    >>> params = {"w": torch.ones(1)}
    >>> state = optimizer.init(params)
    >>> grads = torch.func.grad(lambda params: (params["w"] * torch.inf * state.scale).sum())(params)
    >>> updates, state = optimizer.update(grads, state, params)
    >>> updates["w"].item(), state.scale.item()
    (-0.0, 2.0)
    """
    _refuse_host_count("dynamic_loss_scale", inner)
    if not (init_scale > 0 and growth_factor >= 1 and 0 < backoff_factor < 1 and growth_interval > 0):
        raise ValueError(
            "dynamic_loss_scale: expected init_scale > 0, growth_factor >= 1, 0 < backoff_factor < 1 and growth_interval"
            f" > 0, got {init_scale}, {growth_factor}, {backoff_factor}, {growth_interval}"
        )
    needs = Needs(facts=True, where=inner.needs.where)

    def init(params: Any) -> DynamicLossScaleState:
        scale = torch.full((), init_scale, dtype=torch.float64, device=device_of(params))
        return DynamicLossScaleState(scale, torch.zeros_like(scale, dtype=torch.int64), inner.init(params))

    def update(
        grads: Any,
        state: DynamicLossScaleState,
        params: Any,
        *,
        facts: Facts | None = None,
        count: Count | None = None,
        where: Where = NOWHERE,
    ) -> tuple[Any, DynamicLossScaleState]:
        known = where + needs.where
        facts = facts_of(grads, known, count) if facts is None else facts
        finite = facts.finite.to(state.scale.device)

        def unscale(grad: torch.Tensor) -> torch.Tensor:
            wide = grad.float() if grad.dtype in (torch.float16, torch.bfloat16) else grad
            return wide / state.scale.to(grad.device)

        unscaled = pytree.tree_map(unscale, grads)
        results, new = run_part(inner, unscaled, state.inner_state, params, facts.scaled(1 / state.scale), count, known)
        tracker = torch.where(finite, state.growth_tracker + 1, 0)
        grown = tracker == growth_interval
        scale = torch.where(
            finite, torch.where(grown, state.scale * growth_factor, state.scale), state.scale * backoff_factor
        )
        kept = select(finite, new, state.inner_state)
        state = DynamicLossScaleState(scale, torch.where(grown, 0, tracker), kept)
        return select(finite, results, unchanged(results)), state

    return GradientTransformation(init, update, inner.whole, needs)


def _refuse_host_count(label: str, inner: GradientTransformation[Any]) -> None:
    if inner.needs.host_count:
        raise ValueError(
            f"{label}: inside is a transformation that counts on the host (accumulate), and what depends on values cannot"
            f" take its count back; put it outside: accumulate({label}(...), every)"
        )
