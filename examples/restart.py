"""Start again after a crash: process groups of a new generation, and checkpoints in a folder of runs.

torchrun --max-restarts 5 ... train_gpt.py --checkpoint FOLDER --every 100
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import mfsdp_func as mf


def init_process_group(backend: str, **options: Any) -> None:
    """`torch.distributed.init_process_group`, which works after torchrun has restarted the ranks, too.

    Torchrun's agent keeps one store over all restarts; a new generation of gloo ranks would read the addresses of the
    dead one there, and hang. So each generation has keys of its own.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group(backend, **options)
        return
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    generation = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(f"generation{generation}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        **options,
    )


class Checkpoints:
    """Saves every so many steps, in the background; at most one save is going on.

    Args:
        folder: holds one checkpoint per saved step.
        every: number of steps between two saves.
        mesh: all ranks.
        names: see `mf.checkpoint.save`.
    """

    def __init__(self, folder: Path, every: int, mesh: Any, names: Any) -> None:
        self._folder, self._every, self._mesh, self._names = folder, every, mesh, names
        self._going: Any = None

    def resume(self, like: Any) -> Any:
        """The newest state that verifies; None if there is none. Every rank calls."""
        found = mf.checkpoint.latest(self._folder, mesh=self._mesh)
        first = mf.as_mesh(self._mesh).coordinate() == (0,) * self._mesh.ndim
        if found is None:
            return None
        if first:
            for line in found.skipped:
                print(f"passed over: {line}", flush=True)
        state = mf.checkpoint.load(
            found, like, names=self._names, progress=bar(f"load {found.name}") if first else None
        )
        if first:
            print(f"resumed from {found}", flush=True)
        return state

    def after(self, step: int, state: Any, *, last: bool = False) -> None:
        """Save after `step` steps, where it is time to, or at the end. Every rank calls."""
        if not last and step % self._every:
            return
        self.wait()
        path = self._folder / f"step-{step:06d}"
        while path.exists():  # it did not verify: it stays as it is
            path = path.with_name(f"{path.name}+")
        self._going = mf.checkpoint.save_async(path, state, names=self._names)
        if last:
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is going on."""
        if self._going is not None:
            self._going.wait()
        self._going = None


def bar(label: str) -> Callable[[int, int], None]:
    """A progress bar over bytes, for `mf.checkpoint.save` and `load`."""
    from tqdm import tqdm

    shown = tqdm(desc=label, unit="B", unit_scale=True, mininterval=0.2 if sys.stderr.isatty() else 10)

    def update(done: int, total: int) -> None:
        shown.total = total
        shown.update(done - shown.n)
        if done >= total:
            shown.close()

    return update
