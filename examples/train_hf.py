"""Train any causal language model of transformers from a configuration: sharded by rows, Muon by blocks, AdamW.

    torchrun --nproc-per-node 2 examples/train_hf.py --config LlamaConfig --set hidden_size=64 --set num_hidden_layers=2

The model is made from the name of a configuration class or a JSON file (a `config.json`), never from the network, and reads
bytes of text. `fully_shard` makes its forward a function of sharded buffers; `route` says which of its parameters are
matrices, and of which blocks; `from_route` makes one optimizer of it, which the step chains behind a clip of the norm over
all ranks. Micro-batches are added up before gradients are reduced. With ``--compare`` one process repeats it; with
``--checkpoint FOLDER`` it saves in the background and goes on from there, also when torchrun restarts the ranks.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from leave import leave
from restart import Checkpoints, init_process_group
from text import batch_at, load_text
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from tqdm import tqdm

import mfsdp_func as mf
from mfsdp_func import optim

Batches = Callable[[int], list[torch.Tensor]]
"""Of a step: its micro-batches of bytes on this rank, each ``(batch, context)``."""


def make_model(args: argparse.Namespace) -> transformers.PreTrainedModel:
    """The model of ``--config``, the same on every rank."""
    if args.config.endswith(".json"):
        facts = json.loads(Path(args.config).read_text())
        config = transformers.AutoConfig.for_model(facts.pop("model_type"), **(facts | args.set))
    else:
        config = getattr(transformers, args.config)(**args.set)
    torch.manual_seed(args.seed)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def make_optimizer(model: torch.nn.Module, params: dict[str, mf.DBuffer], args: argparse.Namespace) -> Any:
    """Clip by the norm over all ranks, then Muon and AdamW as the route says, with warm-up and a cosine."""
    warmup = max(1, args.steps // 10)
    muon, adamw = (
        optim.warmup_cosine_decay_schedule(rate / warmup, rate, warmup, args.steps, 0.1 * rate)
        for rate in (args.muon, args.adamw)
    )
    by_route = optim.from_route(
        optim.route(model),
        params,
        muon=partial(optim.muon, muon, weight_decay=args.decay, adjust_lr_fn="match_rms_adamw"),
        adamw=partial(optim.adamw, adamw, weight_decay=args.decay),
    )
    return optim.chain(optim.clip_by_global_norm(args.clip), by_route)


def train(
    model: torch.nn.Module, mesh: Any, batches: Batches, args: argparse.Namespace, folder: Path | None, show: bool
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The training loop, from the newest checkpoint in a folder. Returns the whole weights, and this rank's losses."""
    rows = [mf.RowAtomic()]
    context = mf.FsdpContext(
        param_dtype=getattr(torch, args.dtype),
        reduce_dtype=torch.float32,
        deterministic=True,
        recompute=args.checkpointing,
        shard_layout=mf.ShardLayout.BALANCED,
    )
    apply, params = mf.fully_shard(model, mesh, mf.Placements([0], rows, rows, rows), context=context)
    optimizer = make_optimizer(model, params, args)
    state, losses, first = optimizer.init(params), list[float](), 0
    checkpoints = None if folder is None else Checkpoints(folder, args.every, mesh, apply.names)
    if checkpoints is not None:
        value = mf.checkpoint.spec_of({"params": params, "optimizer": state, "step": 0})
        if (found := checkpoints.resume(value)) is not None:
            params, state, first = found["params"], found["optimizer"], found["step"]

    def loss_of(sums: dict[str, mf.DBuffer], words: torch.Tensor, count: int) -> torch.Tensor:
        return apply.accumulate(params, sums, input_ids=words, labels=words, use_cache=False).loss / count

    with tqdm(total=args.steps, initial=first, disable=not show, mininterval=0.2 if sys.stderr.isatty() else 10) as bar:
        for step in range(first, args.steps):
            torch.manual_seed(hash((args.seed, step, mesh.get_rank())))  # of dropout: no state to be saved
            start, micro = time.perf_counter(), batches(step)
            sums, zeros, total = None, apply.init_accumulator(params), 0.0
            for words in micro:
                found, loss = torch.func.grad_and_value(loss_of)(zeros, words, len(micro))
                sums = found if sums is None else pytree.tree_map(torch.add, sums, found)
                total += float(loss.detach())
            gradients = apply.reduce(sums)
            norm = mf.global_norm(gradients)
            updates, state = optimizer.update(gradients, state, params)
            params = optim.apply_updates(params, updates)
            losses.append(total)
            tokens = sum(words.numel() for words in micro) * mesh.size()
            speed = tokens / (time.perf_counter() - start)
            bar.set_postfix(loss=f"{total:.3f}", norm=f"{float(norm):.2f}", tokens=f"{speed:,.0f}/s", refresh=False)
            bar.update()
            if checkpoints is not None:
                value = {"params": params, "optimizer": state, "step": step + 1}
                checkpoints.after(step + 1, value, last=step + 1 == args.steps)
    return apply.gather_parameters(params), losses


def run(args: argparse.Namespace) -> None:
    """Train; with ``--compare``, once more in one process."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(torch.device(device).type, (world,)) if dist.is_initialized() else mf.Mesh(1, rank=0)
    text = load_text(args.data, args.context + 2)

    def batches(ranks: list[int], step: int) -> list[torch.Tensor]:
        numbers = [(step * args.accumulate + micro, rank) for micro in range(args.accumulate) for rank in ranks]
        sizes = {"size": args.batch, "context": args.context, "seed": args.seed}
        return [batch_at(text, number, rank, **sizes)[:, :-1].to(device) for number, rank in numbers]

    model = make_model(args).to(device)
    if not rank:
        print(optim.route(model).summary())
        count = sum(param.numel() for param in model.parameters())
        print(f"{count:,} parameters on {world} rank(s), {device}")
    weights, losses = train(model, mesh, partial(batches, [rank]), args, args.checkpoint, not rank)
    if losses and not rank:
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    if args.compare and not rank:
        all_ranks = partial(batches, list(range(world)))
        expected, _ = train(make_model(args).to(device), mf.Mesh(1, rank=0), all_ranks, args, None, True)
        worst = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
        print(f"max diff {worst:.2e} between these weights and those of one process")


def setting(word: str) -> tuple[str, Any]:
    """``name=value``, the value in JSON."""
    name, _, value = word.partition("=")
    return name, json.loads(value)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--config", default="GPT2Config", help="a configuration class of transformers, or a JSON file")
    parser.add_argument("--set", type=setting, action="append", default=[], help="a setting of it: name=value")
    parser.add_argument("--data", type=Path, help="a text file or a folder of them; default: Python's own sources")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    parser.add_argument("--batch", type=int, default=4, help="windows of text per rank and micro-batch")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--context", type=int, default=128, help="bytes that the model sees")
    parser.add_argument("--muon", type=float, default=2e-3, help="peak learning rate of Muon")
    parser.add_argument("--adamw", type=float, default=1e-3, help="peak learning rate of AdamW")
    parser.add_argument("--decay", type=float, default=0.01, help="weight decay")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradients")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="in which units compute")
    parser.add_argument("--checkpointing", action="store_true", help="run blocks twice, keep no activations")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save there, and go on from there")
    parser.add_argument("--every", type=int, default=100, metavar="STEPS", help="between two saves")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters and the batches")
    parser.add_argument("--compare", action="store_true", help="repeat the training in one process, and compare")
    args = parser.parse_args(arguments)
    args.set = dict(args.set)
    if args.steps < 1 or not math.isfinite(args.clip):
        parser.error("--steps must be positive, --clip finite")
    return args


if __name__ == "__main__":
    options = parse()
    if "RANK" in os.environ:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    run(options)
    leave()  # all ranks wait for the first one's comparison
