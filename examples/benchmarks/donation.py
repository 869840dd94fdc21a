"""What buffer donation would save: the peak memory of functional steps, eager and compiled, and of steps in place.

    python examples/benchmarks/donation.py

In `jax.jit`, a caller may donate the old state, whose memory the new state then takes. PyTorch's compiler has no such
promise for a pure step: it returns new tensors while the caller still holds the old ones. What it does do is to fuse a
write into an input (``parameter.copy_(new)``) with the computation of what is written, so that a step that writes in
place, as `mf.optim.TorchOptimizer` with ``compile=True``, needs no second state.

Every row is a fresh process: the rise of its resident memory during the third step, from the kernel's own high-water
mark. Units are the bytes of the parameters; the state (and, for an update alone, the gradients) is there before.
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import gpt
import torch
import train_gpt
from torch import nn

import mfsdp_func as mf
from mfsdp_func import optim

Run = Callable[[], None]
TENSORS, NUMEL = 16, 1 << 20
ROWS = {
    "update eager": "AdamW alone, functional, eager",
    "update compiled": "AdamW alone, functional, compiled",
    "update inplace": "AdamW alone, TorchOptimizer, eager",
    "update inplace compiled": "AdamW alone, TorchOptimizer, compiled",
    "step eager": "whole training step (train_gpt.py), functional, eager",
    "step compiled": "whole training step (train_gpt.py), functional, compiled",
}


def functional_update(compile: bool) -> tuple[Run, int]:
    """``state = step(state)``, as a functional loop would."""
    optimizer = optim.adamw(1e-3)
    params = {i: torch.randn(NUMEL) for i in range(TENSORS)}
    grads = {i: torch.randn(NUMEL) for i in range(TENSORS)}
    kept = {"params": params, "state": optimizer.init(params)}
    del params

    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return {"params": optim.apply_updates(params, updates), "state": state}

    chosen = torch.compile(step, fullgraph=True) if compile else step

    def run() -> None:
        nonlocal kept
        kept = chosen(kept["params"], kept["state"], grads)

    return run, 4 * TENSORS * NUMEL


def inplace_update(compile: bool) -> tuple[Run, int]:
    """``optimizer.step()``."""
    params = [nn.Parameter(torch.randn(NUMEL)) for _ in range(TENSORS)]
    for param in params:
        param.grad = torch.randn(NUMEL)
    return optim.TorchOptimizer(params, optim.adamw, compile=compile).step, 4 * TENSORS * NUMEL


def training_step(compile: bool) -> tuple[Run, int]:
    """The step of ``train_gpt.py`` on one rank; its gradients and whole parameters count too."""
    args, _ = train_gpt.parse(["--dim", "512", "--layers", "4", "--context", "32", "--batch", "1"])
    config, mesh = gpt.Config(args.dim, args.layers, args.heads, args.context), mf.Mesh(1, rank=0)
    params, units = gpt.init_params(config, 0, torch.float32), train_gpt.make_units(config, mesh, args)
    buffers = {
        name: mf.DBuffer.distribute_tensors(list(params[name].values()), mesh, [mf.RowAtomic()], unit.layout)
        for name, unit in units.items()
    }
    del params
    nbytes = sum(buffer.local_buffer.nbytes for buffer in buffers.values())
    optimizers = {name: unit.optimizer.init(buffers[name].tensor_views()) for name, unit in units.items()}
    kept = train_gpt.State(buffers, optimizers)
    del buffers, optimizers
    step = train_gpt.make_step(units, config, mesh)
    chosen = train_gpt.compiled(step) if compile else step
    tokens = torch.randint(256, (args.batch, args.context + 1))

    def run() -> None:
        nonlocal kept
        kept = chosen(kept, tokens)[0]

    return run, nbytes


def measure(row: str) -> float:
    """The rise of resident memory during a step, over the bytes of the parameters."""
    torch.set_num_threads(1)
    makers = {"update": functional_update, "step": training_step}
    make = inplace_update if "inplace" in row else makers[row.partition(" ")[0]]
    run, nbytes = make("compiled" in row)
    for _ in range(2):
        run()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    run()
    return (resident("VmHWM") - before) / nbytes


def resident(name: str) -> int:
    """Bytes of resident memory, now ("VmRSS") or at most ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def main() -> None:
    """Print a Markdown table, or, in a child process, one number."""
    parser = argparse.ArgumentParser(description="Peak memory of functional and in-place steps. Linux only.")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    row = parser.parse_args().row
    if row:
        print(measure(row))
        return
    print("| step | peak beyond what was there before, in times the parameters' bytes |\n| --- | --- |")
    for name, words in ROWS.items():
        # With one fixed threshold, freed tensors go back to the kernel at once.
        command = ["env", "MALLOC_MMAP_THRESHOLD_=65536", sys.executable, __file__, "--row", name]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        print(f"| {words} | {float(finished.stdout.split()[-1]):.2f} |", flush=True)


if __name__ == "__main__":
    main()
