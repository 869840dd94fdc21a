"""Peak memory of a gather beyond its result: the process's own high-water mark, read from the kernel."""

import contextlib
import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import on_cuda, synchronize
from workloads import Workload, place

import mfsdp_func as mf
from mfsdp_func import Mesh


def peak_rows(workloads: list[Workload]) -> list[dict[str, Any]]:
    """Per workload: bytes of the results and of the peak beyond them, of the rank that needs most.

    The kernel's mark of resident memory (VmHWM) is reset before the call and read after it; what it rose above the
    resident memory before, less the result, is transient: buffers of this library, of torch and of gloo alike.
    On CUDA, the allocator's own marks. Empty where the system has no such mark.
    """
    rows: list[dict[str, Any]] = []
    if not on_cuda() and not _reset_mark():
        return rows
    mesh = Mesh(dist.get_world_size(), rank=dist.get_rank())
    for workload in workloads:
        placed = place(workload, mesh, "round robin")
        _gather_all(placed)  # connections and plans
        gc.collect()
        _give_back()
        dist.barrier()
        synchronize()
        if on_cuda():
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            results = _gather_all(placed)
            peak = torch.cuda.max_memory_allocated() - before
        else:
            _reset_mark()
            before = _resident("VmRSS")
            results = _gather_all(placed)
            peak = _resident("VmHWM") - before
        nbytes = sum(tensor.nbytes for tensors in results for tensor in tensors.values())
        table = torch.tensor([[nbytes, max(0, peak - nbytes)]])
        gathered = [torch.zeros_like(table) for _ in mesh.ranks]
        dist.all_gather(gathered, table)
        worst = max(gathered, key=lambda row: row[0, 1].item() - 0.05 * row[0, 0].item())[0].tolist()
        rows.append({"workload": workload.name, "result": worst[0], "transient": worst[1]})
        del results, placed
    return rows


def _gather_all(placed: list[Any]) -> list[dict[int, torch.Tensor]]:
    return [mf.gather(group.source, owner_layout=group.owners, dtype=group.flat.dtype)[0] for group in placed]


def _give_back() -> None:
    """Return freed memory to the kernel, so that using it again counts."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _reset_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmHWM") > 0
    except (OSError, KeyError):
        return False


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    return 1024 * int(fields[name].split()[0])
