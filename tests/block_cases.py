"""Block specs and the same blocks taken out by hand."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from mfsdp_func import optim
from mfsdp_func.optim.blocks import Blocks

Q, K, V, G, D, M = 2, 1, 1, 3, 2, 6


class Case(NamedTuple):
    """A spec, a shape, its matrices in order by slices, and in how many runs of memory they lie."""

    name: str
    blocks: Blocks
    shape: tuple[int, ...]
    by_hand: Callable[[torch.Tensor], list[torch.Tensor]]
    runs: int

    def __str__(self) -> str:
        return self.name


def grouped(w: torch.Tensor) -> list[torch.Tensor]:
    return [w.view(G, Q + K + V, D, M)[:, part] for part in (slice(0, Q), slice(Q, Q + K), slice(Q + K, None))]


def heads(w: torch.Tensor) -> list[torch.Tensor]:
    return [head for part in grouped(w) for group in part for head in group]


def fused_heads(w: torch.Tensor) -> list[torch.Tensor]:
    return list(w.split(D))


SIZES = {"q": Q, "k": K, "v": V, "d": D}

CASES = [
    Case(
        "grouped heads",
        optim.blocks("(g (q + k + v) d) m -> (g q) d m | (g k) d m | (g v) d m", **SIZES),
        (G * (Q + K + V) * D, M),
        heads,
        G * (Q + K + V),
    ),
    Case(
        "grouped projections",
        optim.blocks("(g (q + k + v) d) m -> (g q d) m | (g k d) m | (g v d) m", **SIZES),
        (G * (Q + K + V) * D, M),
        lambda w: [part.reshape(-1, M) for part in grouped(w)],
        1,
    ),
    Case(
        "rows",
        optim.blocks("(q + k + v) m -> q m | k m | v m", q=8, k=4),
        (16, 4),
        lambda w: [w[:8], w[8:12], w[12:]],
        3,
    ),
    Case(
        "fused heads",
        optim.blocks("((q + k + v) d) m -> q d m | k d m | v d m", q=2, k=1, v=1),
        (8, 5),
        fused_heads,
        4,
    ),
    Case(
        "columns",
        optim.blocks("m (q + k + v) -> m q | m k | m v", q=6, k=3),
        (4, 12),
        lambda w: [w[:, :6], w[:, 6:9], w[:, 9:]],
        1,
    ),
    Case(
        "columns, transposed",
        optim.blocks("m (q + k + v) -> q m | k m | v m", q=6, k=3),
        (4, 12),
        lambda w: [w[:, :6].T, w[:, 6:9].T, w[:, 9:].T],
        1,
    ),
    Case(
        "gate and up",
        optim.blocks("e (a + b) i -> e a i | e b i", a=4),
        (4, 8, 3),
        lambda w: [*w[:, :4], *w[:, 4:]],
        8,
    ),
    Case("experts", optim.blocks("e o i -> e o i"), (4, 6, 5), list, 4),
    Case("experts with columns", optim.blocks("e m (a + b) -> e m a | e m b", a=2), (4, 3, 6),
         lambda w: [*w[:, :, :2], *w[:, :, 2:]], 4),
    Case("convolution", optim.blocks("o i kh kw -> o (i kh kw)"), (4, 3, 2, 2), lambda w: [w.view(4, 12)], 1),
    Case("heads of columns", optim.blocks("m (h d) -> h m d", d=4), (6, 8), lambda w: [w[:, :4], w[:, 4:]], 1),
    Case("transposed", optim.blocks("n m -> m n"), (4, 6), lambda w: [w.T], 1),
    Case("nested", optim.blocks("((a + b) + h (d + 1 c)) m -> a m | b m | h d m | m (h c)", a=1, b=2, h=2, d=2),
         (9, 4),
         lambda w: [w[:1], w[1:3], w[3:5], w[6:8], w[[5, 8]].T], 3),
    Case("any matrix", optim.blocks("o ... -> o (...)"), (4, 3, 2, 2), lambda w: [w.view(4, 12)], 1),
    Case("any batch", optim.blocks("... o i -> ... o i"), (2, 2, 3, 4), lambda w: list(w.view(4, 3, 4)), 4),
]  # fmt: skip
