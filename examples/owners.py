"""How owners are chosen: a table and a picture of one transformer block's matrices on four ranks.

    python examples/owners.py                     # prints the table
    python examples/owners.py --plot owners.svg   # draws the picture too

A tensor that one rank holds alone stays there. Each of the others goes, the most expensive first, to the least loaded of
the ranks that hold a part of it. So what moves is only what lies on the other holders.
"""

import argparse

import mfsdp_func as mf

NAMES = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
SHAPES = ((192, 64), (64, 64), (256, 64), (64, 256))
RANKS = 4


def choose() -> mf.GroupOwnerLayout:
    layout = mf.build_for_row_atomic_unpadding(SHAPES, RANKS)
    mesh = mf.Mesh(RANKS)
    return mf.GroupOwnerLayout(mesh, layout, mf.assign_owner_work(layout, mesh, range(len(SHAPES))), name="block")


def table(owners: mf.GroupOwnerLayout) -> str:
    layout, cost = owners.layout, mf.ns_cost_fn()
    total = sum(map(cost, layout.tensor_shapes))
    rows = [f"{'tensor':<14} {'shape':>10} {'work':>5}  held by (share)          owner  moved"]
    for i, name in enumerate(NAMES):
        shape, owner = layout.tensor_shapes[i], owners.tensor_to_owner[i]
        held = dict(layout.shards_of(i, mf.Range(0, shape.numel()), RANKS))
        shares = ", ".join(f"{rank} ({part.numel / shape.numel():.0%})" for rank, part in held.items())
        moved = 1 - (held[owner].numel / shape.numel() if owner in held else 0)
        size = "x".join(map(str, shape))
        rows.append(f"{name:<14} {size:>10} {cost(shape) / total:>5.0%}  {shares:<24} {owner:>5} {moved:>6.0%}")
    return "\n".join(rows)


def draw(owners: mf.GroupOwnerLayout, path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams["svg.hashsalt"] = "owners"  # the same bytes at each run
    layout, colours = owners.layout, plt.get_cmap("tab10").colors
    figure, axes = plt.subplots(figsize=(9, 2.6))
    for k in range(RANKS):
        part = layout.get_segment(k, RANKS)
        axes.broken_barh([(part.start, part.numel)], (2, 0.8), facecolors=colours[k], edgecolor="white")
        axes.text(part.start + part.numel / 2, 2.4, f"rank {k}", ha="center", va="center", color="white")
    for i, name in enumerate(NAMES):
        whole, owner = layout.get_tensor_range(i), owners.tensor_to_owner[i]
        axes.broken_barh([(whole.start, whole.numel)], (0, 0.8), facecolors=colours[owner], edgecolor="white")
        axes.text(
            whole.start + whole.numel / 2,
            0.4,
            f"{name}\n-> rank {owner}",
            ha="center",
            va="center",
            color="white",
            fontsize=7,
        )
        for k, part in layout.shards_of(i, mf.Range(0, whole.numel), RANKS):
            middle = whole.start + part.start + part.numel / 2
            style = {
                "color": colours[k],
                "linewidth": 1.5 if k != owner else 0.6,
                "linestyle": "-" if k != owner else ":",
            }
            axes.annotate(
                "", (whole.start + whole.numel / 2, 0.85), (middle, 1.95), arrowprops={"arrowstyle": "->", **style}
            )
    axes.set(
        yticks=[0.4, 2.4],
        yticklabels=["owners", "shards"],
        ylim=(-0.1, 2.9),
        xlim=(0, layout.size),
        xlabel="elements of the flat buffer",
    )
    axes.set_title("gather: solid arrows are messages, dotted ones stay on their rank", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.endswith("svg") else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="where the picture goes: .svg or .png")
    options = parser.parse_args()
    chosen = choose()
    print(table(chosen))
    if options.plot:
        draw(chosen, options.plot)
