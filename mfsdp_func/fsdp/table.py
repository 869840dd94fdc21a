"""A sharded module as text: which unit has which parameters, and how they lie."""

from collections.abc import Mapping, Sequence

from mfsdp_func.fsdp.grouping import Group, Unit
from mfsdp_func.fsdp.param_group import ParamGroup


def table(units: Sequence[Unit], groups: Mapping[str, Group], param_groups: Mapping[str, ParamGroup]) -> str:
    """One line per group, and one per parameter; no weights.

    Sizes are of the logical parameters, of what this rank stores, and of the whole buffer with its padding.
    """
    held = {unit.name: unit.held for unit in units}
    rows = [("unit", "group", "parameters", "stored here", "whole", "dtype", "placements")]
    details: list[list[str]] = [[]]
    for key, group in groups.items():
        b = param_groups[key]
        unit = next((unit.name for unit in units if key in unit.groups), "")
        numel = sum(entry.shape.numel() for entry in group.entries)
        kinds = [str(b.main_dtype).removeprefix("torch."), *([] if b.trainable else ["frozen"])]
        name = (unit or "(root)") + (" (held)" if held.get(unit) else "")
        rows.append(
            (
                name,
                key,
                f"{numel:,}",
                f"{b.spec.local_numel:,}",
                f"{b.whole.local_numel:,}",
                " ".join(kinds),
                ", ".join(map(str, b.spec.placements)),
            )
        )
        details.append([f"{n}: {entry.name} {tuple(entry.shape)}" for n, entry in enumerate(group.entries)])
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    lines: list[str] = []
    for row, more in zip(rows, details, strict=True):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        lines += [f"    {line}" for line in more]
    return "\n".join(lines)
