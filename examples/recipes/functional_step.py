"""A functional training step: differentiate through gather and scatter, on every rank alike.

    torchrun --nproc-per-node 2 examples/recipes/functional_step.py    # or plain python: simulated ranks

The loss is a function of this rank's shards. `torch.func.grad` of it returns shards again, for the sum of all ranks'
losses. A rank that owns nothing gets an empty dict from `gather`; the token carries the gradient's way through it.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_func as mf

sys.path.append(str(Path(__file__).parents[1]))

from leave import leave


def loss(shards, owners, target):
    """Half the squared distance of every owner-normalised matrix from a target, summed over this rank's rows."""
    full, token = mf.gather(shards, owner_layout=owners)
    unit = {i: matrix / torch.linalg.matrix_norm(matrix) for i, matrix in full.items()}
    rows, token = mf.scatter(unit, owner_layout=owners, after=token)
    terms = [(rows[i] - target).square().sum() / 2 for i in rows]
    return sum(terms, token.link), token


def main(mesh):
    layout = mf.build_for_row_atomic_unpadding([(6, 4), (3, 5), (8, 2)], mesh.size())
    owners = mf.GroupOwnerLayout.from_params(mesh, layout)
    torch.manual_seed(0)
    weights = mf.DBuffer.distribute_tensors(
        [torch.randn(shape) for shape in layout.tensor_shapes], mesh, [mf.RowAtomic()], layout
    )
    shards = weights.tensor_views()
    step = torch.func.grad_and_value(loss, has_aux=True)
    losses = []
    for _ in range(20):
        gradients, (value, _) = step(shards, owners, 0.1)
        shards = {i: shard - 2.0 * gradients[i] for i, shard in shards.items()}
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        results = {dist.get_rank(): main(init_device_mesh("cpu", (dist.get_world_size(),)))}
    else:
        results = mf.simulate(main, 4).results
    for rank, losses in results.items():
        print(f"rank {rank}: loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    leave()
