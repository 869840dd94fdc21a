"""AdamW: elementwise, so that every rank updates its own shards without communication."""

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.optim.transformation import (
    GradientTransformation,
    LearningRate,
    check_learning_rate,
    first_step,
    learning_rate_at,
)


class AdamWState(NamedTuple):
    """State of `adamw`."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64."""
    exp_avg: Any
    """Running mean of gradients: a pytree like the parameters, same shapes and dtypes."""
    exp_avg_sq: Any
    """Running mean of squared gradients: likewise."""


def adamw(
    learning_rate: LearningRate,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> GradientTransformation[AdamWState]:
    """Adam with decoupled weight decay, the numbers of `torch.optim.AdamW`.

    Source: I. Loshchilov and F. Hutter, "Decoupled Weight Decay Regularization", 2019. Acts on any pytree of tensors
    of any shapes, so on the shards of a flat buffer too. No communication.

    Args:
        learning_rate: see `LearningRate`.
        betas: how much of the running means of gradients and of their squares an update keeps.
        eps: added to the denominator.
        weight_decay: every update takes ``learning_rate * weight_decay`` of the parameter off it.

    Raises:
        ValueError: on a beta outside [0, 1), or a negative learning rate, `eps` or `weight_decay`.

    >>> optimizer = adamw(0.1)
    >>> params = {"w": torch.ones(2)}
    >>> updates, state = optimizer.update({"w": torch.tensor([1.0, -1.0])}, optimizer.init(params), params)
    >>> updates["w"]
    tensor([-0.1010,  0.0990])
    """
    check_learning_rate("adamw", learning_rate)
    if not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"adamw: betas must lie in [0, 1), got {betas}")
    if eps < 0 or weight_decay < 0:
        raise ValueError(f"adamw: eps and weight_decay must not be negative, got {eps} and {weight_decay}")
    beta1, beta2 = betas

    def init(params: Any) -> AdamWState:
        zeros = [pytree.tree_map(torch.zeros_like, params) for _ in range(2)]
        return AdamWState(first_step(params), *zeros)

    def update(grads: Any, state: AdamWState, params: Any) -> tuple[Any, AdamWState]:
        rate, step = learning_rate_at(learning_rate, state.step), state.step + 1
        correction1, correction2 = (1 - beta ** step.double() for beta in betas)
        step_size, root = rate / correction1, correction2.sqrt()

        def mean(old: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return torch.lerp(old, grad.to(old.dtype), 1 - beta1)

        def mean_of_squares(old: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return torch.addcmul(old * beta2, grad.to(old.dtype), grad.to(old.dtype), value=1 - beta2)

        def change(param: torch.Tensor, average: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
            direction = average / (square.sqrt() / root + eps)
            return (-step_size * direction - rate * weight_decay * param).to(param.dtype)

        exp_avg = pytree.tree_map(mean, state.exp_avg, grads)
        exp_avg_sq = pytree.tree_map(mean_of_squares, state.exp_avg_sq, grads)
        return pytree.tree_map(change, params, exp_avg, exp_avg_sq), AdamWState(step, exp_avg, exp_avg_sq)

    return GradientTransformation(init, update)
