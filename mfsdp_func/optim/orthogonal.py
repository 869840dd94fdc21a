"""Other ways to orthogonalise, as values: functions of a batch of matrices for ``muon(orthogonalize=...)``."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from mfsdp_func.optim.adamw import mixed
from mfsdp_func.optim.newton_schulz import COEFFICIENTS, EPS, default_dtype

Orthogonalize: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""A function of matrices ``(..., m, n)`` that keeps shape and dtype, such as ``functools.partial(newton_schulz, ...)``."""

Coefficients: TypeAlias = tuple[float, float, float]
"""``(a, b, c)`` of ``a x + b x³ + c x⁵``."""

# Of the authors: what an interval may shrink to beside its upper end, and how far rounding is kept from that end.
_CUSHION = 0.02407327424182761
_SAFETY = 1.01


@dataclass(frozen=True)
class polar_express:  # used like a function
    """Newton-Schulz whose polynomial is another in each step: the best one for where singular values then lie.

    Each step applies the odd quintic that brings the interval of singular values nearest to 1 in the worst case, found
    by Remez' algorithm, so that singular values between `lower` and 1 (times the norm) are brought near 1 as fast as any
    such composition can. Source: N. Amsel, D. Persson, C. Musco, R. M. Gower, "The Polar Express: Optimal Matrix Sign
    Methods and Their Application to the Muon Algorithm", arXiv 2505.16932, 2025; with its finite-precision
    modifications (a cushion, and all but the last polynomial divided by 1.01).

    Args:
        steps: number of polynomials.
        lower: the smallest singular value that counts, over the norm of the matrix.
        eps: lower bound of the norm that is divided by.
        dtype: see `newton_schulz`.

    >>> x = torch.diag(torch.tensor([3.0, 1.0, 0.1]))
    >>> torch.linalg.svdvals(polar_express(8)(x)).round(decimals=4)
    tensor([1., 1., 1.])
    """

    steps: int = 5
    lower: float = 1e-3
    eps: float = EPS
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 < self.lower < 1:
            raise ValueError(f"polar_express: steps must be positive, lower in (0, 1), got {self.steps}, {self.lower}")

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """The matrices ``(..., m, n)`` with singular values near 1, in their shape and dtype."""
        x, tall = _start("polar_express", matrix, self.dtype, self.eps, 1.01)
        for a, b, c in polar_express_coefficients(self.steps, self.lower):
            gram = x @ x.mT
            x = a * x + (b * gram + c * (gram @ gram)) @ x
        return (x.mT if tall else x).to(matrix.dtype)


@dataclass(frozen=True)
class gram:  # used like a function
    """Newton-Schulz on the m x m Gram matrix: the product of several polynomials first, then one product with the matrix.

    Every step's result is a polynomial of ``X Xᵀ`` times X, so that the iteration can run on the Gram matrix alone: for
    an m x n matrix with m <= n, ``4 m² n`` operations for `restart` steps together and at most ``8 m³`` a step, where
    `newton_schulz` needs ``4 m² n + 2 m³`` a step: fewer where n is more than about twice m. Source: N. Amsel et al.,
    "The Polar Express", arXiv 2505.16932, 2025 (its iteration for rectangular matrices). What is small in X is squared in
    the Gram matrix, and its rounding grows with each step, so X is formed anew after every `restart` steps.

    Tolerance: the numbers are those of `newton_schulz` with the same coefficients, in the spectral norm, to 1e-10 in
    float64 and 1e-4 in float32; with ``restart=5`` to 2e-3 in float32.

    Args:
        coefficients: one polynomial for all steps, or one for each (`polar_express_coefficients`).
        steps: number of steps where one polynomial serves all.
        restart: how many steps run on one Gram matrix.
        eps: lower bound of the norm that is divided by.
        dtype: of the products with X; by default bfloat16 on CUDA, else that of the matrix. m x m products are in float32
            or better.

    >>> from mfsdp_func.optim.newton_schulz import newton_schulz
    >>> x = torch.randn(4, 30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    >>> bool((gram()(x) - newton_schulz(x)).abs().max() < 1e-10)
    True
    """

    coefficients: Coefficients | tuple[Coefficients, ...] = COEFFICIENTS
    steps: int = 5
    restart: int = 3
    eps: float = EPS
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.steps < 0 or self.restart < 1:
            raise ValueError(f"gram: steps must be >= 0, restart positive, got {self.steps}, {self.restart}")

    def __call__(self, matrix: torch.Tensor) -> torch.Tensor:
        """The matrices ``(..., m, n)`` with singular values near 1, in their shape and dtype."""
        x, tall = _start("gram", matrix, self.dtype, self.eps, 1.0)
        polynomials = self._polynomials()
        for first in range(0, len(polynomials), self.restart):
            x = self._several(x, polynomials[first : first + self.restart])
        return (x.mT if tall else x).to(matrix.dtype)

    def _polynomials(self) -> Sequence[Coefficients]:
        if isinstance(self.coefficients[0], tuple):
            return self.coefficients  # pyright: ignore[reportReturnType]
        return [self.coefficients] * self.steps  # pyright: ignore[reportReturnType]

    def _several(self, x: torch.Tensor, polynomials: Sequence[Coefficients]) -> torch.Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        square = (x @ x.mT).to(wide)
        total: torch.Tensor | None = None
        for n, (a, b, c) in enumerate(polynomials):
            step = b * square + c * (square @ square)
            step.diagonal(dim1=-2, dim2=-1).add_(a)
            total = step if total is None else step @ total
            if n + 1 < len(polynomials):
                square = step @ square @ step
        return x if total is None else total.to(x.dtype) @ x


def _start(
    name: str, matrix: torch.Tensor, dtype: torch.dtype | None, eps: float, margin: float
) -> tuple[torch.Tensor, bool]:
    """The matrix with the shorter side first and norm ``1 / margin``; and whether it was transposed."""
    if matrix.dim() < 2 or not matrix.dtype.is_floating_point:
        raise ValueError(
            f"{name}: expected real floating point of shape (..., m, n), got {matrix.dtype} {tuple(matrix.shape)}"
        )
    x = matrix.to(dtype or default_dtype(matrix))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    return x / (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) * margin).clamp(min=eps), tall


@lru_cache(maxsize=64)
def polar_express_coefficients(steps: int, lower: float = 1e-3) -> tuple[Coefficients, ...]:
    """The polynomials of `polar_express`, in double precision. Source: see there.

    >>> [round(number, 3) for number in polar_express_coefficients(5)[0]]
    [8.205, -22.902, 16.461]
    """
    found: list[Coefficients] = []
    low, high = lower, 1.0
    for _ in range(steps):
        a, b, c = best_quintic(max(low, _CUSHION * high), high)
        if _CUSHION * high > low:  # centre what the polynomial makes of the true interval
            scale = 2 / (a * low + b * low**3 + c * low**5 + a * high + b * high**3 + c * high**5)
            a, b, c = a * scale, b * scale, c * scale
        found.append((a, b, c))
        low = a * low + b * low**3 + c * low**5
        high = 2 - low
    return (*((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in found[:-1]), found[-1])


def best_quintic(low: float, high: float) -> Coefficients:
    """The odd quintic that is nearest to 1 on an interval of positive numbers, in the worst case.

    Source: E. Remez, 1934: the error of the best one alternates at four points, here the ends and two between, which are
    found by turns with the coefficients. Where the interval has next to no length, the limit.

    Raises:
        ValueError: unless ``0 < low <= high``.

    >>> [round(number, 4) for number in best_quintic(1.0, 1.0)]
    [1.875, -1.25, 0.375]
    """
    if not 0 < low <= high:
        raise ValueError(f"best_quintic: expected 0 < low <= high, got {low} and {high}")
    if low / high >= 1 - 5e-6:
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = (3 * low + high) / 4, (low + 3 * high) / 4
    error = math.inf
    for _ in range(100):
        a, b, c, new = _alternating((low, *inner, high))
        root = math.sqrt(9 * b * b - 20 * a * c)
        inner = math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))
        if abs(error - new) <= 1e-15:
            break
        error = new
    return a, b, c  # pyright: ignore[reportPossiblyUnboundVariable]


def _alternating(points: Sequence[float]) -> tuple[float, float, float, float]:
    """``a, b, c, e`` with ``a x + b x³ + c x⁵ = 1 - e, 1 + e, 1 - e, 1 + e`` at four points."""
    rows = [[x, x**3, x**5, sign] for x, sign in zip(points, (1.0, -1.0, 1.0, -1.0), strict=True)]
    solution = torch.linalg.solve(torch.tensor(rows, dtype=torch.float64), torch.ones(4, dtype=torch.float64))
    a, b, c, e = solution.tolist()
    return a, b, c, e


def normalize_rows(
    update: torch.Tensor, second: torch.Tensor, beta: float | torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """NorMuon's step after orthogonalisation: each row over the root of its running mean square, at the old norm.

    Source: Z. Li, L. Liu, C. Liang, W. Chen, T. Zhao, "NorMuon: Making Muon more efficient and scalable", arXiv
    2510.05491, 2025. No bias correction: the norm is restored afterwards, so a common factor falls out.

    Args:
        update: matrices ``(..., m, n)``.
        second: ``(..., m, 1)``, the running mean of the rows' mean squares; zero at first.
        beta: how much of that is kept.

    Returns:
        The rescaled matrices, and the new `second`.

    >>> rows = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> update, _ = normalize_rows(rows, torch.zeros(2, 1), 0.95)
    >>> update.norm(dim=1).round(decimals=3), update.norm().round(decimals=3)
    (tensor([3.6060, 3.6060]), tensor(5.0990))
    """
    new = mixed(second, update.square().mean(-1, keepdim=True).to(second.dtype), beta)
    scaled = update / (new.sqrt() + 1e-8).to(update.dtype)
    norm, after = (torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True) for x in (update, scaled))
    return scaled * (norm / after.clamp(min=1e-30)), new
