"""A compiled step: gather -> Newton-Schulz on the owner -> scatter -> update, in one region without graph breaks.

    torchrun --nproc-per-node 2 examples/recipes/compiled_step.py    # or plain python: simulated ranks

Compiled code guards on the layout by value: equal layouts, however often they are made, never compile again.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_func as mf
from mfsdp_func.optim import newton_schulz

sys.path.append(str(Path(__file__).parents[1]))

from leave import leave


def step(shards, gradients, learning_rate, owners):
    """Move every shard along its orthogonalised gradient."""
    full, token = mf.gather(gradients, owner_layout=owners, dtype=torch.float32)
    full = {i: newton_schulz(matrix) for i, matrix in full.items()}
    updates, _ = mf.scatter(full, owner_layout=owners, after=token)
    return {i: shard - learning_rate * updates[i] for i, shard in shards.items()}


def main(mesh):
    layout = mf.build_for_row_atomic_unpadding([(16, 8), (8, 24), (12, 12)], mesh.size())
    owners = mf.GroupOwnerLayout.from_params(mesh, layout)
    torch.manual_seed(0)
    full = [torch.randn(shape) for shape in layout.tensor_shapes]
    shards = mf.DBuffer.distribute_tensors(full, mesh, [mf.RowAtomic()], layout).tensor_views()
    compiled = torch.compile(step, fullgraph=True)
    eager = shards
    for n in range(3):
        rate = torch.tensor(0.1 / (n + 1))
        shards = compiled(shards, shards, rate, owners)
        eager = step(eager, eager, rate, owners)
    return max((float((shards[i] - eager[i]).abs().max()) for i in shards), default=0.0)


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        results = {dist.get_rank(): main(init_device_mesh("cpu", (dist.get_world_size(),)))}
    else:
        results = mf.simulate(main, 2).results
    for rank, difference in results.items():
        print(f"rank {rank}: largest difference between compiled and eager weights {difference:.1e}")
    leave()
