"""The pictures: owner load, who talks to whom, memory, padding, the timeline of a step. Needs matplotlib."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mfsdp_func.preflight.memory import KINDS, MOMENTS
from mfsdp_func.preflight.result import Answer, seconds
from mfsdp_func.preflight.timing import Span

Draw = Callable[[Answer, Any], bool]
"""Draws into axes; False where there is nothing to draw."""

_COLORS = ("#4878a8", "#e49444", "#6aa56e", "#b8aa3d", "#85659c", "#d1605e", "#7bb5b0", "#967662")
_SUFFIXES = (".png", ".svg", ".pdf")
_STEPS = 512
"""More ranks than this are drawn as the largest value of each bin."""


def pyplot() -> Any:
    """The module matplotlib.pyplot, without a screen.

    Raises:
        ValueError: where it is missing.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError(
            "preflight: pictures need matplotlib; install it: pip install 'mfsdp_func[preflight]'"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def _binned(values: torch.Tensor) -> tuple[list[int], list[float]]:
    """First rank of each bin, and the largest value in it."""
    count = len(values)
    bins = min(_STEPS, count)
    at = torch.arange(count) * bins // count
    largest = torch.zeros(bins, dtype=torch.float64).scatter_reduce_(0, at, values.double(), "amax", include_self=True)
    firsts = [-(-n * count // bins) for n in range(bins)]
    return firsts, largest.tolist()


def draw_load(result: Answer, axes: Any) -> bool:
    """Work of each owner against the mean and the bound."""
    if not result.parts.matrices:
        return False
    loads = torch.tensor(result.parts.loads, dtype=torch.float64) / 1e12
    firsts, values = _binned(loads)
    axes.fill_between([*firsts, len(loads)], [*values, values[-1]], step="post", color=_COLORS[0], linewidth=0)
    mean, bound = float(loads.mean()), result.parts.load_bound / 1e12
    axes.axhline(mean, color="black", linewidth=1, label=f"mean {mean:,.1f}")
    if bound > mean * 1.01:
        axes.axhline(
            bound, color=_COLORS[5], linestyle="--", linewidth=1, label=f"bound {bound:,.1f}: no owners do better"
        )
    axes.set(xlabel="shard index (the same in each replica group)", ylabel="Newton-Schulz work [Tflop]")
    axes.set(xlim=(0, len(loads)), ylim=(0, float(loads.max()) * 1.3))
    axes.legend(loc="upper right", fontsize=8, ncols=2)
    axes.set_title(f"Owner load by rank: max / mean {result.imbalance:.2f}, bound {result.imbalance_bound:.2f}")
    return True


def draw_heat(result: Answer, axes: Any) -> bool:
    """Who sends to whom in the optimizer's gather, or else in all collectives."""
    import matplotlib.ticker
    from matplotlib.colors import LogNorm

    gather = result.operation("optimizer gather")
    chosen = [gather] if gather is not None else list(result.operations)
    if not chosen:
        return False
    heat = sum((operation.heat for operation in chosen), torch.zeros_like(chosen[0].heat)).double()
    if not bool(heat.any()):
        return False
    shown = heat.masked_fill(heat == 0, float("nan")).numpy()
    smallest, largest = float(heat[heat > 0].min()), float(heat.max())
    norm = LogNorm(smallest, largest) if smallest < largest else None
    world, bins = result.settings.world, heat.shape[0]
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="#f2f2f2")
    image = axes.imshow(
        shown, norm=norm, cmap=colors, extent=(0, world, world, 0), interpolation="nearest", rasterized=True
    )
    bar = axes.figure.colorbar(image, ax=axes, format=matplotlib.ticker.EngFormatter("B"), label="bytes of a step")
    if norm is not None and largest < 100 * smallest:  # few powers of ten: the marks between them are needed too
        bar.locator = matplotlib.ticker.LogLocator(subs=(1, 2, 5))
        bar.update_ticks()
    bar.ax.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    each = f" ({world / bins:g} ranks a bin)" if bins < world else ""
    axes.set(xlabel=f"receiving rank{each}", ylabel=f"sending rank{each}")
    what = "gather to owners" if gather is not None else "collectives"
    share = sum(op.between * op.nbytes for op in chosen) / sum(op.nbytes for op in chosen)
    axes.set_title(f"Who talks to whom: {what}, {share:.0%} between nodes")
    return True


def draw_memory(result: Answer, axes: Any) -> bool:
    """Bytes of each rank, stacked by kind, at the moment that needs most; the device's memory as a line."""
    moment, _ = result.memory.worst()
    kinds = result.memory.moments[moment]
    chosen = [kind for kind in KINDS if kind in kinds and int(kinds[kind].max())]
    base = [0.0] * min(_STEPS, result.settings.world)
    for kind in chosen:
        firsts, values = _binned(kinds[kind] / 1e9)
        top = [low + value for low, value in zip(base, values, strict=True)]
        x = [*firsts, result.settings.world]
        color = _COLORS[KINDS.index(kind)]
        axes.fill_between(x, [*base, base[-1]], [*top, top[-1]], step="post", color=color, linewidth=0, label=kind)
        base = top
    limit = result.hardware.memory / 1e9
    if limit < 3 * max(base):
        axes.axhline(
            limit, color="black", linestyle="--", linewidth=1, label=f"one {result.hardware.name}: {limit:,.0f} GB"
        )
    axes.set(xlabel="rank", ylabel="memory [GB]", xlim=(0, result.settings.world), ylim=(0, None))
    axes.set_ylim(0, 1.35 * max(base) if limit >= 3 * max(base) else 1.35 * max(limit, *base))
    axes.legend(loc="upper center", fontsize=8, ncols=3)
    left_out = "" if result.activations else ", activations left out"
    axes.set_title(f"Memory by rank, {MOMENTS[moment]}{left_out}")
    return True


def draw_padding(result: Answer, axes: Any) -> bool:
    """Elements stored beyond those needed, of each distinct buffer."""
    found: dict[tuple[float, float], list[str]] = {}
    for key, part in result.parts.parts.items():
        found.setdefault((part.padding.times, part.padding.bound_times), []).append(key)
    rows = sorted(found.items(), key=lambda item: -item[0][0])[:12][::-1]
    names = [keys[0] + (f" and {len(keys) - 1} alike" if len(keys) > 1 else "") for _, keys in rows]
    extra = [100 * (times - 1) for (times, _), _ in rows]
    axes.barh(range(len(rows)), extra, 0.6, color=_COLORS[1], label="stored")
    axes.set_ylim(-0.6, max(3.0, len(rows) - 0.4))
    axes.scatter(
        [100 * (bound - 1) for (_, bound), _ in rows], range(len(rows)), color="black", marker="|", s=120, label="least"
    )
    axes.set_yticks(range(len(rows)), names, fontsize=8)
    axes.set(xlabel="padding [% of the elements needed]", xlim=(0, max(1.0, axes.get_xlim()[1])))
    axes.legend(loc="lower right", fontsize=8)
    axes.set_title(f"Padding by buffer: {result.padding:.3f} times in all")
    return True


def draw_timeline(result: Answer, axes: Any) -> bool:
    """One step by the alpha-beta model: what is computed, and what is on the links."""
    spans = result.timing.spans
    if not spans:
        return False
    lanes = ("communication", "compute")
    names = list(dict.fromkeys(span.name for span in spans))
    colors = {name: _COLORS[n % len(_COLORS)] for n, name in enumerate(names)}
    scale, unit = (1e3, "ms") if result.timing.step < 1 else (1.0, "s")
    for name in names:
        for lane in lanes:
            mine = _joined([s for s in spans if s.name == name and s.lane == lane])
            if mine:
                bars = [(start * scale, length * scale) for start, length in mine]
                axes.broken_barh(bars, (lanes.index(lane) - 0.35, 0.7), color=colors[name], linewidth=0)
        total = sum(span.seconds for span in spans if span.name == name)
        axes.plot([], [], color=colors[name], linewidth=6, label=f"{name}: {seconds(total)}")
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set(xlabel=f"time [{unit}]", xlim=(0, result.timing.step * scale), ylim=(-0.6, 1.6))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), fontsize=8, ncols=3)
    axes.set_title(f"Timeline of a step: {seconds(result.timing.step)} (alpha-beta model, {result.hardware.name})")
    return True


def _joined(spans: list[Span]) -> list[tuple[float, float]]:
    """Spans that follow one another without a gap, as one."""
    found: list[tuple[float, float]] = []
    for span in spans:
        if found and abs(sum(found[-1]) - span.start) < 1e-12:
            found[-1] = (found[-1][0], found[-1][1] + span.seconds)
        else:
            found.append((span.start, span.seconds))
    return found


PICTURES: dict[str, tuple[Draw, tuple[float, float], str]] = {
    "load": (
        draw_load,
        (7, 3.2),
        "Each matrix is orthogonalised by one rank, its owner. The busiest owner decides how long all wait.",
    ),
    "heat": (
        draw_heat,
        (6, 4.8),
        "Bytes that ranks (rows) send to others (columns) when matrices are gathered to their owners; nothing where it is"
        " grey. The way back is the mirror image. Near the diagonal, ranks are neighbours and mostly share a node.",
    ),
    "memory": (
        draw_memory,
        (8, 3.4),
        "What each rank stores at the moment of the step that needs most.",
    ),
    "padding": (
        draw_padding,
        (7, 3.2),
        "Buffers are cut at row boundaries; what is stored beyond the parameters is padding. The mark is the least that"
        " equal segments must store.",
    ),
    "timeline": (
        draw_timeline,
        (9, 2.8),
        "Gathers run ahead of the unit that needs them, reductions behind it. Without a batch, passes compute nothing.",
    ),
}
"""Name -> how it is drawn, its size in inches, and what it shows."""


def svg_of(result: Answer, name: str) -> str | None:
    """One picture as SVG to be put into a page; None where there is nothing to draw."""
    plt = pyplot()
    draw, size, _ = PICTURES[name]
    with plt.rc_context({"svg.hashsalt": f"{result.command}{name}", "svg.fonttype": "path"}):
        figure, axes = plt.subplots(figsize=size)
        try:
            if not draw(result, axes):
                return None
            file = io.StringIO()
            figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None}, dpi=150)
        finally:
            plt.close(figure)
    text = file.getvalue()
    return text[text.index("<svg") :]


def save_pictures(result: Answer, path: str | Path) -> Path:
    """See `Preflight.plot`."""
    target = Path(path)
    if target.suffix not in _SUFFIXES:
        raise ValueError(f"preflight: pictures go into a {', '.join(_SUFFIXES)} file, got {target}")
    plt = pyplot()
    figure = plt.figure(figsize=(15, 12), layout="constrained")
    try:
        model = result.parts.model
        figure.suptitle(f"{model.label}, {model.numel:,} parameters\n{result.settings.options()}")
        grid = figure.subplot_mosaic([["load", "heat"], ["memory", "padding"], ["timeline", "timeline"]])
        for name, (draw, _, _) in PICTURES.items():
            if not draw(result, grid[name]):
                grid[name].set_axis_off()
        figure.savefig(target, dpi=110)
    finally:
        plt.close(figure)
    return target
