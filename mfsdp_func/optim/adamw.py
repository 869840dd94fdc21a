"""Adam and AdamW: elementwise, so that every rank updates its own shards without communication."""

from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from mfsdp_func.optim.chains import add_decayed_weights, counted_chain, scale_by_learning_rate
from mfsdp_func.optim.transformation import GradientTransformation, LearningRate, check_not_negative, first_step

Number = float | torch.Tensor


class AdamWState(NamedTuple):
    """State of `scale_by_adam` and `adamw`."""

    step: torch.Tensor
    """Number of updates so far: 0-D, int64."""
    exp_avg: Any
    """Running mean of gradients: a pytree like the parameters, same shapes and dtypes."""
    exp_avg_sq: Any
    """Running mean of squared gradients: likewise. Of a complex parameter, that of the squares of both parts."""


def adamw(
    learning_rate: LearningRate,
    *,
    betas: tuple[Number, Number] = (0.9, 0.999),
    eps: Number = 1e-8,
    weight_decay: Number = 0.01,
) -> GradientTransformation[AdamWState]:
    """Adam with decoupled weight decay, the numbers of `torch.optim.AdamW`.

    The chain of `scale_by_adam`, `add_decayed_weights` and `scale_by_learning_rate`. Source: I. Loshchilov and
    F. Hutter, "Decoupled Weight Decay Regularization", 2019. Acts on any pytree of tensors of any shapes, so on the
    shards of a flat buffer too. No communication.

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
    return counted_chain(
        scale_by_adam(*betas, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(learning_rate)
    )


def scale_by_adam(
    b1: Number = 0.9, b2: Number = 0.999, eps: Number = 1e-8, eps_root: Number = 0.0, *, nesterov: bool = False
) -> GradientTransformation[AdamWState]:
    """Divide the running mean of gradients by the root of that of their squares, both corrected for their start at zero.

    Source: D. Kingma and J. Ba, "Adam: A Method for Stochastic Optimization", 2015; `nesterov` is T. Dozat,
    "Incorporating Nesterov Momentum into Adam", 2016. Names and numbers are those of Optax; the two parts of a complex
    number are taken for two numbers, as `torch.optim.AdamW` does.

    Args:
        b1: how much of the running mean of gradients an update keeps.
        b2: likewise, of their squares.
        eps: added to the root.
        eps_root: added under the root.
        nesterov: whether the gradient is mixed once more into its running mean.

    Raises:
        ValueError: on a beta outside [0, 1), or a negative `eps` or `eps_root`.
    """
    if not all(isinstance(beta, torch.Tensor) or 0 <= beta < 1 for beta in (b1, b2)):
        raise ValueError(f"scale_by_adam: betas must lie in [0, 1), got {(b1, b2)}")
    check_not_negative("scale_by_adam", eps=eps, eps_root=eps_root)

    def init(params: Any) -> AdamWState:
        zeros = [pytree.tree_map(torch.zeros_like, params) for _ in range(2)]
        return AdamWState(first_step(params), *zeros)

    def update(grads: Any, state: AdamWState, params: Any) -> tuple[Any, AdamWState]:
        step = state.step + 1
        correction1, correction2 = (1 - beta ** step.double() for beta in (b1, b2))
        ahead = 1 - b1 ** (step.double() + 1)

        def mean(old: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return mixed(old, grad.to(old.dtype), b1)

        def mean_of_squares(old: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return _like(_mean_of_squares(_real(old), _real(grad.to(old.dtype)), b2), old)

        def direction(average: torch.Tensor, square: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            above, below = _real(average), _real(square) / correction2
            above = above / correction1 if not nesterov else _nesterov(above, _real(grad.to(average.dtype)))
            return _like(above / ((below + eps_root).sqrt() + eps), average)

        def _nesterov(average: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
            return b1 * (average / ahead) + (1 - b1) * (grad / correction1)

        exp_avg = pytree.tree_map(mean, state.exp_avg, grads)
        exp_avg_sq = pytree.tree_map(mean_of_squares, state.exp_avg_sq, grads)
        return pytree.tree_map(direction, exp_avg, exp_avg_sq, grads), AdamWState(step, exp_avg, exp_avg_sq)

    return GradientTransformation(init, update)


def mixed(old: torch.Tensor, new: torch.Tensor, keep: Number) -> torch.Tensor:
    """``keep * old + (1 - keep) * new``."""
    weight = 1 - keep
    return torch.lerp(old, new, weight.to(old.dtype) if isinstance(weight, torch.Tensor) else weight)


def _mean_of_squares(old: torch.Tensor, grad: torch.Tensor, keep: Number) -> torch.Tensor:
    if isinstance(keep, torch.Tensor):
        return old * keep + (1 - keep) * grad * grad
    return torch.addcmul(old * keep, grad, grad, value=1 - keep)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _like(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(tensor) if example.is_complex() else tensor
