"""The manifest of a checkpoint: a hash of every block of every file, and of itself. Written last, read first.

A file is hashed in blocks, so that a rank that reads a part of it checks just the blocks that it reads. Two lines of text:
the files and their hashes as JSON, and the SHA-256 of the first line. Blocks are hashed by XXH3 (128 bits), which finds
what disks and networks do and takes a tenth of the time of SHA-256; neither would stop a forger, who can write manifests.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import xxhash

from mfsdp_func.checkpoint.error import CheckpointError

NAME = "manifest.json"
FORMAT = "mfsdp_func.checkpoint 2"
BLOCK_NBYTES = 4 * 1024 * 1024
_KEPT_BLOCKS = 4


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its length in bytes, and the hash of each of its blocks."""

    nbytes: int
    blocks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What is in a checkpoint's folder.

    Attributes:
        files: relative name -> length and hashes.
        facts: anything else that JSON can say (number of ranks, versions).
        block_nbytes: length of a block in bytes; the last one of a file may be shorter.
    """

    files: Mapping[str, FileRecord]
    facts: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    block_nbytes: int = BLOCK_NBYTES

    def encode(self) -> bytes:
        """The bytes of the manifest file."""
        files = {name: [record.nbytes, list(record.blocks)] for name, record in sorted(self.files.items())}
        body = {"format": FORMAT, "block_nbytes": self.block_nbytes, "facts": dict(self.facts), "files": files}
        line = json.dumps(body, sort_keys=True).encode()
        return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"

    @staticmethod
    def decode(content: bytes, where: object) -> "Manifest":
        """The inverse of `encode`.

        Raises:
            CheckpointError: if a single bit is not as it was written.
        """
        line, _, rest = content.partition(b"\n")
        if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
            problem = f"{NAME}: its own hash does not match"
            raise CheckpointError(f"{where}: {problem}; it was changed after it was written", [problem])
        body = json.loads(line)
        if body["format"] != FORMAT:
            raise CheckpointError(f"{where}: {NAME} is of format {body['format']!r}, expected {FORMAT!r}")
        files = {name: FileRecord(nbytes, tuple(blocks)) for name, (nbytes, blocks) in body["files"].items()}
        return Manifest(files, body["facts"], body["block_nbytes"])


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder; None where there is none, as in folders that others wrote.

    Raises:
        CheckpointError: if it was changed, or there is no such folder.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder")
    try:
        return Manifest.decode((folder / NAME).read_bytes(), folder)
    except FileNotFoundError:
        return None


def sync_folder(folder: Path) -> None:
    """Ask the file system to keep a folder's entries."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class HashingFile(io.RawIOBase):
    """A new file that is hashed while it is written; `close` waits until it is on the disk.

    Raises:
        FileExistsError: if there is such a file.
    """

    def __init__(self, path: Path, block_nbytes: int = BLOCK_NBYTES) -> None:
        self._file = path.open("xb")
        self._block_nbytes, self._nbytes = block_nbytes, 0
        self._hash, self._blocks = xxhash.xxh3_128(), list[str]()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._nbytes

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        done = 0
        while done < len(view):
            room = self._block_nbytes - self._nbytes % self._block_nbytes
            piece = view[done : done + room]
            self._hash.update(piece)
            self._nbytes += len(piece)
            done += len(piece)
            if self._nbytes % self._block_nbytes == 0:
                self._blocks.append(self._hash.hexdigest())
                self._hash = xxhash.xxh3_128()
        return len(view)

    def finish(self) -> FileRecord:
        """Bring the file to the disk and close it."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self.close()
        tail = [self._hash.hexdigest()] if self._nbytes % self._block_nbytes else []
        return FileRecord(self._nbytes, (*self._blocks, *tail))

    def close(self) -> None:
        self._file.close()
        super().close()


def write_file(path: Path, content: bytes) -> FileRecord:
    """Write a whole new file, to the disk."""
    with HashingFile(path) as file:
        file.write(content)
        return file.finish()


class CheckedFile(io.RawIOBase):
    """A file of which no byte is handed out before the hash of its block was compared.

    Raises:
        CheckpointError: when opened, if the file is missing or has another length; when read, if a block is not as it
            was written, naming the file and the bytes.
    """

    def __init__(self, folder: Path, name: str, record: FileRecord, block_nbytes: int) -> None:
        self._name, self._record, self._block_nbytes, self._folder = name, record, block_nbytes, folder
        self._at = 0
        self._kept: dict[int, memoryview] = {}  # a reader goes to the end of an item, back, and through it
        try:
            self._file = (folder / name).open("rb", buffering=0)
        except OSError as error:
            raise _damage(folder, f"{name}: cannot be opened ({error.strerror})") from error
        found = os.fstat(self._file.fileno()).st_size
        if found != record.nbytes:
            self._file.close()
            raise _damage(folder, f"{name}: has {found} bytes, expected {record.nbytes}")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._record.nbytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        target, done = memoryview(buffer).cast("B"), 0
        while done < len(target) and self._at < self._record.nbytes:
            number, skipped = divmod(self._at, self._block_nbytes)
            room, size = target[done:], self._size(number)
            if not skipped and len(room) >= size and number not in self._kept:  # whole: where it is wanted
                piece = room[:size]
                self._read(number, piece)
            else:
                piece = self._block(number)[skipped : skipped + len(room)]
                target[done : done + len(piece)] = piece
            done += len(piece)
            self._at += len(piece)
        return done

    def _size(self, number: int) -> int:
        return min(self._block_nbytes, self._record.nbytes - number * self._block_nbytes)

    def _read(self, number: int, view: memoryview) -> None:
        """Fill memory with a block, and compare its hash."""
        start, got = number * self._block_nbytes, 0
        self._file.seek(start)
        while got < len(view):
            count = self._file.readinto(view[got:])
            if not count:
                raise _damage(self._folder, f"{self._name}: ends at byte {start + got}")
            got += count
        if xxhash.xxh3_128_hexdigest(view) != self._record.blocks[number]:
            raise _damage(self._folder, f"{self._name}: bytes {start} to {start + len(view)} are not as written")

    def _block(self, number: int) -> memoryview:
        if number not in self._kept:
            view = memoryview(self._room(self._size(number)))
            self._read(number, view)
            self._kept[number] = view
        return self._kept[number]

    def _room(self, nbytes: int) -> bytearray:
        """Memory for a block: that of the one that was kept the longest, where it fits."""
        if len(self._kept) >= _KEPT_BLOCKS:
            oldest: Any = self._kept.pop(next(iter(self._kept))).obj
            if len(oldest) == nbytes:
                return oldest
        return bytearray(nbytes)

    def damage(self) -> list[str]:
        """What is wrong with any block."""
        found: list[str] = []
        for number in range(len(self._record.blocks)):
            try:
                self._block(number)
            except CheckpointError as error:
                found += error.problems
        return found

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def _damage(folder: Path, problem: str) -> CheckpointError:
    return CheckpointError(f"{folder}: {problem}; take another checkpoint (latest finds one)", [problem])


def open_checked(folder: Path, name: str, manifest: Manifest | None) -> io.RawIOBase:
    """A file for reading: checked, or as it is where there is no manifest.

    Raises:
        CheckpointError: see `CheckedFile`.
    """
    if manifest is None:
        try:
            return (folder / name).open("rb", buffering=0)
        except OSError as error:
            raise _damage(folder, f"{name}: cannot be opened ({error.strerror})") from error
    if name not in manifest.files:
        raise _damage(folder, f"{name}: is not in the manifest")
    return CheckedFile(folder, name, manifest.files[name], manifest.block_nbytes)


def find_damage(folder: Path, manifest: Manifest, progress: Any = None) -> list[str]:
    """Everything that is not as the manifest says: changed, missing, cut, swapped and surplus files."""
    problems: list[str] = []
    total, done = sum(record.nbytes for record in manifest.files.values()), 0
    for name, record in manifest.files.items():
        try:
            with CheckedFile(folder, name, record, manifest.block_nbytes) as file:
                problems += file.damage()
        except CheckpointError as error:
            problems += error.problems
        done += record.nbytes
        if progress is not None:
            progress(done, total)
    problems += [f"{name}: is not in the manifest" for name in files_in(folder) if name not in manifest.files]
    return problems


def files_in(folder: Path) -> Iterable[str]:
    """All files of a folder but the manifest, by relative name."""
    names = (str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if not path.is_dir())
    return [name for name in names if name != NAME]
