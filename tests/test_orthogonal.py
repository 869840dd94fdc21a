"""Orthogonalisation: other polynomials, fewer operations, rows of one size."""

import pytest
import torch

from mfsdp_func import optim
from mfsdp_func.optim.orthogonal import best_quintic

PUBLISHED = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
"""The first polynomials that the authors print, for ``lower=1e-3``, before the safety factor."""


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def with_values(m: int, n: int, values: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(randn(m, n), full_matrices=False)
    return (u * values) @ vh


def test_the_polynomials_of_the_authors() -> None:
    *all_but_last, _ = optim.polar_express_coefficients(len(PUBLISHED) + 1)
    for ours, theirs in zip(all_but_last, PUBLISHED, strict=True):
        scaled = [number * 1.01**power for number, power in zip(ours, (1, 3, 5), strict=True)]
        assert scaled == pytest.approx(theirs, rel=1e-9)


@pytest.mark.parametrize("low", [1e-3, 0.1, 0.9])
def test_no_quintic_is_nearer(low: float) -> None:
    points = torch.linspace(low, 1, 2001, dtype=torch.float64)

    def worst(a: float, b: float, c: float) -> float:
        return float((1 - (a * points + b * points**3 + c * points**5)).abs().max())

    best = best_quintic(low, 1.0)
    for seed in range(50):
        other = torch.tensor(best) + 1e-3 * randn(3, seed=seed) * randn(1, seed=seed + 99).abs()
        assert worst(*other.tolist()) >= worst(*best) - 1e-9


@pytest.mark.parametrize("shape", [(8, 40), (40, 8), (2, 3, 6, 6)])
def test_polar_express_beats_newton_schulz(shape: tuple[int, ...]) -> None:
    u, _, vh = torch.linalg.svd(randn(*shape), full_matrices=False)
    matrix = (u * torch.linspace(0.02, 1, min(shape[-2:]), dtype=torch.float64)) @ vh
    errors = [(torch.linalg.svdvals(f(matrix)) - 1).abs().max() for f in (optim.polar_express(), optim.newton_schulz)]
    assert errors[0] < 0.5 * errors[1]
    assert (torch.linalg.svdvals(optim.polar_express(8)(matrix)) - 1).abs().max() < 1e-2
    assert float((optim.polar_express(10)(matrix) - u @ vh).abs().max()) < 1e-5


@pytest.mark.parametrize("shape", [(16, 64), (64, 16), (16, 16), (3, 8, 20)])
@pytest.mark.parametrize("values", ["even", "tiny"])
def test_gram_is_newton_schulz(shape: tuple[int, ...], values: str) -> None:
    spectrum = torch.linspace(0.1, 1, min(shape[-2:])) if values == "even" else torch.logspace(-6, 0, min(shape[-2:]))
    u, _, vh = torch.linalg.svd(randn(*shape), full_matrices=False)
    matrix = (u * spectrum.double()) @ vh
    for dtype, restart, tolerance in [(torch.float64, 3, 1e-10), (torch.float32, 3, 1e-4), (torch.float32, 5, 2e-3)]:
        expected = optim.newton_schulz(matrix.to(dtype)).double()
        found = optim.gram(restart=restart)(matrix.to(dtype)).double()
        assert float(torch.linalg.matrix_norm(found - expected, 2).max()) < tolerance
    other = optim.gram(coefficients=optim.polar_express_coefficients(5))(matrix)
    # polar_express divides by 1.01 times the norm.
    assert float(torch.linalg.matrix_norm(other - optim.polar_express()(matrix), 2).max()) < 0.3


def test_zero_stays_zero() -> None:
    for function in (optim.polar_express(), optim.gram()):
        assert torch.equal(function(torch.zeros(3, 4)), torch.zeros(3, 4))
        assert function(torch.zeros(0, 4)).shape == (0, 4)
        assert function(torch.ones(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"shape \(\.\.\., m, n\)"):
            function(torch.zeros(3))


def test_values_can_be_compared() -> None:
    assert optim.polar_express(5) == optim.polar_express()
    assert hash(optim.gram()) == hash(optim.gram(steps=5))
    with pytest.raises(ValueError, match="steps must be positive"):
        optim.polar_express(0)


def test_rows_of_one_size() -> None:
    matrix, second = randn(2, 4, 6), torch.zeros(2, 4, 1, dtype=torch.float64)
    means = torch.zeros_like(second)
    for step in range(3):
        update = matrix * (step + 1)
        found, second = optim.normalize_rows(update, second, 0.9)
        means = 0.9 * means + 0.1 * update.square().mean(-1, keepdim=True)
        expected = update / means.sqrt()
        expected = expected * update.norm(dim=(-2, -1), keepdim=True) / expected.norm(dim=(-2, -1), keepdim=True)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
