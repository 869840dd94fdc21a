"""The command line: ``python -m mfsdp_func checkpoint show|verify|diff|to-hf PATH``."""

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.checkpoint.hf_export import HfTensor, config_text, lay_out, write_folder
from mfsdp_func.checkpoint.loading import open_folder
from mfsdp_func.checkpoint.looking import diff, inspect, read_whole, verify
from mfsdp_func.values.mesh import Mesh


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The subcommands of ``checkpoint``."""
    actions = parser.add_subparsers(dest="action", required=True)
    show = actions.add_parser("show", help="what is in a checkpoint")
    check = actions.add_parser("verify", help="read every byte and compare it with its hash; exit status 1 on damage")
    compare = actions.add_parser("diff", help="compare two checkpoints bitwise, by name; exit status 1 if they differ")
    convert = actions.add_parser("to-hf", help="write a Hugging Face folder; one tensor in memory at a time")
    for action in (show, check, compare, convert):
        action.add_argument("path", type=Path, metavar="PATH", help="the folder of a checkpoint")
    compare.add_argument("other", type=Path, metavar="OTHER", help="another one")
    convert.add_argument("out", type=Path, nargs="?", metavar="OUT", help="the new folder; default: PATH-hf")
    convert.add_argument(
        "--prefix", help="of the parameters' names, left out; default: params or model, if names have it"
    )
    convert.add_argument("--config", type=Path, metavar="FILE", help="becomes config.json")
    convert.add_argument("--dtype", metavar="DTYPE", help="converts floating-point tensors, to bfloat16 or the like")
    convert.add_argument("--max-file-nbytes", type=int, default=5 * 2**30, metavar="N", help="default: 5 GiB")


def run(options: argparse.Namespace) -> int:
    """Run one action; prints what it finds. Returns the exit status: 0, 1 for a difference or damage."""
    try:
        return _ACTIONS[options.action](options)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 1


def _show(options: argparse.Namespace) -> int:
    print(inspect(options.path))
    return 0


def _verify(options: argparse.Namespace) -> int:
    found = verify(options.path, progress=progress_bar("verify"))
    print(f"{options.path}: every byte is as it was written; {len(found.tensors)} tensors, {found.nbytes} bytes")
    return 0


def _diff(options: argparse.Namespace) -> int:
    found = diff(options.path, options.other)
    print(found)
    return int(bool(found))


def _to_hf(options: argparse.Namespace) -> int:
    folder = open_folder(options.path)
    tensors = {
        name: stored
        for name, stored in folder.metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    aliases = inspect(options.path).aliases
    prefixes = ("params.", "model.") if options.prefix is None else (f"{options.prefix}.".lstrip("."),)
    prefix = next(
        (p for p in prefixes if any(name.startswith(p) for name in tensors)), prefixes[0] if options.prefix else ""
    )
    chosen = {name.removeprefix(prefix): name for name in tensors if name.startswith(prefix) and name not in aliases}
    if not chosen:
        raise CheckpointError(f"{options.path}: no tensor's name begins with {prefix!r}; see show")
    dtype = None if options.dtype is None else getattr(torch, options.dtype, None)
    if options.dtype is not None and not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"--dtype: {options.dtype!r} is no torch dtype")

    def kind(name: str) -> torch.dtype:
        own = tensors[name].properties.dtype
        return dtype if dtype is not None and own.is_floating_point else own

    kinds = [(name, kind(full), torch.Size(tensors[full].size)) for name, full in sorted(chosen.items())]
    config = None if options.config is None else config_text(json.loads(options.config.read_text()), dtype)
    target = Path(os.path.abspath(options.out or f"{options.path}-hf"))
    if os.path.lexists(target):
        raise CheckpointError(f"export to {target}: it exists; give a new path")

    def fetch(tensor: HfTensor) -> torch.Tensor:
        return read_whole(folder, chosen[tensor.name])

    laid_out = lay_out(kinds, [[0]] * len(kinds), options.max_file_nbytes)
    write_folder(target, laid_out, Mesh(1, rank=0), fetch, config, progress_bar("to-hf"))
    print(f"{len(kinds)} tensors in {target}")
    return 0


def progress_bar(what: str) -> Callable[[int, int], None] | None:
    """A line of text that shows how far a long call is; None where nobody looks."""
    if not sys.stderr.isatty():
        return None

    def show(done: int, total: int) -> None:
        share = done / max(total, 1)
        end = "\n" if done >= total else ""
        print(f"\r{what} [{'#' * int(30 * share):30}] {100 * share:3.0f} %", end=end, file=sys.stderr, flush=True)

    return show


_ACTIONS: dict[str, Callable[[Any], int]] = {"show": _show, "verify": _verify, "diff": _diff, "to-hf": _to_hf}
