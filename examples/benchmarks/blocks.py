"""Muon by heads against whole parameters, and `gram` against `newton_schulz` by shape.

    torchrun --nproc-per-node 4 examples/benchmarks/blocks.py
    torchrun --nproc-per-node 4 examples/benchmarks/blocks.py --readme examples/benchmarks/README.md   # writes the tables there

The step is that of the attention of a few layers: queries and keys and values taken whole, or head by head, each head with an
owner of its own; in both cases where the buffer is cut between heads. Newton-Schulz alone is timed on one rank.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import environment, join, leave, medians, ratio, time_rounds
from report import put_lines, table

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.values.balance import WorkGroup, balance_owner_work

MARKS = "<!-- blocks -->", "<!-- end of blocks -->"
WIDTH, HEAD, KEY_HEADS = 1024, 64, 4
ATTENTION = ((WIDTH, WIDTH), (KEY_HEADS * HEAD, WIDTH), (KEY_HEADS * HEAD, WIDTH), (WIDTH, WIDTH))
HEADS = optim.blocks("(h d) m -> h d m", d=HEAD)
SHAPES = ((16, 64, 1024), (64, 1024), (256, 1024), (512, 1024), (1024, 1024), (256, 4096), (1024, 4096), (4096, 256))
ORTHOGONALIZE = {"newton_schulz": optim.newton_schulz, "gram": optim.gram()}


def steps_of(layers: int, mesh: mf.Mesh, per_head: bool, orthogonalize: Any) -> Any:
    """A Muon step on this rank's part of some layers, and what it moves."""
    whole = "m n -> m n"
    specs = {0: HEADS, 1: HEADS, 2: HEADS, 3: whole} if per_head else dict.fromkeys(range(4), whole)
    layout = mf.build_row_atomic_layout(ATTENTION, mesh.size(), block_size=HEAD, shard_layout=mf.ShardLayout.UNPADDED)
    finer = optim.block_layout(layout, specs)
    work = [WorkGroup(finer.fine, mesh, finer.costs(), (mf.RowAtomic(),)) for _ in range(layers)]
    chosen = balance_owner_work(work, [finer.costs()] * layers).owners
    owners = {n: mf.GroupOwnerLayout(mesh, finer.fine, owner) for n, owner in enumerate(chosen)}
    full = [torch.randn(shape) for shape in ATTENTION]
    views = mf.DBuffer.distribute_tensors(full, mesh, [mf.RowAtomic()], layout).tensor_views()
    shards = {(n, i): view.clone() for n in range(layers) for i, view in views.items()}
    muon = optim.muon(
        0.02, owner_layout=owners, blocks=dict.fromkeys(range(layers), finer), orthogonalize=orthogonalize
    )
    state = muon.init(shards)
    return lambda: muon.update(shards, state, shards)


def step_rows(rounds: int, layers: int) -> list[dict[str, Any]]:
    """Seconds of a step by each way, and their ratios; every rank calls."""
    mesh = mf.Mesh(dist.get_world_size(), rank=dist.get_rank())
    ways = {
        f"{kind}, {name}": steps_of(layers, mesh, kind == "per head", function)
        for kind in ("whole", "per head")
        for name, function in ORTHOGONALIZE.items()
    }
    seconds = time_rounds(ways, rounds)
    base = "whole, newton_schulz"
    return [
        {"step": name, "(s)": value, f"over {base}": ratio(seconds, name, base)}
        for name, value in medians(seconds).items()
    ]


def shape_rows(rounds: int) -> list[dict[str, Any]]:
    """Newton-Schulz alone, in float32; every rank calls, the first one computes."""
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        matrix = torch.randn(shape)
        ways = {
            name: (lambda f=f, matrix=matrix: f(matrix)) if dist.get_rank() == 0 else (lambda: None)
            for name, f in ORTHOGONALIZE.items()
        }
        seconds = time_rounds(ways, rounds)
        row: dict[str, Any] = {"shape": " x ".join(map(str, shape))}
        row |= {f"{name} (s)": value for name, value in medians(seconds).items()}
        rows.append(row | {"gram / newton_schulz": ratio(seconds, "gram", "newton_schulz")})
    return rows


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--readme", type=Path, help="a Markdown file to write the tables into, between its marks")
    options = parser.parse_args()
    rank, size = join()
    steps, shapes = step_rows(options.rounds, options.layers), shape_rows(options.rounds)
    if rank == 0:
        here = ", ".join(f"{name} {value}" for name, value in environment().items() if value)
        title = f"A Muon step on the attention of {options.layers} layers, heads of {HEAD} x {WIDTH}, {size} ranks"
        lines = [here, "", f"### {title}", "", *table(steps), "", "### Newton-Schulz by shape, float32, one core", ""]
        lines += [*table(shapes), ""]
        print("\n".join(lines))
        if options.readme:
            put_lines(lines, options.readme, MARKS)
    leave()


if __name__ == "__main__":
    main()
