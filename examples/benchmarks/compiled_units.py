"""Compiled training beside FSDP2: what compiling costs by depth, and the seconds of a step.

    python examples/benchmarks/compiled_units.py --depths 1 4 16            # one rank, a fresh process for each
    torchrun --nproc-per-node 2 examples/benchmarks/compiled_units.py       # steps, methods by turns in every round

The model is a Llama of transformers. Methods: *FSDP2*, whose blocks are compiled by `Module.compile`; *units*, where
`FsdpContext(compile=True)` compiles the blocks; *region*, where `apply` is in one region of `torch.compile`, and
``backward()`` outside; *step*, where forward, backward and the AdamW update are one region. Compiling: seconds of the
processor, of the process and of the compilers that it starts, on empty caches.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import join, leave, medians, on_cuda, ratio, time_rounds
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import grad_and_value
from transformers import LlamaConfig, LlamaForCausalLM

import mfsdp_func as mf
from mfsdp_func.fsdp import ShardedModule
from mfsdp_func.optim import adamw, apply_updates

RATE, WORDS = 1e-3, 512
METHODS = ("FSDP2", "units", "region", "step")
Step = Callable[[torch.Tensor], torch.Tensor]


def model_of(depth: int, width: int) -> nn.Module:
    """The same values on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=depth,
        hidden_size=width,
        intermediate_size=2 * width,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=WORDS,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next word."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def theirs(model: nn.Module, mesh: DeviceMesh) -> Step:
    """A step of FSDP2 with torch's AdamW."""
    for block in model.model.layers:  # pyright: ignore[reportAttributeAccessIssue, reportGeneralTypeIssues]
        block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)

    def step(words: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(input_ids=words).logits, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(method: str, model: nn.Module, mesh: DeviceMesh) -> Step:
    """A step of `apply`, compiled by its units, as a region of its own, or as a whole."""
    rows = mf.RowAtomic()
    context = mf.FsdpContext(compile=[f"model.layers.{n}" for n in range(model.config.num_hidden_layers)])  # pyright: ignore[reportAttributeAccessIssue]
    apply, params = mf.fully_shard(
        model,
        mesh,
        mf.Placements(0, [rows], [rows], [rows]),
        context=context if method == "units" else None,
    )
    if method == "step":
        return whole_step(apply, params)
    run = (
        apply
        if method == "units"
        else torch.compile(lambda params, words: apply(params, input_ids=words), fullgraph=True)
    )
    leaves = {key: mf.DBuffer(b.spec, b.local_buffer.detach().requires_grad_()) for key, b in params.items()}
    optimizer = torch.optim.AdamW([buffer.local_buffer for buffer in leaves.values()], lr=RATE)

    def step(words: torch.Tensor) -> torch.Tensor:
        results = run(leaves, input_ids=words) if method == "units" else run(leaves, words)
        loss = loss_of(results.logits, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def whole_step(apply: ShardedModule, params: Any) -> Step:
    """Forward, backward and update in one region."""
    optimizer = adamw(RATE, weight_decay=0.01)

    @torch.compile(fullgraph=True)
    def compiled(params: Any, state: Any, words: torch.Tensor) -> Any:
        gradients, loss = grad_and_value(lambda params: loss_of(apply(params, input_ids=words).logits, words))(params)
        updates, state = optimizer.update(gradients, state, params)
        return apply_updates(params, updates), state, loss

    state = optimizer.init(params)

    def step(words: torch.Tensor) -> torch.Tensor:
        nonlocal params, state
        params, state, loss = compiled(params, state, words)
        return loss

    return step


def step_of(method: str, depth: int, width: int, mesh: DeviceMesh) -> Step:
    """See the module."""
    model = model_of(depth, width)
    return theirs(model, mesh) if method == "FSDP2" else ours(method, model, mesh)


def batch(length: int, number: int = 0) -> torch.Tensor:
    """A batch of two lines, of this rank alone."""
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    return torch.randint(0, WORDS, (2, length), generator=generator)


def compile_row(method: str, depth: int, width: int, length: int) -> dict[str, Any]:
    """Seconds of the first steps, until nothing is compiled any more; in a process of its own."""
    step = step_of(method, depth, width, init_device_mesh("cuda" if on_cuda() else "cpu", (dist.get_world_size(),)))
    start, before = time.perf_counter(), os.times()
    for number in range(3):
        step(batch(length, number))
    after = os.times()
    own = after.user + after.system - before.user - before.system
    children = after.children_user + after.children_system - before.children_user - before.children_system
    return {"method": method, "depth": depth, "processor (s)": own + children, "wall (s)": time.perf_counter() - start}


def compile_rows(depths: list[int], methods: list[str], width: int, length: int) -> list[dict[str, Any]]:
    """`compile_row` of each method at each depth."""
    rows: list[dict[str, Any]] = []
    for depth in depths:
        for method in methods:
            with tempfile.TemporaryDirectory() as cache:
                environ = os.environ | {
                    "TORCHINDUCTOR_CACHE_DIR": cache,
                    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # the compilers count as children then
                    "OMP_NUM_THREADS": "1",
                }
                command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", __file__]
                command += ["--one", method, "--depths", str(depth), "--width", str(width), "--length", str(length)]
                command += ["--out", f"{cache}/row.json"]
                subprocess.run(command, check=True, env=environ)
                rows.append(json.loads(Path(cache, "row.json").read_text()))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def step_row(depth: int, width: int, length: int, methods: list[str], rounds: int) -> dict[str, Any]:
    """Median seconds of a compiled step by each method, and medians of ratios to FSDP2's within a round.

    Raises:
        ValueError: if the losses of the first steps differ.
    """
    mesh = init_device_mesh("cuda" if on_cuda() else "cpu", (dist.get_world_size(),))
    steps = {method: step_of(method, depth, width, mesh) for method in methods}
    losses = {method: [float(step(batch(length, n))) for n in range(3)] for method, step in steps.items()}
    for method, found in losses.items():
        if not torch.allclose(torch.tensor(found), torch.tensor(losses["FSDP2"]), rtol=1e-3):
            raise ValueError(f"losses of {method} are {found}, of FSDP2 {losses['FSDP2']}")
    words = batch(length, 9)
    seconds = time_rounds({method: lambda step=step: step(words) for method, step in steps.items()}, rounds)
    row: dict[str, Any] = {"depth": depth, "width": width, "length": length, "ranks": dist.get_world_size()}
    row |= {f"{method} (s)": value for method, value in medians(seconds).items()}
    return row | {f"{method} / FSDP2": ratio(seconds, method, "FSDP2") for method in methods if method != "FSDP2"}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[4])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--one", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        compile_rows(options.depths, options.methods, options.width, options.length)
        return
    rank, _ = join()
    if options.one:
        row = compile_row(options.one, options.depths[0], options.width, options.length)
        options.out.write_text(json.dumps(row))
    else:
        for depth in options.depths:
            row = step_row(depth, options.width, options.length, options.methods, options.rounds)
            if rank == 0:
                print(json.dumps(row, indent=2), flush=True)
    leave()


if __name__ == "__main__":
    main()
