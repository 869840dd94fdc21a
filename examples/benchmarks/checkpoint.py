"""Checkpoints against `torch.distributed.checkpoint`: the same model and AdamW state, ours and its FSDP2 twin.

    torchrun --nproc-per-node 2 examples/benchmarks/checkpoint.py --mib 256

Per row: seconds (the slowest rank; the median of a few runs), bytes on disk, and the rise of a rank's resident memory while
it runs. The stall is the time for which `save_async` keeps the training loop; a step (products of matrices on one core) is
measured with nothing beside it and while the save writes. Ours hash every byte, written and read; dcp loads in place.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from leave import leave
from memory import _give_back, _reset_mark, _resident
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from mfsdp_func import checkpoint, optim

WIDTH = 1024


def model(mib: int) -> nn.Module:
    """Matrices of which one is a quarter and the rest 4 MiB each; parameters and AdamW's state make `mib` MiB."""
    torch.manual_seed(0)
    holder = nn.Module()
    large, count = max(1, mib // 12) * WIDTH // 4, max(1, mib // 16)
    holder.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])
    holder.layers.append(nn.Linear(WIDTH, large, bias=False))
    return holder


def step(factor: torch.Tensor, times: int) -> torch.Tensor:
    """Work of a step: new tensors of old ones."""
    value = factor
    for _ in range(times):
        value = torch.tanh(factor @ value)
    return value


def ours(mib: int, mesh: Any) -> tuple[Any, dict[str, Any]]:
    rows = mf.Placements((0,), [mf.RowAtomic()], [mf.RowAtomic()], [mf.RowAtomic()])
    context = mf.FsdpContext(shard_layout=mf.ShardLayout.UNPADDED)
    apply, params = mf.fully_shard(model(mib), mesh, rows, context=context)
    copies = [{key: mf.DBuffer(b.spec, b.local_buffer.clone()) for key, b in params.items()} for _ in range(2)]
    return apply, {"model": params, "optim": optim.AdamWState(torch.tensor(1), *copies)}


def theirs(mib: int, mesh: Any) -> dict[str, Any]:
    twin = model(mib)
    for layer in twin.layers:
        fsdp2(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(twin.parameters())
    for param in twin.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return {"model": get_model_state_dict(twin), "optim": get_optimizer_state_dict(twin, optimizer)}


def made_like(state: Any) -> Any:
    """The same tensors in memory of their own, unspecified."""
    return pytree.tree_map(lambda leaf: torch.empty_like(leaf) if isinstance(leaf, torch.Tensor) else leaf, state)


def measure(act: Callable[[], Any]) -> tuple[float, int]:
    """Seconds of the slowest rank, and the largest rise of resident memory."""
    _give_back()
    marked = _reset_mark()
    before = _resident("VmRSS") if marked else 0
    dist.barrier()
    start = time.perf_counter()
    act()
    elapsed = time.perf_counter() - start
    peak = _resident("VmHWM") - before if marked else 0
    found = torch.tensor([elapsed, float(peak)], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), int(found[1])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=256, help="of parameters and optimizer state, all ranks together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--products", type=int, default=300, help="of matrices in a step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared)
    root = Path(shared[0])
    apply, state = ours(args.mib, mesh)
    largest = max(layer.weight.nbytes for layer in model(args.mib).layers)
    factor = torch.randn(512, 512)
    twin = theirs(args.mib, mesh)
    handles: list[Any] = []
    rows: dict[str, list[tuple[float, int]]] = {}
    nbytes: dict[str, int] = {}
    for n in range(args.repeats):
        acts: dict[str, Callable[[], Any]] = {
            "dcp.save (FSDP2)": lambda n=n: dcp.save(twin, checkpoint_id=str(root / f"dcp{n}")),
            "checkpoint.save": lambda n=n: checkpoint.save(root / f"save{n}", state, names=apply.names),
            "a step": lambda: step(factor, args.products),
            "checkpoint.save_async, stall": lambda n=n: handles.append(
                checkpoint.save_async(root / f"async{n}", state, names=apply.names)
            ),
            "a step, while it writes": lambda: step(factor, args.products),
            "checkpoint.save_async, wait": lambda: handles.pop().wait(),
            "dcp.load (FSDP2)": lambda n=n: dcp.load(twin, checkpoint_id=str(root / f"dcp{n}")),
            "dcp.load, into new memory": lambda n=n: dcp.load(made_like(twin), checkpoint_id=str(root / f"dcp{n}")),
            "checkpoint.load": lambda n=n: checkpoint.load(root / f"save{n}", state, names=apply.names),
            "export_hf (parameters alone)": lambda n=n: checkpoint.export_hf(
                state["model"], root / f"hf{n}", names=apply.names
            ),
        }
        for name, act in acts.items():
            rows.setdefault(name, []).append(measure(act))
        nbytes = {"dcp": size_of(root / f"dcp{n}"), "ours": size_of(root / f"save{n}")}
        dist.barrier()
        if not dist.get_rank():
            for path in root.iterdir():
                shutil.rmtree(path)
        dist.barrier()
    if not dist.get_rank():
        print(
            f"{args.mib} MiB on {dist.get_world_size()} rank(s); on disk: dcp {nbytes['dcp']}, ours {nbytes['ours']} bytes;"
            f" the largest tensor has {largest / 2**20:.0f} MiB"
        )
        for name, measured in rows.items():
            seconds = statistics.median(s for s, _ in measured)
            peak = statistics.median(p for _, p in measured)
            print(f"{name:32} {seconds:8.3f} s  {peak / 2**20:8.1f} MiB more at the peak")
        if args.json:
            args.json.write_text(json.dumps({"args": {"mib": args.mib}, "rows": rows, "nbytes": nbytes}))
        os.rmdir(root)
    leave()


if __name__ == "__main__":
    main()
