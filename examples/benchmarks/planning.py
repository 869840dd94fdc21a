"""What needs no other rank: planning time, warm lookups, input checks, and how evenly owners are loaded."""

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from measure import time_alone
from workloads import GPT2_MATRICES, LLAMA_1B_MATRICES, Shape

from mfsdp_func import (
    GroupOwnerLayout,
    Mesh,
    assign_owner_work,
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    intersect_ranges,
    ns_cost_fn,
)
from mfsdp_func.effects.call import Wanted, check_tensors
from mfsdp_func.operations.gather_scatter import given_tensors, plan_of
from mfsdp_func.values.balance import WorkGroup, balance_owner_work
from mfsdp_func.values.layout import GlobalLayout


def plain_loop(layout: GlobalLayout, ranks: int) -> dict[int, int]:
    """Owners by looking at every rank for every tensor: the same choice as `assign_owner_work`."""
    cost = ns_cost_fn()
    segments = [layout.get_segment(k, ranks) for k in range(ranks)]
    load, owners = [0.0] * ranks, dict[int, int]()
    boundary: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(layout.tensor_shapes)), key=layout.tensor_to_offset.__getitem__):
        whole = layout.get_tensor_range(i)
        held = [k for k, segment in enumerate(segments) if intersect_ranges(whole, segment).numel]
        if len(held) > 1:
            boundary.append((i, held))
            continue
        owners[i] = held[0]
        load[held[0]] += cost(layout.tensor_shapes[i])
    for i, held in sorted(boundary, key=lambda item: -cost(layout.tensor_shapes[item[0]])):
        owners[i] = min(held, key=load.__getitem__)
        load[owners[i]] += cost(layout.tensor_shapes[i])
    return owners


def planning_rows(tensors: int = 5000, ranks: int = 2048, repeats: int = 5) -> list[dict[str, Any]]:
    """Seconds to choose owners: one group, a plain loop, and all groups at once.

    Raises:
        ValueError: if the loop and `assign_owner_work` disagree.
    """
    generator = random.Random(3)
    shapes = [(generator.choice([64, 128, 256, 512]), generator.choice([64, 128, 512])) for _ in range(tensors)]
    layout, mesh = build_for_row_atomic_unpadding(shapes, ranks), Mesh(ranks)
    start = time.perf_counter()
    expected = plain_loop(layout, ranks)
    loop = time.perf_counter() - start
    if assign_owner_work(layout, mesh, range(tensors)) != expected:
        raise ValueError("the plain loop chose other owners")
    groups = [(layout, mesh, range(tensors))] * 2
    small = [(build_for_row_atomic_unpadding(shapes, 64), Mesh(64), range(tensors))] * 2
    what = f"{tensors} tensors on {ranks} ranks"
    return [
        {"what": f"owners of {what}", "seconds": time_alone(lambda: assign_owner_work(*groups[0]), repeats)},
        {"what": f"owners of {what}, plain loop", "seconds": loop},
        {"what": f"owners of 2 x {what}, balanced", "seconds": time_alone(lambda: balance_owner_work(groups), 3)},
        {
            "what": f"owners of 2 x {tensors} tensors on 64 ranks",
            "seconds": time_alone(lambda: balance_owner_work(small), 3),
        },
    ]


def warm_rows(
    tensors: int = 2000, rank_counts: Sequence[int] = (2, 64, 2048), repeats: int = 50
) -> list[dict[str, Any]]:
    """Seconds that a warm gather spends on finding its plan and on checking its inputs, at several numbers of ranks."""
    rows: list[dict[str, Any]] = []
    for ranks in rank_counts:
        # All tensors are held by rank 0, so that it checks all of them, whatever the number of ranks.
        shapes = [(64, 64)] * tensors
        numel = 64 * 64 * tensors
        layout = GlobalLayout(shapes, range(0, numel, 64 * 64), numel, [0] + [numel] * (ranks - 1))
        mesh = Mesh(ranks, rank=0)
        owners = dict.fromkeys(range(tensors), 0)
        first = GroupOwnerLayout(mesh, layout, owners)
        plan_of("gather", first, True)
        again = GroupOwnerLayout(Mesh(ranks, rank=0), layout, owners)  # an equal value, not the same object
        hash(again)
        flat = torch.zeros(numel)
        source = dict(enumerate(flat.view(tensors, 64, 64)))
        plan = plan_of("gather", again, True)

        def find(again: GroupOwnerLayout = again, source: Any = source) -> None:
            given_tensors(plan_of("gather", again, True), (source,))

        def look(plan: Any = plan, source: Any = source) -> None:
            check_tensors(plan, given_tensors(plan, (source,)), Wanted(), ())

        what = f"{tensors} tensors, {ranks} ranks"
        rows.append({"what": f"find the plan: {what}", "seconds": time_alone(find, repeats)})
        rows.append({"what": f"check the inputs: {what}", "seconds": time_alone(look, repeats)})
    return rows


def load_rows(
    models: dict[str, tuple[list[Shape], int]] | None = None, rank_counts: Sequence[int] = (4, 8, 16, 64)
) -> list[dict[str, Any]]:
    """Owner load, max over mean, of block groups balanced one by one, together, and together with a price on bytes."""
    chosen = models or {"GPT-2": (GPT2_MATRICES, 12), "Llama-1B": (LLAMA_1B_MATRICES, 16)}
    rows: list[dict[str, Any]] = []
    for name, (shapes, count) in chosen.items():
        for ranks in rank_counts:
            group = WorkGroup(build_for_row_atomic(shapes, ranks), Mesh(ranks), range(len(shapes)))
            one = assign_owner_work(group.layout, group.mesh, group.tensor_indices)
            cost, load = ns_cost_fn(), dict.fromkeys(range(ranks), 0.0)
            for i, owner in one.items():
                load[owner] += count * cost(torch.Size(shapes[i]))
            per_node = max(2, min(8, ranks // 2))
            even = balance_owner_work([group] * count, ranks_per_node=per_node, element_nbytes=2).trade
            near = balance_owner_work([group] * count, ranks_per_node=per_node, element_nbytes=2, byte_cost=1e4).trade
            rows.append(
                {
                    "model": name,
                    "ranks": ranks,
                    "one by one": max(load.values()) / even.mean_load,
                    "together": even.imbalance,
                    "bound": even.imbalance_bound,
                    "moved": even.moved_nbytes,
                    "between nodes": even.inter_node_nbytes,
                    "priced: load": near.imbalance,
                    "priced: moved": near.moved_nbytes,
                    "priced: between nodes": near.inter_node_nbytes,
                    "least moved": even.least_nbytes,
                }
            )
    return rows
