"""``python -m mfsdp_func preflight MODEL --mesh 8x64 --node 8 --optimizer muon``."""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from mfsdp_func.optim.routed import BYTE_COST
from mfsdp_func.preflight import Preflight, run
from mfsdp_func.preflight.advice import advise
from mfsdp_func.preflight.models import ModelShapes, read_model
from mfsdp_func.preflight.result import comparison
from mfsdp_func.preflight.settings import Carrying, Optimizing, Owning, Settings
from mfsdp_func.values.placement import ShardLayout

_SHAPE = re.compile(r"\d+(x\d+)*")

_EPILOG = """\
examples:
  preflight LlamaConfig --set num_hidden_layers=80 --set hidden_size=8192 --mesh 2048
  preflight config.json --mesh 512x4 --mesh 64x32 --batch 1x4096 --html page.html
  preflight my_package.models:build --mesh 8 --optimizer adamw --json result.json
  preflight 4096x4096 14336x4096 4096 --repeat 32 --mesh 64 --advice
"""


def add_parser(commands: Any) -> None:
    """Add the command to a parser's commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "preflight",
        help="what a training run will move, store and take, before anyone rents a GPU",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="+",
        metavar="MODEL",
        help="a configuration file or class of transformers, module:function, or shapes such as 1024x768 768",
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a value of the configuration")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="as many buffers of the given shapes")
    parser.add_argument(
        "--mesh",
        type=_sizes,
        action="append",
        required=True,
        help="ranks along each axis, such as 64 or 8x64; the last axis shards, others replicate; several are compared",
    )
    layouts = [each.value for each in ShardLayout]
    parser.add_argument("--layout", choices=layouts, nargs="+", default=["padded"], help="several are compared")
    parser.add_argument(
        "--owners", choices=get_args(Owning), nargs="+", default=["planned"], help="several are compared"
    )
    parser.add_argument("--node", type=int, default=8, metavar="RANKS", help="ranks of a node; default 8")
    parser.add_argument("--optimizer", choices=get_args(Optimizing), default="muon")
    parser.add_argument(
        "--dtype", type=_dtype, default=torch.float32, help="of main weights and state; default float32"
    )
    parser.add_argument("--param-dtype", type=_dtype, help="in which units gather and compute")
    parser.add_argument("--reduce-dtype", type=_dtype, help="in which gradients are averaged")
    parser.add_argument(
        "--travel-dtype", type=_dtype, default=torch.bfloat16, help="of matrices on their way to owners"
    )
    parser.add_argument(
        "--finer-rows",
        action="append",
        default=[],
        metavar="PATTERN",
        help="names of parameters laid out by their last dim, such as '*.experts.*'",
    )
    parser.add_argument("--recompute", action="store_true", help="units run again backward, and keep no activations")
    parser.add_argument("--byte-cost", type=float, default=BYTE_COST, help="price of a byte in the choice of owners")
    parser.add_argument("--near-nodes", action="store_true", help="let bytes between nodes cost more there")
    parser.add_argument(
        "--blocks",
        action="append",
        default=[],
        metavar="PATTERN=SPEC",
        help="what parameters of such names get: parts that are matrices, muon, or adamw",
    )
    parser.add_argument(
        "--batch", type=_sizes, metavar="SEQUENCESxTOKENS", help="of one rank, for activations and time"
    )
    parser.add_argument("--hardware", default="h100", help="a name of the hardware table; default h100")
    parser.add_argument("--hardware-file", type=Path, help="JSON with more entries of that table")
    parser.add_argument(
        "--carrier", choices=get_args(Carrying), default="process group", help="whose messages to count"
    )
    parser.add_argument("--advice", action="store_true", help="try other settings and say which are better")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write all figures; - for the terminal, in place of text"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page with pictures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the pictures as .png, .svg or .pdf")


def answer(options: argparse.Namespace) -> str:
    """What the command prints.

    Raises:
        ValueError: on arguments that make no sense.
    """
    model = _model(options)
    choices = _choices(options.blocks)

    def answer_to(settings: Settings) -> Preflight:
        return run(model, settings, hardware_file=options.hardware_file, blocks=choices)

    results = [answer_to(settings) for settings in _settings(options)]
    words: list[str] = []
    if len(results) > 1:
        words.append(comparison(results))
    else:
        words.append(str(results[0]))
    advice = advise(results[0], answer_to) if options.advice else []
    if options.advice:
        lines = [f"{each}\n    {each.command}" for each in advice[:5]]
        words.append(
            "ADVICE for the worst line, by trying\n" + ("\n".join(lines) or "nothing that was tried is better")
        )
    if options.html:
        from mfsdp_func.preflight.page import save_page

        words.append(f"the page is {save_page(results, options.html, advice[:5])}")
    if options.plot:
        words.append(f"the pictures are in {results[0].plot(options.plot)}")
    if options.json:
        found = [result.as_dict() for result in results]
        text = json.dumps(found[0] if len(found) == 1 else found, indent=1)
        if str(options.json) == "-":
            return text
        options.json.write_text(text)
        words.append(f"all figures are in {options.json}")
    return "\n\n".join(words)


def _model(options: argparse.Namespace) -> ModelShapes:
    words: list[str] = [*options.model, *(word for change in options.set for word in ("--set", change))]
    if all(_SHAPE.fullmatch(word) for word in options.model):
        if options.set:
            raise ValueError("--set changes configurations, and shapes were given")
        if options.repeat < 1:
            raise ValueError(f"--repeat must be positive, got {options.repeat}")
        shapes = [_sizes(word) for word in options.model]
        words += ["--repeat", str(options.repeat)] if options.repeat > 1 else []
        return read_model({f"block.{n}": shapes for n in range(options.repeat)}, words=words)
    if len(options.model) > 1:
        raise ValueError(f"give one model, or shapes only; got {' '.join(options.model)}")
    if options.repeat != 1:
        raise ValueError("--repeat is for shapes")
    return read_model(options.model[0], dict(map(_change, options.set)), words)


def _change(word: str) -> tuple[str, Any]:
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"--set {word}: write KEY=VALUE, such as num_hidden_layers=80")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _choices(given: Sequence[str]) -> dict[str, str]:
    """Name pattern -> block spec, "muon" or "adamw"."""
    found: dict[str, str] = {}
    for word in given:
        pattern, equals, spec = word.partition("=")
        if not equals or not pattern:
            raise ValueError(
                f"--blocks {word!r}: write PATTERN=SPEC, such as '*.qkv.weight=(q + k + v) m -> q m | k m | v m'"
            )
        found[pattern] = spec
    return found


def _settings(options: argparse.Namespace) -> list[Settings]:
    return [
        Settings(
            mesh=mesh,
            node=options.node,
            layout=ShardLayout(layout),
            owners=owners,
            optimizer=options.optimizer,
            dtype=options.dtype,
            param_dtype=options.param_dtype,
            reduce_dtype=options.reduce_dtype,
            travel_dtype=options.travel_dtype,
            finer_rows=tuple(options.finer_rows),
            recompute=options.recompute,
            byte_cost=options.byte_cost,
            near_nodes=options.near_nodes,
            batch=options.batch,
            hardware=options.hardware,
            carrier=options.carrier,
        )
        for mesh in options.mesh
        for layout in options.layout
        for owners in options.owners
    ]


def _sizes(word: str) -> tuple[int, ...]:
    if not _SHAPE.fullmatch(word):
        raise argparse.ArgumentTypeError(f"{word!r}: write whole numbers joined by x, such as 8x64")
    return tuple(map(int, word.split("x")))


def _dtype(word: str) -> torch.dtype:
    dtype = getattr(torch, word, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{word!r} is no torch dtype; write float32, bfloat16 or the like")
    return dtype


def preflights(arguments: Sequence[str]) -> list[Preflight]:
    """The results that a command line asks for, as values.

    Raises:
        ValueError: see `answer`.
    """
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(dest="command", required=True))
    options = parser.parse_args(["preflight", *arguments])
    model = _model(options)
    choices = _choices(options.blocks)
    return [run(model, s, hardware_file=options.hardware_file, blocks=choices) for s in _settings(options)]
