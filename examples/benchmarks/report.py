"""Results as JSON, as Markdown tables, and as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Write ``results.json``, ``results.md`` and, where matplotlib is installed, ``results.png``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    (folder / "results.md").write_text("\n".join(["# Benchmark results", "", *_sections(results)]))
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    _draw(results, folder / "results.png")


def put_into(results: dict[str, Any], file: Path) -> None:
    """Write the tables into a Markdown file, in the place of what stands between its two marks."""
    put_lines(_sections(results), file, MARKS)


def put_lines(lines: Sequence[str], file: Path, marks: tuple[str, str]) -> None:
    """Write lines into a Markdown file, in the place of what stands between two marks."""
    before, after = around_marks(file, marks)
    file.write_text("\n".join([before + marks[0], "", *lines, marks[1] + after]))


def around_marks(file: Path, marks: tuple[str, str] | None = None) -> tuple[str, str]:
    """The text before and after the place of the tables in a Markdown file.

    Raises:
        ValueError: if it lacks one of the marks.
    """
    first, last = marks or MARKS
    before, _, rest = file.read_text().partition(first)
    _, found, after = rest.partition(last)
    if not found:
        raise ValueError(f"{file} lacks the marks {first} and {last}, between which the tables go")
    return before, after


MARKS = "<!-- tables -->", "<!-- end of tables -->"


def _sections(results: dict[str, Any]) -> list[str]:
    here = results["environment"]
    lines = [", ".join(f"{name} {value}" for name, value in here.items() if value), ""]
    sizes = ", ".join(f"{size} ranks" for size in results["ranks"])
    for section, columns, title in _MEASURED:
        rows = _joined(results["ranks"], section, columns)
        if rows:
            lines += [f"### {title}", "", f"Numbers: {sizes}.", "", *table(rows), ""]
    for found in results["ranks"].values():
        if found.get("thresholds"):
            lines += ["### Direct and packed messages, 64 pieces each way", "", *table(found["thresholds"]), ""]
    for section, title in (("planning", "Planning, one process"), ("load", "Owner load, max over mean")):
        if results.get(section):
            lines += [f"### {title}", "", *table(results[section]), ""]
    if results.get("overlap"):
        lines += ["### Slowed link, 2 ranks, 12 groups", "", *table(results["overlap"]), ""]
    if results.get("model"):
        model = results["model"]
        title = f"alpha {model['alpha'] * 1e6:.0f} us per message, {1e-9 / max(model['beta'], 1e-15):.2f} GB/s"
        lines += [f"### Not measured: gather of GPT-2's blocks by the alpha-beta model ({title})", ""]
        lines += [*table(model["rows"]), ""]
    return lines


_MEASURED = (
    (
        "movement",
        (
            "pure / limit",
            "in place / limit",
            "in place / documented",
            "documented / limit",
            "limit: fresh / preallocated",
            "limit, preallocated (s)",
            "copy, preallocated (s)",
        ),
        "Gather and scatter: one group after the other",
    ),
    (
        "movement",
        (
            *("coalesced / limit", "coalesced in place / limit", "coalesced in place / documented"),
            *("coalesced / pure", "coalesced in place / in place", "coalesced limit / limit"),
        ),
        "Gather and scatter: all groups in one exchange",
    ),
    (
        "steps",
        (
            *("full tensor (s)", "muon-fsdp2 (s)", "ours (s)", "ours, coalesced (s)"),
            *("ours, one by one (s)", "ours, pipelined (s)", "ours / full tensor", "ours / muon-fsdp2"),
            *("ours, coalesced / full tensor", "ours, coalesced / muon-fsdp2"),
        ),
        "Muon step",
    ),
    (
        "groups",
        ("one after the other (s)", "all in flight", "one exchange", "limit: one exchange", "one group"),
        "Many groups: gather, over one after the other",
    ),
    ("memory", ("result", "transient"), "Peak memory of gather beyond its result, bytes"),
    ("growth", ("pure (s)", "documented (s)", "limit, fresh (s)"), "Growth with the number of tensors"),
)
"""Section, columns and title. Rows that lack the columns are left out."""

_KEYS = ("workload", "owners", "operation", "received nbytes")


def _joined(ranks: dict[str, Any], section: str, columns: Sequence[str]) -> Rows:
    """The rows of all numbers of ranks side by side: a cell holds one number for each."""
    by_key: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for size, found in ranks.items():
        for row in found.get(section, []):
            if columns[0] in row:
                by_key.setdefault(tuple(row.get(name) for name in _KEYS[:3]), {})[size] = row
    rows: list[dict[str, Any]] = []
    for key, by_size in by_key.items():
        joined: dict[str, Any] = {name: value for name, value in zip(_KEYS, key, strict=False) if value is not None}
        for name in (_KEYS[3], *columns):
            cells = [_cell(name, by_size.get(size, {}).get(name)) or "-" for size in ranks]
            if set(cells) != {"-"}:
                joined[name] = ", ".join(cells)
        rows.append(joined)
    return rows


def table(rows: Rows) -> list[str]:
    """The rows as a Markdown table."""
    columns = list(dict.fromkeys(name for row in rows for name in row if not isinstance(row[name], dict)))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(name, row.get(name)) for name in columns) + " |" for row in rows]
    return lines


def _cell(name: str, value: Any) -> str:
    if name == "received nbytes" and isinstance(value, int):
        return f"{value / 1e6:.1f} MB"
    if isinstance(value, float):
        return _time(value) if name.endswith("(s)") or name in _SECONDS else f"{value:.2f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)


_SECONDS = ("seconds", "direct", "packed")


def _time(seconds: float) -> str:
    return (
        f"{seconds:.2f} s"
        if seconds >= 1
        else f"{seconds * 1e3:.1f} ms"
        if seconds >= 1e-3
        else f"{seconds * 1e6:.0f} us"
    )


def _draw(results: dict[str, Any], file: Path) -> None:
    from matplotlib import pyplot as plt

    measured = results["ranks"].values()
    panels = [
        draw
        for draw, rows in (
            (_draw_movement, [row for found in measured for row in found.get("movement", [])]),
            (_draw_steps, [row for found in measured for row in found.get("steps", [])]),
            (_draw_growth, [row for found in measured for row in found.get("growth", [])]),
            (_draw_load, results.get("load", [])),
        )
        if rows
    ]
    if not panels:
        return
    figure, axes = plt.subplots((len(panels) + 1) // 2, 2, figsize=(13, 9), squeeze=False)
    for axis, draw in zip(axes.flat, panels, strict=False):
        draw(axis, results)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _draw_movement(axes: Any, results: dict[str, Any]) -> None:
    rows = [
        row
        for found in results["ranks"].values()
        for row in found.get("movement", [])
        if row["operation"] == "gather" and row["owners"] == "round robin"
    ]
    names = ("pure / limit", "in place / limit", "coalesced / limit", "coalesced in place / limit")
    for k, name in enumerate(names):
        axes.bar([n + (k - 1.5) * 0.2 for n in range(len(rows))], [row.get(name, 0) for row in rows], 0.2, label=name)
    labels = [f"{row['workload']}, {row['ranks']}" for row in rows]
    axes.set_xticks(range(len(rows)), labels, rotation=70, ha="right", fontsize=7)
    axes.axhline(1.15, color="grey", linestyle="--", linewidth=1)
    axes.set_title("gather, round-robin owners: time over the limit (target 1.15)")
    axes.set_ylim(0, 5)
    axes.legend()


def _draw_steps(axes: Any, results: dict[str, Any]) -> None:
    rows = [row for found in results["ranks"].values() for row in found.get("steps", [])]
    methods = list(dict.fromkeys(name for row in rows for name in row if name.endswith(" (s)")))
    width = 0.8 / max(1, len(methods))
    for k, name in enumerate(methods):
        places = [n + (k - (len(methods) - 1) / 2) * width for n in range(len(rows))]
        axes.bar(places, [row.get(name, 0) for row in rows], width=width, label=name.removesuffix(" (s)"))
    axes.set_xticks(range(len(rows)), [f"{row['workload']}\n{row['ranks']} ranks" for row in rows])
    axes.set_yscale("log")
    axes.set_ylabel("seconds")
    axes.set_title("one Muon step")
    axes.legend(fontsize=8)


def _draw_growth(axes: Any, results: dict[str, Any]) -> None:
    for size, found in results["ranks"].items():
        rows = found.get("growth", [])
        counts = [int(row["workload"].split()[0]) for row in rows]
        for name in ("pure (s)", "documented (s)", "limit, fresh (s)"):
            label = f"{name.removesuffix(' (s)')}, {size} ranks"
            axes.plot(counts, [row[name] for row in rows], marker="o", label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("tensors of (64, 64)")
    axes.set_ylabel("seconds")
    axes.set_title("gather by number of tensors, round-robin owners")
    axes.legend(fontsize=7)


def _draw_load(axes: Any, results: dict[str, Any]) -> None:
    rows = results.get("load", [])
    for shift, name in ((-0.25, "one by one"), (0.0, "together"), (0.25, "bound")):
        axes.bar([n + shift for n in range(len(rows))], [row[name] for row in rows], width=0.25, label=name)
    axes.set_xticks(range(len(rows)), [f"{row['model']}\n{row['ranks']}" for row in rows], fontsize=8)
    axes.set_yscale("log")
    axes.set_title("owner load, max over mean, by number of ranks")
    axes.legend()
