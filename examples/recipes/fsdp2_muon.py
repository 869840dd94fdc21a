"""FSDP2's sharding, this library's Muon: native DTensors, checkpoints and schedulers stay as they are.

    torchrun --nproc-per-node 2 examples/recipes/fsdp2_muon.py

The model is sharded by PyTorch. `route` says which of its parameters are matrices, `owners_of` who orthogonalises which,
and `TorchOptimizer` runs Muon on their shards, and AdamW on the rest, in place.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from mfsdp_func import optim

sys.path.append(str(Path(__file__).parents[1]))

from leave import leave


def make_optimizer(model: nn.Module, mesh: DeviceMesh, lr: float = 0.02) -> optim.TorchOptimizer:
    """Muon for the matrices of a model that FSDP2 has sharded, AdamW for all else."""
    lines = {line.name: line for line in optim.route(model).lines}
    params = dict(model.named_parameters())
    matrices = {name: param for name, param in params.items() if lines[name].optimizer == "muon"}
    blocks = {name: lines[name].blocks for name in matrices}
    owners = optim.owners_of(matrices, mesh, blocks=blocks)
    muon = partial(optim.muon, owner_layout=owners, blocks={(name, 0): spec for name, spec in blocks.items()})
    groups = [
        {"params": {(name, 0): param for name, param in matrices.items()}, "transformation": muon, "lr": lr},
        {"params": [param for name, param in params.items() if lines[name].optimizer == "adamw"], "lr": 0.1 * lr},
    ]
    return optim.TorchOptimizer(groups, optim.adamw, mesh=mesh)


def make_model() -> nn.Module:
    """A small residual network; every rank makes the same."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)]
    return nn.ModuleDict({"embed": nn.Embedding(50, 16), "layers": nn.ModuleList(layers), "head": nn.Linear(16, 50)})


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Cross entropy of the next word."""
    x = model["embed"](words[:, :-1])
    for layer in model["layers"]:
        x = x + layer(x)
    return nn.functional.cross_entropy(model["head"](x).flatten(0, 1), words[:, 1:].flatten())


def train(mesh: DeviceMesh, steps: int = 5) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on one batch. Returns the losses, and the whole weights."""
    model = make_model()
    for layer in model["layers"]:
        fully_shard(layer, mesh=mesh)
    for name in ("embed", "head"):
        fully_shard(model[name], mesh=mesh)
    optimizer = make_optimizer(model, mesh)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    words = torch.randint(0, 50, (4, 12), generator=torch.Generator().manual_seed(1))
    losses: list[float] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, words)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, {name: param.full_tensor().detach() for name, param in model.named_parameters()}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found, _ = train(init_device_mesh("cpu", (dist.get_world_size(),)))
    if dist.get_rank() == 0:
        print(f"loss {found[0]:.3f} -> {found[-1]:.3f}")
    leave()
