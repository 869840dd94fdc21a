"""Hugging Face folders out: each tensor is gathered to one owner, who writes it at its place in a file."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from mfsdp_func.checkpoint.consensus import agree, all_ranks, attempt, share, together
from mfsdp_func.checkpoint.entry import Entry
from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.checkpoint.hf import _WORDS, INDEX, Kind
from mfsdp_func.checkpoint.manifest import sync_folder, write_file
from mfsdp_func.checkpoint.names import check_names, entries_of, leaves_of
from mfsdp_func.checkpoint.parts import bytes_of
from mfsdp_func.checkpoint.saving import Progress
from mfsdp_func.checkpoint.shards import Shards
from mfsdp_func.checkpoint.staging import Staging
from mfsdp_func.operations.dbuffer import DBuffer
from mfsdp_func.operations.gather_scatter import gather
from mfsdp_func.values.mesh import Mesh, MeshLike
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.placement import shard_axes

_PIECE_NBYTES = 32 * 1024 * 1024


class HfTensor(NamedTuple):
    """A tensor of a folder: where it lies, and who writes it.

    Attributes:
        name: of the parameter.
        dtype: in the file.
        shape: logical.
        file: its number.
        start: first byte behind the header of the file.
        owner: position among all ranks of the one that writes it.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    file: int
    start: int
    owner: int

    @property
    def nbytes(self) -> int:
        """In the file."""
        return self.shape.numel() * self.dtype.itemsize


def lay_out(tensors: Sequence[Kind], candidates: Sequence[Sequence[int]], max_file_nbytes: int) -> list[HfTensor]:
    """Give each tensor its file, its place and its owner. Tensors stay in order; a file has at least one.

    Owners are balanced by bytes: the largest tensor first, each to that of its candidates that has least.

    >>> tensors = [("a", torch.int8, torch.Size([n])) for n in (3, 5, 4)]
    >>> [(t.file, t.start, t.owner) for t in lay_out(tensors, [(0, 1)] * 3, 8)]
    [(0, 0, 1), (0, 3, 0), (1, 0, 1)]
    """
    sizes = [shape.numel() * dtype.itemsize for _, dtype, shape in tensors]
    loads: dict[int, int] = {}
    owners = [0] * len(tensors)
    for i in sorted(range(len(tensors)), key=lambda i: -sizes[i]):
        owners[i] = min(candidates[i], key=lambda rank: (loads.get(rank, 0), rank))
        loads[owners[i]] = loads.get(owners[i], 0) + sizes[i]
    found: list[HfTensor] = []
    file = start = 0
    for (name, dtype, shape), nbytes, owner in zip(tensors, sizes, owners, strict=True):
        if start and start + nbytes > max_file_nbytes:
            file, start = file + 1, 0
        found.append(HfTensor(name, dtype, shape, file, start, owner))
        start += nbytes
    return found


def header_of(tensors: Sequence[HfTensor]) -> bytes:
    """What a safetensors file begins with: the length of a JSON text, and the text."""
    body: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        offsets = [tensor.start, tensor.start + tensor.nbytes]
        body[tensor.name] = {"dtype": _WORDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(body).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def export_hf(
    state: Any,
    folder: str | os.PathLike[str],
    *,
    config: Any = None,
    names: Any = None,
    max_file_nbytes: int = 5 * 2**30,
    dtype: torch.dtype | None = None,
    mesh: Mesh | MeshLike | None = None,
    progress: Progress | None = None,
) -> None:
    """Write parameters to a new folder that `transformers` and other readers of safetensors open. Every rank calls.

    Each tensor is gathered to one rank, which writes it at its place and lets go of it: no rank holds more than one whole
    tensor and 64 MiB. The folder appears whole or not at all. Of tied parameters the first name is written.

    Args:
        state: parameters by name: what `fully_shard` returns, a dict of tensors, `Shards`, DTensors.
        folder: does not exist yet.
        config: for ``config.json``: a mapping, or an object with ``to_json_string`` as those of `transformers`.
        names: see `save`.
        max_file_nbytes: a further file begins where this would be passed.
        dtype: converts floating-point tensors.
        mesh: see `save`.
        progress: called with bytes that all ranks have written, and bytes in all.

    Raises:
        CheckpointError: alike on all ranks, with nothing left at `folder`: see `save`; a dtype that safetensors lacks.
    """
    ranks, target = all_ranks(mesh), Path(os.path.abspath(folder))
    what = f"export to {target}"

    def look() -> dict[str, tuple[Entry, Any]]:
        if os.path.lexists(target):
            raise CheckpointError(f"{what}: it exists; give a new path")
        if max_file_nbytes < 1:
            raise CheckpointError(f"{what}: max_file_nbytes must be positive, got {max_file_nbytes}")
        entries = entries_of(state, names, ranks)
        check_names(entries)
        leaves = leaves_of(state)[0]
        found: dict[str, tuple[Entry, Any]] = {}
        for entry in _untied(entries):
            leaf = leaves[entry.leaf][1]
            if isinstance(leaf, Shards):
                raise CheckpointError(f"{what}: {entry.name!r} is a bare shard; put parameters into DBuffers")
            if not entry.is_tensor or _dtype(entry, dtype) not in _WORDS:
                kind = entry.dtype if entry.is_tensor else type(entry.value).__name__
                raise CheckpointError(f"{what}: {entry.name!r} is a {kind}, which safetensors cannot hold")
            found[entry.name] = (entry, leaf)
        return found

    own = together(ranks, what, look)
    kinds, candidates, error = _merge({rank: _table(t) for rank, t in share(ranks, _rows(own, dtype)).items()}, ranks)
    if error:
        raise CheckpointError(f"{what}: {error}")
    tensors = lay_out(kinds, candidates, max_file_nbytes)

    def fetch(tensor: HfTensor) -> torch.Tensor | None:
        return _gathered(*own[tensor.name], ranks.ranks[tensor.owner], ranks) if tensor.name in own else None

    text, error = attempt(lambda: None if config is None else config_text(config, dtype))
    agree(ranks, what, error)
    write_folder(target, tensors, ranks, fetch, text, progress)


def _rows(own: Mapping[str, tuple[Entry, Any]], dtype: torch.dtype | None) -> list[list[Any]]:
    """What this rank has, as JSON: name, dtype, shape, and how many elements it would write."""
    rows: list[list[Any]] = []
    for name, (entry, _) in own.items():
        held = sum(box.numel for box, _ in entry.pieces()) if entry.writes and not entry.shared else 0
        rows.append([name, str(_dtype(entry, dtype)), list(entry.shape or ()), None if entry.shared else held])
    return rows


def _table(rows: list[list[Any]]) -> dict[str, tuple[Kind, int | None]]:
    return {
        name: ((name, getattr(torch, dtype.removeprefix("torch.")), torch.Size(shape)), held)
        for name, dtype, shape, held in rows
    }


def _merge(
    tables: Mapping[int, Mapping[str, tuple[Kind, int | None]]], ranks: Mesh
) -> tuple[list[Kind], list[list[int]], str]:
    """All tensors of all ranks, who could write each, and what is wrong with them."""
    kinds: dict[str, Kind] = {}
    candidates: dict[str, list[int]] = {}
    held: dict[str, int] = {}
    for position, rank in enumerate(ranks.ranks):
        for name, (kind, numel) in tables[rank].items():
            if kinds.setdefault(name, kind) != kind:
                return [], [], f"{name!r} is {kinds[name][1:]} on one rank, {kind[1:]} on another"
            candidates.setdefault(name, []).append(position)
            if numel is not None:
                held[name] = held.get(name, 0) + numel
    for name, numel in held.items():
        if numel != kinds[name][2].numel():
            return [], [], f"{name!r} has {kinds[name][2].numel()} elements, the ranks hold {numel} of it"
    return list(kinds.values()), list(candidates.values()), ""


def _untied(entries: Sequence[Entry]) -> list[Entry]:
    """All but plain tensors that are another one under a further name."""
    seen: set[tuple[int, torch.Size]] = set()
    found: list[Entry] = []
    for entry in entries:
        key = (entry.value.data_ptr(), entry.shape or torch.Size(())) if entry.is_tensor and entry.shared else None
        if key is None or not entry.value.numel() or key not in seen:
            found.append(entry)
        if key is not None:
            seen.add(key)
    return found


def _dtype(entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype


def _gathered(entry: Entry, leaf: Any, owner: int, ranks: Mesh) -> torch.Tensor | None:
    """A whole tensor on its owner, None elsewhere. All ranks that have the entry call."""
    mine, shape = ranks.get_rank() == owner, entry.shape or torch.Size(())
    if isinstance(leaf, DTensor):
        whole = leaf.full_tensor().detach()
        return whole if mine else None
    if isinstance(leaf, DBuffer) and shard_axes(leaf.placements):
        owners = GroupOwnerLayout(leaf.mesh, leaf.layout, {entry.index: owner}, leaf.placements, entry.name)
        held = {entry.index: entry.value} if entry.value.numel() else {}
        gathered, _ = gather(held, owner_layout=owners, dtype=entry.dtype, device=entry.value.device)
        return gathered[entry.index].view(shape) if mine else None
    return entry.value.view(shape) if mine else None


def write_folder(
    target: Path,
    tensors: Sequence[HfTensor],
    ranks: Mesh,
    fetch: Callable[[HfTensor], torch.Tensor | None],
    config: str | None,
    progress: Progress | None,
) -> None:
    """Write a folder of safetensors. Every rank calls.

    Args:
        target: does not exist.
        tensors: all of them, laid out.
        ranks: all that call.
        fetch: called on every rank for every tensor, in order; gives it whole on its owner, in any dtype.
        config: text of ``config.json``.
        progress: see `Progress`.

    Raises:
        CheckpointError: see `export_hf`.
    """
    what, first = f"export to {target}", ranks.get_rank() == ranks.ranks[0]
    files: dict[int, list[HfTensor]] = {}
    for tensor in tensors:
        files.setdefault(tensor.file, []).append(tensor)
    headers = {number: header_of(own) for number, own in files.items()}
    token = share(ranks, os.urandom(8).hex())[ranks.ranks[0]]
    folder = target.parent / f".{target.name}.{token}.partial"
    names = {number: _file_name(number, len(files)) for number in files}

    def prepare() -> None:
        folder.mkdir(parents=True)
        for number, own in files.items():
            with (folder / names[number]).open("xb") as file:
                file.write(headers[number])
                file.truncate(len(headers[number]) + sum(tensor.nbytes for tensor in own))

    def publish() -> None:
        if len(files) > 1:
            weights = {tensor.name: names[tensor.file] for tensor in tensors}
            index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)}, "weight_map": weights}
            write_file(folder / INDEX, json.dumps(index, indent=2).encode())
        if config is not None:
            write_file(folder / "config.json", config.encode())
        sync_folder(folder)
        if os.path.lexists(target):
            raise CheckpointError(f"{what}: something came there meanwhile; it is left as it is")
        folder.rename(target)
        sync_folder(target.parent)

    try:
        together(ranks, what, lambda: prepare() if first else None)
        error = _write_tensors(folder, tensors, ranks, fetch, headers, names, progress)
        agree(ranks, what, error)
        together(ranks, what, lambda: publish() if first else None)
    except BaseException:  # an interrupt too
        if first:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _file_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_tensors(
    folder: Path,
    tensors: Sequence[HfTensor],
    ranks: Mesh,
    fetch: Callable[[HfTensor], torch.Tensor | None],
    headers: Mapping[int, bytes],
    names: Mapping[int, str],
    progress: Progress | None,
) -> BaseException | None:
    """Write what this rank owns; what goes wrong is returned, so that the rank takes part in the gathers of others."""
    total, done, staging = sum(tensor.nbytes for tensor in tensors), 0, Staging()
    position, written = ranks.ranks.index(ranks.get_rank()), set[int]()
    failure: BaseException | None = None

    def write(tensor: HfTensor, whole: torch.Tensor) -> None:
        flat, count = whole.reshape(-1), max(1, _PIECE_NBYTES // whole.element_size())
        with (folder / names[tensor.file]).open("r+b", buffering=0) as file:
            file.seek(len(headers[tensor.file]) + tensor.start)
            for start in range(0, flat.numel(), count):
                piece = staging.on_cpu(flat[start : start + count].to(tensor.dtype))
                rest = bytes_of(piece)
                while len(rest):
                    rest = rest[file.write(rest) :]
        written.add(tensor.file)

    for tensor in tensors:
        whole = fetch(tensor)
        if tensor.owner == position and failure is None:
            if whole is None or whole.shape != tensor.shape:
                failure = CheckpointError(f"{tensor.name!r} did not come whole to its owner")
            else:
                _, failure = attempt(lambda tensor=tensor, whole=whole: write(tensor, whole))
        del whole
        done += tensor.nbytes
        if progress is not None:
            progress(done, total)
    for number in sorted(written):
        with (folder / names[number]).open("r+b") as file:
            os.fsync(file.fileno())
    return failure


def config_text(config: Any, dtype: torch.dtype | None) -> str:
    """The text of ``config.json``, which says the dtype where parameters were converted.

    Raises:
        CheckpointError: if it is neither a mapping nor a configuration of `transformers`.
    """
    if hasattr(config, "to_dict") and hasattr(config, "to_json_string"):
        body = cast("dict[str, Any]", json.loads(config.to_json_string(use_diff=False)))
    elif isinstance(config, Mapping):
        body = dict(cast("Mapping[str, Any]", config))
    else:
        raise CheckpointError(
            f"config is a {type(config).__name__}, expected a mapping or a configuration of transformers"
        )
    if dtype is not None:
        key = "torch_dtype" if "torch_dtype" in body else "dtype"
        body[key] = str(dtype).removeprefix("torch.")
    return json.dumps(body, indent=2) + "\n"
