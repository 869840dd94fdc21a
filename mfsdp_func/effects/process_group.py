"""The carrier over torch.distributed: point-to-point messages of any process group that contains the mesh.

Elements travel as bytes, so every dtype that torch stores can move. On gloo each message carries a tag made from the
plan, the dtype and the batch, so that calls which do not agree never meet: they end at the group's timeout instead of
mixing (gloo aborts the process when a message is larger than the buffer posted for it). Its native collectives have no
tags of ours: all-gathers are made of messages instead, and reductions are led by a byte with the tag, from each rank to
the next. Whole calls took, beside torch.distributed's own (two ranks on a busy machine, medians of ratios): all-gathers
3.0 times as long for 1 KiB, 2.5 for 64 KiB, 1.2 for 16 MiB; reductions 2.4 to 3.4 up to 256 KiB, 1.0 for 16 MiB.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from mfsdp_func.effects.agreement import ENVIRONMENT_VARIABLE, bytes_of, compare_facts, decoded, encoded, is_set
from mfsdp_func.effects.carrier import Call, Parcel
from mfsdp_func.effects.groups import axis_groups, group_of
from mfsdp_func.effects.messages import by_stage, is_staged, post, post_batch, run_stages, run_stages_later, swap
from mfsdp_func.effects.native_collectives import start_native, starting
from mfsdp_func.effects.origin import Ledger
from mfsdp_func.effects.torch_internals import device_types_of, outside_transforms
from mfsdp_func.effects.waiting import FAILED, Waiter, give_up
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
_HINT = "all ranks must make the same calls, with agreement_check (or its environment variable) switched alike; "


class ProcessGroups:
    """See `Carrier`. Without state but for the groups that have communicated before, and what is counted on meshes.

    Attributes:
        reach: called with its operation at the beginning of every communicating call, where faults are injected.
    """

    def __init__(self) -> None:
        self.reach: Callable[[str], None] | None = None
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
            words = self._gather_bytes(mesh, word.encode().ljust(4), _FIRST_USE_TAG, f"{label}, the first call")
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
        if mesh.size() > 1 and not _carries(group_of(mesh), "cpu"):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    def exchange(
        self, call: Call, outgoing: Sequence[Parcel], incoming: Sequence[Parcel], *, at_once: bool
    ) -> Callable[[], None]:
        if len(call.mesh.ranks) == 1:
            return _nothing
        waiter = Waiter(group_of(call.mesh), call.label, call.mesh)
        if FAILED:
            waiter.check()
        if self.reach is not None:
            self._reach(call.mesh, call.label)
        if not self.ledger(call.mesh).compared:
            self._compare_environments(call.mesh, call.label)
        own = torch.cuda.is_available() and set(dist.get_process_group_ranks(waiter.group)) == set(call.mesh.ranks)
        if own and _carries(waiter.group, "cuda"):
            self._warm_up(waiter)  # on all ranks, also on those that move nothing and know no device
        first = outgoing[0].parts[0] if outgoing else incoming[0].parts[0] if incoming else None
        if first is not None and not call.forward and _is_unseen(call):
            _compare_with(waiter, call, {parcel.peer for parcel in (*outgoing, *incoming)}, first.device)
        if first is not None and first.is_cuda:
            if not own:
                raise RuntimeError(
                    f"{call.label}: on CUDA, {call.mesh} needs a process group of exactly its own ranks; use a DeviceMesh of"
                    " one axis over them (DeviceMesh._flatten makes one of several axes)"
                )
            queueing = waiter._replace(blocks=False)
            run_stages(by_stage(outgoing, incoming), lambda sends, receives: post_batch(queueing, sends, receives))
            return _nothing
        if call.dtype is None:
            return _nothing
        if not is_staged(outgoing, incoming):
            return post(waiter, call.tag, outgoing, incoming)
        stages = by_stage(outgoing, incoming)
        in_flight = len(stages) if at_once else 1 + _STAGES_IN_FLIGHT
        return run_stages_later(stages, lambda sends, receives: post(waiter, call.tag, sends, receives), in_flight)

    def _reach(self, mesh: Mesh, label: str) -> None:
        try:
            if self.reach is not None:
                self.reach(label)
        except Exception as error:
            self.give_up(mesh, f"rank {mesh.get_rank()}: {error}")
            raise

    def _warm_up(self, waiter: Waiter) -> None:
        """Let all ranks of a group communicate once: NCCL's first point-to-point batch may not leave a rank out."""
        group = waiter.group
        if group.group_name not in self._warm:
            work = dist.all_reduce(torch.zeros(1, device="cuda"), group=group, async_op=True)
            waiter.wait([work], [rank for rank in waiter.mesh.ranks if rank != waiter.mesh.get_rank()])
            self._warm.add(group.group_name)

    def collective(
        self, call: Call, collective: Collective, source: torch.Tensor, target: torch.Tensor
    ) -> Callable[[], None] | None:
        start = starting(collective, source)
        if start is None or (collective.kind == "allgather" and not source.is_cuda):
            return None
        waiter = Waiter(start.group, call.label, call.mesh, blocks=not source.is_cuda)
        if FAILED:
            waiter.check()
        if self.reach is not None:
            self._reach(call.mesh, call.label)
        if not self.ledger(call.mesh).compared:
            self._compare_environments(call.mesh, call.label)
        if not source.is_cuda:
            _lead(waiter, call.tag, collective)
        elif not call.forward and _is_unseen(call) and len(collective.line) > 1:
            peers = {rank for rank in collective.line if rank != call.mesh.rank}
            _compare_with(waiter._replace(group=group_of(call.mesh)), call, peers, source.device)
        return start_native(waiter, collective, start, source, target)

    def watch(self, call: Call, outputs: Sequence[torch.Tensor]) -> Callable[[], None]:
        return _nothing

    def give_up(self, mesh: Mesh, words: str) -> None:
        if mesh.size() > 1:
            for group in {group_of(mesh), *axis_groups(mesh)}:
                give_up(group, words)

    def world(self) -> Mesh:
        if not dist.is_available() or not dist.is_initialized():
            return Mesh(1, rank=0)
        return Mesh(dist.get_world_size(), rank=dist.get_rank())

    def all_gather_bytes(self, mesh: Mesh, record: bytes) -> list[bytes]:
        if mesh.size() == 1:
            return [record]
        inside = self.inside.get(mesh.digest)
        operation = "the agreement check" + (f" of {inside[1].label}" if inside is not None else "")
        if self.reach is not None:
            self._reach(mesh, operation)
        self._compare_environments(mesh, operation)
        return self._gather_bytes(mesh, record, _RECORD_TAG, operation)

    def _gather_bytes(self, mesh: Mesh, record: bytes, tag: int, what: str) -> list[bytes]:
        waiter, device = Waiter(group_of(mesh), what, mesh, _HINT), self.device(mesh)
        if FAILED:
            waiter.check()
        mine = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        by_rank = {rank: torch.empty_like(mine) for rank in mesh.ranks}
        peers = [rank for rank in mesh.ranks if rank != mesh.get_rank()]
        order = dist.get_process_group_ranks(waiter.group)
        if device.type == "cuda" and set(order) == set(mesh.ranks):
            work = dist.all_gather([by_rank[rank] for rank in order], mine, group=waiter.group, async_op=True)
            waiter.wait([work], peers)
        else:
            swap(waiter, mine, peers, {peer: by_rank[peer] for peer in peers}, tag ^ len(record))
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


def _compare_with(waiter: Waiter, call: Call, peers: Collection[int], device: torch.device) -> None:
    """Compare a call with those of the ranks that it exchanges something with.

    Raises:
        ValueError: if they differ.
    """
    facts = {fact: word for fact, word in call.facts.items() if fact != "differentiated"}
    mine = torch.frombuffer(bytearray(encoded(facts)), dtype=torch.uint8).to(device)
    theirs = {peer: torch.empty_like(mine) for peer in sorted(peers)}
    swap(waiter, mine, list(theirs), theirs, _PAIR_TAG)
    records = {call.mesh.get_rank(): facts} | {peer: decoded(bytes_of(other)) for peer, other in theirs.items()}
    compare_facts(call.label, dict(sorted(records.items())))


def _lead(waiter: Waiter, tag: int, collective: Collective) -> None:
    """Wait for the rank before this one on the line to come to the same call, by its tag."""
    line, here = collective.line, collective.position
    byte, room = torch.zeros(2, dtype=torch.uint8, device="cpu").split(1)
    swap(waiter, byte, [line[(here + 1) % len(line)]], {line[here - 1]: room}, tag ^ _LEAD_TAG)


def _carries(group: dist.ProcessGroup, device: str) -> bool:
    return device in device_types_of(group)
