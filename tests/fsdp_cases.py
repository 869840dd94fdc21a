"""Models, placements and dense references for the tests of `fully_shard`."""

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value

import mfsdp_func as mf
from mfsdp_func.effects.launch import launches_watched
from mfsdp_func.fsdp.sharded_module import ShardedModule
from mfsdp_func.plans.collective import Collective
from mfsdp_func.plans.linear_map import LinearMap

WORDS, WIDTH, LENGTH = 17, 6, 5
ROWS, FULL, WHOLE = mf.RowAtomic(), mf.Replicate(), mf.TensorAtomic()

ROLES: dict[str, tuple[tuple[int, ...], Any, Any, Any]] = {
    "one": ((1,), [ROWS], [ROWS], [ROWS]),
    "two": ((2,), [ROWS], [ROWS], [ROWS]),
    "four": ((4,), [ROWS], [ROWS], [ROWS]),
    "hsdp": ((2, 2), [FULL, ROWS], [FULL, ROWS], [FULL, ROWS]),
    "both": ((2, 2), [ROWS, ROWS], [ROWS, ROWS], [ROWS, ROWS]),
    "replicas": ((2,), [FULL], [FULL], [FULL]),
    "zero1": ((4,), [FULL], [FULL], [ROWS]),
    "zero2": ((4,), [FULL], [ROWS], [ROWS]),
    "outer": ((2, 2), [FULL, ROWS], [ROWS, ROWS], [ROWS, ROWS]),
    "zero2 hsdp": ((2, 2), [FULL, FULL], [FULL, ROWS], [FULL, ROWS]),
}
"""Mesh shape; placements of parameters, gradients and main weights."""


class Block(nn.Module):
    """Normalised, wide, scaled by a 0-D parameter."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.tensor(1.3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.narrow(torch.tanh(self.wide(self.norm(x)))) * self.scale)


class Net(nn.Module):
    """Embedding, a held position table, blocks, and a head that may be tied to the embedding."""

    def __init__(self, *, blocks: int = 2, tie: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block(WIDTH, dropout) for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tie:
            self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net(**choices: Any) -> Net:
    """The same values at every call, in float64."""
    torch.manual_seed(0)
    return Net(**choices).double()


def batches(count: int) -> torch.Tensor:
    """One batch of three lines for each of `count` ranks or micro-batches."""
    return torch.randint(0, WORDS, (count, 3, LENGTH), generator=torch.Generator().manual_seed(1))


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next word."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def place(mesh: mf.Mesh, roles: str) -> mf.Placements:
    """The placements of a case, on all axes of a mesh."""
    _, parameter, gradient, optimizer = ROLES[roles]
    return mf.Placements(tuple(range(mesh.ndim)), parameter, gradient, optimizer)


def number(mesh: mf.Mesh) -> int:
    """The position of this rank in the mesh: which batch it takes."""
    return mesh.ranks.index(mesh.get_rank())


def dense_step(
    module: nn.Module, data: torch.Tensor, loss: Any = loss_of
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of the mean over batches, of one copy of each trainable parameter, and that mean."""
    weights = {name: param.detach() for name, param in module.named_parameters() if param.requires_grad}
    return grad_and_value(
        lambda weights: torch.stack([loss(functional_call(module, weights, (x,)), x) for x in data]).mean()
    )(weights)


def leaves_of(params: Mapping[str, mf.DBuffer]) -> dict[str, mf.DBuffer]:
    """Copies that plain autograd differentiates."""
    return {key: mf.DBuffer(b.spec, b.local_buffer.clone().requires_grad_()) for key, b in params.items()}


def scaled(params: Mapping[str, mf.DBuffer], factor: Any) -> dict[str, mf.DBuffer]:
    """Every buffer times a factor."""
    return {key: mf.DBuffer(buffer.spec, buffer.local_buffer * factor) for key, buffer in params.items()}


def filled(buffer: mf.DBuffer) -> torch.Tensor:
    """What is no padding, side by side."""
    spans = buffer.spec.filled
    return torch.cat([buffer.local_buffer[:0], *(buffer.local_buffer[span.start : span.end] for span in spans)])


def assert_same(given: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], **tolerance: float) -> None:
    """Every expected tensor is there; float64 to 1e-12 by default."""
    for name, tensor in expected.items():
        torch.testing.assert_close(
            given[name], tensor, **tolerance or {"rtol": 1e-12, "atol": 1e-12}, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_same_buffers(
    given: Mapping[str, mf.DBuffer], expected: Mapping[str, mf.DBuffer], **tolerance: float
) -> None:
    """The same, of what this rank holds."""
    assert_same({k: filled(b) for k, b in given.items()}, {k: filled(b) for k, b in expected.items()}, **tolerance)


def on_each(mesh_shape: Sequence[int], program: Callable[[mf.Mesh], Any], **choices: Any) -> dict[int, Any]:
    """The results of a simulated run."""
    return mf.simulate(program, mesh_shape, **choices).results


@contextmanager
def gathers_watched() -> Iterator[SimpleNamespace]:
    """Every whole buffer that an all-gather makes inside: `count`, bytes that are `alive`, and their `peak`.

    Of all ranks of this process: on a simulated mesh, watch one rank alone.
    """
    seen = SimpleNamespace(count=0, peak=0, alive={})

    def watch(linear: LinearMap, outputs: Sequence[torch.Tensor]) -> None:
        if isinstance(linear, Collective) and linear.kind == "allgather":
            seen.count += 1
            seen.alive[seen.count] = outputs[0].nbytes
            seen.peak = max(seen.peak, sum(seen.alive.values()))
            weakref.finalize(outputs[0].untyped_storage(), seen.alive.pop, seen.count)

    with launches_watched(watch):
        yield seen
        gc.collect()


@contextmanager
def calls_watched() -> Iterator[dict[int, list[str]]]:
    """The labels of all operations that run inside, by rank, on whatever carrier."""
    labels: dict[int, list[str]] = {}

    def watch(linear: LinearMap, outputs: object) -> None:
        labels.setdefault(linear.mesh.get_rank(), []).append(linear.label)

    with launches_watched(watch):
        yield labels


def bytes_of(apply: ShardedModule) -> dict[str, int]:
    """Group -> bytes of its whole buffer in compute dtype."""
    return {key: bound.whole.local_numel * bound.param_dtype.itemsize for key, bound in apply.param_groups.items()}
