"""A Muon step of two groups, taken by real ranks while something goes wrong, and what is left of it."""

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from mfsdp_func import checkpoint, faults, optim
from mfsdp_func.values.mesh import Mesh

WORLD = 4
TIMEOUT = 2.0
"""Seconds after which a group gives up."""
SLACK = 1.0
"""What a survivor may take beyond that."""
NAMES = {"a": ("a.up", "a.down"), "b": ("b.up", "b.down")}
_SHAPES = {"a": [(12, 4), (4, 12)], "b": [(6, 8), (8, 6)]}
_LAYOUTS = {"a": mf.ShardLayout.UNPADDED, "b": mf.ShardLayout.BALANCED}  # moved by messages, and by native collectives

State = dict[str, Any]


def first_state(mesh: Mesh) -> State:
    """Parameters and states of Muon, by group; alike in every layout."""
    params: dict[str, mf.DBuffer] = {}
    for seed, (name, shapes) in enumerate(_SHAPES.items()):
        generator = torch.Generator().manual_seed(seed)
        tensors = [torch.randn(shape, generator=generator) for shape in shapes]
        layout = mf.build_row_atomic_layout(shapes, mesh.size(), shard_layout=_LAYOUTS[name])
        params[name] = mf.DBuffer.distribute_tensors(tensors, mesh, [mf.RowAtomic()], layout)
    return {"params": params, "muon": {name: muon.init({name: params[name]}) for name, muon in _muons(params).items()}}


def _muons(params: dict[str, mf.DBuffer]) -> dict[str, Any]:
    owners = {name: mf.GroupOwnerLayout.from_params(b.mesh, b.layout, name=name) for name, b in params.items()}
    return {name: optim.muon(0.1, owner_layout={name: owners[name]}) for name in params}


def step(state: State, batch: float) -> State:
    """Gather weights, differentiate, clip over all ranks, then one group after the other to its owners and back."""
    params = state["params"]

    def loss(params: dict[str, mf.DBuffer]) -> torch.Tensor:
        whole = [buffer.allgather(0).local_buffer for buffer in params.values()]
        mine = batch + params["a"].mesh.get_rank()
        return torch.stack([(weights * mine).sin().sum() for weights in whole]).sum()

    gradients = torch.func.grad(loss)(params)
    clip = optim.clip_by_global_norm(1.0)
    gradients, _ = clip.update(gradients, clip.init(params), params)
    muons, states = _muons(params), dict(state["muon"])
    for name, muon in muons.items():
        updates, states[name] = muon.update({name: gradients[name]}, states[name], {name: params[name]})
        params = params | optim.apply_updates({name: params[name]}, updates)
    return {"params": params, "muon": states}


def bits(state: Any) -> list[bytes]:
    """Every tensor of a state, as bytes."""
    return [
        leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in pytree.tree_leaves(state)
    ]


def loaded(mesh: Mesh, folder: Path) -> State:
    """The state of a checkpoint, in this mesh's layout."""
    return checkpoint.load(folder, first_state(mesh), names=NAMES)


def world_mesh() -> Mesh:
    """All ranks of the default process group."""
    return mf.as_mesh(DeviceMesh("cpu", list(range(dist.get_world_size()))))


@dataclass
class Outcome:
    """What a survivor has to tell."""

    error: BaseException | None
    seconds: float
    kept: bool
    """Whether the state is bitwise what it was."""
    new: list[bytes] | None
    """The state after the step, where there is one."""
    at_once: tuple[str, float]
    """What a later call on the group raised, and after how many seconds."""
    points: int
    again: list[bytes] | None = None
    """The state after the step was tried again, on the new group."""


def faulty_step(rank: int, folder: Path, store: Path, what: tuple[faults.Fault, ...], left: tuple[int, ...]) -> Outcome:
    """Take a step while faults happen; then try it again on a group of the ranks that are left."""
    step(loaded(world_mesh(), folder), 0.0)  # what is slow the first time is done before time counts
    mesh = join(rank, WORLD, store / "first", TIMEOUT)
    state = loaded(mesh, folder)
    committed, before = mf.commit(step, mesh=mesh), bits(state)
    new, error = None, None
    with faults.injected(*what) as points:
        start = time.monotonic()
        try:
            new = committed(state, 0.5)
        except Exception as raised:
            error = raised
        seconds = time.monotonic() - start
    kept = bits(state) == before
    if isinstance(error, mf.CommitError):
        kept &= bits(error.old) == before
        new = error.new
    outcome = Outcome(error, seconds, kept, None if new is None else bits(new), _at_once(state, error), points.number)
    if rank in left:
        outcome.again = tried_again(left.index(rank), len(left), folder, store)
    return outcome


def _at_once(state: State, error: BaseException | None) -> tuple[str, float]:
    start, text = time.monotonic(), ""
    if error is not None:
        try:
            state["params"]["a"].allgather(0)
        except mf.ExchangeError as found:
            text = str(found)
    return text, time.monotonic() - start


def tried_again(rank: int, ranks: int, folder: Path, store: Path) -> list[bytes]:
    """Load, and take the step, on a new group."""
    mesh = join(rank, ranks, store / "second", 20.0)
    return bits(mf.commit(step, mesh=mesh)(loaded(mesh, folder), 0.5))


def join(rank: int, ranks: int, path: Path, timeout: float) -> Mesh:
    """Leave the process group, and make another one."""
    dist.destroy_process_group()
    store = dist.FileStore(str(path), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout))
    return world_mesh()
