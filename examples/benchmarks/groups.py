"""Many groups: one gather after the other, all of them in flight at once, and all tensors as one group."""

from typing import Any

from measure import medians, ratio, time_rounds
from workloads import Workload, place

import mfsdp_func as mf
from mfsdp_func import Mesh


def group_row(workload: Workload, mesh: Mesh, rounds: int) -> dict[str, Any]:
    """Seconds to gather all groups of a workload in three ways. Every rank calls."""
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

    def as_one() -> list[Any]:
        return [mf.gather(g.source, owner_layout=g.owners, dtype=workload.dtype)[0] for g in joined]

    runs = {"one after the other": one_by_one, "all in flight": at_once, "one group": as_one}
    seconds = time_rounds(runs, rounds)
    row: dict[str, Any] = {"workload": workload.name, "groups": len(workload.groups)}
    row |= {f"{name} (s)": value for name, value in medians(seconds).items()}
    row |= {name: ratio(seconds, name, "one after the other") for name in ("all in flight", "one group")}
    return row
