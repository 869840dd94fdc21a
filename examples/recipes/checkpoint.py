"""Save on any number of ranks, load on any other: the loaded values are new, and bitwise the saved ones.

    torchrun --nproc-per-node 2 examples/recipes/checkpoint.py    # or plain python: simulated ranks

The state is a pytree: sharded parameters, the optimizer's state, a step. In the file, a tensor has the name of its
parameter (``optimizer.layers.0.weight.exp_avg``) and its whole shape, whatever layout wrote it.
"""

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_func as mf
from mfsdp_func import checkpoint, optim

sys.path.append(str(Path(__file__).parents[1]))

from leave import leave


def make_module():
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2))


ROUTE = optim.route(make_module()).override({"*.weight": "muon"})


def start(mesh, layout):
    torch.manual_seed(0)
    module = make_module()
    rows = mf.Placements((0,), [mf.RowAtomic()], [mf.RowAtomic()], [mf.RowAtomic()])
    apply, params = mf.fully_shard(module, mesh, rows, context=mf.FsdpContext(shard_layout=layout))
    optimizer = optim.from_route(ROUTE, params, muon=0.02, adamw=0.003, names=apply.names)
    return apply, {"params": params, "optimizer": optimizer.init(params), "step": 0}


def save(mesh, path):
    apply, state = start(mesh, mf.ShardLayout.PADDED)
    state = state | {"step": 20}
    handle = checkpoint.save_async(path, state, names=apply.names)  # the next step may begin: values are immutable
    handle.wait()


def load(mesh, path):
    apply, like = start(mesh, mf.ShardLayout.UNPADDED)
    state = checkpoint.load(path, checkpoint.spec_of(like), names=apply.names)
    same = all(
        torch.equal(state["params"][key].local_buffer, like["params"][key].local_buffer) for key in like["params"]
    )
    return state["step"], same


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        path = Path(folder[0]) / "step20"
        save(mesh, path)
        results = {dist.get_rank(): load(mesh, path)}
    else:
        path = Path(tempfile.mkdtemp()) / "step20"
        mf.simulate(lambda mesh: save(mesh, path), 3)
        results = mf.simulate(lambda mesh: load(mesh, path), 4).results
    if 0 in results:
        print(checkpoint.verify(path))
    for rank, (step, same) in results.items():
        print(f"rank {rank}: step {step}, parameters {'equal' if same else 'DIFFER'}")
    leave()
