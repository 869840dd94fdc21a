"""Many groups: one gather after the other, all of them in flight at once or in one exchange, and all tensors as one group."""

from typing import Any

import torch
from measure import medians, ratio, time_rounds
from movement import Limit
from workloads import Workload, place

import mfsdp_func as mf
from mfsdp_func import Mesh
from mfsdp_func.operations.gather_scatter import plan_of


def group_row(workload: Workload, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """Seconds to gather all groups of a workload in several ways. Every rank calls."""
    apart = place(workload, mesh)
    shapes = tuple(shape for group in workload.groups for shape in group)
    joined = place(Workload("joined", (shapes,), workload.dtype), mesh)

    def one_by_one() -> list[Any]:
        return [mf.gather(g.source, owner_layout=g.owners, dtype=workload.dtype)[0] for g in apart]

    def at_once() -> list[Any]:
        calls = [mf.gather(g.source, owner_layout=g.owners, dtype=workload.dtype, async_op=True) for g in apart]
        for _, token in calls:
            token.wait()
        return [tensors for tensors, _ in calls]

    def coalesced() -> list[Any]:
        owners = [g.owners for g in apart]
        return mf.gather_coalesced([g.source for g in apart], owner_layouts=owners, dtype=workload.dtype)[0]

    def as_one() -> list[Any]:
        return [mf.gather(g.source, owner_layout=g.owners, dtype=workload.dtype)[0] for g in joined]

    plans = [plan_of("gather", g.owners, True) for g in apart]
    limits, together = [Limit([plan], workload.dtype) for plan in plans], Limit(plans, workload.dtype)
    rooms = [torch.empty(limit.total, dtype=workload.dtype) for limit in limits]
    room = torch.empty(together.total, dtype=workload.dtype)
    runs = {"one after the other": one_by_one, "all in flight": at_once, "one exchange": coalesced, "one group": as_one}
    runs["limit, one after the other"] = lambda: [limit.run(to) for limit, to in zip(limits, rooms, strict=True)]
    runs["limit, one exchange"] = lambda: together.run(room)
    seconds = time_rounds(runs, rounds)
    row: dict[str, Any] = {"workload": workload.name, "groups": len(workload.groups)}
    row |= {f"{name} (s)": value for name, value in medians(seconds).items()}
    row |= {name: ratio(seconds, name, "one after the other") for name in list(runs)[1:4]}
    row["limit: one exchange"] = ratio(seconds, "limit, one exchange", "limit, one after the other")
    return row
