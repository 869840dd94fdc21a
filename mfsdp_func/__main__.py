"""Plan without hardware: ``python -m mfsdp_func padding``, ``plan 8x4 2x6 3 --ranks 4``, ``preflight MODEL --mesh 8x64``.

Look at checkpoints: ``python -m mfsdp_func checkpoint show|verify|diff|to-hf PATH``.
"""

import argparse
import os
import re
import sys
import warnings
from collections.abc import Sequence

import torch

from mfsdp_func.checkpoint import command
from mfsdp_func.preflight.command import add_parser, answer
from mfsdp_func.report import GROUPS, padding_table, plan_report
from mfsdp_func.values.layout_builder import build_row_atomic_layout
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.padding import PaddingWarning
from mfsdp_func.values.placement import ShardLayout


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; prints its table. Returns the exit status: 0, or 2 for arguments that cannot be planned."""
    options = _parser().parse_args(arguments)
    if options.command == "checkpoint":
        return command.run(options)
    try:
        print({"padding": _padding, "plan": _plan, "preflight": answer}[options.command](options), flush=True)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its exit
        return 1
    except ValueError as error:
        print(f"mfsdp_func {options.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mfsdp_func", description="Tables about layouts and plans, for any ranks.")
    commands = parser.add_subparsers(dest="command", required=True)

    padding = commands.add_parser("padding", help="what the layouts store for hard cases and known models")
    padding.add_argument("--ranks", type=int, nargs="+", default=[2, 8, 64, 512], metavar="N", help="numbers of ranks")
    padding.add_argument("--shapes", type=_shape, nargs="+", metavar="SHAPE", help="a buffer of your own: 8x769 8x1021")

    command.add_arguments(commands.add_parser("checkpoint", help="show, verify, compare and convert checkpoints"))

    plan = commands.add_parser("plan", help="layout, owners and gather plan of one buffer")
    plan.add_argument("shapes", type=_shape, nargs="+", metavar="SHAPE", help="logical shapes, such as 1024x768 or 768")
    plan.add_argument("--ranks", type=int, required=True, metavar="N", help="number of ranks that share the buffer")
    plan.add_argument("--layout", choices=[kind.value for kind in ShardLayout], default=ShardLayout.PADDED.value)
    plan.add_argument("--block-size", type=int, default=1, metavar="ROWS", help="rows that stay together; default 1")
    plan.add_argument("--dtype", type=_dtype, default=torch.float32, metavar="DTYPE", help="default: float32")
    plan.add_argument(
        "--owners", type=int, nargs="+", metavar="RANK", help="one rank per tensor, -1 for none; default: even work"
    )
    add_parser(commands)
    return parser


def _shape(word: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+(x\d+)*", word):
        raise argparse.ArgumentTypeError(f"{word!r} is no shape; write dims joined by x, such as 1024x768")
    return tuple(map(int, word.split("x")))


def _dtype(word: str) -> torch.dtype:
    dtype = getattr(torch, word, None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"{word!r} is no torch dtype; write float32, bfloat16 or the like")
    return dtype


def _padding(options: argparse.Namespace) -> str:
    return padding_table(options.ranks, GROUPS if options.shapes is None else {"given": options.shapes})


def _plan(options: argparse.Namespace) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PaddingWarning)  # the report has the figures
        layout = build_row_atomic_layout(
            options.shapes,
            options.ranks,
            block_size=options.block_size,
            shard_layout=ShardLayout(options.layout),
        )
    mesh = Mesh(options.ranks)
    if options.owners is None:
        owners = GroupOwnerLayout.from_params(mesh, layout)
    elif len(options.owners) != len(options.shapes):
        raise ValueError(f"{len(options.shapes)} shapes but {len(options.owners)} owners; give one each, -1 for none")
    else:
        owners = GroupOwnerLayout(mesh, layout, {i: owner for i, owner in enumerate(options.owners) if owner != -1})
    return plan_report(owners, options.dtype, block_size=options.block_size)


if __name__ == "__main__":
    sys.exit(main())
