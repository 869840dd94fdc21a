"""What simulated ranks share: where their calls meet, which messages are under way, and who has given up."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mfsdp_func.effects.blocks import unpack
from mfsdp_func.effects.carrier import Call, Parcel
from mfsdp_func.simulation.baton import Baton
from mfsdp_func.simulation.errors import SimulationError
from mfsdp_func.simulation.meetings import Meeting, Meetings
from mfsdp_func.simulation.messages import Message
from mfsdp_func.simulation.queues import Queues
from mfsdp_func.simulation.rank_state import outside_modes
from mfsdp_func.simulation.results import Sent
from mfsdp_func.simulation.settings import Settings
from mfsdp_func.values.mesh import Mesh


@dataclass(eq=False)
class Posted:
    """A call that a rank has made: its facts, what it sends to each peer, and where it wants what comes from each."""

    call: Call
    rank: int
    messages: dict[int, list[Message]] = field(default_factory=dict)
    wanted: dict[int, list[Parcel]] = field(default_factory=dict)
    lent: list[Message] = field(default_factory=list)
    """All of `messages`; those that have arrived are there no more."""
    sends: dict[int, int] = field(default_factory=dict)
    """Number of messages to each peer."""
    receives: dict[int, int] = field(default_factory=dict)
    """Number of messages from each peer."""
    damaged: set[int] = field(default_factory=set)
    """Senders of what differed from its hash."""

    @property
    def peers(self) -> set[int]:
        """With whom it exchanges something."""
        return {*self.messages, *self.wanted}

    def sign(self) -> None:
        """Let a hash travel with each message."""
        for message in self.lent:
            message.sign()

    def end(self) -> None:
        """Look at what was lent for the last time."""
        while self.lent:
            message = self.lent.pop()
            message.check()
            message.keep()

    def flip(self, bits: Sequence[int]) -> None:
        """Flip bits on the way, counted over all messages."""
        total = 8 * sum(message.nbytes for message in self.lent)
        for bit in bits if total else ():
            at = bit % total
            for message in self.lent:
                if at < 8 * message.nbytes:
                    message.flip(at)
                    break
                at -= 8 * message.nbytes


class Network:
    """All of it.

    Attributes:
        known_meshes: digests of meshes whose ranks are those of the simulation.
        trace: every message so far.
        given_up: who has failed in an exchange on a mesh, and may not use it again: the first on each mesh, and its words.
    """

    def __init__(self, settings: Settings, baton: Baton) -> None:
        self.settings, self.baton = settings, baton
        self.meetings, self.queues = Meetings(), Queues()
        self.known_meshes: set[Hashable] = set()
        self.trace: list[Sent] = []
        self.given_up: dict[str, dict[int, str]] = {}
        self._open: dict[int, dict[Posted, None]] = {}
        """The calls of each rank that have not ended."""

    def has_left(self, mesh: Mesh, rank: int) -> bool:
        """Whether a rank takes no more part in exchanges on a mesh."""
        return self.baton.ranks[rank].finished or rank in self.given_up.get(mesh.digest, ())

    def give_up(self, mesh: Mesh, rank: int, words: str) -> None:
        """A rank has failed on a mesh; its peers there will know."""
        self.given_up.setdefault(mesh.digest, {}).setdefault(rank, words)
        self.queues.drop(rank, mesh.digest)
        self.let_go(rank, mesh)

    def let_go(self, rank: int, mesh: Mesh | None = None) -> None:
        """A rank ends its calls on a mesh, or all of them, as it is gone: what it was sending is under way as it was."""
        for posted in [*self._open.get(rank, ())]:
            if mesh is None or posted.call.mesh.digest == mesh.digest:
                for message in posted.lent:
                    message.keep()
                self.close(posted)

    def close(self, posted: Posted) -> None:
        """A call has ended on its rank, whose memory is its own again."""
        posted.end()
        self._open.get(posted.rank, {}).pop(posted, None)

    def first_failure(self, mesh: Mesh) -> tuple[int, str] | None:
        """Who failed first on a mesh, in words."""
        return next(iter(self.given_up.get(mesh.digest, {}).items()), None)

    def post(self, call: Call, rank: int, outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> Posted:
        """Take a rank's messages, and leave a note of each in the trace."""
        posted, live = Posted(call, rank), self.settings.memory == "live"
        for parcel in outgoing:
            message = Message(call.label, rank, parcel.peer, parcel.parts, live=live)
            posted.messages.setdefault(parcel.peer, []).append(message)
            posted.lent.append(message)
            self.trace.append(Sent(call.operation or call.label, rank, parcel.peer, message.nbytes))
        for parcel in incoming:
            posted.wanted.setdefault(parcel.peer, []).append(parcel)
        if live:
            self._open.setdefault(rank, {})[posted] = None
        posted.sends.update({peer: len(messages) for peer, messages in posted.messages.items()})
        posted.receives.update({peer: len(parcels) for peer, parcels in posted.wanted.items()})
        return posted

    def check_pairs(self, meeting: Meeting[Posted], mine: Posted) -> None:
        """Whether every message that a rank sends is received, and the other way round.

        Raises:
            SimulationError: if not; plans that agree never come to it.
        """
        for peer in {**mine.sends, **mine.receives}:
            for sender, receiver in ((mine, meeting.entries[peer]), (meeting.entries[peer], mine)):
                sent, wanted = sender.sends.get(receiver.rank, 0), receiver.receives.get(sender.rank, 0)
                if sent != wanted:
                    raise SimulationError(
                        f"{mine.call.label}: rank {sender.rank} sends {sent} messages to rank {receiver.rank}, which"
                        f" receives {wanted} from it; both ends must follow one plan"
                    )

    def announce(self, meeting: Meeting[Posted], mine: Posted) -> None:
        """In live memory, messages may arrive as soon as both ends have made their calls."""
        if self.settings.memory != "live" or not self.baton.tape.free:
            return
        for peer in sorted(mine.peers):
            other = meeting.entries.get(peer)
            if other is None or other.call.tag != mine.call.tag:
                continue
            for sender, receiver in ((mine, other), (other, mine)):
                if receiver.rank in sender.messages and sender.rank in receiver.wanted:
                    name = meeting, sender.rank, receiver.rank
                    self.baton.arrivals[name] = partial(self._arrive_early, meeting, sender, receiver)

    def arrive(self, meeting: Meeting[Posted], sender: Posted, receiver: Posted) -> None:
        """Bring what one rank sent another into the latter's memory; nothing where it has arrived before."""
        self.baton.arrivals.pop((meeting, sender.rank, receiver.rank), None)
        messages, parcels = sender.messages.pop(receiver.rank, []), receiver.wanted.pop(sender.rank, [])
        for parcel, message in zip(parcels, messages, strict=True):
            unpack(message.read(), parcel.parts)
        if any(message.is_damaged for message in messages):
            receiver.damaged.add(sender.rank)

    def _arrive_early(self, meeting: Meeting[Posted], sender: Posted, receiver: Posted) -> None:
        with outside_modes():  # of the rank that happens to run
            self.arrive(meeting, sender, receiver)
