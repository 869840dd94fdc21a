"""The carrier over torch.distributed: point-to-point messages of any process group that contains the mesh.

Elements travel as bytes, so every dtype that torch stores can move. On gloo each message carries a tag made from the
plan, the dtype and the batch, so that calls which do not agree never meet: they end at the group's timeout instead of
mixing (gloo aborts the process when a message is larger than the buffer posted for it).
"""

import math
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from mfsdp_func.effects.agreement import bytes_of, compare_facts
from mfsdp_func.effects.blocks import as_bytes, packed, room_for, unpack
from mfsdp_func.effects.carrier import Call, Parcel
from mfsdp_func.effects.groups import axis_groups
from mfsdp_func.effects.native_collectives import native_collective
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

_TELL_TAG = 0x6D667364


class ProcessGroups:
    """See `Carrier`. Without state but for the groups that have communicated before."""

    def __init__(self) -> None:
        self._warm: set[str] = set()

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
        group = _group(call.mesh)
        own = torch.cuda.is_available() and set(dist.get_process_group_ranks(group)) == set(call.mesh.ranks)
        if own and _carries(group, "cuda"):
            self._warm_up(group)  # on all ranks, also on those that move nothing and know no device
        parts = [part for parcel in (*outgoing, *incoming) for part in parcel.parts[:1]]
        if parts and call.batch and not call.forward:
            _compare_batches(call, {parcel.peer for parcel in (*outgoing, *incoming)}, group, parts[0].device)
        if parts and parts[0].is_cuda:
            if not own:
                raise RuntimeError(
                    f"{call.label}: on CUDA, {call.mesh} needs a process group of exactly its own ranks; use a DeviceMesh of"
                    " one axis over them (DeviceMesh._flatten makes one of several axes)"
                )
            _run_stages(_by_stage(outgoing, incoming), lambda sends, receives: _post_batch(group, sends, receives))
            return _nothing
        if call.dtype is None:
            return _nothing
        stages = _by_stage(outgoing, incoming)
        in_flight = len(stages) if at_once else 1 + _STAGES_IN_FLIGHT
        return _run_stages_later(stages, lambda sends, receives: _post(group, call.tag, sends, receives), in_flight)

    def _warm_up(self, group: dist.ProcessGroup) -> None:
        """Let all ranks of a group communicate once: NCCL's first point-to-point batch may not leave a rank out."""
        if group.group_name not in self._warm:
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            self._warm.add(group.group_name)

    def collective(
        self, call: Call, collective: Collective, source: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None] | None:
        if call.batch and not call.forward and len(collective.line) > 1:
            peers = {rank for rank in collective.line if rank != call.mesh.rank}
            _compare_batches(call, peers, _group(call.mesh), source.device)
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
        group, device = _group(mesh), self.device(mesh)
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        if set(dist.get_process_group_ranks(group)) == set(mesh.ranks):
            all_records = [torch.empty_like(mine) for _ in mesh.ranks]
            dist.all_gather(all_records, mine, group=group)
            order = dist.get_process_group_ranks(group)
            by_rank = dict(zip(order, all_records, strict=True))
        else:
            by_rank = {rank: torch.empty_like(mine) for rank in mesh.ranks}
            by_rank[mesh.get_rank()] = mine
            peers = [rank for rank in mesh.ranks if rank != mesh.get_rank()]
            works = [_irecv(by_rank[peer], peer, group, _TELL_TAG) for peer in peers]
            _wait(works + [_isend(mine, peer, group, _TELL_TAG) for peer in peers])
        return [bytes_of(by_rank[rank]) for rank in mesh.ranks]


PROCESS_GROUPS = ProcessGroups()


def _nothing() -> None:
    pass


def _compare_batches(call: Call, peers: Collection[int], group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse unequal batches of autograd's calls, which no agreement check has seen: of `vmap` around a vjp function.

    Raises:
        ValueError: if a peer has another batch.
    """
    mine = torch.tensor([math.prod(call.batch)], device=device)
    theirs = {peer: torch.empty_like(mine) for peer in sorted(peers)}
    tag = _tell_tag(call) ^ 1
    works = [_irecv(theirs[peer], peer, group, tag) for peer in theirs]
    _wait(works + [_isend(mine, peer, group, tag) for peer in theirs])
    sizes = {call.mesh.get_rank(): int(mine)} | {peer: int(size) for peer, size in theirs.items()}
    compare_facts(call.label, {rank: {"batch size under vmap": str(size)} for rank, size in sorted(sizes.items())})


def _tell_tag(call: Call) -> int:
    return (int(call.digest[:8], 16) ^ _TELL_TAG) >> 1


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
    group: dist.ProcessGroup, tag: int, sends: Sequence[Parcel], receives: Sequence[Parcel]
) -> Callable[[], None]:
    """Post the messages of one stage to gloo; return what waits for them and unpacks."""
    incoming = [room_for(parcel.parts) for parcel in receives]
    works = [_irecv(as_bytes(room), p.peer, group, tag) for room, p in zip(incoming, receives, strict=True)]
    outgoing = [packed(parcel.parts) for parcel in sends]
    works += [_isend(as_bytes(buffer), p.peer, group, tag) for buffer, p in zip(outgoing, sends, strict=True)]

    def finish() -> None:
        _wait(works, *outgoing)
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
