"""Timing: methods by turns in every round, ratios within a round, medians over rounds."""

import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[1]))

from leave import leave  # noqa: F401  # the counterpart of `join`

Run = Callable[[], object]
Message = tuple[torch.Tensor, int]


def time_rounds(
    runs: Mapping[str, Run], rounds: int, *, warm_up: int = 1, prepare: Mapping[str, Run] | None = None
) -> dict[str, list[float]]:
    """Seconds of each run in each round, the slowest rank's; every rank calls.

    Every round runs each of them once, in an order of its own that all ranks draw alike, so that none always finds the
    caches and the free memory of the same other; all ranks start together. What `prepare` holds for one runs before
    it, untimed.
    """
    names = list(runs)
    seconds = {name: [0.0] * rounds for name in names}
    for number in range(-warm_up, rounds):
        for name in random.Random(number).sample(names, len(names)):
            if prepare is not None:
                prepare[name]()
            dist.barrier()
            synchronize()
            start = time.perf_counter()
            result = runs[name]()
            synchronize()
            elapsed = time.perf_counter() - start
            del result
            if number >= 0:
                seconds[name][number] = elapsed
    table = torch.tensor([seconds[name] for name in names], dtype=torch.float64)
    dist.all_reduce(table, op=dist.ReduceOp.MAX)
    return dict(zip(names, table.tolist(), strict=True))


def time_alone(run: Run, repeats: int) -> float:
    """Median seconds of a run that needs no other rank."""
    run()
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def ratio(seconds: Mapping[str, list[float]], name: str, to: str) -> float:
    """Median over rounds of one method's time over another's, within the round."""
    return statistics.median(a / b for a, b in zip(seconds[name], seconds[to], strict=True))


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median seconds of each method."""
    return {name: statistics.median(values) for name, values in seconds.items()}


def environment() -> dict[str, Any]:
    """The machine and the software, as far as they decide what is measured."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()


def join() -> tuple[int, int]:
    """Join the process group that torchrun (or the driver) describes; returns this rank and the number of ranks.

    NCCL, and all tensors on CUDA, where there is a device for each rank of this machine; else gloo and the CPU.
    """
    torch.set_num_threads(1)
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        torch.set_default_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def on_cuda() -> bool:
    """Whether `join` chose CUDA."""
    return torch.get_default_device().type == "cuda"


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if on_cuda():
        torch.cuda.synchronize()


def post(receives: Sequence[Message], sends: Sequence[Message]) -> list[dist.Work]:
    """Start messages, each a contiguous tensor and a rank, as bytes; NCCL wants all of them as one batch."""
    if on_cuda():
        operations = [dist.P2POp(dist.irecv, tensor.view(torch.uint8), peer) for tensor, peer in receives]
        operations += [dist.P2POp(dist.isend, tensor.view(torch.uint8), peer) for tensor, peer in sends]
        return dist.batch_isend_irecv(operations) if operations else []
    works = [dist.irecv(tensor.view(torch.uint8), peer) for tensor, peer in receives]
    return [work for work in (*works, *(dist.isend(t.view(torch.uint8), peer) for t, peer in sends)) if work]
