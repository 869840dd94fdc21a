"""Tables for people: what layouts store, and what a plan moves. No process group, no tensor: any number of ranks."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from mfsdp_func.effects.process_group import PROCESS_GROUPS
from mfsdp_func.plans.plan import gather_plan
from mfsdp_func.plans.rank_view import group_messages
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_balanced,
    build_for_row_atomic_unpadding,
)
from mfsdp_func.values.owner_planning import CostFn, GroupOwnerLayout, tensor_costs
from mfsdp_func.values.padding import finer_view, padding_report

Shapes = Sequence[tuple[int, ...]]

_GPT2_BLOCK: Shapes = [
    *((768,), (768,), (768, 2304), (2304,), (768, 768), (768,)),
    *((768,), (768,), (768, 3072), (3072,), (3072, 768), (768,)),
]
_LLAMA_BLOCK: Shapes = [
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),
    *((14336, 4096), (14336, 4096), (4096, 14336), (4096,), (4096,)),
]
_BOTTLENECK: Shapes = [
    *((512, 2048, 1, 1), (512,), (512,), (512, 512, 3, 3), (512,), (512,)),
    *((2048, 512, 1, 1), (2048,), (2048,)),
]

GROUPS: Mapping[str, Shapes] = {
    "coprime rows": [(8, 769), (8, 1021), (8, 2039)],
    "8 experts": [(8, 4096, 7168), (8, 7168, 2048)],
    "GPT-2 block": _GPT2_BLOCK,
    "GPT-2 whole": [(50257, 768), (1024, 768), *_GPT2_BLOCK * 12, (768,), (768,)],
    "Llama-3 8B block": _LLAMA_BLOCK,
    "Llama-3 8B root": [(128256, 4096), (4096,), (128256, 4096)],
    "ResNet-50 stage 4": [
        *((512, 1024, 1, 1), *_BOTTLENECK[1:], (2048, 1024, 1, 1), (2048,), (2048,)),
        *_BOTTLENECK * 2,
    ],
}
"""Name -> shapes of the tensors of one buffer: hard cases, and units of known models."""

_BUILDERS: Mapping[str, Callable[[Shapes, int], GlobalLayout]] = {
    "PADDED": build_for_row_atomic,
    "UNPADDED": build_for_row_atomic_unpadding,
    "BALANCED": build_for_row_atomic_balanced,
}


def format_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns of equal width: the first aligned left, the others right.

    >>> print(format_table(["name", "n"], [["a", 1], ["long name", 1000]]))
    name          n
    a             1
    long name  1000
    """
    cells = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines: list[str] = []
    for first, *others in cells:
        right = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    return "\n".join(lines)


def padding_table(ranks: Sequence[int] = (2, 8, 64, 512), groups: Mapping[str, Shapes] = GROUPS) -> str:
    """What the fullest rank stores of each group under each layout, in even shares of the tensors' elements.

    "bound" is the least that equal segments can reach without splitting a row; "finer" lays every tensor of three or
    more dims out with its last dim as the row (`finer_view`), and "finer bound" goes with it.
    """
    rows: list[list[object]] = []
    for name, shapes in groups.items():
        finer = [tuple(finer_view(shape)) for shape in shapes]
        for count in ranks:
            reports = [padding_report(build(shapes, count)) for build in _BUILDERS.values()]
            fine = padding_report(build_for_row_atomic_balanced(finer, count))
            times = [report.fullest_times for report in reports]
            figures = [*times, reports[0].bound_times, fine.fullest_times, fine.bound_times]
            rows.append([name, f"{reports[0].needed:,}", count, *(f"{figure:,.2f}" for figure in figures)])
    header = ["tensors of one buffer", "elements", "ranks", *_BUILDERS, "bound", "finer BALANCED", "finer bound"]
    return (
        "Elements on the fullest rank, in even shares (elements / ranks). PADDED and BALANCED store that much on every"
        " rank, UNPADDED 1.00 on average.\n" + format_table(header, rows)
    )


def layout_table(layout: GlobalLayout, *, block_size: int = 1) -> str:
    """Where the tensors and the segments of a layout lie."""
    tensors = [
        [i, tuple(shape), f"{layout.tensor_to_offset[i]:,}", f"{layout.get_tensor_range(i).end:,}"]
        for i, shape in enumerate(layout.tensor_shapes)
    ]
    segments = [layout.get_segment(k, layout.dp_size) for k in range(layout.dp_size)]
    shards = [[k, f"{part.start:,}", f"{part.end:,}", f"{part.numel:,}"] for k, part in enumerate(segments)]
    return "\n\n".join(
        [
            f"buffer of {layout.size:,} elements; {padding_report(layout, block_size=block_size)}",
            format_table(["tensor", "shape", "start", "end"], tensors),
            format_table(["shard", "start", "end", "elements"], shards),
        ]
    )


def owner_table(owners: GroupOwnerLayout, dtype: torch.dtype, cost_fn: CostFn | None = None) -> str:
    """What each rank owns, its work, and what it receives and sends in a gather of elements of `dtype`.

    The load is a rank's work by `cost_fn` over the mean of all ranks. Messages are counted as process groups pack them;
    a scatter sends the same back.
    """
    mesh, plan = owners.mesh, gather_plan(owners, owners.name)
    costs = tensor_costs(owners.layout, owners.tensor_to_owner, cost_fn)
    # An owner stands for its shard coordinates: where an axis replicates, each replica group has such a rank.
    shard_of = {rank: mesh.shard_index(plan.groups[0].axes, rank) for rank in mesh.ranks}
    owned = {k: [i for i, owner in owners.tensor_to_owner.items() if shard_of[owner] == k] for k in shard_of.values()}
    work = {k: sum(costs[i] for i in tensors) for k, tensors in owned.items()}
    mean = sum(work.values()) / len(work)
    direct, packed = (max(1, nbytes // dtype.itemsize) for nbytes in PROCESS_GROUPS.packing(mesh))
    rows: list[list[object]] = []
    totals = [0] * 6
    for rank, k in shard_of.items():
        figures: list[int] = []
        for messages in reversed(group_messages(plan.view(rank), direct, packed)):
            numel = sum(transfer.numel for message in messages for transfer in message.transfers)
            figures += [len(messages), numel, numel * dtype.itemsize]
        totals = [total + figure for total, figure in zip(totals, figures, strict=True)]
        load = f"{work[k] / mean:.2f}" if mean else "0.00"
        rows.append([rank, ",".join(map(str, owned[k])) or "-", load, *(f"{figure:,}" for figure in figures)])
    rows.append(["all", len(costs), "", *(f"{total:,}" for total in totals)])
    sides = [f"{side} {unit}" for side in ("received", "sent") for unit in ("messages", "elements", "bytes")]
    return format_table(["rank", "owns", "load", *sides], rows)


def plan_report(owners: GroupOwnerLayout, dtype: torch.dtype, *, block_size: int = 1) -> str:
    """The layout, the gather plan piece by piece, and its cost for each owner."""
    return "\n\n".join(
        [
            layout_table(owners.layout, block_size=block_size),
            str(gather_plan(owners, owners.name)),
            owner_table(owners, dtype),
        ]
    )
