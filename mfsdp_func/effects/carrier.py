"""What every carrier offers."""

import hashlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from mfsdp_func.effects.origin import Ledger
from mfsdp_func.plans.collective import Collective
from mfsdp_func.values.mesh import Mesh


@dataclass(frozen=True)
class Call:
    """One rank's call of one operation: the facts on which the ranks must agree.

    Attributes:
        label: the operation and its group, for messages.
        digest: of the operation's plan; equal on all ranks.
        mesh: the ranks that take part.
        dtype: of the elements; None where this rank has none to send or receive.
        batch: sizes of the batch dims that `torch.func.vmap` added, which trail in every tensor.
        differentiated: whether autograd or `torch.func` follows this call on this rank; None where it need not.
        forward: whether the program made the call, on all ranks in the same order; autograd makes the others.
        origin: the call of the program that it is, or belongs to, in words that are compared; None where nobody compares.
        linear: the map; what differs between ranks is told in its words.
        operation: what `label` is without the name of what moves; empty where they are one.
    """

    label: str
    digest: str
    mesh: Mesh
    dtype: torch.dtype | None
    batch: tuple[int, ...]
    differentiated: bool | None
    forward: bool
    origin: dict[str, str] | None = None
    linear: Any = None
    operation: str = ""

    @cached_property
    def facts(self) -> dict[str, str]:
        """What is compared, in words; an empty word agrees with everything."""
        return {
            "operation": self.operation or self.label,
            "plan": self.digest[:16],
            "dtype": str(self.dtype).removeprefix("torch.") if self.dtype else "",
            "batch size under vmap": "x".join(map(str, self.batch)) or "no vmap",
            "differentiated": {None: "", False: "no", True: "yes"}[self.differentiated],
            **(self.origin or {}),
        }

    def of(self, name: str, origin: dict[str, str]) -> "Call":
        """The same call, of what has a name, with its origin."""
        label = f"{self.label} of {name!r}" if name else self.label
        return replace(self, label=label, origin=origin, operation=self.label)

    @cached_property
    def tag(self) -> int:
        """A positive 31-bit number that two ranks share only where their calls agree (up to hash collisions)."""
        word = f"{self.digest} {self.dtype} {self.batch}".encode()
        return int.from_bytes(hashlib.sha256(word).digest()[:4], "big") >> 1


class Parcel(NamedTuple):
    """One message: the elements of `parts`, one after the other, to or from global rank `peer`.

    Parts are tensors of one dtype and of any strides; how a message is cut into parts is each end's own affair. Parcels
    of stage 0 have one contiguous part; the others are numbered per pair of ranks, and a carrier that needs buffers for
    them handles a few stages at a time.
    """

    peer: int
    stage: int
    parts: tuple[torch.Tensor, ...]


class Carrier(Protocol):
    """Moves parcels between the ranks of a mesh. Every rank of the mesh makes every call, in the same order.

    Attributes:
        inside: which thread is inside which map, by the mesh's digest.
        compares: whether calls are compared, check or no check.
    """

    inside: dict[str, tuple[int, Any]]
    compares: bool

    def ledger(self, mesh: Mesh) -> Ledger:
        """What this rank counts on a mesh."""
        ...

    def number_of_ranks(self) -> int:
        """How many ranks there are in all."""
        ...

    def packing(self, mesh: Mesh) -> tuple[int, int]:
        """In bytes: from which size on elements travel alone, and how large a packed message may be."""
        ...

    def device(self, mesh: Mesh) -> torch.device:
        """Where elements live on a rank that has no tensor to tell it."""
        ...

    def exchange(
        self, call: Call, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, at_once: bool
    ) -> Callable[[], None]:
        """Start sending and receiving; return what waits until both are done.

        With `at_once` all messages are under way on return, whatever buffers that takes; else only a few stages are,
        the rest follow while waiting, and buffers stay small.
        """
        ...

    def collective(
        self, call: Call, collective: Collective, source: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None] | None:
        """Start the backend's own collective; None where it has none for this case."""
        ...

    def watch(self, call: Call, outputs: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Take note that `outputs` are in flight; the function returned ends that, before they are waited for."""
        ...

    def give_up(self, mesh: Mesh, words: str) -> None:
        """Let this rank take part in no more calls over a mesh, and tell the others why; see `ExchangeError.cause`."""
        ...

    def world(self) -> Mesh:
        """All ranks that there are, along one axis."""
        ...

    def all_gather_bytes(self, mesh: Mesh, record: bytes) -> list[bytes]:
        """Records of equal length, one from each rank, in mesh order."""
        ...


class Simulated(NamedTuple):
    """A rank inside a simulated mesh, and its carrier."""

    rank: int
    carrier: Carrier


SIMULATED: ContextVar[Simulated | None] = ContextVar("mfsdp_func_simulated", default=None)
