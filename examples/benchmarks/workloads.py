"""What is measured: parameter groups of known models, and the state of one rank for moving them."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from mfsdp_func import GroupOwnerLayout, Mesh, assign_owner_work, build_for_row_atomic
from mfsdp_func.values.balance import balance_owner_work

Shape: TypeAlias = tuple[int, ...]
Owning: TypeAlias = Literal["planned", "per group", "round robin"]

GPT2_MATRICES: list[Shape] = [(2304, 768), (768, 768), (3072, 768), (768, 3072)]
GPT2_BLOCK: list[Shape] = [*GPT2_MATRICES, (2304,), (768,), (3072,), (768,), *[(768,)] * 4]
LLAMA_1B_MATRICES: list[Shape] = [
    *((2048, 2048), (512, 2048), (512, 2048), (2048, 2048)),
    *((8192, 2048), (8192, 2048), (2048, 8192)),
]
LLAMA_1B_BLOCK: list[Shape] = [*LLAMA_1B_MATRICES, (2048,), (2048,)]
QWEN_BLOCK: list[Shape] = [
    *((896, 896), (128, 896), (128, 896), (896, 896)),
    *((4864, 896), (4864, 896), (896, 4864)),
    *((896,), (128,), (128,), (896,), (896,)),
]
EXPERT: list[Shape] = [(1024, 2048), (1024, 2048), (2048, 1024)]


@dataclass(frozen=True)
class Workload:
    """Parameter groups; their tensors of two dims or more take part.

    Attributes:
        name: in tables.
        groups: shapes of the tensors of each group.
        dtype: of all of them.
    """

    name: str
    groups: tuple[tuple[Shape, ...], ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """Of all tensors that take part."""
        shapes = [torch.Size(shape) for group in self.groups for shape in group if len(shape) > 1]
        return self.dtype.itemsize * sum(shape.numel() for shape in shapes)

    def scaled(self, factor: int) -> "Workload":
        """The same with every dim divided by `factor`, at least 2, and fewer tensors: for tests."""
        groups = [
            [tuple(max(2, size // factor) for size in shape) for shape in group[:40]] for group in self.groups[:3]
        ]
        return Workload(self.name, tuple(map(tuple, groups)), self.dtype)


def workloads() -> dict[str, Workload]:
    """All workloads, by name."""
    repeated = {
        "gpt2": [[shape for _ in range(12) for shape in GPT2_BLOCK]],
        "gpt2 blocks": [GPT2_BLOCK] * 12,
        "llama block": [LLAMA_1B_BLOCK],
        "small": [[(64, 64)] * 2000 + [(37, 64)]],
        "qwen blocks": [QWEN_BLOCK] * 24,
        "experts": [[shape for _ in range(8) for shape in EXPERT]],
    }
    found = [
        Workload(f"{name} {word}", tuple(map(tuple, groups)), dtype)
        for name, groups in repeated.items()
        for word, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    ]
    # 16 blocks in fp32 are 3.9 GB, of which each method needs a few copies.
    found.append(Workload("llama blocks bf16", (tuple(LLAMA_1B_BLOCK),) * 16, torch.bfloat16))
    return {workload.name: workload for workload in found}


@dataclass(frozen=True)
class Placed:
    """One group on one rank: who owns what, this rank's flat shard, and its views by tensor."""

    owners: GroupOwnerLayout
    flat: torch.Tensor
    source: dict[int, torch.Tensor]


def place(workload: Workload, mesh: Mesh, owning: Owning = "planned") -> list[Placed]:
    """Lay the groups out in RowAtomic buffers, share their tensors out among the ranks, and fill this rank's shards.

    Args:
        workload: the groups.
        mesh: of one axis, seen by this rank.
        owning: "planned" over all groups, as `balance_owner_work` does it; "per group", among the holders; or "round
            robin", which moves nearly everything, whatever the layout.
    """
    layouts = [build_for_row_atomic(shapes, mesh.size()) for shapes in workload.groups]
    chosen = [[i for i, shape in enumerate(shapes) if len(shape) > 1] for shapes in workload.groups]
    if owning == "planned":
        owners = list(balance_owner_work(list(zip(layouts, [mesh] * len(layouts), chosen, strict=True))).owners)
    elif owning == "per group":
        owners = [assign_owner_work(layout, mesh, take) for layout, take in zip(layouts, chosen, strict=True)]
    else:
        turns = itertools.cycle(mesh.ranks)
        owners = [{i: next(turns) for i in take} for take in chosen]
    placed: list[Placed] = []
    for layout, mapping in zip(layouts, owners, strict=True):
        me = mesh.shard_index((0,))
        segment = layout.get_segment(me, mesh.size())
        # Values that differ everywhere and are the same however the buffer is cut.
        flat = torch.arange(segment.start, segment.end).remainder_(251).to(workload.dtype)
        source = {
            i: flat[(at := layout.tensor_to_offset[i] + part.start - segment.start) : at + part.numel]
            for i, part in layout.tensors_in(segment)
            if i in mapping
        }
        placed.append(Placed(GroupOwnerLayout(mesh, layout, mapping), flat, source))
    return placed


def check_gathered(placed: Placed, tensors: Mapping[int, torch.Tensor]) -> None:
    """Check gathered tensors, bit by bit.

    Raises:
        ValueError: naming the tensor that is wrong.
    """
    for i, tensor in tensors.items():
        whole = placed.owners.layout.get_tensor_range(i)
        expected = torch.arange(whole.start, whole.end).remainder_(251).to(tensor.dtype)
        if not torch.equal(tensor.reshape(-1), expected):
            raise ValueError(f"tensor {i} was gathered wrongly")


def check_scattered(placed: Placed, parts: Mapping[int, torch.Tensor]) -> None:
    """Check scattered parts, bit by bit: they must be the shards that the tensors were gathered from.

    Raises:
        ValueError: naming the tensor that is wrong.
    """
    for i, part in parts.items():
        if not torch.equal(part.reshape(-1), placed.source[i]):
            raise ValueError(f"tensor {i} was scattered wrongly")
