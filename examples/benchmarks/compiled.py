"""A compiled step beside the eager one, and what the guards of a plan over 2,000 tensors cost.

torchrun --nproc-per-node 2 examples/benchmarks/compiled.py
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import join, leave, medians, on_cuda, ratio, time_rounds
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_func as mf
from mfsdp_func import GroupOwnerLayout, Mesh
from mfsdp_func.optim import apply_updates, muon

SHAPES = [(256, 256), (1024, 256), (256, 1024), (768, 256)] * 4
"""Of the step: 16 matrices, small enough that what Python costs is seen."""

Tensors = dict[int, torch.Tensor]


def step(params: Tensors, momentum: Any, grads: Tensors, rate: torch.Tensor, owners: GroupOwnerLayout) -> Any:
    """One Muon step: momentum, gather, Newton-Schulz on the owners, scatter, update."""
    updates, momentum = muon(rate, owner_layout=owners).update(grads, momentum, params)
    return apply_updates(params, updates), momentum


def step_row(mesh: Mesh, rounds: int, backend: str = "inductor") -> dict[str, Any]:
    """Median seconds of a step, eager and compiled, and the median of their ratio within a round."""
    layout = mf.build_for_row_atomic(SHAPES, mesh.size())
    owners = GroupOwnerLayout.from_params(mesh, layout)
    full = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(SHAPES)]
    shards = mf.DBuffer.distribute_tensors(full, mesh, [mf.RowAtomic()], layout).tensor_views()
    grads = {i: shard.sin() for i, shard in shards.items()}
    state, rate = muon(0.1, owner_layout=owners).init(shards), torch.tensor(0.1)
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    expected, found = (fn(shards, state, grads, rate, owners)[0] for fn in (step, compiled))
    difference = max((float((found[i] - expected[i]).abs().max()) for i in shards), default=0.0)
    seconds = time_rounds(
        {
            "eager": lambda: step(shards, state, grads, rate, owners),
            "compiled": lambda: compiled(shards, state, grads, rate, owners),
        },
        rounds,
    )
    return {
        "workload": f"{len(SHAPES)} matrices",
        "ranks": mesh.size(),
        "compiled / eager": ratio(seconds, "compiled", "eager"),
        "largest difference": difference,
        **{f"{method} (s)": value for method, value in medians(seconds).items()},
    }


def guard_seconds(fn: Callable[..., Any], arguments: dict[str, Any], repeats: int = 2000) -> float:
    """Median seconds of one check of all guards of a compiled function."""
    torch._dynamo.reset()
    torch.compile(fn, fullgraph=True, backend="eager")(**arguments)
    (entry,) = _debug_get_cache_entry_list(fn.__code__)
    closure = dict(zip(fn.__code__.co_freevars, (cell.cell_contents for cell in fn.__closure__ or ()), strict=True))
    values, check = {**arguments, **closure}, entry.guard_manager.check
    if not check(values):
        raise RuntimeError("the guards do not hold for the values that were compiled for")
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        check(values)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def guard_row(count: int) -> dict[str, Any]:
    """Microseconds of guards, by what a compiled function takes, for a plan over `count` tensors. Needs no ranks."""
    mesh = Mesh(1, rank=0)
    layout = mf.build_for_row_atomic([(4, 4)] * count, 1)
    owners = GroupOwnerLayout(mesh, layout, {0: 0})
    owners_of_all = GroupOwnerLayout(mesh, layout, dict.fromkeys(range(count), 0))
    buffer = mf.DBuffer.empty(mesh, [mf.RowAtomic()], layout)
    shards = buffer.tensor_views()

    def nothing(shard: torch.Tensor) -> torch.Tensor:
        return shard * 2

    def plan(shard: torch.Tensor) -> torch.Tensor:
        return mf.gather({0: shard}, owner_layout=owners)[0][0] * 2

    def flat(buffer: mf.DBuffer) -> mf.DBuffer:
        return mf.DBuffer(buffer.spec, buffer.get_tensor_view(0).flatten() * 2)

    def every(shards: Tensors) -> torch.Tensor:
        return mf.gather(shards, owner_layout=owners_of_all)[0][0] * 2

    row = {
        "no plan (us)": guard_seconds(nothing, {"shard": shards[0]}),
        "plan in a closure (us)": guard_seconds(plan, {"shard": shards[0]}),
        "buffer as argument (us)": guard_seconds(flat, {"buffer": buffer}),
        "plan, and a dict of all shards (us)": guard_seconds(every, {"shards": shards}, 200),
    }
    return {"tensors": count} | {name: 1e6 * value for name, value in row.items()}


def main() -> None:
    """See the module."""
    rank, size = join()
    row = step_row(mf.as_mesh(init_device_mesh("cuda" if on_cuda() else "cpu", (size,))), rounds=15)
    if rank == 0:
        print(json.dumps({"guards": [guard_row(count) for count in (3, 2000)], "steps": [row]}, indent=2))


if __name__ == "__main__":
    main()
    leave()
