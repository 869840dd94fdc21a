"""A rank dies in the middle of training; the others take their step back, form a new group, load, and go on.

    python examples/recipes/survivors.py

This process starts four ranks, serves the store that outlives every group, and says who is left. Rank 2 kills itself. A
`commit` makes a step transactional: survivors have the old state, and a named error. What the dead rank held is gone,
so that they load the last checkpoint, on three ranks now.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import mfsdp_func as mf
from mfsdp_func import checkpoint, optim

sys.path.append(str(Path(__file__).parents[1]))

from leave import leave

STEPS, EVERY, TIMEOUT = 6, 2, 20.0
NAMES = {"block": ("up", "down")}
SHAPES = [(8, 4), (4, 8)]


def first_state(mesh):
    layout = mf.build_for_row_atomic_unpadding(SHAPES, mesh.size())
    tensors = [torch.linspace(-1, 1, 32).view(shape) for shape in SHAPES]
    params = {"block": mf.DBuffer.distribute_tensors(tensors, mesh, [mf.RowAtomic()], layout)}
    return {"params": params, "muon": muon_of(params).init(params)}


def muon_of(params):
    owners = {
        name: mf.GroupOwnerLayout.from_params(buffer.mesh, buffer.layout, name=name) for name, buffer in params.items()
    }
    return optim.muon(0.1, owner_layout=owners)


def step(state, batch):
    def loss(params):
        return (params["block"].allgather(0).local_buffer * batch).sin().sum()

    gradients = torch.func.grad(loss)(state["params"])
    updates, muon = muon_of(state["params"]).update(gradients, state["muon"], state["params"])
    return {"params": optim.apply_updates(state["params"], updates), "muon": muon}


def join(store, generation, me):
    """The process group of those that are left; returns its mesh."""
    left = [int(word) for word in store.get(f"left{generation}").decode().split()]
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"group{generation}", store),
        rank=left.index(me),
        world_size=len(left),
        timeout=timedelta(seconds=TIMEOUT),
    )
    return mf.Mesh(len(left), rank=dist.get_rank())


def start_or_resume(mesh, folder):
    state, path = first_state(mesh), checkpoint.latest(folder, mesh=mesh)
    if path is None:
        return mf.commit(step, mesh=mesh), state
    number = int(path.name.removeprefix("step"))
    return mf.commit(step, mesh=mesh, number=number), checkpoint.load(path, state, names=NAMES)


def train(me, port, folder):
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store, generation = dist.TCPStore("127.0.0.1", port, is_master=False), 0
    mesh = join(store, generation, me)
    committed, state = start_or_resume(mesh, folder)
    while committed.number < STEPS:
        if (me, committed.number, generation) == (2, 3, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            state = committed(state, 1.0 + committed.number)
            if committed.number % EVERY == 0:
                checkpoint.save(folder / f"step{committed.number}", state, names=NAMES)
        except mf.ExchangeError as error:
            print(f"rank {me}: step {committed.number} not taken, {len(error.awaited)} awaited", flush=True)
            dist.destroy_process_group()
            generation += 1
            mesh = join(store, generation, me)
            committed, state = start_or_resume(mesh, folder)
    norm = float(mf.global_norm(state["params"]))
    print(f"rank {me}, now {mesh.get_rank()} of {mesh.size()}: {committed.number} steps, norm {norm:.6f}", flush=True)
    leave()


def main():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder, left, generation = Path(tempfile.mkdtemp()), [0, 1, 2, 3], 0
    store.set("left0", " ".join(map(str, left)))
    context = multiprocessing.get_context("spawn")
    ranks = {me: context.Process(target=train, args=(me, store.port, folder)) for me in left}
    for process in ranks.values():
        process.start()
    while any(process.exitcode is None for process in ranks.values()):
        multiprocessing.connection.wait([process.sentinel for process in ranks.values() if process.exitcode is None])
        if dead := [me for me in left if ranks[me].exitcode]:
            left, generation = [me for me in left if me not in dead], generation + 1
            print(f"launcher: rank {dead[0]} died", flush=True)
            store.set(f"left{generation}", " ".join(map(str, left)))


if __name__ == "__main__":
    main()
