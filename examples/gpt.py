"""A byte-level GPT as plain functions: parameters are a dict of units, each a dict of tensors."""

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

Params: TypeAlias = Mapping[str, Mapping[str, torch.Tensor]]

VOCABULARY = 256
OUTER = "outer"
"""The unit of all that is outside the blocks."""


class Config(NamedTuple):
    """Sizes of the model; `heads` divides `dim`."""

    dim: int
    layers: int
    heads: int
    context: int


def unit_shapes(config: Config) -> dict[str, dict[str, tuple[int, ...]]]:
    """Unit -> name -> shape. Blocks are units; embeddings, the last norm and the head are one more."""
    d = config.dim
    block = {"norm1": (d,), "q": (d, d), "k": (d, d), "v": (d, d), "o": (d, d)}
    block |= {"norm2": (d,), "up": (4 * d, d), "down": (d, 4 * d)}
    outer = {"bytes": (VOCABULARY, d), "positions": (config.context, d), "norm": (d,), "head": (VOCABULARY, d)}
    return {f"block{n}": block for n in range(config.layers)} | {OUTER: outer}


def init_params(config: Config, seed: int, dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """Norms at one, embeddings and the head small, other matrices scaled by their fan-in and the depth."""
    generator = torch.Generator().manual_seed(seed)

    def make(unit: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype)
        scale = 0.02 if unit == OUTER else shape[1] ** -0.5
        if name in ("o", "down"):
            scale *= (2 * config.layers) ** -0.5
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    return {
        unit: {name: make(unit, name, shape) for name, shape in shapes.items()}
        for unit, shapes in unit_shapes(config).items()
    }


def loss(params: Params, tokens: torch.Tensor, config: Config) -> torch.Tensor:
    """Mean cross entropy of the next byte, in nats.

    Args:
        params: see `unit_shapes`.
        tokens: shape (batch, context + 1), int64.
        config: see `Config`.

    Returns:
        A 0-D tensor of the parameters' dtype.
    """
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    outer = params[OUTER]
    x = F.embedding(inputs, outer["bytes"]) + outer["positions"][: inputs.shape[1]]
    for n in range(config.layers):
        x = _block(params[f"block{n}"], x, config)
    logits = F.linear(F.rms_norm(x, (config.dim,), outer["norm"]), outer["head"])
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _block(p: Mapping[str, torch.Tensor], x: torch.Tensor, config: Config) -> torch.Tensor:
    """Attention and feed-forward, each added to its input; shapes (batch, time, dim)."""
    batch, time, dim = x.shape
    h = F.rms_norm(x, (dim,), p["norm1"])
    q, k, v = (F.linear(h, p[name]).view(batch, time, config.heads, -1).transpose(1, 2) for name in "qkv")
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + F.linear(attended.transpose(1, 2).reshape(batch, time, dim), p["o"])
    h = F.rms_norm(x, (dim,), p["norm2"])
    return x + F.linear(F.gelu(F.linear(h, p["up"])), p["down"])
