"""One message between two simulated ranks: when its contents leave the sender's memory, and what may happen to them."""

import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from mfsdp_func.effects.agreement import bytes_of
from mfsdp_func.effects.blocks import as_bytes, packed
from mfsdp_func.effects.streams import are_ordered, mark_used, streams_of
from mfsdp_func.simulation.errors import SimulationError
from mfsdp_func.simulation.rank_state import outside_modes


class _Lent:
    """A tensor of the sender, without keeping its memory alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._like = tensor.dtype, tensor.device, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> torch.Tensor | None:
        """None where its memory is gone."""
        if self._storage.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)  # pyright: ignore[reportPrivateUsage]
        dtype, device, offset, shape, strides = self._like
        if not storage.nbytes():
            return None
        return torch.empty(0, dtype=dtype, device=device).set_(storage, offset, shape, strides)


class Message:
    """What a rank sends a peer in one call.

    It is what the sender's memory held when the call began. In live memory, the memory must still be there and be the same
    when the message arrives, which is as late as the tape of choices allows, and when the sender's call ends.
    """

    def __init__(self, label: str, src: int, dst: int, parts: Sequence[torch.Tensor], *, live: bool) -> None:
        self.label, self.src, self.dst = label, src, dst
        self._sent = packed(parts).detach().clone()
        self.nbytes = self._sent.nbytes
        self._lent = [_Lent(part) for part in parts] if live else None
        self._hash: int | None = None
        self._flipped: int | None = None
        self._copied: Any = None
        """Where streams order work, the event after which the copy is done: ranks may work on different streams."""
        if are_ordered(device := self._sent.device):
            self._copied = streams_of(device).current_stream(device).record_event()

    def sign(self) -> None:
        """Let a hash travel with the contents."""
        self._hash = zlib.crc32(bytes_of(as_bytes(self._sent)))

    def flip(self, bit: int) -> None:
        """Flip one bit on the way."""
        self._flipped = bit

    def check(self) -> None:
        """Look into the sender's memory, while it is lent.

        Raises:
            SimulationError: if it was freed, or written to, since the call began.
        """
        if self._lent is None:
            return
        with outside_modes():  # no work of the rank that happens to run
            parts = [lent.tensor() for lent in self._lent]
            alive = [part for part in parts if part is not None]
            freed = len(alive) < len(parts)
            changed = not freed and not torch.equal(as_bytes(packed(alive).detach().clone()), as_bytes(self._sent))
        if freed:
            raise SimulationError(
                f"rank {self.src} freed memory that {self.label} was still sending to rank {self.dst}; keep a call's inputs"
                " until its token was waited for"
            )
        if changed:
            raise SimulationError(
                f"rank {self.src} wrote into memory that {self.label} was still sending to rank {self.dst}; wait for the"
                " call's token first"
            )

    def keep(self) -> None:
        """Look into the sender's memory no more."""
        self._lent = None

    def read(self) -> torch.Tensor:
        """The contents, as they arrive."""
        self.check()
        if self._copied is not None:
            stream = streams_of(self._sent.device).current_stream(self._sent.device)
            stream.wait_event(self._copied)
            mark_used(self._sent, stream)
        if self._flipped is not None:
            as_bytes(self._sent)[self._flipped // 8] ^= 1 << self._flipped % 8
        return self._sent

    @property
    def is_damaged(self) -> bool:
        """Whether the contents that were read differ from the hash that came with them."""
        return self._hash is not None and self._hash != zlib.crc32(bytes_of(as_bytes(self._sent)))


class Record:
    """What a rank says to all others in an agreement check; a hash goes with it."""

    def __init__(self, said: bytes, flips: Sequence[int]) -> None:
        arrived = bytearray(said)
        for bit in flips:
            arrived[bit // 8 % len(arrived)] ^= 1 << bit % 8
        self.arrived, self._hash = bytes(arrived), zlib.crc32(said)

    @cached_property
    def is_damaged(self) -> bool:
        """Whether what arrived differs from the hash that came with it."""
        return zlib.crc32(self.arrived) != self._hash
