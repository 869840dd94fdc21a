"""The carrier of a simulated rank: messages are copied when they are sent, and appear when they are waited for."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mfsdp_func.effects.agreement import compare_calls
from mfsdp_func.effects.blocks import packed, unpack
from mfsdp_func.effects.carrier import Call, Parcel
from mfsdp_func.effects.origin import Ledger
from mfsdp_func.plans.collective import Collective
from mfsdp_func.simulation.baton import Baton, Rank
from mfsdp_func.simulation.meetings import Meeting, Meetings
from mfsdp_func.simulation.poison import PoisonMode, fill_with_poison
from mfsdp_func.simulation.results import Sent
from mfsdp_func.values.mesh import Mesh

PACKING_NBYTES = (128 * 1024, 1024 * 1024)
"""See `Carrier.packing`."""


class Network:
    """What the ranks share: meetings, the meshes seen so far, and the trace."""

    def __init__(self) -> None:
        self.meetings = Meetings()
        self.known_meshes: set[Hashable] = set()
        self.trace: list[Sent] = []


@dataclass
class _Posted:
    """A call that a rank has made: its facts, and copies of what it sent to each peer."""

    call: Call
    payloads: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    copied: Any = None
    """On CUDA, the event after which the copies are done: ranks may work on different streams."""


class SimulatedCarrier:
    """One rank's carrier; see `Carrier`. Ranks that disagree about a call are told so, check or no check."""

    def __init__(self, baton: Baton, network: Network, rank: Rank, poison: PoisonMode | None) -> None:
        self._baton, self._network, self._rank, self._poison = baton, network, rank, poison
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

    def world(self) -> Mesh:
        mesh = self._baton.mesh
        return Mesh(mesh.size(), ranks=mesh.ranks, rank=self._rank.id)

    def exchange(
        self, call: Call, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, at_once: bool
    ) -> Callable[[], None]:
        self._check_mesh(call.label, call.mesh)
        meeting = self._network.meetings.join(self._rank.id, _kind(call), self._post(call, outgoing))
        if self._poison is not None and at_once:
            for parcel in incoming:
                for part in parcel.parts:
                    fill_with_poison(part)

        def finish() -> None:
            me = self._rank.id
            if call.forward:
                partners, first = call.mesh.ranks, meeting.missing_of(call.mesh)
            else:
                partners = {me, *(parcel.peer for parcel in (*outgoing, *incoming))}
                first = meeting.missing(partners)
            self._wait_for(meeting, call, first)
            if not meeting.compared:  # all ranks compare the same, if they are the same
                compare_calls({rank: meeting.entries[rank].call for rank in sorted(partners)})
                meeting.compared = call.forward
            for peer in dict.fromkeys(parcel.peer for parcel in incoming):
                self._receive(meeting.entries[peer], [parcel for parcel in incoming if parcel.peer == peer])

        return finish

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

    def all_gather_bytes(self, mesh: Mesh, record: bytes) -> list[bytes]:
        self._check_mesh("agreement check", mesh)
        meeting = self._network.meetings.join(self._rank.id, ("records", mesh.digest), record)
        first = meeting.missing_of(mesh)
        self._baton.wait_until(
            self._rank,
            lambda: first() is None,
            lambda: f"in an agreement check (number {meeting.number}) for rank {first()}",
        )
        return [meeting.entries[rank] for rank in mesh.ranks]

    def _post(self, call: Call, outgoing: Sequence[Parcel]) -> _Posted:
        posted = _Posted(call)
        for parcel in outgoing:
            payload = packed(parcel.parts).detach().clone()
            posted.payloads.setdefault(parcel.peer, []).append(payload)
            self._network.trace.append(Sent(call.operation or call.label, self._rank.id, parcel.peer, payload.nbytes))
        if outgoing and outgoing[0].parts[0].is_cuda:
            posted.copied = torch.cuda.current_stream(outgoing[0].parts[0].device).record_event()
        return posted

    def _wait_for(self, meeting: Meeting[_Posted], call: Call, first: Callable[[], int | None]) -> None:
        line = (call.origin or {}).get("line")
        at = f", at {line}" if line else ""
        self._baton.wait_until(
            self._rank,
            lambda: first() is None,
            lambda: f"in {call.label} (call {meeting.number}) for rank {first()}{at}",
        )

    def _receive(self, posted: _Posted, parcels: Sequence[Parcel]) -> None:
        sent = posted.payloads.pop(self._rank.id)
        if posted.copied is not None:
            stream = torch.cuda.current_stream(sent[0].device)
            stream.wait_event(posted.copied)
            for tensor in sent:
                tensor.record_stream(stream)
        for parcel, payload in zip(parcels, sent, strict=True):
            unpack(payload, parcel.parts)

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
