"""All benchmarks: ``python examples/benchmarks/run.py``, or ``torchrun --nproc-per-node N examples/benchmarks/run.py``.

Alone, it starts torchrun for each of ``--ranks`` and measures what needs no ranks itself; under torchrun, it measures
on the ranks that are there. Either way it writes ``results.json``, ``results.md`` and ``results.png`` into ``--out``.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from groups import group_row
from measure import environment, join, leave, medians, on_cuda, ratio, time_rounds
from memory import peak_rows
from model import model_rows
from movement import movement_rows
from overlap import can_slow_links, measure_overlap
from planning import load_rows, planning_rows, warm_rows
from report import around_marks, put_into, write_report
from steps import TOLERANCE, largest_difference, steps_of
from thresholds import SIZES, alpha_beta, measure_thresholds
from workloads import Workload, workloads

from mfsdp_func import Mesh

STEP_BLOCKS = {
    "16 matrices": [[(1024, 256), (256, 1024), (256, 256), (768, 256)]] * 4,
    "48 matrices": [[(768, 256), (256, 256), (1024, 256), (256, 1024)]] * 12,
}
"""The second has the shapes of GPT-2's blocks at a third of their width."""
RANK_SECTIONS = ("movement", "growth", "groups", "steps", "memory", "thresholds")
LONE_SECTIONS = ("planning", "model", "overlap")

Results = dict[str, Any]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder for the results")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (not under torchrun)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each comparison")
    parser.add_argument("--workloads", nargs="+", default=list(workloads()), help="names of workloads")
    parser.add_argument("--only", nargs="+", default=[*RANK_SECTIONS, *LONE_SECTIONS], help="sections to run")
    parser.add_argument("--readme", type=Path, help="a Markdown file to write the tables into, between its marks")
    parser.add_argument("--scale", type=int, default=1, help="divide all dims: a try-out, not a measurement")
    return parser.parse_args(arguments)


def measure_on_ranks(options: argparse.Namespace) -> Results:
    """The sections that need ranks; every rank calls."""
    mesh = Mesh(dist.get_world_size(), rank=dist.get_rank())
    chosen = [workloads()[name] for name in options.workloads]
    if options.scale > 1:
        chosen = [workload.scaled(options.scale) for workload in chosen]
    results: Results = {}

    def said(section: str) -> bool:
        if section in options.only and mesh.get_rank() == 0:
            print(f"{mesh.size()} ranks: {section}", file=sys.stderr, flush=True)
        return section in options.only

    if said("movement"):
        rows = results["movement"] = []
        for workload in chosen:
            if 8 * workload.nbytes > free_nbytes():
                print(f"{workload.name}: left out, it needs {8 * workload.nbytes:,} free bytes", file=sys.stderr)
                continue
            if mesh.get_rank() == 0:
                print(f"  {workload.name}", file=sys.stderr, flush=True)
            rounds = max(3, options.rounds // 3) if workload.nbytes > 1 << 30 else options.rounds
            for owning in ("planned", "round robin"):
                rows += movement_rows(workload, mesh, owning, rounds)
    if said("growth"):
        rows = results["growth"] = []
        for count in (8, 32, 128, 512, 2000):
            workload = Workload(f"{count} x (64, 64)", (((64, 64),) * (count // options.scale or 1),))
            rows += movement_rows(workload, mesh, "round robin", options.rounds)[:1]
    if said("groups"):
        many = [workload for workload in chosen if len(workload.groups) > 1 and workload.nbytes < 1 << 30]
        many.append(Workload("12 x 16 (64, 64)", (((64, 64),) * 16,) * 12))
        results["groups"] = [group_row(workload, mesh, options.rounds) for workload in many]
    if said("steps"):
        results["steps"] = [
            step_row(name, [[tuple(max(4, size // options.scale) for size in s) for s in b] for b in blocks], options)
            for name, blocks in STEP_BLOCKS.items()
        ]
    if said("memory"):
        results["memory"] = peak_rows([workload for workload in chosen if workload.nbytes < 1 << 30])
    if said("thresholds") and mesh.size() == 2 and not on_cuda():
        results["thresholds"] = measure_thresholds(SIZES if options.scale == 1 else SIZES[:2], rounds=options.rounds)
    return results


def free_nbytes() -> int:
    """Memory that is free on the machine, as rank 0 sees it, so that all ranks decide alike."""
    meminfo = Path("/proc/meminfo")
    free = 1 << 62
    if on_cuda():
        free = torch.cuda.mem_get_info()[0] * dist.get_world_size()
    elif meminfo.exists():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        free = 1024 * int(fields["MemAvailable"].split()[0])
    told = torch.tensor(free)
    dist.broadcast(told, 0)
    return int(told)


def step_row(name: str, blocks: list[list[tuple[int, ...]]], options: argparse.Namespace) -> dict[str, Any]:
    """Seconds and ratios of one Muon step by each method.

    Raises:
        ValueError: if the first updates differ by more than the tolerance.
    """
    steps = steps_of(blocks)
    differences = largest_difference(blocks, steps)
    if max(differences.values()) > TOLERANCE:
        raise ValueError(f"{name}: first updates differ by {differences}, more than {TOLERANCE}")
    seconds = time_rounds(
        {method: step.run for method, step in steps.items()},
        max(3, options.rounds // 2),
        prepare={method: step.prepare for method, step in steps.items()},
    )
    row: dict[str, Any] = {"workload": name, "ranks": dist.get_world_size(), "differences": differences}
    row |= {f"{method} (s)": value for method, value in medians(seconds).items()}
    for other in ("full tensor", "muon-fsdp2"):
        if other in steps:
            row |= {f"{m} / {other}": ratio(seconds, m, other) for m in steps if m.startswith("ours")}
    return row


def measure_alone(options: argparse.Namespace, results: Results) -> None:
    """The sections that need no ranks, into `results`."""
    small = options.scale > 1
    if "planning" in options.only:
        print("planning", file=sys.stderr, flush=True)
        results["planning"] = planning_rows(50, 16, 2) if small else planning_rows()
        results["planning"] += warm_rows(20, (2, 16), 3) if small else warm_rows()
        results["load"] = load_rows()
    if "model" in options.only:
        thresholds = [found["thresholds"] for found in results["ranks"].values() if "thresholds" in found]
        alpha, beta = alpha_beta(thresholds[0]) if thresholds else (50e-6, 1 / 1.2e9)
        counts = (2, 4) if small else (2, 4, 8, 16, 32, 64, 128)
        results["model"] = {"alpha": alpha, "beta": beta, "rows": model_rows(alpha, beta, counts)}
    if "overlap" in options.only and can_slow_links() and not small:
        print("overlap", file=sys.stderr, flush=True)
        results["overlap"] = measure_overlap(options.out / "overlap.json")


def main() -> None:
    """See the module."""
    options = parse()
    if options.readme:
        around_marks(options.readme)  # before an hour is spent
    options.out.mkdir(parents=True, exist_ok=True)
    results: Results = {"environment": environment(), "ranks": {}}
    if "RANK" in os.environ:
        rank, size = join()
        found = measure_on_ranks(options)
        if rank == 0 and os.environ.get("MFSDP_BENCHMARK_PART"):
            (options.out / f"ranks-{size}.json").write_text(json.dumps(found))
        dist.barrier()
        if rank or os.environ.get("MFSDP_BENCHMARK_PART"):
            leave(together=False)  # the first rank may go on for an hour
        results["ranks"][str(size)] = found
    elif set(options.only) & set(RANK_SECTIONS):
        for size in options.ranks:
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), *sys.argv]
            environ = os.environ | {"MFSDP_BENCHMARK_PART": "1", "OMP_NUM_THREADS": "1"}
            subprocess.run(command, check=True, env=environ)
            results["ranks"][str(size)] = json.loads((options.out / f"ranks-{size}.json").read_text())
    torch.set_num_threads(1)
    measure_alone(options, results)
    write_report(results, options.out)
    if options.readme:
        put_into(results, options.readme)
    print((options.out / "results.md").read_text())
    leave(together=False)


if __name__ == "__main__":
    main()
