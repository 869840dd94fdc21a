"""Results as JSON, as Markdown tables, and as a picture."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]


def write_report(results: dict[str, Any], folder: Path) -> None:
    """Write ``results.json``, ``results.md`` and, where matplotlib is installed, ``results.png``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    (folder / "results.md").write_text("\n".join(_sections(results)))
    try:
        import matplotlib as mpl
    except ImportError:
        return
    mpl.use("Agg")
    _draw(results, folder / "results.png")


def _sections(results: dict[str, Any]) -> list[str]:
    here = results["environment"]
    lines = ["# Benchmark results", "", ", ".join(f"{name} {value}" for name, value in here.items() if value), ""]
    for size, found in results["ranks"].items():
        for section, title in _TITLES.items():
            if found.get(section):
                lines += [f"## {title}, {size} ranks", "", *_table(found[section]), ""]
    for section, title in (("planning", "Planning, one process"), ("load", "Owner load"), ("overlap", "Slowed link")):
        if results.get(section):
            lines += [f"## {title}", "", *_table(results[section]), ""]
    if results.get("model"):
        model = results["model"]
        title = f"alpha {model['alpha'] * 1e6:.0f} us per message, {1e-9 / max(model['beta'], 1e-15):.2f} GB/s"
        lines += [f"## Gather of GPT-2's blocks by the alpha-beta model ({title})", "", *_table(model["rows"]), ""]
    return lines


_TITLES = {
    "movement": "Gather and scatter",
    "growth": "Gather by number of tensors",
    "groups": "Many groups",
    "steps": "Muon step",
    "memory": "Peak memory of gather beyond its result",
    "thresholds": "Direct and packed messages",
}


def _table(rows: Rows) -> list[str]:
    columns = list(dict.fromkeys(name for row in rows for name in row if not isinstance(row[name], dict)))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(name, row.get(name)) for name in columns) + " |" for row in rows]
    return lines


def _cell(name: str, value: Any) -> str:
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
    for shift, name in ((-0.2, "pure / limit"), (0.2, "in place / limit")):
        axes.bar([n + shift for n in range(len(rows))], [row[name] for row in rows], width=0.4, label=name)
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
