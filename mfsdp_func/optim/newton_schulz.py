"""Orthogonalisation by matrix products alone."""

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def newton_schulz(
    matrix: torch.Tensor,
    steps: int = 5,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Bring the singular values of each matrix near 1 and keep its singular vectors.

    The matrix is scaled to Frobenius norm 1, then `steps` times ``X <- a X + (b A + c A²) X`` with ``A = X Xᵀ``. The
    default coefficients rise as fast as possible at zero instead of converging: after 5 steps singular values lie in
    about 0.7 to 1.2, where they were not tiny. Source: K. Jordan et al., "Muon: An optimizer for hidden layers in
    neural networks", 2024. A zero matrix stays zero.

    Args:
        matrix: shape ``(..., m, n)``: one matrix or a batch; the shorter side is brought first by transposition.
        steps: number of iterations.
        coefficients: ``(a, b, c)`` of the odd quintic polynomial.
        eps: lower bound of the norm that is divided by.
        dtype: of the computation, the norm included; by default bfloat16 on CUDA, else that of `matrix`.

    Returns:
        A tensor of the shape and dtype of `matrix`. Pure and differentiable.

    Raises:
        ValueError: if `matrix` has fewer than two dims, or `steps` is negative.
        TypeError: if `matrix` is not real floating point.

    >>> torch.linalg.svdvals(newton_schulz(torch.diag(torch.tensor([3.0, 2.0, 1.0])))).round(decimals=1)
    tensor([1.1000, 0.7000, 0.7000])
    """
    if matrix.dim() < 2:
        raise ValueError(f"newton_schulz: expected shape (..., m, n), got {tuple(matrix.shape)}")
    if not matrix.dtype.is_floating_point:
        raise TypeError(f"newton_schulz: expected a real floating point dtype, got {matrix.dtype}")
    if steps < 0:
        raise ValueError(f"newton_schulz: steps must not be negative, got {steps}")
    a, b, c = coefficients
    x = matrix.to(dtype or default_dtype(matrix))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = _add_product(x, _add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a, alpha=1.0)
    return (x.mT if tall else x).to(matrix.dtype)


def default_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which `newton_schulz` computes unless told."""
    return torch.bfloat16 if tensor.device.type == "cuda" else tensor.dtype


def _add_product(
    x: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float, alpha: float
) -> torch.Tensor:
    """``beta * x + alpha * (left @ right)``, rounded once."""
    if x.dim() == 2:
        return torch.addmm(x, left, right, beta=beta, alpha=alpha)
    flat = [tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (x, left, right)]
    return torch.baddbmm(*flat, beta=beta, alpha=alpha).view(x.shape)
