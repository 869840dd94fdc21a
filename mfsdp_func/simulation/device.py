"""Who reads and writes which memory on which stream, and what the allocator may give to whom.

The allocator is that of torch on CUDA: memory that the host has freed may be given at once to what is made next on the
stream on which it was made, because a stream runs in order; other streams that read or write it must be told to the
allocator (`record_stream`), or be waited for. Here every freed block may be given to every later tensor of its stream,
whatever the sizes, which change from run to run.
"""

import os
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from mfsdp_func.simulation.clocks import Clocks, Moment
from mfsdp_func.simulation.errors import SimulationError

Line = tuple[str, int]


class Access(NamedTuple):
    """A piece of work that reads or writes a stretch of a block.

    Attributes:
        stream: on which it was queued.
        number: of the work, see `Clocks`.
        writes: whether it writes.
        begin: in bytes from the block's begin.
        end: likewise.
        operator: what it is.
        lines: where in the code, the innermost first.
    """

    stream: int
    number: int
    writes: bool
    begin: int
    end: int
    operator: str
    lines: tuple[Line, ...]


class Work(NamedTuple):
    """One piece of queued work."""

    stream: int
    number: int
    operator: str
    lines: tuple[Line, ...]


@dataclass(eq=False)
class Block:
    """The memory of one storage.

    Attributes:
        home: the stream on which it was made; None where nobody saw that.
        lines: where it was made.
        storage: whose memory it is.
        accesses: the last of each stream to each stretch, since all of it was written.
        told: streams that the allocator knows to use it.
    """

    home: int | None
    lines: tuple[Line, ...]
    storage: "weakref.ref[torch.UntypedStorage]"
    accesses: dict[tuple[int, int, int, bool], Access] = field(default_factory=dict)
    told: set[int] = field(default_factory=set)


class Device:
    """The streams of all ranks, and all memory."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.names: list[str] = []
        """Of the streams, which are numbers here."""
        self._ranks: list[int] = []
        """Whose each stream is: what ranks have in common here, such as the caller's tensors, they do not have there."""
        self._blocks: dict[int, Block] = {}
        self._freed: dict[int, list[Block]] = {}
        self._ended: deque[tuple[int, weakref.ref[torch.UntypedStorage]]] = deque()

    def begin_stream(self, name: str, rank: int, after: Moment) -> int:
        """A new stream of a rank, which begins after a moment; its number."""
        number = len(self.names)
        self.names.append(f"{name} of rank {rank}")
        self._ranks.append(rank)
        self.clocks.begin(number, after)
        return number

    def meet(self, tensors: Iterable[torch.Tensor]) -> None:
        """Tensors are about to be used; those that nobody knows were there before, on no stream."""
        for tensor in tensors:
            if self._known(tensor) is None:
                self._add(tensor, None, ())

    def allocate(self, work: Work, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Give memory to those of the tensors that a piece of work has made; gives these back.

        Raises:
            SimulationError: if memory that other work may still use could be given away.
        """
        self._collect()
        made = [tensor for tensor in tensors if self._known(tensor) is None and tensor.untyped_storage().nbytes()]
        if made:
            self._check_free(work)
        for tensor in made:
            self._add(tensor, work.stream, work.lines)
        return made

    def touch(self, work: Work, tensors: Iterable[torch.Tensor], *, writes: bool) -> None:
        """A piece of work reads, or writes, tensors.

        Raises:
            SimulationError: if that may happen while other work writes them, or a write while other work reads them.
        """
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            if (block := self._known(tensor)) is None:
                continue
            begin = int(tensor.storage_offset()) * tensor.itemsize
            nbytes = _span(tensor)
            access = Access(work.stream, work.number, writes, begin, begin + nbytes, *work[2:])
            for other in reversed(block.accesses.values()):  # the last one first, which a program's author looks for
                if (writes or other.writes) and other.begin < access.end and access.begin < other.end:
                    self._check_order(work, access, other, block)
            if writes:  # what it was ordered after, whoever is ordered after it is ordered after too
                block.accesses = {
                    key: other
                    for key, other in block.accesses.items()
                    if not (access.begin <= other.begin and other.end <= access.end)
                }
            key = access.stream, access.begin, access.end, writes
            block.accesses.pop(key, None)
            block.accesses[key] = access

    def tell(self, tensor: torch.Tensor, stream: int) -> None:
        """Let the allocator know that a stream uses a tensor."""
        if (block := self._known(tensor)) is not None:
            block.told.add(stream)

    def _known(self, tensor: torch.Tensor) -> Block | None:
        storage = tensor.untyped_storage()
        block = self._blocks.get(storage._cdata)
        return block if block is not None and block.storage() is storage else None

    def _add(self, tensor: torch.Tensor, home: int | None, lines: tuple[Line, ...]) -> Block:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:  # its storage has ended, and another one lies where it lay
            self._collect()
        block = Block(home, lines, weakref.ref(storage, lambda ref: self._ended.append((key, ref))))
        self._blocks[key] = block
        return block

    def _collect(self) -> None:
        """Take back the memory of storages that have ended."""
        while self._ended:
            key, ref = self._ended.popleft()
            block = self._blocks.get(key)
            if block is not None and block.storage is ref:
                del self._blocks[key]
                if block.home is not None and block.accesses:
                    self._freed.setdefault(block.home, []).append(block)

    def _check_free(self, work: Work) -> None:
        """Any memory that was made on the stream, and freed, may be given to a tensor that is made there now."""
        for block in self._freed.pop(work.stream, ()):
            for other in block.accesses.values():
                if other.stream not in block.told and not self._is_done(other, work.stream):
                    raise SimulationError(
                        f"early reuse: {self._told(work)} makes a tensor, which may be given the memory of one that was"
                        f" made on the same stream ({_at(block.lines)}) and has been freed, while {self._told(other)}"
                        f" still {'writes' if other.writes else 'reads'} it. Tell the allocator of the other stream"
                        " (tensor.record_stream), or keep the tensor until the first one waits for the other"
                    )

    def _check_order(self, work: Work, access: Access, other: Access, block: Block) -> None:
        if not self._is_done(other, access.stream):
            made = f" (made {_at(block.lines)})" if block.lines else ""
            raise SimulationError(
                f"missing wait: {self._told(work)} {'writes' if access.writes else 'reads'} memory{made} that"
                f" {self._told(other)} may still be {'writing' if other.writes else 'reading'}. Let the first wait for the"
                " second: token.wait(), after=token, stream.wait_stream or an event"
            )

    def _is_done(self, access: Access, before: int) -> bool:
        if self._ranks[access.stream] != self._ranks[before]:
            return True
        return self.clocks.is_done(access.stream, access.number, before)

    def _told(self, work: Work | Access) -> str:
        return f"{work.operator} on {self.names[work.stream]} ({_at(work.lines)})"


def _span(tensor: torch.Tensor) -> int:
    """From a tensor's first byte to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (int(last) + 1) * tensor.itemsize


def _at(lines: tuple[Line, ...]) -> str:
    return "at " + ", called at ".join(f"{'/'.join(file.split(os.sep)[-2:])}:{line}" for file, line in lines)


_HERE = os.path.dirname(__file__) + os.sep
_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep


def lines_here() -> tuple[Line, ...]:
    """Where the program is: the innermost line outside of torch, and the innermost one outside of this package too."""
    return tuple(_lines_here())


def _lines_here() -> Iterator[Line]:
    frame, inside = sys._getframe(1), False  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_TORCH, _HERE)):
            outside = not file.startswith(_PACKAGE)
            if outside or not inside:
                yield file, frame.f_lineno
            if outside:
                return
            inside = True
        frame = frame.f_back
