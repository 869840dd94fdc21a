"""The carrier over torch.distributed: point-to-point messages of any process group that contains the mesh.

Elements travel as bytes, so every dtype that torch stores can move. On gloo each message carries a tag made from the
plan, the dtype and the batch, so that calls which do not agree never meet: they end at the group's timeout instead of
mixing (gloo aborts the process when a message is larger than the buffer posted for it). Its native collectives have no
tags of ours: all-gathers are made of messages instead, and reductions are led by a byte with the tag, from each rank to
the next. Whole calls took, beside torch.distributed's own (two ranks on a busy machine, medians of ratios): all-gathers
3.0 times as long for 1 KiB, 2.5 for 64 KiB, 1.2 for 16 MiB; reductions 2.4 to 3.4 up to 256 KiB, 1.0 for 16 MiB.
"""

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from mfsdp_func.effects.agreement import ENVIRONMENT_VARIABLE, bytes_of, compare_facts, decoded, encoded, is_set
from mfsdp_func.effects.blocks import as_bytes, packed, room_for, unpack
from mfsdp_func.effects.carrier import Call, Parcel
from mfsdp_func.effects.groups import axis_groups
from mfsdp_func.effects.native_collectives import native_collective
from mfsdp_func.effects.origin import Ledger
from mfsdp_func.effects.torch_internals import outside_transforms
from mfsdp_func.plans.collective import Collective
from mfsdp_func.values.mesh import Mesh

# Two gloo ranks on loopback, 64 pieces each way, medians: a message costs 40 to 60 us beyond its bytes (1 to 1.4 GB/s);
# packing costs two more passes over them. Direct over packed: 4 at 4 KiB, 1.0 to 1.1 at 32 KiB, 0.7 to 0.8 at 64 KiB
# (examples/benchmarks/thresholds.py).
DIRECT_NBYTES = 64 * 1024
# Buffers for packed messages in flight, all peers together: two stages, each way, and a third one where no large pieces
# come first. 8 MB of small tensors take 1.3 to 1.5 times as long with half of it, and hardly less with twice as much.
PACKED_NBYTES = 4 * 1024 * 1024
_STAGES_IN_FLIGHT = 2

# Tags of messages that belong to no call; a length is added, so that records of different lengths never meet.
_RECORD_TAG, _FIRST_USE_TAG, _PAIR_TAG, _LEAD_TAG = 0x6D667364, 0x5D667364, 0x4D667364, 0x3D667364


class ProcessGroups:
    """See `Carrier`. Without state but for the groups that have communicated before, and what is counted on meshes."""

    def __init__(self) -> None:
        self.inside: dict[str, tuple[int, Any]] = {}
        self.compares = False
        self._warm: set[str] = set()
        self._ledgers: dict[str, tuple[Callable[[], object], Ledger]] = {}

    def ledger(self, mesh: Mesh) -> Ledger:
        world = dist.group.WORLD if dist.is_available() else None
        kept = self._ledgers.get(mesh.digest)
        if kept is None or kept[0]() is not world:  # a new world counts anew
            kept = self._ledgers[mesh.digest] = ref(world) if world is not None else _nothing, Ledger()
        return kept[1]

    def _compare_environments(self, mesh: Mesh, label: str) -> None:
        """Refuse, at the first use of a mesh, an agreement check that only some ranks switch on for their process."""
        ledger = self.ledger(mesh)
        if ledger.compared or mesh.size() == 1:
            return
        word = "on" if is_set() else "off"
        with outside_transforms():
            words = self._gather_bytes(
                mesh, word.encode().ljust(4), _FIRST_USE_TAG, f"{label}, the first call over {mesh}"
            )
        records = {
            rank: {ENVIRONMENT_VARIABLE: other.decode().strip()} for rank, other in zip(mesh.ranks, words, strict=True)
        }
        compare_facts(f"{label}, the first call over {mesh}", records)
        ledger.compared = True

    def number_of_ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def packing(self, mesh: Mesh) -> tuple[int, int]:
        return DIRECT_NBYTES, max(DIRECT_NBYTES, PACKED_NBYTES // (2 * _STAGES_IN_FLIGHT * max(1, len(mesh.ranks) - 1)))

    def device(self, mesh: Mesh) -> torch.device:
        if mesh.size() > 1 and not _carries(_group(mesh), "cpu"):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def exchange(
        self, call: Call, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, at_once: bool
    ) -> Callable[[], None]:
        if len(call.mesh.ranks) == 1:
            return _nothing
        if not self.ledger(call.mesh).compared:
            self._compare_environments(call.mesh, call.label)
        group = _group(call.mesh)
        own = torch.cuda.is_available() and set(dist.get_process_group_ranks(group)) == set(call.mesh.ranks)
        if own and _carries(group, "cuda"):
            self._warm_up(group)  # on all ranks, also on those that move nothing and know no device
        first = outgoing[0].parts[0] if outgoing else incoming[0].parts[0] if incoming else None
        if first is not None and not call.forward and _is_unseen(call):
            _compare_with(call, {parcel.peer for parcel in (*outgoing, *incoming)}, group, first.device)
        if first is not None and first.is_cuda:
            if not own:
                raise RuntimeError(
                    f"{call.label}: on CUDA, {call.mesh} needs a process group of exactly its own ranks; use a DeviceMesh of"
                    " one axis over them (DeviceMesh._flatten makes one of several axes)"
                )
            _run_stages(_by_stage(outgoing, incoming), lambda sends, receives: _post_batch(group, sends, receives))
            return _nothing
        if call.dtype is None:
            return _nothing
        if not ((outgoing and outgoing[-1].stage) or (incoming and incoming[-1].stage)):
            return _post(group, call, outgoing, incoming)
        stages = _by_stage(outgoing, incoming)
        in_flight = len(stages) if at_once else 1 + _STAGES_IN_FLIGHT
        return _run_stages_later(stages, lambda sends, receives: _post(group, call, sends, receives), in_flight)

    def _warm_up(self, group: dist.ProcessGroup) -> None:
        """Let all ranks of a group communicate once: NCCL's first point-to-point batch may not leave a rank out."""
        if group.group_name not in self._warm:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            self._warm.add(group.group_name)

    def collective(
        self, call: Call, collective: Collective, source: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None] | None:
        if not self.ledger(call.mesh).compared:
            self._compare_environments(call.mesh, call.label)
        if not source.is_cuda:
            if collective.kind == "allgather":
                return None
            return native_collective(call, collective, source, target, lambda group: _lead(call, collective, group))
        if not call.forward and _is_unseen(call) and len(collective.line) > 1:
            peers = {rank for rank in collective.line if rank != call.mesh.rank}
            _compare_with(call, peers, _group(call.mesh), source.device)
        return native_collective(call, collective, source, target)

    def watch(self, call: Call, outputs: Sequence[torch.Tensor]) -> Callable[[], None]:
        return _nothing

    def world(self) -> Mesh:
        if not dist.is_available() or not dist.is_initialized():
            return Mesh(1, rank=0)
        return Mesh(dist.get_world_size(), rank=dist.get_rank())

    def all_gather_bytes(self, mesh: Mesh, record: bytes) -> list[bytes]:
        if mesh.size() == 1:
            return [record]
        self._compare_environments(mesh, "agreement check")
        return self._gather_bytes(mesh, record, _RECORD_TAG, f"the agreement check is on here, over {mesh}")

    def _gather_bytes(self, mesh: Mesh, record: bytes, tag: int, what: str) -> list[bytes]:
        group, device = _group(mesh), self.device(mesh)
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        by_rank = {rank: torch.empty_like(mine) for rank in mesh.ranks}
        if device.type == "cuda" and set(dist.get_process_group_ranks(group)) == set(mesh.ranks):
            order = dist.get_process_group_ranks(group)
            dist.all_gather([by_rank[rank] for rank in order], mine, group=group)
        else:
            peers, silent = [rank for rank in mesh.ranks if rank != mesh.get_rank()], dict[int, RuntimeError]()
            works = {peer: _irecv(by_rank[peer], peer, group, tag ^ len(record)) for peer in peers}
            sent = [_isend(mine, peer, group, tag ^ len(record)) for peer in peers]
            for peer, work in works.items():
                try:
                    work.wait()
                except RuntimeError as error:
                    silent[peer] = error
            if silent:
                raise RuntimeError(
                    f"{what}: rank {mesh.get_rank()} waited in vain for ranks {list(silent)} to compare what is called;"
                    " all ranks must make the same calls, with agreement_check (or its environment variable) switched"
                    f" alike ({next(iter(silent.values()))})"
                ) from next(iter(silent.values()))
            _wait(sent)
            by_rank[mesh.get_rank()] = mine
        return [bytes_of(by_rank[rank]) for rank in mesh.ranks]


PROCESS_GROUPS = ProcessGroups()


def _nothing() -> None:
    pass


def _is_unseen(call: Call) -> bool:
    """Whether autograd makes a call of which no check has seen something that ranks must agree on.

    That is the batch of `vmap` around a vjp function; and, where the program's own calls were checked, which forward
    call it belongs to.
    """
    return not call.forward and bool(call.batch or call.origin)


def _compare_with(call: Call, peers: Collection[int], group: dist.ProcessGroup, device: torch.device) -> None:
    """Compare a call with those of the ranks that it exchanges something with.

    Raises:
        ValueError: if they differ.
    """
    facts = {fact: word for fact, word in call.facts.items() if fact != "differentiated"}
    mine = torch.frombuffer(bytearray(encoded(facts)), dtype=torch.uint8).to(device)
    theirs = {peer: torch.empty_like(mine) for peer in sorted(peers)}
    works = [_irecv(theirs[peer], peer, group, _PAIR_TAG) for peer in theirs]
    works += [_isend(mine, peer, group, _PAIR_TAG) for peer in theirs]
    with _named(call, theirs):
        _wait(works)
    records = {call.mesh.get_rank(): facts} | {peer: decoded(bytes_of(other)) for peer, other in theirs.items()}
    compare_facts(call.label, dict(sorted(records.items())))


def _lead(call: Call, collective: Collective, group: dist.ProcessGroup) -> None:
    """Wait for the rank before this one on the line to come to the same call, by its tag."""
    line, here = collective.line, collective.position
    before, behind = line[here - 1], line[(here + 1) % len(line)]
    byte, room = torch.zeros(2, dtype=torch.uint8, device="cpu").split(1)
    works = [_irecv(room, before, group, call.tag ^ _LEAD_TAG), _isend(byte, behind, group, call.tag ^ _LEAD_TAG)]
    with _named(call, (before, behind)):
        _wait(works)


@contextmanager
def _named(call: Call, peers: Collection[int]) -> Generator[None, None, None]:
    """Name the call in what gloo raises."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(_vain(call, peers, error)) from error


def _vain(call: Call, peers: Collection[int], error: RuntimeError) -> str:
    return (
        f"{call.label}: rank {call.mesh.get_rank()} exchanges with ranks {sorted(peers)}, and one of them did not come to"
        f" the same call, or ended: {error}. Calls that differ never meet; agreement_check() tells how they differ"
    )


def _group(mesh: Mesh) -> dist.ProcessGroup:
    """A process group through which the ranks of a mesh can reach one another; none is ever created here.

    Raises:
        RuntimeError: if there is none.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            f"no process group is initialised, so {mesh} cannot communicate; start the program with torchrun and call"
            " torch.distributed.init_process_group, or run it in one process with mfsdp_func.simulate"
        )
    groups = axis_groups(mesh)
    if len(groups) == 1:
        return groups[0]
    world = dist.group.WORLD
    if world is None or max(mesh.ranks) >= dist.get_world_size():
        raise RuntimeError(f"{mesh} has ranks beyond the {dist.get_world_size()} ranks of the default process group")
    return world


def _carries(group: dist.ProcessGroup, device: str) -> bool:
    return device in {d.type for d in group._device_types}  # pyright: ignore[reportPrivateUsage]


def _isend(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    return group.send([tensor], dist.get_group_rank(group, peer), tag)


def _irecv(tensor: torch.Tensor, peer: int, group: dist.ProcessGroup, tag: int) -> dist.Work:
    return group.recv([tensor], dist.get_group_rank(group, peer), tag)


def _wait(works: Sequence[Any], *keep: torch.Tensor) -> None:
    for work in works:
        work.wait()


Stage = tuple[list[Parcel], list[Parcel]]
Post = Callable[[Sequence[Parcel], Sequence[Parcel]], Callable[[], None]]


def _by_stage(outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> list[Stage]:
    if not ((outgoing and outgoing[-1].stage) or (incoming and incoming[-1].stage)):
        return [(list(outgoing), list(incoming))]
    stages: dict[int, Stage] = {}
    for side, parcels in enumerate((outgoing, incoming)):
        for number, group in groupby(parcels, key=lambda parcel: parcel.stage):
            stages.setdefault(number, ([], []))[side].extend(group)
    return [stages[number] for number in sorted(stages)]


def _post(
    group: dist.ProcessGroup, call: Call, sends: Sequence[Parcel], receives: Sequence[Parcel]
) -> Callable[[], None]:
    """Post the messages of one stage to gloo; return what waits for them and unpacks."""
    tag, works = call.tag, list[dist.Work]()
    incoming: list[torch.Tensor] = []
    outgoing: list[torch.Tensor] = []
    for parcel in receives:
        incoming.append(room := room_for(parcel.parts))
        works.append(_irecv(as_bytes(room), parcel.peer, group, tag))
    for parcel in sends:
        outgoing.append(buffer := packed(parcel.parts))
        works.append(_isend(as_bytes(buffer), parcel.peer, group, tag))

    def finish(held: Sequence[torch.Tensor] = outgoing) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(_vain(call, {parcel.peer for parcel in (*sends, *receives)}, error)) from error
        for room, parcel in zip(incoming, receives, strict=True):
            unpack(room, parcel.parts)

    return finish


def _post_batch(group: dist.ProcessGroup, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], None]:
    """Queue one stage on the current CUDA stream as one batch."""
    incoming = [room_for(parcel.parts) for parcel in receives]
    operations = [
        dist.P2POp(dist.irecv, as_bytes(room), parcel.peer, group)
        for room, parcel in zip(incoming, receives, strict=True)
    ]
    operations += [dist.P2POp(dist.isend, as_bytes(packed(parcel.parts)), parcel.peer, group) for parcel in sends]
    works = dist.batch_isend_irecv(operations)

    def finish() -> None:
        _wait(works)
        for room, parcel in zip(incoming, receives, strict=True):
            unpack(room, parcel.parts)

    return finish


def _run_stages(stages: Sequence[Stage], post: Post) -> None:
    for sends, receives in stages:
        post(sends, receives)()


def _run_stages_later(stages: Sequence[Stage], post: Post, in_flight: int) -> Callable[[], None]:
    """Post the first stages now; the function returned waits for them and posts the rest, a few at a time.

    No deadlock: all ranks go through the stages in ascending order, so the lowest stage that anybody waits for has
    been posted, or will be, by everybody who takes part in it.
    """
    waiting = [post(*stage) for stage in stages[:in_flight]]

    def finish() -> None:
        for number in range(len(stages)):
            waiting[number]()
            waiting[number] = _nothing
            if number + in_flight < len(stages):
                waiting.append(post(*stages[number + in_flight]))

    return finish
