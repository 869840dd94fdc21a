"""States to save and to load: the same values under any mesh and layout."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.values.placement import Placement, Replicate, RowAtomic, TensorAtomic

SHAPES = {
    "words.weight": (7, 4),
    "layers.0.wq.weight": (5, 3),
    "layers.0.norm.weight": (3,),
    "layers.0.none": (0, 2),
    "layers.1.conv.weight": (4, 2, 3),
    "scale": (1,),
}
GROUPINGS: tuple[dict[str, tuple[str, ...]], ...] = (
    {"a": tuple(SHAPES)},
    {"x": tuple(SHAPES)[3:], "y": tuple(SHAPES)[1:3], "z": tuple(SHAPES)[:1]},
)
KINDS = ("padded", "unpadded", "balanced", "tensor")
MESHES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((1,), (1, 1)),
    2: ((2,), (2, 1)),
    3: ((3,), (3, 1)),
    4: ((4,), (2, 2)),
    5: ((5,), (1, 5)),
    8: ((8,), (2, 4)),
}
"""Number of ranks -> one axis, and HSDP: replicas of shards."""


class Way(NamedTuple):
    """How a state lies on ranks."""

    shape: tuple[int, ...]
    kind: str
    grouping: int = 0
    replicas: bool = True
    """Whether the first of two axes holds replicas; else both cut."""

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        return GROUPINGS[self.grouping]

    def placements(self) -> tuple[Placement, ...]:
        shard = TensorAtomic() if self.kind == "tensor" else RowAtomic()
        if len(self.shape) == 1:
            return (shard,)
        return (Replicate() if self.replicas else shard, shard)

    def layout(self, names: Sequence[str]) -> mf.GlobalLayout:
        shapes = [SHAPES[name] for name in names]
        count = self.shape[-1] if len(self.shape) == 1 or self.replicas else self.shape[0] * self.shape[1]
        if self.kind == "tensor":
            return mf.build_for_tensor_atomic(
                shapes, count, tensor_owners=[(2 * i + 1) % count for i in range(len(shapes))]
            )
        build = {
            "padded": mf.build_for_row_atomic,
            "unpadded": mf.build_for_row_atomic_unpadding,
            "balanced": mf.build_for_row_atomic_balanced,
        }[self.kind]
        return build(shapes, count)


def value_of(name: str, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The whole tensor, the same under every mesh."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(map(ord, name)))
    return torch.randn(SHAPES[name], generator=generator).to(dtype)


def buffers(mesh: mf.Mesh, way: Way, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, mf.DBuffer]:
    return {
        group: mf.DBuffer.distribute_tensors(
            [value_of(name, seed, dtype) for name in names], mesh, way.placements(), way.layout(names)
        )
        for group, names in way.names.items()
    }


def state_of(mesh: mf.Mesh, way: Way, seed: int = 0) -> dict[str, Any]:
    """Parameters, AdamW's state, a step, a random state that all ranks share."""
    return {
        "params": buffers(mesh, way, seed, torch.bfloat16),
        "optimizer": optim.AdamWState(
            torch.tensor(7 + seed), buffers(mesh, way, seed + 1), buffers(mesh, way, seed + 2, torch.float64)
        ),
        "step": 7 + seed,
        "random": torch.Generator().manual_seed(seed).get_state(),
        "words": ["a", 1.5, None],
    }


def assert_same(got: Any, expected: Any) -> None:
    """Bitwise, by structure."""
    left, structure = torch.utils._pytree.tree_flatten(got)
    right, other = torch.utils._pytree.tree_flatten(expected)
    assert structure == other, f"{structure}\n{other}"
    for a, b in zip(left, right, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), f"{a}\n{b}"
        else:
            assert type(a) is type(b)
            assert a == b


def save_in_simulation(path: Path, way: Way, seed: int = 0) -> None:
    mf.simulate(lambda mesh: mf.checkpoint.save(path, state_of(mesh, way, seed), names=way.names), way.shape)


def load_in_simulation(path: Path, way: Way, seed: int = 0) -> None:
    """Load onto other values, and compare."""

    def program(mesh: mf.Mesh) -> None:
        like = state_of(mesh, way, seed + 50)
        before = [t.clone() if isinstance(t, torch.Tensor) else t for t in torch.utils._pytree.tree_leaves(like)]
        got = mf.checkpoint.load(path, mf.checkpoint.spec_of(like) if seed % 2 else like, names=way.names)
        assert_same(got, state_of(mesh, way, seed))
        assert_same(torch.utils._pytree.tree_leaves(like), before)

    mf.simulate(program, way.shape)


def all_ways(ranks: Sequence[int] = (1, 2, 3, 4, 5, 8)) -> list[Way]:
    return [Way(shape, kind, (n + len(kind)) % 2) for n, kind in itertools.product(ranks, KINDS) for shape in MESHES[n]]
