"""The boundary to `torch.distributed.checkpoint`: boxes as its items, its metadata, its reader over checked files."""

import io
import os
import pickle
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from mfsdp_func.checkpoint.boxes import Box, boxes_of
from mfsdp_func.checkpoint.error import CheckpointError
from mfsdp_func.checkpoint.manifest import Manifest, open_checked
from mfsdp_func.values.ranges import Range

METADATA = ".metadata"


class BoxTensor(torch.Tensor):
    """This rank's flat range of a tensor, for `torch.distributed.checkpoint`: it saves and loads any cut as boxes.

    Reports the shape of the whole tensor. No operator works on it; `local` is what there is.
    """

    local: torch.Tensor
    part: Range | None
    writes: bool

    @staticmethod
    def __new__(
        cls: Any, local: torch.Tensor, shape: torch.Size, part: Range | None, writes: bool = True
    ) -> "BoxTensor":
        """Wrap a local tensor, which is not copied.

        Args:
            cls: this class.
            local: contiguous, of ``part.numel`` elements.
            shape: of the whole tensor.
            part: which of its elements these are, in row-major order; None where nothing tells, which cannot be saved.
            writes: whether `mfsdp_func.checkpoint` writes them from this rank, and not from another replica.
        """
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)  # pyright: ignore[reportAttributeAccessIssue]
        made.local, made.part, made.writes = local.detach().view(-1), part, writes
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(
            f"{function}: this is a part of a tensor, wrapped for torch.distributed.checkpoint, which alone can use it;"
            " its local attribute holds the elements"
        )

    def __repr__(self) -> str:
        return f"BoxTensor({tuple(self.shape)}, {self.part}, {self.local!r})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return BoxTensor, (self.local, self.shape, self.part, self.writes)

    def __deepcopy__(self, memo: Any) -> "BoxTensor":
        return BoxTensor(self.local.clone(), self.shape, self.part, self.writes)

    def pieces(self) -> list[tuple[Box, torch.Tensor]]:
        """The boxes of this rank's range, each with a view of its elements.

        Raises:
            CheckpointError: if nothing tells which range it is.
        """
        if self.part is None:
            raise CheckpointError(
                f"state of shape {tuple(self.shape)} belongs to a bare shard, and nothing tells of which elements of which"
                " tensor: every rank would write its own under one name. Give the optimizer DBuffers, or DTensors"
            )
        return pieces_of(self.shape, self.part, self.local)

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        return [write_item(fqn, self.shape, self.dtype, box) for box, _ in self.pieces()]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk_of(box) for box, _ in self.pieces()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        offsets = tuple(index.offset or ())
        return next(view for box, view in self.pieces() if box.offsets == offsets)


def pieces_of(shape: Sequence[int], part: Range, local: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """A flat range of a tensor as boxes, each with a view of its elements."""
    flat = local.view(-1)
    return [
        (box, flat[covered.start - part.start : covered.end - part.start].view(box.sizes))
        for box, covered in boxes_of(shape, part)
    ]


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """A box in the words of `torch.distributed.checkpoint`."""
    return ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """The inverse of `chunk_of`."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def write_item(name: str, shape: torch.Size, dtype: torch.dtype, box: Box) -> WriteItem:
    """What `torch.distributed.checkpoint` plans for one box."""
    data = TensorWriteData(chunk_of(box), TensorProperties(dtype=dtype), shape)
    return WriteItem(MetadataIndex(name, box.offsets), WriteItemType.SHARD, tensor_data=data)


class Stored(NamedTuple):
    """One piece in a file: a box of a tensor, or bytes (`box` is None)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    box: Box | None
    file: str
    offset: int
    length: int

    def encode(self) -> list[Any]:
        """As JSON."""
        box = None if self.box is None else [list(self.box.offsets), list(self.box.sizes)]
        return [self.name, self.dtype, list(self.shape), box, self.file, self.offset, self.length]

    @classmethod
    def decode(cls, record: list[Any]) -> "Stored":
        """From JSON."""
        name, dtype, shape, box, file, offset, length = record
        return cls(name, dtype, tuple(shape), box and Box(*map(tuple, box)), file, offset, length)


def make_metadata(stored: Iterable[Stored], aliases: Mapping[str, Iterable[str]]) -> Metadata:
    """The metadata file of all ranks' pieces.

    Args:
        stored: all pieces; those of one tensor agree on its shape and dtype.
        aliases: name -> further names under which the same bytes are found (tied weights).
    """
    names: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for piece in stored:
        info = filesystem._StorageInfo(piece.file, piece.offset, piece.length)
        for name in (piece.name, *aliases.get(piece.name, ())):
            if piece.box is None:
                names[name], places[MetadataIndex(name)] = BytesStorageMetadata(), info
                continue
            whole = names.setdefault(
                name,
                TensorStorageMetadata(TensorProperties(dtype=getattr(torch, piece.dtype)), torch.Size(piece.shape), []),
            )
            whole.chunks.append(chunk_of(piece.box))
            places[MetadataIndex(name, piece.box.offsets, len(whole.chunks) - 1)] = info
    return Metadata(
        state_dict_metadata=names,
        planner_data={name: (name,) for name in names},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=filesystem.CURRENT_DCP_VERSION,
    )


def read_metadata(folder: Path, manifest: Manifest | None) -> Metadata:
    """The metadata of a folder. It is a pickle: it is unpickled when its hash was compared, where there is one.

    Raises:
        CheckpointError: if there is none, or it is not as it was written.
    """
    with open_checked(folder, METADATA, manifest) as file:
        content = file.read()
    try:
        metadata = _MetadataUnpickler(io.BytesIO(content or b"")).load()
    except Exception as error:
        raise CheckpointError(f"{folder}: {METADATA} cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise CheckpointError(f"{folder}: {METADATA} holds no metadata of torch.distributed.checkpoint")
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Finds what metadata is made of, and nothing that could run code: folders without hashes may be anyone's."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        found: Any = None
        known = module_name.partition(".")[0] == "torch" or (module_name, global_name) in _PLAIN
        if known and "." not in global_name:  # a dotted name would reach what a module imports
            found = super().find_class(module_name, global_name)
        own = isinstance(found, type) and found.__module__.startswith("torch.distributed.checkpoint.")
        if own or isinstance(found, torch.dtype) or (module_name, global_name) in _PLAIN:
            return found
        raise pickle.UnpicklingError(f"it refers to {module_name}.{global_name}, which is no part of metadata")


_PLAIN = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    *(("pathlib", name) for name in ("PosixPath", "Path", "PurePosixPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "Path", "PurePosixPath")),
}


class CheckedFileSystem(filesystem.FileSystem):
    """The files of one folder, for `torch.distributed.checkpoint`'s reader: every byte is checked before it is used."""

    def __init__(self, folder: Path, manifest: Manifest | None) -> None:
        self._folder, self._manifest = folder, manifest

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        if mode != "rb":
            raise CheckpointError(f"{path}: a checkpoint that is read is not written")
        with open_checked(self._folder, os.path.relpath(path, self._folder), self._manifest) as file:
            yield file


class Wanted(NamedTuple):
    """A tensor's pieces to be filled."""

    name: str
    pieces: list[tuple[Box, torch.Tensor]]


class _Filler(LoadPlanner):
    """Puts what a reader reads into tensors."""

    def __init__(self, targets: Mapping[MetadataIndex, torch.Tensor], progress: Callable[[int], None]) -> None:
        self._targets, self._progress = targets, progress
        self.objects: dict[str, Any] = {}

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None: ...

    def create_local_plan(self) -> LoadPlan:
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = torch.load(value, weights_only=True)
        self._progress(len(value.getbuffer()))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index]
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self._progress(tensor.nbytes)


def read_into(
    folder: Path,
    manifest: Manifest | None,
    metadata: Metadata,
    wanted: Sequence[Wanted],
    objects: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Fill tensors with what a folder holds of them, through `FileSystemReader`.

    Args:
        folder: of the checkpoint.
        manifest: its hashes; None reads without checks.
        metadata: what is where.
        wanted: names in the file, and boxes with their targets, of any dtype and device.
        objects: names of bytes to read.
        progress: called with bytes done and bytes in all.

    Returns:
        The objects by name.

    Raises:
        CheckpointError: if anything read is not as it was written.
    """
    items: list[ReadItem] = []
    targets: dict[MetadataIndex, torch.Tensor] = {}
    for name, pieces in wanted:
        stored = metadata.state_dict_metadata[name]
        if not isinstance(stored, TensorStorageMetadata):
            raise CheckpointError(f"{folder}: {name!r} holds bytes, expected a tensor")
        items += create_read_items_for_chunk_list(name, stored, [chunk_of(box) for box, _ in pieces])
        targets |= {MetadataIndex(name, box.offsets): view for box, view in pieces}
    empty = torch.Size((0,))
    items += [
        ReadItem(LoadItemType.BYTE_IO, MetadataIndex(name), empty, MetadataIndex(name), empty, empty)
        for name in objects
    ]
    places: dict[MetadataIndex, Any] = metadata.storage_data
    try:
        items.sort(key=lambda item: (places[item.storage_index].relative_path, places[item.storage_index].offset))
    except KeyError as error:
        raise CheckpointError(f"{folder}: {METADATA} does not say where {error} is") from error
    total, done = sum(_nbytes(item, targets, places) for item in items), 0

    def count(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    filler = _Filler(targets, count)
    reader = filesystem.FileSystemReader(folder)
    reader.fs = CheckedFileSystem(folder, manifest)
    reader.storage_data = places
    try:
        with torch.no_grad():
            reader.read_data(LoadPlan(items), filler)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{folder}: cannot be read: {type(error).__name__}: {error}") from error
    return filler.objects


def _nbytes(item: ReadItem, targets: Mapping[MetadataIndex, torch.Tensor], places: Mapping[MetadataIndex, Any]) -> int:
    if item.type == LoadItemType.BYTE_IO:
        return places[item.storage_index].length
    return torch.Size(item.lengths).numel() * targets[item.dest_index].element_size()
