"""What happens when all files are there: records are compared, and the folder is published whole."""

import json
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mfsdp_func.checkpoint import manifest as manifests
from mfsdp_func.checkpoint.boxes import find_fault
from mfsdp_func.checkpoint.dcp import METADATA, Stored, make_metadata
from mfsdp_func.checkpoint.entry import Entry
from mfsdp_func.checkpoint.error import CheckpointError, listed
from mfsdp_func.checkpoint.manifest import FileRecord, Manifest, sync_folder, write_file
from mfsdp_func.values.mesh import Mesh

PARTIAL_SUFFIX = ".partial"


@dataclass(frozen=True)
class Job:
    """One rank's share of one save.

    Attributes:
        path: where the checkpoint will be.
        folder: where it is until then.
        mesh: all ranks.
        entries: what this rank writes, in order.
        late: large values whose equality on all ranks is compared at the end, by hashes of their elements.
        aliases: name -> further names that this rank knows, of what others write, too.
    """

    path: Path
    folder: Path
    mesh: Mesh
    entries: tuple[Entry, ...]
    late: tuple[Entry, ...] = ()
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])

    @property
    def position(self) -> int:
        """This rank's place among all ranks."""
        return self.mesh.ranks.index(self.mesh.get_rank())

    @property
    def is_first(self) -> bool:
        """Whether this rank publishes."""
        return self.position == 0


def leaders_of(tables: dict[int, dict[str, str]]) -> tuple[dict[str, int], set[str]]:
    """Which rank writes a plain value, and which of them ranks hold differently."""
    leaders: dict[str, int] = {}
    differing: set[str] = set()
    first: dict[str, str] = {}
    for rank, table in tables.items():
        for name, digest in table.items():
            leaders.setdefault(name, rank)
            if first.setdefault(name, digest) != digest:
                differing.add(name)
    return leaders, differing


def await_records(job: Job, timeout: float, stopped: Callable[[], bool]) -> None:
    """Wait until all ranks have left their records.

    Raises:
        CheckpointError: if a rank says that it failed, or says nothing in time.
    """
    deadline, pause = time.monotonic() + timeout, 0.001
    missing = set(range(job.mesh.size()))
    while missing:
        for position in sorted(missing):
            if (job.folder / f"rank{position}.record.json").exists():
                missing.discard(position)
            elif (job.folder / f"rank{position}.failure.json").exists() or stopped():
                raise CheckpointError(f"checkpoint to {job.path}: rank {job.mesh.ranks[position]} failed")
        if missing and time.monotonic() > deadline:
            raise CheckpointError(
                f"checkpoint to {job.path}: no record of ranks {[job.mesh.ranks[p] for p in sorted(missing)]} after"
                f" {timeout:.0f} s; the folder must be shared by all ranks"
            )
        if missing:
            time.sleep(pause)
            pause = min(2 * pause, 0.2)


def publish(job: Job) -> None:
    """Make metadata and manifest of all ranks' records, and give the folder its name. Rank 0 alone; no communication.

    Raises:
        CheckpointError: if the ranks' pieces do not cover each tensor exactly once, or `path` exists by now.
    """
    records = [job.folder / f"rank{position}.record.json" for position in range(job.mesh.size())]
    said = [json.loads(record.read_bytes()) for record in records]
    stored = [Stored.decode(piece) for record in said for piece in record["stored"]]
    if problems := find_faults(stored) + _late_faults([record["late"] for record in said]):
        raise CheckpointError(f"checkpoint to {job.path}: the state is no whole:{listed(problems)}", problems)
    aliases: dict[str, dict[str, None]] = {}
    files: dict[str, FileRecord] = {}
    for record in said:
        for name, further in record["aliases"].items():
            aliases.setdefault(name, {}).update(dict.fromkeys(further))
        files |= {name: FileRecord(nbytes, tuple(blocks)) for name, (nbytes, blocks) in record["files"].items()}
    files[METADATA] = write_file(job.folder / METADATA, pickle.dumps(make_metadata(stored, aliases)))
    facts = {"ranks": job.mesh.size(), "time_ns": time.time_ns(), "torch": torch.__version__}
    write_file(job.folder / manifests.NAME, Manifest(files, facts).encode())
    for record in records:
        record.unlink()
    sync_folder(job.folder)
    if os.path.lexists(job.path):
        raise CheckpointError(f"checkpoint to {job.path}: something came there meanwhile; it is left as it is")
    job.folder.rename(job.path)
    sync_folder(job.path.parent)


def find_faults(stored: Sequence[Stored]) -> list[str]:
    """Tensors whose pieces disagree, overlap, or leave holes."""
    by_name: dict[str, list[Stored]] = {}
    for piece in stored:
        by_name.setdefault(piece.name, []).append(piece)
    problems: list[str] = []
    for name, pieces in by_name.items():
        kinds = sorted({f"{piece.dtype} {piece.shape}" for piece in pieces})
        boxes = [piece.box for piece in pieces if piece.box is not None]
        if len(kinds) > 1:
            problems.append(f"{name!r} is {' on one rank, '.join(kinds)} on another")
        elif len(boxes) != len(pieces):
            problems += [f"{name!r} is written by {len(pieces)} ranks"] if len(pieces) > 1 else []
        elif fault := find_fault(pieces[0].shape, boxes):
            problems.append(f"{name!r} {fault}")
    return problems


def _late_faults(tables: Sequence[dict[str, str]]) -> list[str]:
    _, differing = leaders_of(dict(enumerate(tables)))
    return [f"{name!r} differs between ranks; what is replicated must be equal on all ranks" for name in differing]
