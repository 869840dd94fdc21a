"""Writing a checkpoint: every rank its own files, rank 0 the rest; published whole or not at all.

All files go into a hidden folder beside the final one. Each rank writes its data, then a record of it; when all records
are there, rank 0 makes the metadata and the manifest, and renames the folder. Everything is brought to the disk before
what refers to it is (`fsync`), which orders what a loss of power can leave behind; that order is not proved here.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import xxhash

from mfsdp_func.checkpoint.consensus import agree, all_ranks, attempt, share, together
from mfsdp_func.checkpoint.dcp import Stored
from mfsdp_func.checkpoint.entry import Entry
from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.checkpoint.manifest import FileRecord, HashingFile, write_file
from mfsdp_func.checkpoint.names import check_names, entries_of
from mfsdp_func.checkpoint.parts import bytes_of
from mfsdp_func.checkpoint.publishing import PARTIAL_SUFFIX, Job, leaders_of, publish
from mfsdp_func.checkpoint.staging import Staging
from mfsdp_func.values.mesh import Mesh, MeshLike

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes that this rank has done, and the bytes that it has to do in all."""

PIECE_NBYTES = 64 * 1024 * 1024
"""Larger boxes are cut, so that who reads a part of a tensor reads little more than that."""


def save(
    path: str | os.PathLike[str],
    state: Any,
    *,
    names: Any = None,
    mesh: Mesh | MeshLike | None = None,
    progress: Progress | None = None,
) -> None:
    """Write a checkpoint of a state to a new folder. Every rank calls; it is there on return, on all of them.

    `torch.distributed.checkpoint` reads it, too. A tensor cut over ranks is one tensor in the file, of its logical shape,
    to be read by any number of ranks in any layout. What ranks hold alike is written once. Values that are no floating
    point and differ between ranks (random states, positions in data) are written for each rank.

    Args:
        path: a folder that does not exist yet; its parents are made.
        state: a pytree of `DBuffer`s, `Shards`, DTensors, tensors and plain values (numbers, strings, lists of them).
            See `mfsdp_func.checkpoint.names` for how things are called in the file.
        names: the parameters in buffers: ``apply.names``, or a mapping from group keys to names in order.
        mesh: the ranks that call; by default all of the process group (or of the simulated mesh).
        progress: see `Progress`.

    Raises:
        CheckpointError: alike on all ranks, with nothing left at `path`: it exists; something has no name, or two have
            one; ranks disagree; a file cannot be written.

    Effects: communication of a few KiB; reads the state, and copies pieces of at most 64 MiB of it at a time.
    """
    job = plan(path, state, names, all_ranks(mesh))
    _, error = attempt(lambda: write(job, progress))
    finish(job, error)


def plan(path: str | os.PathLike[str], state: Any, names: Any, mesh: Mesh, *, hash_most: int | None = None) -> Job:
    """Agree with all ranks on what each of them writes, and make the hidden folder. Communicates.

    Raises:
        CheckpointError: see `save`.
    """
    target = Path(os.path.abspath(path))
    what = f"checkpoint to {target}"

    def look() -> list[Entry]:
        if os.path.lexists(target):
            raise CheckpointError(f"{what}: it exists; a checkpoint never replaces another: give a new path")
        entries = entries_of(state, names, mesh)
        check_names(entries)
        for entry in entries:
            if entry.is_tensor and entry.value.is_meta:
                raise CheckpointError(f"{what}: {entry.name!r} is a meta tensor, which holds no elements")
        return entries

    entries = together(mesh, what, look)
    small = [entry for entry in entries if entry.shared and (hash_most is None or _nbytes(entry) <= hash_most)]
    large = [entry for entry in entries if entry.shared and entry not in small] if len(small) < len(entries) else []
    digests, error = attempt(lambda: {entry.name: digest_of(entry) for entry in small})
    agree(mesh, what, error)
    table = (digests or {}) | {entry.name: "" for entry in large}
    word = hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()
    token = os.urandom(8).hex()
    facts = share(mesh, [str(target), word, token])
    if len({path for path, *_ in facts.values()}) > 1:
        raise CheckpointError(f"{what}: ranks give different paths: { {r: f[0] for r, f in facts.items()} }")
    if len({word for _, word, _ in facts.values()}) == 1:
        leaders, differing = dict.fromkeys(table, mesh.ranks[0]), set[str]()
    else:
        leaders, differing = leaders_of(share(mesh, table))
    floats = [e.name for e in entries if e.name in differing and e.is_tensor and e.dtype.is_floating_point]
    agree(mesh, what, CheckpointError(_differing(what, floats), floats) if floats else None)
    position = mesh.ranks.index(mesh.get_rank())
    written = [_own(entry, leaders, differing, mesh.get_rank(), position) for entry in entries]
    folder = target.parent / f".{target.name}.{facts[mesh.ranks[0]][2]}{PARTIAL_SUFFIX}"
    aliases = {entry.name: entry.aliases for entry in written if entry.aliases}
    job = Job(target, folder, mesh, tuple(entry for entry in written if entry.writes), tuple(large), aliases)
    together(mesh, what, lambda: _make_folder(job) if job.is_first else None)
    return job


def _differing(what: str, names: Sequence[str]) -> str:
    return (
        f"{what}: {names[0]!r} ({len(names)} in all) differs between ranks, or is held by them in different shapes. Bare"
        " shards go in as checkpoint.Shards(dict, owner_layout, names), or in a DBuffer; what is replicated must be"
        " equal on all ranks"
    )


def _own(entry: Entry, leaders: dict[str, int], differing: set[str], rank: int, position: int) -> Entry:
    """An entry as this rank writes it."""
    if not entry.shared:
        return entry
    if entry.name in differing:
        return replace(entry, name=per_rank(entry.name, position), aliases=())
    return replace(entry, writes=leaders[entry.name] == rank)


def per_rank(name: str, position: int) -> str:
    """The name of what one rank alone has of a value that ranks hold differently."""
    return f"{name}.rank{position}"


def digest_of(entry: Entry) -> str:
    """A hash of a value, its dtype and its shape.

    Raises:
        CheckpointError: on a plain value that cannot be read again without running code.
    """
    if entry.is_tensor:
        words = f"{entry.dtype} {tuple(entry.shape or ())}".encode()
        found = xxhash.xxh3_128(words)
        found.update(bytes_of(entry.value.cpu().resolve_conj().resolve_neg().contiguous()))
        return found.hexdigest()
    return hashlib.sha256(encode_object(entry)).hexdigest()[:32]


def encode_object(entry: Entry) -> bytes:
    """A plain value as `torch.distributed.checkpoint` stores it.

    Raises:
        CheckpointError: see `digest_of`.
    """
    buffer = io.BytesIO()
    try:
        torch.save(entry.value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{entry.name!r} is a {type(entry.value).__name__}, expected a tensor, a number, a string, or lists of them: it"
            f" cannot be read again without running code ({type(error).__name__})"
        ) from error
    return buffer.getvalue()


def _nbytes(entry: Entry) -> int:
    return entry.value.nbytes if entry.is_tensor else 0


def _make_folder(job: Job) -> None:
    job.path.parent.mkdir(parents=True, exist_ok=True)
    for other in job.path.parent.iterdir():  # left by a save that was killed
        if other.name.startswith(f".{job.path.name}.") and other.name.endswith(PARTIAL_SUFFIX):
            shutil.rmtree(other)
    job.folder.mkdir()


def _nothing() -> None:
    pass


def write(
    job: Job,
    progress: Progress | None = None,
    staging: Staging | None = None,
    check: Callable[[], None] = _nothing,
) -> None:
    """Write this rank's data, bring it to the disk, then say so in its record. No communication.

    Args:
        job: what to write.
        progress: see `Progress`.
        staging: copies to CPU.
        check: called when the data is written; what it raises, nobody may take for written.
    """
    stored: list[Stored] = []
    files: dict[str, FileRecord] = {}
    total, done = sum(map(_nbytes, job.entries)), 0
    if job.entries:
        name = f"__{job.position}_0.distcp"
        with HashingFile(job.folder / name) as file:
            for entry in job.entries:
                stored += _write_entry(file, name, entry, staging or Staging())
                done += _nbytes(entry)
                if progress is not None:
                    progress(done, total)
            files[name] = file.finish()
    record = {
        "stored": [piece.encode() for piece in stored],
        "files": {name: [record.nbytes, list(record.blocks)] for name, record in files.items()},
        "aliases": {name: list(aliases) for name, aliases in job.aliases.items()},
        "late": {entry.name: digest_of(entry) for entry in job.late},
    }
    check()
    _put(job, "record", record)


def _write_entry(file: HashingFile, name: str, entry: Entry, staging: Staging) -> list[Stored]:
    if not entry.is_tensor:
        start = file.tell()
        file.write(encode_object(entry))
        return [Stored(entry.name, "", (), None, name, start, file.tell() - start)]
    stored: list[Stored] = []
    dtype, shape = str(entry.dtype).removeprefix("torch."), tuple(entry.shape or ())
    for box, view in entry.pieces(most=max(1, PIECE_NBYTES // entry.dtype.itemsize)):
        start = file.tell()
        torch.save(staging.on_cpu(view), file)  # pyright: ignore[reportArgumentType]
        stored.append(Stored(entry.name, dtype, shape, box, name, start, file.tell() - start))
    return stored


def _put(job: Job, kind: str, content: Any) -> None:
    """Publish a rank's word: it is there whole or not at all."""
    final = job.folder / f"rank{job.position}.{kind}.json"
    temporary = final.with_suffix(".writing")
    temporary.unlink(missing_ok=True)
    write_file(temporary, json.dumps(content).encode())
    temporary.replace(final)


def report_failure(job: Job, error: BaseException) -> None:
    """Leave word for rank 0 that this rank's record will not come."""
    attempt(lambda: _put(job, "failure", f"{type(error).__name__}: {error}"))


def finish(job: Job, error: BaseException | None) -> None:
    """Agree that all ranks have written, publish, agree again. Communicates.

    Raises:
        CheckpointError: with nothing left behind, if anything went wrong anywhere.
    """
    what = f"checkpoint to {job.path}"
    try:
        agree(job.mesh, what, error)
        together(job.mesh, what, lambda: publish(job) if job.is_first else None)
    except BaseException:  # an interrupt too
        if job.is_first:
            shutil.rmtree(job.folder, ignore_errors=True)
        raise
