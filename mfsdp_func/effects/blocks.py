"""Where tensors lie in memory, and the fewest strided views that cover what an exchange reads and writes.

Thousands of small tensors mostly lie in one flat buffer, side by side or at equal distances. One view of all of them
then takes the place of a view, a copy and a check of each.
"""

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import torch

Places: TypeAlias = tuple[tuple[int, int], ...]
"""For each tensor, the number of its storage and where it starts there, in elements."""
Run: TypeAlias = tuple[tuple[int, int], int]
"""A place, and the number of elements there."""


class Memory(NamedTuple):
    """Where contiguous tensors of one dtype lie.

    Attributes:
        storages: one tensor of each storage, and where it starts there.
        places: see `Places`. Equal for tensors that lie alike, wherever their storages are.
    """

    storages: tuple[tuple[torch.Tensor, int], ...]
    places: Places

    @property
    def device(self) -> torch.device:
        """Of the tensors, of which there is at least one."""
        return self.storages[0][0].device

    def view(self, block: "Block") -> torch.Tensor:
        """The elements of a block: ``(count, numel)``, or 1-D where there is one run."""
        tensor, start = self.storages[block.storage]
        if block.count > 1:
            return tensor.as_strided((block.count, block.numel), (block.step, 1), block.start)
        if block.start == start and block.numel == tensor.numel() > 1:  # cheaper than as_strided
            return tensor if tensor.dim() == 1 else tensor.view(-1)  # (of one element the stride may be anything)
        return tensor.as_strided((block.numel,), (1,), block.start)

    def views(self, blocks: Sequence["Block"], run_by_run: Sequence["Block"] = ()) -> list[torch.Tensor]:
        """One view of each block, then one view of each run of further blocks."""
        views = [*map(self.view, blocks)]
        for block in run_by_run:
            views += self.view(block).unbind() if block.count > 1 else (self.view(block),)
        return views


class Block(NamedTuple):
    """`count` runs of `numel` elements of one storage, `step` elements from one start to the next, first at `start`."""

    storage: int
    start: int
    count: int
    step: int
    numel: int


class Pair(NamedTuple):
    """Two places, each a storage and a start, and the number of elements there."""

    source: tuple[int, int]
    target: tuple[int, int]
    numel: int


_NBYTES = attrgetter("nbytes")


def locate(tensors: Sequence[torch.Tensor]) -> Memory:
    """Where tensors lie. Tensors of one storage are found by their addresses.

    Raises:
        RuntimeError: if a tensor's storage has been freed.
    """
    storages: list[tuple[torch.Tensor, int]] = []
    places: list[tuple[int, int]] = []
    numbers: dict[tuple[int, int], int] = {}
    number, begin, end = -1, 0, 0
    itemsize = tensors[0].itemsize if tensors else 1
    for tensor, address, nbytes in zip(
        tensors, map(torch.Tensor.data_ptr, tensors), map(_NBYTES, tensors), strict=True
    ):
        # Storages over foreign memory (NumPy's) may overlap, and be unaligned to one another.
        if address < begin or address + nbytes > end or (address - begin) % itemsize:
            begin, end = _extent(tensor)
            number = numbers.setdefault((begin, end), len(storages))
            if number == len(storages):
                storages.append((tensor, (address - begin) // itemsize))
        places.append((number, (address - begin) // itemsize))
    return Memory(tuple(storages), tuple(places))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the begin and of the end of a tensor's storage."""
    storage = tensor.untyped_storage()
    if storage.nbytes() < tensor.nbytes:
        raise RuntimeError(
            f"a tensor of {tensor.nbytes} bytes has a storage of {storage.nbytes()}: it was freed, as FSDP does with gathered"
            " parameters (untyped_storage().resize_(0)); give the tensor while it is there"
        )
    begin = storage.data_ptr()
    return begin, begin + storage.nbytes()


def pair_blocks(pairs: Iterable[Pair]) -> list[tuple[Block, Block]]:
    """The same elements in the same order, as few pairs of blocks of equal count and size.

    First, runs that are neighbours on both sides become one; then, runs of one size at equal distances on both sides
    become a block. Targets do not overlap.
    """
    return _at_equal_distances(_joined(pairs))


def blocks_of(runs: Iterable[Run], *, join: bool = True) -> tuple[Block, ...]:
    """Runs of one memory as blocks, in the same order; neighbours become one run if `join`."""
    pairs: list[Pair] = []
    at = 0
    for place, numel in runs:
        pairs.append(Pair(place, (0, at), numel))  # their other side: one after the other in a message
        at += numel
    return tuple(block for block, _ in _at_equal_distances(_joined(pairs) if join else pairs))


def _joined(pairs: Iterable[Pair]) -> Iterable[Pair]:
    last: Pair | None = None
    for pair in pairs:
        if last is not None:
            after = ((last.source[0], last.source[1] + last.numel), (last.target[0], last.target[1] + last.numel))
            if (pair.source, pair.target) == after:
                last = last._replace(numel=last.numel + pair.numel)
                continue
            yield last
        last = pair
    if last is not None:
        yield last


def _at_equal_distances(pairs: Iterable[Pair]) -> list[tuple[Block, Block]]:
    blocks: list[tuple[Block, Block]] = []
    for source, target, numel in pairs:
        if blocks:
            (a, b), sizes = blocks[-1], (numel, numel)
            steps = source[1] - _last(a), target[1] - _last(b)
            same = (a.storage, b.storage) == (source[0], target[0]) and (a.numel, b.numel) == sizes
            if same and ((a.step, b.step) == steps if a.count > 1 else min(steps) > 0):
                blocks[-1] = a._replace(count=a.count + 1, step=steps[0]), b._replace(count=b.count + 1, step=steps[1])
                continue
        blocks.append((Block(*source, 1, 0, numel), Block(*target, 1, 0, numel)))
    return blocks


def _last(block: Block) -> int:
    return block.start + (block.count - 1) * block.step


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The elements of the parts, one part after the other, 1-D: the memory itself where that is one contiguous part."""
    room = room_for(parts)
    if room.data_ptr() != parts[0].data_ptr():
        copy_all(_split_like(room, parts), parts)
    return room


def room_for(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Memory to receive parts into: their own where that is one contiguous part, else a buffer for `unpack`."""
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0].as_strided((parts[0].numel(),), (1,))  # no view: of one element the stride may be anything
    return parts[0].new_empty(sum(part.numel() for part in parts))


def unpack(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Bring elements from a buffer into the parts, unless they have been received there."""
    if buffer.data_ptr() != parts[0].data_ptr():
        copy_all(parts, _split_like(buffer, parts))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor, 1-D."""
    # No view: of one element the stride may be anything.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def copy_all(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target: blocks one by one, the (1-D) runs together, for which CUDA has one kernel."""
    runs: list[torch.Tensor] = []
    read: list[torch.Tensor] = []
    for target, source in zip(targets, sources, strict=True):
        if target.dim() > 1:
            target.copy_(source)
        else:
            runs.append(target)
            read.append(source)
    if runs:
        torch._foreach_copy_(runs, read)  # pyright: ignore[reportPrivateUsage]


def _split_like(buffer: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    pieces = buffer.split([part.numel() for part in parts])
    return [piece if part.dim() == 1 else piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def find_overlap(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Positions of two tensors that share an element, or twice that of one which has two elements in one place.

    Tensors that lie apart, or are contiguous, are judged by where they begin and end; only the rest by every element.
    """
    begins = list(map(torch.Tensor.data_ptr, tensors))
    cluster: list[int] = []
    end = 0
    for i in sorted((i for i, tensor in enumerate(tensors) if tensor.numel()), key=begins.__getitem__):
        if begins[i] >= end:
            if found := _overlap_within(tensors, cluster):
                return found
            cluster = []
        cluster.append(i)
        end = max(end, begins[i] + _span_nbytes(tensors[i]))
    return _overlap_within(tensors, cluster)


def _span_nbytes(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _overlap_within(tensors: Sequence[torch.Tensor], cluster: Sequence[int]) -> tuple[int, int] | None:
    """Of tensors that lie in one stretch of memory."""
    if len(cluster) < 2 and all(_is_spread(tensors[i]) for i in cluster):
        return None
    begin = tensors[cluster[0]].data_ptr()
    nbytes = max(tensors[i].data_ptr() + _span_nbytes(tensors[i]) for i in cluster) - begin
    taken = torch.zeros(nbytes, dtype=torch.bool, device="cpu")
    for n, i in enumerate(cluster):
        tensor = tensors[i]
        shape = (*tensor.shape, tensor.itemsize)
        strides = (*(stride * tensor.itemsize for stride in tensor.stride()), 1)
        where = shape, strides, tensor.data_ptr() - begin
        if not _is_spread(tensor):
            alone = torch.zeros_like(taken).index_fill_(0, _indices(nbytes).as_strided(*where).reshape(-1), True)
            if int(alone.sum()) < tensor.numel() * tensor.itemsize:
                return i, i
        place = taken.as_strided(*where)
        if place.any():
            others = (j for j in cluster[:n] if len(cluster) == 2 or _overlap_within(tensors, (j, i)))
            return next(others, i), i
        place.fill_(True)
    return None


def _indices(count: int) -> torch.Tensor:
    return torch.arange(count, device="cpu")


def _is_spread(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements surely have places of their own: each dim steps over all that smaller steps reach."""
    reach = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True
