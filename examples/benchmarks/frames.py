"""How many Python frames of the package a warm call runs: ``python examples/benchmarks/frames.py``, on two gloo ranks.

Counted by `sys.setprofile` on the first rank: functions, and comprehensions, which have frames of their own before Python
3.12. It is what the library adds to each call whatever the sizes, and does not depend on how busy the machine is.
"""

import argparse
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from measure import leave
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mfsdp_func as mf

PACKAGE = str(Path(mf.__file__).parent) + os.sep
SHAPES = [(8, 4), (6, 4), (4, 4)]


def frames_of(call: Callable[[], object]) -> Counter[str]:
    """Frames of the package by file and function, in the calling thread."""
    found: Counter[str] = Counter()

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[f"{frame.f_code.co_filename.removeprefix(PACKAGE)}: {frame.f_code.co_qualname}"] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def calls(mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    """What is counted."""
    value, rows = mf.as_mesh(mesh), mf.RowAtomic()
    layout = mf.build_for_row_atomic(SHAPES, value.size())
    owners = mf.GroupOwnerLayout.from_params(value, layout)
    shards = mf.DBuffer.distribute_tensors(
        [torch.ones(shape) for shape in SHAPES], value, [rows], layout
    ).tensor_views()
    leaves = {i: shard.clone().requires_grad_() for i, shard in shards.items()}

    def gather() -> object:
        return mf.gather(shards, owner_layout=owners, dtype=torch.float32)

    def gradient() -> object:
        full, token = mf.gather(leaves, owner_layout=owners, dtype=torch.float32)
        return sum((tensor.sum() for tensor in full.values()), token.link).backward()

    units = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    apply, params = mf.fully_shard(units, mesh, mf.Placements(0, [rows], [rows], [rows]))
    trained = {key: mf.DBuffer(b.spec, b.local_buffer.clone().requires_grad_()) for key, b in params.items()}
    x = torch.ones(3, 4)
    return {
        "gather": gather,
        "gather and its gradient": gradient,
        "forward and backward of two units": lambda: apply(trained, x).sum().backward(),
        "forward of two units, without gradients": lambda: apply(params, x),
    }


def program(rank: int, ranks: int, port: int, details: bool) -> None:
    """See the module."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    for name, call in calls(init_device_mesh("cpu", (ranks,))).items():
        for _ in range(3):
            call()
        found = frames_of(call)
        if rank == 0:
            print(f"{found.total():6} {name}", flush=True)
        for place, count in found.most_common() if details and rank == 0 else ():
            print(f"       {count:6} {place}", flush=True)
    leave()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--details", action="store_true", help="by function")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(program, (2, port, options.details), 2)  # pyright: ignore[reportPrivateImportUsage]


if __name__ == "__main__":
    main()
