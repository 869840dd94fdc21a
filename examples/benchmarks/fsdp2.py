"""A training step by `fully_shard` beside FSDP2's: time, and peak memory. And what a sharded model takes at rest.

    torchrun --nproc-per-node 2 examples/benchmarks/fsdp2.py --out fsdp2.json
    python examples/benchmarks/fsdp2.py --readme examples/benchmarks/README.md     # 2 and 4 ranks, and the tables

The same Llama (transformers), the same batches, AdamW of torch on both sides, over FSDP2's DTensors and over this
library's flat buffers; *functional* is `torch.func.grad` and `optim.adamw`. Methods take turns, see `measure`; processor
time is that of all ranks together, which tells more than seconds where others use the machine too. Memory is
what torch's allocator has given out and not got back, from before the model is there to the end of the third step
(`torch.profiler` tells each allocation).
"""

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import environment, join, leave, ratio, time_rounds
from report import put_lines, table
from torch.distributed.fsdp import fully_shard as fsdp2
from transformers import LlamaConfig, LlamaForCausalLM

import mfsdp_func as mf
from mfsdp_func import optim

Run = Callable[[], object]
MARKS = "<!-- fsdp2 -->", "<!-- end of fsdp2 -->"
LIKE_FSDP2 = {"ours": "FSDP2", "ours, functional": "FSDP2"}
CHECKPOINTED = {"ours, checkpointed": "FSDP2, checkpointed", "ours, recompute": "FSDP2, checkpointed"}
BATCHES = {"ours, accumulated": "FSDP2, accumulated"}
AGAINST = LIKE_FSDP2 | CHECKPOINTED | BATCHES
LARGE = {"vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 10}
MICRO_BATCHES = 3


def llama(**sizes: int) -> LlamaForCausalLM:
    """The same values on every rank."""
    torch.manual_seed(0)
    chosen = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6} | sizes
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**chosen, **heads)).train()


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next word."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def batch() -> torch.Tensor:
    """This rank's."""
    return torch.randint(0, 2048, (4, 64), generator=torch.Generator().manual_seed(dist.get_rank()))


def step_of_fsdp2(method: str) -> Run:
    """One step, as FSDP2's documentation has it."""
    model, words = llama(), batch()
    if "checkpointed" in method:
        model.gradient_checkpointing_enable()
    for layer in model.model.layers:
        fsdp2(layer)
    fsdp2(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step() -> torch.Tensor:
        for _ in range(MICRO_BATCHES if "accumulated" in method else 1):
            loss = loss_of(model(words).logits, words)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def sharded(method: str) -> tuple[Any, dict[str, mf.DBuffer]]:
    """`apply` and the parameters."""
    model, rows = llama(), [mf.RowAtomic()]
    if "checkpointed" in method:
        model.gradient_checkpointing_enable()
    mesh = mf.Mesh(dist.get_world_size(), rank=dist.get_rank())
    context = mf.FsdpContext(recompute="recompute" in method)
    return mf.fully_shard(model, mesh, mf.Placements(0, rows, rows, rows), context=context)


def step_of_ours(method: str) -> Run:
    """One step with autograd's own idiom, or by functions."""
    (apply, params), words = sharded(method), batch()
    if "functional" in method:
        return functional_step(apply, params, words)
    leaves = {key: mf.DBuffer(b.spec, b.local_buffer.requires_grad_()) for key, b in params.items()}
    del params
    optimizer = torch.optim.AdamW([buffer.local_buffer for buffer in leaves.values()], 1e-3)

    def step() -> torch.Tensor:
        loss = loss_of(apply(leaves, words).logits, words)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def accumulated_step() -> torch.Tensor:
        accumulator = apply.init_accumulator(leaves)
        for _ in range(MICRO_BATCHES):
            loss = mf.inplace.accumulate(lambda out: loss_of(out.logits, words), apply, leaves, accumulator, words)
        for key, gradient in apply.reduce(accumulator).items():
            leaves[key].local_buffer.grad = gradient.local_buffer
        del accumulator
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return accumulated_step if "accumulated" in method else step


def functional_step(apply: Any, params: dict[str, mf.DBuffer], words: torch.Tensor) -> Run:
    """By `torch.func` and a gradient transformation."""
    optimizer = optim.adamw(1e-3)
    kept: dict[str, Any] = {"params": params, "state": optimizer.init(params)}
    differentiated = torch.func.grad_and_value(lambda params: loss_of(apply(params, words).logits, words))

    def step() -> torch.Tensor:
        gradients, loss = differentiated(kept["params"])
        updates, kept["state"] = optimizer.update(gradients, kept["state"], kept["params"])
        kept["params"] = optim.apply_updates(kept["params"], updates)
        return loss

    return step


def make(method: str) -> Run:
    """The step of a method."""
    return step_of_fsdp2(method) if method.startswith("FSDP2") else step_of_ours(method)


class Allocations:
    """What torch's allocator has given out inside, in bytes: at the end, and at most."""

    def __enter__(self) -> "Allocations":
        gc.collect()
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        gc.collect()
        self._profile.__exit__(None, None, None)
        events = [e for e in self._profile.profiler.kineto_results.events() if e.name() == "[memory]"]
        self.now = self.peak = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            self.now += event.nbytes()
            self.peak = max(self.peak, self.now)


def largest(number: int) -> int:
    """Over the ranks."""
    found = torch.tensor(number)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return int(found)


def peak_of(method: str) -> int:
    """Bytes of the rank that needs most, during three steps; what comes before does not count."""
    with Allocations() as before:
        step = make(method)
        step()
    with Allocations() as during:
        step()
        step()
    return largest(before.now + during.peak)


def step_rows(rounds: int) -> list[dict[str, Any]]:
    """Times and peaks, and their ratios to FSDP2's; first losses must agree."""
    steps = {method: make(method) for method in (*AGAINST, *dict.fromkeys(AGAINST.values()))}
    losses = {method: float(step()) for method, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-5:
        raise ValueError(f"first losses differ: {losses}")
    seconds: dict[str, list[float]] = {}
    busy: dict[str, list[float]] = {name: [] for name in steps}

    def watched(name: str) -> Run:
        def run() -> None:
            start = time.process_time()
            steps[name]()
            busy[name].append(time.process_time() - start)

        return run

    for methods in (LIKE_FSDP2, CHECKPOINTED, BATCHES):
        names = [*methods, *dict.fromkeys(methods.values())]
        seconds |= time_rounds({name: watched(name) for name in names}, rounds)
    steps.clear()
    table_of_busy = torch.tensor([busy[name][-rounds:] for name in seconds], dtype=torch.float64)
    dist.all_reduce(table_of_busy)
    busy = dict(zip(seconds, table_of_busy.tolist(), strict=True))
    peaks = {method: peak_of(method) for method in seconds}
    rows: list[dict[str, Any]] = []
    for method, other in AGAINST.items():
        ratios = [a / b for a, b in zip(seconds[method], seconds[other], strict=True)]
        quarters = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "method": method,
                "beside": other,
                "step (s)": statistics.median(seconds[method]),
                "beside (s)": statistics.median(seconds[other]),
                "time ratio": statistics.median(ratios),
                "quartiles": f"{quarters[0]:.2f} to {quarters[2]:.2f}",
                "processor time ratio": ratio(busy, method, other),
                "peak MB": round(peaks[method] / 1e6, 1),
                "peak ratio": peaks[method] / peaks[other],
            }
        )
    return rows


def rest_rows() -> list[dict[str, Any]]:
    """A model of about 100 M parameters, from a real module and from one on the meta device."""
    rows: list[dict[str, Any]] = []
    mesh, placed = mf.Mesh(dist.get_world_size(), rank=dist.get_rank()), [mf.RowAtomic()]
    placements, context = mf.Placements(0, placed, placed, placed), mf.FsdpContext(init=initialise, device="cpu")

    def module_on(device: str) -> torch.nn.Module:
        with torch.device(device):
            return llama(**LARGE)

    for device in ("cpu", "meta"):
        module = module_on(device)
        total = sum(param.nbytes for param in module.parameters())
        with Allocations() as beside:
            apply, params = mf.fully_shard(module, mesh, placements, context=context)
        stored = sum(buffer.local_buffer.nbytes for buffer in params.values())
        unit = max(group.whole.local_numel * group.main_dtype.itemsize for group in apply.param_groups.values())
        del module, apply, params
        with Allocations() as rest:
            module = module_on(device)
            kept = mf.fully_shard(module, mesh, placements, context=context)
            del module
        rows.append(
            {
                "module": {"cpu": "real", "meta": "meta"}[device],
                "parameters MB": round(total / 1e6, 1),
                "shards MB": round(stored / 1e6, 1),
                "at rest MB": round(largest(rest.now) / 1e6, 1),
                "at rest / shards": rest.now / stored,
                "peak beside the module MB": round(largest(beside.peak) / 1e6, 1),
                "shards and largest unit MB": round((stored + unit) / 1e6, 1),
            }
        )
        del kept
    return rows


def initialise(name: str, module: torch.nn.Module) -> None:
    """What transformers does in a method of the whole model."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()
    elif hasattr(module, "inv_freq"):
        module.inv_freq.copy_(
            1.0 / 10000 ** (torch.arange(0, module.inv_freq.numel() * 2, 2) / module.inv_freq.numel() / 2)
        )
        module.original_inv_freq = module.inv_freq
    else:
        for param in module.parameters(recurse=False):
            param.fill_(1.0)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file for the results (under torchrun)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=["steps", "rest"])
    parser.add_argument("--readme", type=Path, help="a Markdown file to write the tables into, between its marks")
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank, _ = join()
        found: dict[str, Any] = {"environment": environment()}
        if "steps" in options.only:
            found["steps"] = step_rows(options.rounds)
        if "rest" in options.only:
            found["rest"] = rest_rows()
        if rank == 0:
            print("\n".join([*table(found.get("steps", [])), "", *table(found.get("rest", []))]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(found))
        leave()
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (2, 4):
            file = Path(folder) / f"{ranks}.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), __file__]
            chosen = ["--out", str(file), "--rounds", str(options.rounds), "--only", *options.only]
            subprocess.run([*command, *chosen], check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
            results[ranks] = json.loads(file.read_text())
    here = next(iter(results.values()))["environment"]
    lines = [", ".join(f"{name} {value}" for name, value in here.items() if value), ""]
    for section in options.only:
        rows = [{"ranks": ranks} | row for ranks, found in results.items() for row in found[section]]
        lines += [*table(rows), ""]
    if options.readme:
        put_lines(lines, options.readme, MARKS)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
