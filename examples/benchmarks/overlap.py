"""How much communication a pipelined Muon step hides on a slow link.

Two ranks, each in a network namespace of its own, joined by a virtual cable whose rate `tc` limits (needs root and
iproute2). The rate is chosen so that communication alone takes about as long as Newton-Schulz alone. An ideal overlap
takes the longer of the two; `hidden` is the share of what the ideal saves that the pipeline saves.

Newton-Schulz on the CPU takes cores from the network's own threads. So a second row puts an accelerator's place holder
in its stead: a sleep as long as the owned matrices' share of the work, which leaves the cores alone.
"""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import leave, medians, ratio, time_rounds
from steps import DTYPE, orthogonalize
from workloads import Shape, Workload, place

import mfsdp_func as mf
from mfsdp_func import Mesh
from mfsdp_func.operations.pipeline import pipeline

GROUPS = 12
SHAPES: list[Shape] = [(768, 256), (256, 256), (1024, 256), (256, 1024)]


SLEEP_SECONDS = 0.6
"""Of all emulated compute together, on the rank that has most of it."""


def overlap_row(emulated: bool, groups: int = GROUPS, shapes: list[Shape] = SHAPES, rounds: int = 5) -> dict[str, Any]:
    """Seconds of compute alone, of communication alone, of both one after the other, and pipelined."""
    mesh = Mesh(dist.get_world_size(), rank=dist.get_rank())
    placed = place(Workload("overlap", (tuple(shapes),) * groups, DTYPE), mesh, "round robin")
    owners = [group.owners for group in placed]
    sources = [group.source for group in placed]
    full = [mf.gather(group.source, owner_layout=group.owners, dtype=DTYPE)[0] for group in placed]

    cost = mf.ns_cost_fn()
    most = torch.tensor(sum(cost(tensor.shape) for tensors in full for tensor in tensors.values()), dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)

    def work(tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if not emulated:
            return orthogonalize(tensors)
        time.sleep(SLEEP_SECONDS * sum(cost(tensor.shape) for tensor in tensors.values()) / most.item())
        return tensors

    def compute() -> None:
        for tensors in full:
            work(tensors)

    def run(depth: int, function: Any) -> None:
        pipeline(function, sources, owners, depth=depth, dtype=DTYPE)

    seconds = time_rounds(
        {
            "compute": compute,
            "communication": lambda: run(0, lambda _, tensors: tensors),
            "one after the other": lambda: run(0, lambda _, tensors: work(tensors)),
            "pipelined": lambda: run(1, lambda _, tensors: work(tensors)),
            "pipelined, depth 2": lambda: run(2, lambda _, tensors: work(tensors)),
        },
        rounds,
    )
    row: dict[str, Any] = {"compute is": "a sleep" if emulated else "Newton-Schulz"}
    row |= {f"{name} (s)": value for name, value in medians(seconds).items()}
    for name in ("pipelined", "pipelined, depth 2"):
        hidden = [
            (alone - piped) / (alone - max(busy, moving))
            for alone, piped, busy, moving in zip(
                *(seconds[key] for key in ("one after the other", name, "compute", "communication")), strict=True
            )
        ]
        row[f"hidden, {name}"] = statistics.median(hidden)
        row[f"{name} / one after the other"] = ratio(seconds, name, "one after the other")
    row["nbytes each way"] = DTYPE.itemsize * sum(
        transfer.numel for owner in owners for transfer in mf.gather_scatter.plan_of("gather", owner, True).local.sends
    )
    return row


def can_slow_links() -> bool:
    """Whether this process may make network namespaces."""
    return hasattr(os, "geteuid") and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc")))


def measure_overlap(target: Path, rounds: int = 5) -> list[dict[str, Any]]:
    """Run `overlap_row` on two ranks at a rate where compute and communication take about equally long.

    The first run is without a limit, to learn how long compute takes and how many bytes move.
    """
    rows: list[dict[str, Any]] = []
    with _cable() as namespaces:
        for emulated in (False, True):
            free = _run_ranks(namespaces, target, 3, emulated)
            # Twice the bytes: the gather and then the scatter.
            rate = 8 * 2 * free["nbytes each way"] / free["compute (s)"]
            for attempt in range(2):
                for namespace in namespaces:
                    _limit(namespace, rate)
                row = {"rate (Mbit/s)": rate / 1e6} | _run_ranks(namespaces, target, rounds, emulated)
                if attempt == 0:
                    rate *= row["communication (s)"] / row["compute (s)"]
            rows.append(row)
            for namespace in namespaces:
                _do("tc", "-n", namespace, "qdisc", "delete", "dev", "cable", "root")
    return rows


@contextlib.contextmanager
def _cable() -> Iterator[tuple[str, str]]:
    """Two network namespaces joined by a virtual cable; removed at the end."""
    names = (f"mfsdp{os.getpid()}a", f"mfsdp{os.getpid()}b")
    try:
        for name in names:
            _do("ip", "netns", "add", name)
        _do("ip", "link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for number, name in enumerate(names, 1):
            _do("ip", "-n", name, "address", "add", f"10.99.0.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _do("ip", "-n", name, "link", "set", device, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _limit(namespace: str, rate: float) -> None:
    burst = max(64 * 1024, int(rate / 8 / 250))
    limits = ("rate", f"{int(rate)}bit", "burst", str(burst), "latency", "50ms")
    _do("tc", "-n", namespace, "qdisc", "replace", "dev", "cable", "root", "tbf", *limits)


def _do(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


def _run_ranks(namespaces: tuple[str, str], target: Path, rounds: int, emulated: bool) -> dict[str, Any]:
    """This file as rank 0 and rank 1, each in its namespace; returns what rank 0 measured."""
    shared = {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": "29555", "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "cable"}
    command = [sys.executable, __file__, str(target), str(rounds), str(int(emulated))]
    processes = [
        subprocess.Popen(
            ["ip", "netns", "exec", namespace, *command],
            env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank, namespace in enumerate(namespaces)
    ]
    try:
        codes = [process.wait(600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"the ranks of the overlap benchmark ended with {codes}")
    return json.loads(target.read_text())


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    measured = overlap_row(sys.argv[3] == "1", rounds=int(sys.argv[2]))
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(measured))
    leave()
