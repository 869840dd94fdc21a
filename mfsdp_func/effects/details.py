"""What is in a linear map, in words: for ranks whose maps differ."""

from mfsdp_func.plans.collective import Collective
from mfsdp_func.plans.linear_map import LinearMap
from mfsdp_func.plans.plan import GroupPlan, Plan
from mfsdp_func.values.mesh import Mesh


def details_of(linear: LinearMap | None) -> dict[str, str]:
    """Facts of a map, such as the owner of each tensor; none where there is no map."""
    if isinstance(linear, Collective):
        return _collective(linear)
    if not isinstance(linear, Plan):
        return {}
    found: dict[str, str] = {}
    for n, group in enumerate(linear.groups):
        of_which = f"group {group.name or n}, " if len(linear.groups) > 1 else ""
        facts = _group(linear.operation, linear.mesh, group)
        found |= {f"{of_which}{fact}": word for fact, word in facts.items()}
    return found


def _collective(linear: Collective) -> dict[str, str]:
    return {
        "operation": linear.label,
        "reduction": "" if linear.kind == "allgather" else "average" if linear.average else "sum",
        "deterministic": str(linear.deterministic),
        "padded to": str(linear.stored or ""),
        "placements": linear.group.rpartition(" ")[0],
        "layout": linear.group.rpartition(" ")[2][:16],
    }


def _group(operation: str, mesh: Mesh, group: GroupPlan) -> dict[str, str]:
    gathers = operation in ("gather", "transpose of scatter")
    rows, owned = (group.source, group.target) if gathers else (group.target, group.source)
    ranks = mesh.shard_ranks(group.axes, mesh.ranks[0])
    found = {"name": group.name, "tensors that take part:": str(list(group.tensors)), "dtype": str(group.dtype or "")}
    for i in group.tensors:
        owners = [ranks[k] for k in owned.holders_of(i, len(ranks))]
        found[f"tensor {i}: owner"] = ", ".join(map(str, owners))
    for i, shape in enumerate(group.shapes):
        found[f"tensor {i}: shape"] = str(tuple(shape))
        found[f"tensor {i}: offset"] = str(rows.tensor_to_offset[i])
    found["buffer size"] = str(rows.size)
    found["segments start at"] = str(list(rows.rank_to_offset))
    found["own parts"] = "left out" if group.without_own else "kept"
    return found
