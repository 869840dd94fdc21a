"""The carrier of a simulated rank: its calls meet those of the others, and are compared with them, check or no check."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from mfsdp_func.effects.agreement import checking, compare_calls
from mfsdp_func.effects.carrier import Call, Parcel
from mfsdp_func.effects.exchange_error import ExchangeError
from mfsdp_func.effects.faults import InjectedFault
from mfsdp_func.effects.origin import Ledger, line_here
from mfsdp_func.effects.streams import SIMULATED_STREAMS
from mfsdp_func.plans.collective import Collective
from mfsdp_func.simulation.baton import Rank, Wait
from mfsdp_func.simulation.injection import Injection
from mfsdp_func.simulation.meetings import Meeting
from mfsdp_func.simulation.messages import Record
from mfsdp_func.simulation.network import Network, Posted
from mfsdp_func.simulation.poison import PoisonMode, fill_with_poison
from mfsdp_func.simulation.queues import Operation
from mfsdp_func.values.mesh import Mesh

Entry = TypeVar("Entry")

PACKING_NBYTES = (128 * 1024, 1024 * 1024)
"""See `Carrier.packing`."""


class SimulatedCarrier:
    """One rank's carrier; see `Carrier`."""

    def __init__(self, network: Network, rank: Rank, injection: Injection, poison: PoisonMode | None) -> None:
        self._network, self._baton = network, network.baton
        self._rank, self._injection, self._poison = rank, injection, poison
        self.inside: dict[str, tuple[int, Any]] = {}
        self.compares = True
        self._ledgers: dict[str, Ledger] = {}

    def ledger(self, mesh: Mesh) -> Ledger:
        return self._ledgers.setdefault(mesh.digest, Ledger())

    def number_of_ranks(self) -> int:
        return self._baton.mesh.size()

    def packing(self, mesh: Mesh) -> tuple[int, int]:
        return PACKING_NBYTES

    def device(self, mesh: Mesh) -> torch.device:
        return torch.device("cpu")

    def give_up(self, mesh: Mesh, words: str) -> None:
        self._network.give_up(mesh, self._rank.id, words)

    def world(self) -> Mesh:
        mesh = self._baton.mesh
        return Mesh(mesh.size(), ranks=mesh.ranks, rank=self._rank.id)

    def collective(
        self, call: Call, collective: Collective, source: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None] | None:
        return None

    def watch(self, call: Call, outputs: Sequence[torch.Tensor]) -> Callable[[], None]:
        if self._poison is None:
            return _nothing
        poison = self._poison
        poison.hold(call.label, outputs)
        return lambda: poison.release(call.label, outputs)

    def exchange(
        self, call: Call, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, at_once: bool
    ) -> Callable[[], None]:
        flips = self.begin(call.label, call.mesh)
        posted = self._network.post(call, self._rank.id, outgoing, incoming)
        if checking():
            posted.sign()
        posted.flip(flips)
        meeting = self._network.meetings.join(self._rank.id, _kind(call), posted)
        peers, senders = posted.peers, [*posted.wanted]
        operation = self._queued(call.label, call.mesh, meeting, peers)
        if self._poison is not None and at_once:
            for parcel in incoming:
                for part in parcel.parts:
                    fill_with_poison(part)
        self._network.announce(meeting, posted)
        if self._network.settings.carrier == "rendezvous":
            receivers = [*posted.messages]
            self._wait_for(meeting, call, meeting.missing(receivers), receivers, "to send to ")

        def finish() -> None:
            if call.forward:
                partners: Iterable[int] = call.mesh.ranks
                first = meeting.missing_of(call.mesh)
            else:
                partners = {self._rank.id, *peers}
                first = meeting.missing(partners)
            self._wait_for(meeting, call, first, partners, operation=operation)
            if not meeting.compared:  # all ranks compare the same, if they are the same
                compare_calls({rank: meeting.entries[rank].call for rank in sorted(partners)})
                meeting.compared = call.forward
            self._network.check_pairs(meeting, posted)
            for peer in senders:
                self._network.arrive(meeting, meeting.entries[peer], posted)
            self._network.close(posted)
            self._refuse_damaged(call.label, call.mesh, posted.damaged)

        return finish

    def all_gather_bytes(self, mesh: Mesh, record: bytes) -> list[bytes]:
        flips = self.begin("agreement check", mesh)
        meeting = self._network.meetings.join(self._rank.id, ("records", mesh.digest), Record(record, flips))
        operation = self._queued("agreement check", mesh, meeting, mesh.ranks)
        words = f"in an agreement check (number {meeting.number}) for "
        self._wait("agreement check", mesh, words, meeting, meeting.missing_of(mesh), mesh.ranks, operation=operation)
        self._refuse_damaged("agreement check", mesh, [r for r in mesh.ranks if meeting.entries[r].is_damaged])
        return [meeting.entries[rank].arrived for rank in mesh.ranks]

    @property
    def holds_senders(self) -> bool:
        """Whether a message is held back until its receiver has come."""
        return self._network.settings.carrier != "eager"

    def meet(
        self, label: str, mesh: Mesh, kind: Hashable, entry: Entry, partners: Sequence[int], *, queued: bool
    ) -> tuple[Meeting[Entry], Callable[[], None]]:
        """After `begin`, make a call that is none of this library: where its partners meet, and what waits for all of them.

        With `queued`, it stands in the queue of operations where there is one.
        """
        meeting = self._network.meetings.join(self._rank.id, kind, entry)
        operation = self._queued(label, mesh, meeting, partners) if queued else None
        line, first = line_here(), meeting.missing(partners)
        words, at = f"in {label} (call {meeting.number}) for ", f", at {line}" if line else ""
        return meeting, lambda: self._wait(label, mesh, words, meeting, first, partners, at, operation)

    def begin(self, label: str, mesh: Mesh) -> list[int]:
        """Come to a point: whatever may happen there, happens; the bits to flip are returned."""
        self._check_mesh(label, mesh)
        me, left = self._rank.id, self._network.given_up.get(mesh.digest, {})
        if me in left:
            raise self._in_vain(label, mesh, (), self._baton.now, "an exchange over this mesh has failed before")
        try:
            flips = self._injection.come_to_point(label)
        except InjectedFault as error:
            self._network.give_up(mesh, me, f"rank {me}: {error}")
            raise
        self._baton.pause(self._rank)
        return flips

    def _queued(self, label: str, mesh: Mesh, meeting: Meeting[Any], peers: Iterable[int]) -> Operation | None:
        if self._network.settings.carrier != "nccl":
            return None
        streams = SIMULATED_STREAMS.get()
        stream = None if streams is None else streams.current_stream(torch.device("cpu"))
        return self._network.queues.launch(label, self._rank.id, meeting, mesh.digest, peers, mesh.ranks, stream)

    def _wait_for(
        self,
        meeting: Meeting[Posted],
        call: Call,
        first: Callable[[], int | None],
        partners: Iterable[int],
        doing: str = "for ",
        operation: Operation | None = None,
    ) -> None:
        line = (call.origin or {}).get("line")
        words, at = f"in {call.label} (call {meeting.number}) {doing}", f", at {line}" if line else ""
        self._wait(call.label, call.mesh, words, meeting, first, partners, at, operation)

    def _wait(
        self,
        label: str,
        mesh: Mesh,
        words: str,
        meeting: Meeting[Any],
        first: Callable[[], int | None],
        partners: Iterable[int],
        at: str = "",
        operation: Operation | None = None,
    ) -> None:
        """Wait until the partners have come, and, as on NCCL, the operation is done."""
        start = self._baton.now

        def ready() -> bool:
            return first() is None and (operation is None or operation.done)

        def said() -> str:
            if first() is None and operation is not None:
                return f"{words}{self._network.queues.words(operation)}{at}"
            return f"{words}rank {first()}{at}"

        def awaited() -> list[int]:
            missing = [rank for rank in partners if rank not in meeting.entries]
            return missing or sorted(operation.awaited if operation is not None else ())

        def lost() -> bool:
            return any(self._network.has_left(mesh, rank) for rank in awaited())

        if not self._baton.wait_until(self._rank, Wait(ready, said, lost, start + self._network.settings.timeout)):
            peers = awaited()
            left = [rank for rank in peers if self._network.has_left(mesh, rank)]
            gone = [rank for rank in left if self._baton.ranks[rank].finished]
            reason = f"ranks {gone} have ended" if gone else f"ranks {left} have given up" if left else "nobody came"
            raise self._in_vain(label, mesh, peers, start, reason)

    def _in_vain(self, label: str, mesh: Mesh, awaited: Iterable[int], start: float, reason: str) -> ExchangeError:
        me, first = self._rank.id, self._network.first_failure(mesh)
        error = ExchangeError(
            label,
            mesh,
            rank=me,
            awaited=awaited,
            elapsed=self._baton.now - start,
            timeout=self._network.settings.timeout,
            cause=first[1] if first is not None else None,
            reason=reason,
        )
        self._network.give_up(mesh, me, f"rank {me}, {error.elapsed:.3g} s into {label}: {reason}")
        return error

    def _refuse_damaged(self, label: str, mesh: Mesh, senders: Iterable[int]) -> None:
        """Raise where a message differs from its hash."""
        if senders := sorted(senders):
            reason = (
                f"what came from ranks {senders} was damaged on the way: it differs from the hash that came with it"
            )
            raise self._in_vain(label, mesh, senders, self._baton.now, reason)

    def _check_mesh(self, label: str, mesh: Mesh) -> None:
        known = self._network.known_meshes
        if mesh.digest not in known and self._baton.ranks.keys() >= set(mesh.ranks):
            known.add(mesh.digest)
        if mesh.rank != self._rank.id or mesh.digest not in known:
            raise RuntimeError(
                f"{label}: simulated rank {self._rank.id} of {self._baton.mesh} communicates over {mesh}, which is not a"
                " mesh of this simulation as this rank sees it; use the one that simulate gives to the program, or a part"
                " of it"
            )


def _kind(call: Call) -> Hashable:
    """Of a rank's calls of one kind, the n-th meets the n-th of the others.

    Calls of the program come in one order on all ranks of a mesh; autograd's own calls are told apart by plan.
    """
    return call.mesh.digest if call.forward else (call.digest, call.label)


def _nothing() -> None:
    pass
