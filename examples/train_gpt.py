"""Train a byte-level GPT on real text, its parameters cut by rows, its matrices updated by their owners.

    torchrun --nproc-per-node 2 examples/train_gpt.py

Every transformer block is one flat buffer, cut between the ranks at row boundaries. A step gathers the blocks, takes
the gradient of this rank's batch, averages it onto each rank's own rows, and updates these by one optimizer: it clips the
norm over all ranks, trains matrices with Muon (queries, keys and values head by head) by way of their owners (gather,
Newton-Schulz, scatter), and all else with AdamW where it lies. At the end rank 0 repeats the training in one process,
without any of this, and compares the weights.

With ``--compile`` the whole step is one compiled region per rank, and the run ends with an error if any of it falls
back to eager code or is compiled a second time.

With ``--checkpoint FOLDER --every N`` it saves in the background and goes on from the newest checkpoint that verifies, also
when torchrun starts the ranks again (``--max-restarts``), and on another number of ranks: to train on the same text
there, say in how many ``--streams`` it is dealt to the ranks.

The step is a pure function of its state. PyTorch has no donation: the old state lives until its name is bound to the
new one, so a step needs room for both. Where that matters, write in place: `mf.optim.TorchOptimizer` with
``compile=True`` needs no second state (measured by ``examples/benchmarks/donation.py``).
"""

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import gpt
import reference
import torch
import torch.distributed as dist
from leave import leave
from restart import Checkpoints, init_process_group
from text import TextError, batch_at, load_text
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.plans.plan import gather_plan, scatter_plan

MUON_RATE, ADAMW_RATE, WARMUP, CLIP = 0.02, 0.003, 10, 1.0
PLOT_SUFFIXES = (".pdf", ".png", ".svg")


class State(NamedTuple):
    """What a step takes and returns: a pytree."""

    params: dict[str, mf.DBuffer]
    """By unit: this rank holds its rows of each flat buffer."""
    optimizer: Any
    """Of this rank's rows."""


class Metrics(NamedTuple):
    """What a step tells."""

    loss: torch.Tensor
    """Mean over ranks: 0-D."""


def learning_rate(peak: float, steps: int) -> optim.Schedule:
    """A linear rise, then half a cosine down to a tenth."""
    return optim.warmup_cosine_decay(peak / WARMUP, peak, WARMUP, max(steps, WARMUP + 1), 0.1 * peak)


def blocks_of(unit: str, name: str, config: gpt.Config) -> int:
    """Into how many blocks of rows Muon takes a tensor apart: heads, or the whole matrix; 0 where AdamW trains it."""
    if unit == gpt.OUTER or name.startswith("norm"):
        return 0
    return config.heads if name in "qkv" else 1


def make_route(config: gpt.Config) -> optim.Route:
    """The same for the optimizer."""
    units = gpt.unit_shapes(config)
    shapes = {f"{unit}.{name}": shape for unit, named in units.items() for name, shape in named.items()}
    found = {f"{unit}.{name}": blocks_of(unit, name, config) for unit, named in units.items() for name in named}
    specs = {name: optim.blocks("(h d) m -> h d m", h=heads) for name, heads in found.items() if heads}
    return optim.route(shapes, {name: specs.get(name, "adamw") for name in shapes})


def make_optimizer(plan: optim.RoutePlan, args: argparse.Namespace) -> optim.GradientTransformation[Any]:
    """Clip, then Muon and AdamW as the route says; rates rise and fall."""
    muon_rate, adamw_rate = (learning_rate(peak, args.steps) for peak in (MUON_RATE, ADAMW_RATE))
    # bfloat16, usual on CUDA, would blur the comparison with one process.
    muon = partial(optim.muon, muon_rate, ns_dtype=getattr(torch, args.dtype))
    routed = plan.transformation(muon=muon, adamw=partial(optim.adamw, adamw_rate, weight_decay=0.0))
    return optim.chain(optim.clip_by_global_norm(CLIP), routed)


# Training


Step = Callable[[State, torch.Tensor], tuple[State, Metrics]]


def make_step(optimizer: optim.GradientTransformation[Any], config: gpt.Config, mesh: Any) -> Step:
    """The training step ``(state, tokens) -> (state, metrics)``: pure but for communication; all ranks call it."""
    one_number = mf.BufferSpec(mesh, [mf.Partial("avg")], mf.build_for_row_atomic([(1,)], 1))

    def loss_of(whole: dict[str, mf.DBuffer], tokens: torch.Tensor) -> torch.Tensor:
        return gpt.loss(named(whole, config), tokens, config)

    def step(state: State, tokens: torch.Tensor) -> tuple[State, Metrics]:
        whole = {name: buffer.allgather(0) for name, buffer in state.params.items()}
        gradients, loss = torch.func.grad_and_value(loss_of)(whole, tokens)
        # The objective is the mean over ranks of their losses. Added in rank order, as the reference does.
        average = {name: gradient.view([mf.Partial("avg")]) for name, gradient in gradients.items()}
        own = {name: one.reduce_scatter(0, mf.RowAtomic(), deterministic=True) for name, one in average.items()}
        updates, optimizer_state = optimizer.update(own, state.optimizer, state.params)
        mean = mf.DBuffer(one_number, loss.reshape(1)).allreduce(0).local_buffer
        return State(optim.apply_updates(state.params, updates), optimizer_state), Metrics(mean[0])

    return step


def named(whole: dict[str, mf.DBuffer], config: gpt.Config) -> gpt.Params:
    """Views of the tensors in whole buffers."""
    shapes = gpt.unit_shapes(config)
    return {
        unit: dict(zip(shapes[unit], buffer.tensor_views().values(), strict=True)) for unit, buffer in whole.items()
    }


def compiled(step: Step, backend: str = "inductor") -> Step:
    """The step as one compiled region, which refuses to break, to fall back to eager code, or to compile again."""
    region = torch.compile(step, fullgraph=True, backend=backend)
    stats = torch._dynamo.utils.counters["stats"]
    before, calls = stats["unique_graphs"], 0

    def call(state: State, tokens: torch.Tensor) -> tuple[State, Metrics]:
        nonlocal calls
        with torch._dynamo.config.patch(suppress_errors=False, error_on_recompile=calls > 0):
            results = region(state, tokens)
        calls += 1
        if stats["unique_graphs"] - before != 1:
            raise RuntimeError(f"the step must be one compiled graph, there are {stats['unique_graphs'] - before}")
        return results

    return call


def moved_elements(owners: Mapping[str, mf.GroupOwnerLayout]) -> tuple[int, int]:
    """Elements that the gathers and scatters of one step move between ranks: by their plans, and at least.

    An owner lacks those elements of its blocks that it does not hold: they must come to it, their results go back.
    """
    planned = bound = 0
    for name, layout in owners.items():
        plans = gather_plan(layout, name), scatter_plan(layout, name)
        planned += sum(piece.part.numel for plan in plans for piece in plan.pieces())
        for i, owner in layout.tensor_to_owner.items():
            block = layout.layout.get_tensor_range(i)
            held = layout.layout.get_rank_range(layout.mesh, layout.placements, owner)
            bound += 2 * (block.numel - mf.intersect_ranges(block, held).numel)
    return planned, bound


def progress(args: argparse.Namespace, label: str, rank: int) -> Any:
    """A bar that rank 0 shows."""
    from tqdm import tqdm

    return tqdm(total=args.steps, desc=label, disable=rank > 0, mininterval=0.2 if sys.stderr.isatty() else 10)


def run(args: argparse.Namespace, text: torch.Tensor, device: torch.device) -> None:
    """Train, repeat the training in one process, compare."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mesh = init_device_mesh(device.type, (world,)) if dist.is_initialized() else mf.Mesh(1, rank=0)
    config = gpt.Config(args.dim, args.layers, args.heads, args.context)
    params = {
        unit: {name: tensor.to(device) for name, tensor in tensors.items()}
        for unit, tensors in gpt.init_params(config, args.seed, getattr(torch, args.dtype)).items()
    }
    if not rank:
        numel = sum(tensor.numel() for tensors in params.values() for tensor in tensors.values())
        print(f"{len(text)} bytes of text, {numel} parameters in {len(params)} units on {world} rank(s), {device.type}")

    def batch(step: int, rank: int) -> torch.Tensor:
        own = range(rank, args.streams or world, world)
        windows = [batch_at(text, step, k, size=args.batch, context=args.context, seed=args.seed) for k in own]
        return torch.cat(windows).to(device)

    buffers: dict[str, mf.DBuffer] = {}
    for unit, tensors in params.items():
        shapes = [tensor.shape for tensor in tensors.values()]
        layout = mf.build_row_atomic_layout(shapes, world, shard_layout=mf.ShardLayout(args.layout))
        buffers[unit] = mf.DBuffer.distribute_tensors(list(tensors.values()), mesh, [mf.RowAtomic()], layout)
    plan = optim.plan_route(make_route(config), buffers)
    optimizer = make_optimizer(plan, args)
    step, state = make_step(optimizer, config, mesh), State(buffers, optimizer.init(buffers))
    if args.compile:
        step = compiled(step)
        start = time.perf_counter()
        step(state, batch(0, rank))  # pure: its results may be dropped
        if not rank:
            print(f"compiled in {time.perf_counter() - start:.1f} s: one graph per rank, without breaks")
    losses: list[float] = []
    checkpoints = None
    if args.checkpoint is not None:
        names = {unit: [f"{unit}.{name}" for name in tensors] for unit, tensors in params.items()}
        checkpoints = Checkpoints(args.checkpoint, args.every, mesh, names)
        found = checkpoints.resume(mf.checkpoint.spec_of({"state": state, "losses": [0.0]}))
        state, losses = (state, losses) if found is None else (found["state"], found["losses"])
    with progress(args, "train", rank) as bar:
        bar.update(len(losses))
        for number in range(len(losses), args.steps):
            state, metrics = step(state, batch(number, rank))
            losses.append(float(metrics.loss))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            bar.update()
            if checkpoints is not None:
                value = {"state": state, "losses": list(losses)}
                checkpoints.after(number + 1, value, last=number + 1 == args.steps)
    trained = named({name: buffer.allgather(0) for name, buffer in state.params.items()}, config)
    if rank or not args.reference:
        return

    with progress(args, "reference", rank) as bar:

        def rates(number: int) -> tuple[float, float]:
            bar.update()
            return tuple(float(learning_rate(peak, args.steps)(number)) for peak in (MUON_RATE, ADAMW_RATE))

        batches = ([batch(number, r) for r in range(world)] for number in range(args.steps))
        kinds = partial(blocks_of, config=config)
        expected, expected_losses = reference.train(params, kinds, batches, rates, CLIP, config)
    report(args, losses, expected_losses)
    differences = [(trained[unit][name] - one).abs().max() for unit in expected for name, one in expected[unit].items()]
    itemsize = getattr(torch, args.dtype).itemsize
    planned, bound = (count * itemsize * args.steps for count in moved_elements(plan.owners))
    print(
        f"max diff {float(torch.stack(differences).max()):.2e} between these weights and those of one process,"
        f" bytes moved {planned} of a lower bound of {bound}"
    )


def report(args: argparse.Namespace, losses: list[float], expected: list[float]) -> None:
    """Say, and with ``--plot`` draw, how the loss fell."""
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f} (one process: {expected[0]:.4f} -> {expected[-1]:.4f})")
    if args.plot is None:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(losses, label="sharded")
    axes.plot(expected, "--", label="one process")
    axes.set(xlabel="step", ylabel="loss [nats per byte]")
    axes.legend()
    figure.savefig(args.plot, bbox_inches="tight", dpi=150)
    print(f"the loss is drawn in {args.plot}")


# The command line


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, torch.Tensor]:
    """The options and the text. Every rank checks them alike, before any process group exists."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT with sharded Muon. Start with: torchrun --nproc-per-node 2 train_gpt.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )

    def positive(word: str) -> int:
        if not word.isdecimal() or not int(word):
            raise argparse.ArgumentTypeError(f"must be a positive whole number, got {word!r}")
        return int(word)

    parser.add_argument("--steps", type=positive, default=300, help="training steps")
    parser.add_argument("--data", type=Path, help="a text file or a folder of them; default: Python's own sources")
    parser.add_argument("--plot", type=Path, metavar="FILE", help=f"draw the loss ({', '.join(PLOT_SUFFIXES)})")
    parser.add_argument("--seed", type=int, default=0, help="of the first parameters and the batches")
    parser.add_argument("--layout", choices=[each.value for each in mf.ShardLayout], default="padded", help="of rows")
    parser.add_argument("--compile", action="store_true", help="the whole step as one compiled region")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="of all numbers")
    parser.add_argument("--batch", type=positive, default=8, help="windows of text per rank and step")
    parser.add_argument("--streams", type=positive, help="streams of text, dealt to the ranks; default: one per rank")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save there, and go on from there")
    parser.add_argument("--every", type=positive, default=100, metavar="STEPS", help="between two saves")
    parser.add_argument(
        "--reference", action=argparse.BooleanOptionalAction, default=True, help="repeat the training in one process"
    )
    parser.add_argument("--context", type=positive, default=128, help="bytes that the model sees")
    parser.add_argument("--dim", type=positive, default=128, help="width of the model")
    parser.add_argument("--layers", type=positive, default=4, help="transformer blocks")
    parser.add_argument("--heads", type=positive, default=4, help="attention heads")
    args = parser.parse_args(arguments)
    if (args.streams or 0) % int(os.environ.get("WORLD_SIZE", "1")):
        parser.error(f"--streams {args.streams} must be a multiple of the number of ranks, {os.environ['WORLD_SIZE']}")
    if args.dim % args.heads:
        parser.error(f"--dim {args.dim} must be a multiple of --heads {args.heads}")
    if args.plot is not None and (args.plot.suffix not in PLOT_SUFFIXES or not args.plot.parent.is_dir()):
        parser.error(f"--plot {args.plot}: give a {', '.join(PLOT_SUFFIXES)} file in a folder that exists")
    for module in ("tqdm", "matplotlib") if args.plot else ("tqdm",):
        if importlib.util.find_spec(module) is None:
            parser.error(f"{module} is missing; install what the examples need: pip install '.[examples]'")
    try:
        return args, load_text(args.data, args.context + 2)
    except TextError as error:
        parser.error(f"--data: {error}")


def main() -> None:
    """Join the process group, if torchrun started this, and run."""
    args, text = parse()
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        print("one process; for more: torchrun --nproc-per-node 2 examples/train_gpt.py")
        run(args, text, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return
    local_rank, local_size = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    if torch.cuda.is_available() and torch.cuda.device_count() >= local_size:
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        init_process_group("nccl", device_id=device)
    else:
        device = torch.device("cpu")
        init_process_group("gloo")
    run(args, text, device)
    leave()  # all ranks wait for the first one's comparison


if __name__ == "__main__":
    main()
