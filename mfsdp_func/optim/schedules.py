"""Schedules: functions from the number of updates so far (0-D, or a Python int) to a 0-D float64 tensor.

Names, arguments and values are those of Optax. Any of them is a `LearningRate`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

Schedule: TypeAlias = Callable[[torch.Tensor | int], torch.Tensor]
"""A function of a step, 0-D or an int, that returns a 0-D tensor."""


def _float(step: torch.Tensor | int) -> torch.Tensor:
    return step.double() if isinstance(step, torch.Tensor) else torch.tensor(step, dtype=torch.float64)


def constant_schedule(value: float) -> Schedule:
    """The same value at every step."""
    return lambda step: torch.full_like(_float(step), value)


def polynomial_schedule(
    init_value: float, end_value: float, power: float, transition_steps: int, transition_begin: int = 0
) -> Schedule:
    """From `init_value` to `end_value` in `transition_steps`, by a power of what remains of them.

    Raises:
        ValueError: if `transition_steps` is not positive or `transition_begin` negative.
    """
    if transition_steps <= 0 or transition_begin < 0:
        raise ValueError(
            f"polynomial_schedule: {transition_steps} steps from {transition_begin}; expected > 0 and >= 0"
        )

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        done = (_float(step) - transition_begin).clamp(0, transition_steps)
        return (init_value - end_value) * (1 - done / transition_steps) ** power + end_value

    return schedule


def linear_schedule(init_value: float, end_value: float, transition_steps: int, transition_begin: int = 0) -> Schedule:
    """`polynomial_schedule` of power 1.

    >>> linear_schedule(0.0, 1.0, 4)(1).item()
    0.25
    """
    return polynomial_schedule(init_value, end_value, 1, transition_steps, transition_begin)


def cosine_decay_schedule(init_value: float, decay_steps: int, alpha: float = 0.0, exponent: float = 1.0) -> Schedule:
    """Half a cosine from `init_value` to ``alpha * init_value``, raised to a power.

    Source: I. Loshchilov and F. Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    Raises:
        ValueError: if `decay_steps` is not positive.
    """
    if decay_steps <= 0:
        raise ValueError(f"cosine_decay_schedule: decay_steps must be positive, got {decay_steps}")

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        done = _float(step).clamp(max=decay_steps) / decay_steps
        return init_value * ((1 - alpha) * (0.5 * (1 + torch.cos(math.pi * done))) ** exponent + alpha)

    return schedule


def exponential_decay(
    init_value: float,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """``init_value * decay_rate ** ((step - transition_begin) / transition_steps)``, not beyond `end_value`.

    Raises:
        ValueError: if `transition_steps` or `decay_rate` is not positive, or `transition_begin` negative.
    """
    if transition_steps <= 0 or decay_rate <= 0 or transition_begin < 0:
        raise ValueError(
            f"exponential_decay: expected transition_steps > 0, decay_rate > 0 and transition_begin >= 0, got"
            f" {transition_steps}, {decay_rate}, {transition_begin}"
        )

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        since = _float(step) - transition_begin
        power = since / transition_steps
        value = init_value * decay_rate ** (power.floor() if staircase else power)
        value = torch.where(since <= 0, init_value, value)
        if end_value is None:
            return value
        return value.clamp(min=end_value) if decay_rate < 1 else value.clamp(max=end_value)

    return schedule


def piecewise_constant_schedule(
    init_value: float, boundaries_and_scales: Mapping[int, float] | None = None
) -> Schedule:
    """`init_value`, multiplied by each scale once its boundary is passed."""
    scales = dict(boundaries_and_scales or {})

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        at = _float(step)
        value = torch.full_like(at, init_value)
        for boundary, factor in sorted(scales.items()):
            value = torch.where(at >= boundary, value * factor, value)
        return value

    return schedule


def join_schedules(schedules: Sequence[Schedule], boundaries: Sequence[int]) -> Schedule:
    """One schedule after the other, each counting from its boundary.

    Raises:
        ValueError: unless there is one boundary between each two schedules.
    """
    if len(boundaries) != len(schedules) - 1:
        raise ValueError(
            f"join_schedules: {len(schedules)} schedules need {len(schedules) - 1} boundaries, got {boundaries}"
        )

    def schedule(step: torch.Tensor | int) -> torch.Tensor:
        at = _float(step)
        value = schedules[0](at)
        for boundary, following in zip(boundaries, schedules[1:], strict=True):
            value = torch.where(at < boundary, value, following(at - boundary))
        return value

    return schedule


def warmup_constant_schedule(init_value: float, peak_value: float, warmup_steps: int) -> Schedule:
    """A linear rise to `peak_value`, which then stays."""
    return linear_schedule(init_value, peak_value, warmup_steps)


def warmup_cosine_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    decay_steps: int,
    end_value: float = 0.0,
    exponent: float = 1.0,
) -> Schedule:
    """A linear rise to `peak_value`, then half a cosine down to `end_value`; `decay_steps` counts both.

    Raises:
        ValueError: if `decay_steps` is not more than `warmup_steps`.

    >>> schedule = warmup_cosine_decay_schedule(0.0, 1.0, 10, 110)
    >>> [round(schedule(step).item(), 3) for step in (0, 5, 10, 60, 110)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    if not decay_steps > warmup_steps:
        raise ValueError(
            f"warmup_cosine_decay_schedule: decay_steps, which counts the warm-up too, must be more than {warmup_steps},"
            f" got {decay_steps}"
        )
    alpha = 0.0 if peak_value == 0 else end_value / peak_value
    fall = cosine_decay_schedule(peak_value, decay_steps - warmup_steps, alpha, exponent)
    return join_schedules([_rise(init_value, peak_value, warmup_steps), fall], [warmup_steps])


def warmup_exponential_decay_schedule(
    init_value: float,
    peak_value: float,
    warmup_steps: int,
    transition_steps: int,
    decay_rate: float,
    transition_begin: int = 0,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    """A linear rise to `peak_value`, then `exponential_decay`."""
    fall = exponential_decay(peak_value, transition_steps, decay_rate, transition_begin, staircase, end_value)
    return join_schedules([_rise(init_value, peak_value, warmup_steps), fall], [warmup_steps])


def _rise(init_value: float, peak_value: float, steps: int) -> Schedule:
    return linear_schedule(init_value, peak_value, steps) if steps > 0 else constant_schedule(peak_value)


warmup_cosine_decay = warmup_cosine_decay_schedule
"""The same as `warmup_cosine_decay_schedule`."""
