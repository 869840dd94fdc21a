"""Beyond the ranks that can be run here: messages and bytes from the plans, time from the alpha-beta model."""

from collections.abc import Sequence
from typing import Any

import torch
from workloads import GPT2_MATRICES, Workload, place

from mfsdp_func import Mesh
from mfsdp_func.effects.process_group import DIRECT_NBYTES, PROCESS_GROUPS
from mfsdp_func.operations.gather_scatter import plan_of
from mfsdp_func.plans.rank_view import group_messages


def model_rows(
    alpha: float, beta: float, rank_counts: Sequence[int] = (2, 4, 8, 16, 32, 64, 128), groups: int = 12
) -> list[dict[str, Any]]:
    """Gather of GPT-2's block matrices, bf16: the busiest rank's messages and bytes, and ``alpha m + beta n`` seconds.

    A rank's link carries one message at a time each way; ranks do not slow one another down. No measurement.

    Args:
        alpha: seconds per message.
        beta: seconds per byte.
        rank_counts: numbers of ranks.
        groups: how many blocks.
    """
    rows: list[dict[str, Any]] = []
    workload = Workload("GPT-2", (tuple(GPT2_MATRICES),) * groups, torch.bfloat16)
    for ranks in rank_counts:
        mesh = Mesh(ranks, rank=0)
        packed = max(DIRECT_NBYTES, PROCESS_GROUPS.packing(mesh)[1])
        plans = [plan_of("gather", group.owners, True) for group in place(workload, mesh)]
        messages, nbytes = [0] * ranks, [0] * ranks
        for plan in plans:
            for rank in mesh.ranks:
                view = plan.view(rank)
                sides = group_messages(view, DIRECT_NBYTES // 2, packed // 2)
                moved = [sum(transfer.numel for transfer in side) for side in (view.sends, view.receives)]
                messages[rank] += max(map(len, sides))
                nbytes[rank] += 2 * max(moved)
        worst = max(range(ranks), key=lambda rank: alpha * messages[rank] + beta * nbytes[rank])
        seconds = alpha * messages[worst] + beta * nbytes[worst]
        rows.append({"ranks": ranks, "messages": messages[worst], "nbytes": nbytes[worst], "model (s)": seconds})
    return rows
