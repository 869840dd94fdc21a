"""Muon on whole matrices or on row shards: momentum where the rows are, Newton-Schulz where the owner is."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

import torch

from mfsdp_func.effects.here import carrier_of
from mfsdp_func.optim.adamw import mixed
from mfsdp_func.optim.chains import add_decayed_weights, counted_chain, scale_by_learning_rate
from mfsdp_func.optim.newton_schulz import COEFFICIENTS, EPS, default_dtype, newton_schulz
from mfsdp_func.optim.owners import Owners, map_on_owners, owned_shapes
from mfsdp_func.optim.transformation import GradientTransformation, LearningRate, first_step
from mfsdp_func.values.owner_planning import GroupOwnerLayout

Key = TypeVar("Key")

AdjustLr: TypeAlias = Literal["original", "match_rms_adamw"]

Orthogonalize: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A function of matrices, ``(..., m, n)``, to as many of the same shape."""

_RATIOS: dict[AdjustLr, Callable[[int, int], float]] = {
    "original": lambda m, n: math.sqrt(max(1, m / n)),
    "match_rms_adamw": lambda m, n: 0.2 * math.sqrt(max(m, n)),
}


class MuonState(NamedTuple):
    """State of `muon`."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64."""
    momentum: dict[Any, torch.Tensor]
    """Running mean of gradients: per tensor (or shard) that takes part, the shape and dtype of the parameter."""


def muon(
    learning_rate: LearningRate,
    *,
    owner_layout: Owners | None = None,
    momentum: float | torch.Tensor = 0.95,
    nesterov: bool = True,
    weight_decay: float | torch.Tensor = 0.0,
    adjust_lr_fn: AdjustLr = "original",
    ns_steps: int = 5,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    ns_dtype: torch.dtype | None = None,
    eps: float = EPS,
    batch_of_matrices: bool = False,
    stack_equal_shapes: bool = True,
) -> GradientTransformation[MuonState]:
    """Momentum, orthogonalised: the numbers of `torch.optim.Muon` (which has ``ns_dtype=torch.bfloat16``).

    The chain of `scale_by_muon`, `add_decayed_weights` and `scale_by_learning_rate`.

    With an `owner_layout`, parameters, gradients, momentum and updates are dicts, tensor index -> this rank's shard, in
    any shape, of every participating tensor that this rank holds. Every rank of the mesh calls `update`: momentum on
    the shards, `gather`, Newton-Schulz on the owners, `scatter`, and the rest on the shards again. The two exchanges
    travel in `ns_dtype`, which changes no bit of the result: Newton-Schulz begins by converting to it. Without an
    `owner_layout`, the dicts hold whole tensors under any keys, and nothing moves. Both give the same bits with
    ``stack_equal_shapes=False``.

    With owner layouts of several groups by name (blocks of a model, whose buffers are their own), keys are pairs
    ``(name, tensor index)``: all groups move in one exchange each way, and equal shapes of all of them are stacked. They
    share one dtype; else give `ns_dtype`, in which everything travels.

    Sources: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; J. Liu et al., "Muon is
    Scalable for LLM Training", 2025 ("match_rms_adamw").

    Args:
        learning_rate: see `LearningRate`.
        owner_layout: who orthogonalises what, see `Owners`; None where tensors are whole.
        momentum: how much of the running mean of gradients an update keeps.
        nesterov: whether the gradient is mixed once more into its running mean.
        weight_decay: every update takes ``learning_rate * weight_decay`` of the parameter off it.
        adjust_lr_fn: what the learning rate is multiplied with, for an m x n matrix: "original" is
            ``sqrt(max(1, m / n))``, "match_rms_adamw" is ``0.2 * sqrt(max(m, n))``.
        ns_steps: see `newton_schulz`.
        ns_coefficients: see `newton_schulz`.
        ns_dtype: dtype of Newton-Schulz; by default bfloat16 on CUDA, else that of the parameters. Where a rank owns a
            tensor but holds no shard at all, give it (on CUDA and in compiled regions).
        eps: see `newton_schulz`.
        batch_of_matrices: how a tensor of more than two dims is seen: as a batch of its last two dims (experts), or
            (False) as the one matrix ``(shape[0], shape[1:].numel())`` (convolutions).
        stack_equal_shapes: run Newton-Schulz once per shape, on the stacked matrices of an owner; may change rounding.

    Raises:
        ValueError: on a tensor of less than two dims, an unknown `adjust_lr_fn`, a momentum outside [0, 1], or a
            negative learning rate or `weight_decay`.
        KeyError: in `update`, where the gradient of a tensor is missing.
    """
    function = partial(newton_schulz, steps=ns_steps, coefficients=ns_coefficients, eps=eps, dtype=ns_dtype)
    return counted_chain(
        scale_by_muon(
            owner_layout=owner_layout,
            momentum=momentum,
            nesterov=nesterov,
            orthogonalize=function,
            adjust_lr_fn=adjust_lr_fn,
            ns_dtype=ns_dtype,
            batch_of_matrices=batch_of_matrices,
            stack_equal_shapes=stack_equal_shapes,
        ),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(learning_rate),
    )


def scale_by_muon(
    *,
    owner_layout: Owners | None = None,
    momentum: float | torch.Tensor = 0.95,
    nesterov: bool = True,
    bias_correction: bool = False,
    orthogonalize: Orthogonalize = newton_schulz,
    adjust_lr_fn: AdjustLr = "original",
    ns_dtype: torch.dtype | None = None,
    batch_of_matrices: bool = False,
    stack_equal_shapes: bool = True,
) -> GradientTransformation[MuonState]:
    """Replace every gradient by its running mean, orthogonalised and scaled by the shape of the matrix; see `muon`.

    Args:
        owner_layout: see `muon`.
        momentum: see `muon`.
        nesterov: see `muon`.
        bias_correction: correct the running mean for its start at zero, as Optax does and `torch.optim.Muon` does not.
            (That changes how gradient and mean are mixed; the scale of a matrix is lost in its orthogonalisation.)
        orthogonalize: matrices of one shape, ``(..., m, n)``, to as many of that shape.
        adjust_lr_fn: see `muon`.
        ns_dtype: the dtype in which matrices travel to their owners and back; by default bfloat16 on CUDA, else that of
            the parameters. `orthogonalize` may compute in another.
        batch_of_matrices: see `muon`.
        stack_equal_shapes: see `muon`.

    Raises:
        ValueError: see `muon`.
        KeyError: in `update`, where the gradient of a tensor is missing.
    """
    if adjust_lr_fn not in _RATIOS:
        raise ValueError(f"muon: adjust_lr_fn must be one of {', '.join(_RATIOS)}, got {adjust_lr_fn!r}")
    if not isinstance(momentum, torch.Tensor) and not 0 <= momentum <= 1:
        raise ValueError(f"muon: momentum must lie in [0, 1], got {momentum}")
    taking_part = None if owner_layout is None else owned_shapes(owner_layout)
    for i, shape in (taking_part or {}).items():
        _check_dims(i, shape)

    def init(params: Mapping[Any, torch.Tensor]) -> MuonState:
        own = {i: param for i, param in params.items() if taking_part is None or i in taking_part}
        if taking_part is None:
            for i, param in own.items():
                _check_dims(i, param.shape)
        return MuonState(first_step(own), {i: torch.zeros_like(param) for i, param in own.items()})

    def directions_of(tensors: dict[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        matrices = {i: _as_matrices(tensor, batch_of_matrices) for i, tensor in tensors.items()}
        if not stack_equal_shapes:
            return {i: orthogonalize(matrix) for i, matrix in matrices.items()}
        return _run_stacked(orthogonalize, matrices)

    def mix(mean: torch.Tensor, grad: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        if bias_correction:
            now, ahead = (1 - momentum ** (step.double() + n) for n in (1, 2))
            return mixed(grad / now, mean / ahead, 1 - momentum) if nesterov else mean / now
        return mixed(grad, mean, 1 - momentum) if nesterov else mean

    def update(
        grads: Mapping[Any, torch.Tensor], state: MuonState, params: Mapping[Any, torch.Tensor]
    ) -> tuple[dict[Any, torch.Tensor], MuonState]:
        if missing := [i for i in state.momentum if i not in grads or i not in params]:
            raise KeyError(f"muon: no gradient or parameter of tensor {missing[0]!r} ({len(missing)} missing in all)")
        given = {i: grads[i].to(mean.dtype) for i, mean in state.momentum.items()}
        means = {i: mixed(mean, given[i], momentum) for i, mean in state.momentum.items()}
        mixtures = {i: mix(mean, given[i], state.step) for i, mean in means.items()}
        if owner_layout is None:
            shapes = {i: params[i].shape for i in mixtures}
            directions = directions_of(mixtures)
        else:
            shapes = owned_shapes(owner_layout)
            dtype = ns_dtype or next(map(default_dtype, mixtures.values()), None) or _dtype_without_shards(owner_layout)
            travelling = {
                i: shard.to(ns_dtype or default_dtype(shard)) for i, shard in mixtures.items() if shard.numel()
            }
            directions, _ = map_on_owners(directions_of, travelling, owner_layout=owner_layout, dtype=dtype)
        updates: dict[Any, torch.Tensor] = {}
        for i in mixtures:
            param, ratio = params[i], _RATIOS[adjust_lr_fn](*_matrix_shape(shapes[i], batch_of_matrices))
            # A rank's empty shard takes no part in the exchange.
            direction = directions[i].reshape(param.shape).to(param.dtype) if i in directions else param
            updates[i] = ratio * direction
        return updates, MuonState(state.step + 1, means)

    return GradientTransformation(init, update, whole=owner_layout is None)


def _dtype_without_shards(owner_layout: Owners) -> torch.dtype | None:
    """In which dtype shards travel, on a rank that has none; None leaves it to the groups."""
    group = owner_layout if isinstance(owner_layout, GroupOwnerLayout) else next(iter(owner_layout.values()))
    on_cuda = carrier_of(group.mesh).device(group.mesh).type == "cuda"
    return torch.bfloat16 if on_cuda else None


def _check_dims(key: object, shape: torch.Size) -> None:
    if len(shape) < 2:
        raise ValueError(
            f"muon: tensor {key!r} {tuple(shape)} is no matrix;"
            " leave it to adamw (see partition), and out of the owner layout"
        )


def _matrix_shape(shape: torch.Size, batch_of_matrices: bool) -> tuple[int, int]:
    return (shape[-2], shape[-1]) if batch_of_matrices else (shape[0], shape[1:].numel())


def _as_matrices(tensor: torch.Tensor, batch_of_matrices: bool) -> torch.Tensor:
    return tensor if batch_of_matrices else tensor.reshape(_matrix_shape(tensor.shape, False))


def _run_stacked(
    function: Callable[[torch.Tensor], torch.Tensor], matrices: Mapping[Key, torch.Tensor]
) -> dict[Key, torch.Tensor]:
    """`function` once per matrix shape, on all matrices of that shape side by side."""
    groups: dict[tuple[int, ...], list[Key]] = {}
    for i, matrix in matrices.items():
        groups.setdefault(tuple(matrix.shape[-2:]), []).append(i)
    results: dict[Key, torch.Tensor] = {}
    for shape, members in groups.items():
        if len(members) == 1:
            results[members[0]] = function(matrices[members[0]])
            continue
        stacks = [matrices[i].reshape(-1, *shape) for i in members]
        parts = function(torch.cat(stacks)).split([stack.shape[0] for stack in stacks])
        results |= {i: part.reshape(matrices[i].shape) for i, part in zip(members, parts, strict=True)}
    return {i: results[i] for i in matrices}
