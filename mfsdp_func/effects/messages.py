"""Messages over a process group: posted a stage at a time, waited for, unpacked."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist

from mfsdp_func.effects.blocks import as_bytes, packed, room_for, unpack
from mfsdp_func.effects.carrier import Parcel
from mfsdp_func.effects.exchange_error import ExchangeError
from mfsdp_func.effects.waiting import Waiter, give_up

Stage = tuple[list[Parcel], list[Parcel]]
Post = Callable[[Sequence[Parcel], Sequence[Parcel]], Callable[[], None]]


def swap(
    waiter: Waiter, mine: torch.Tensor, receivers: Sequence[int], theirs: dict[int, torch.Tensor], tag: int
) -> None:
    """Send one small message to each of `receivers`, and receive one from each rank in `theirs`.

    Raises:
        ExchangeError: if not all of them take part in time.
    """
    peers = [*theirs, *receivers]
    works = [_irecv(waiter, room, peer, tag, peers) for peer, room in theirs.items()]
    works += [_isend(waiter, mine, peer, tag, peers) for peer in receivers]
    waiter.wait(works, peers)


def post(waiter: Waiter, tag: int, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], None]:
    """Post the messages of one stage to gloo; return what waits for them and unpacks.

    Raises:
        ExchangeError: if the backend cannot.
        Exception: if this rank's own memory fails; the others are told.
    """
    group, works = waiter.group, list[dist.Work]()
    peers = [parcel.peer for parcel in (*receives, *sends)]
    incoming: list[torch.Tensor] = []
    outgoing: list[torch.Tensor] = []
    try:
        for parcel in receives:
            incoming.append(room := room_for(parcel.parts))
            works.append(_irecv(waiter, as_bytes(room), parcel.peer, tag, peers))
        for parcel in sends:
            outgoing.append(buffer := packed(parcel.parts))
            works.append(_isend(waiter, as_bytes(buffer), parcel.peer, tag, peers))
    except ExchangeError:
        raise
    except Exception as error:
        give_up(group, f"rank {waiter.mesh.get_rank()}, in {waiter.operation}: {type(error).__name__}: {error}")
        raise

    def finish(held: Sequence[torch.Tensor] = outgoing) -> None:
        waiter.wait(works, peers)
        for room, parcel in zip(incoming, receives, strict=True):
            unpack(room, parcel.parts)

    return finish


def post_batch(waiter: Waiter, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Callable[[], None]:
    """Queue one stage on the current CUDA stream as one batch."""
    group = waiter.group
    incoming = [room_for(parcel.parts) for parcel in receives]
    peers = [parcel.peer for parcel in (*receives, *sends)]
    operations = [
        dist.P2POp(dist.irecv, as_bytes(room), parcel.peer, group)
        for room, parcel in zip(incoming, receives, strict=True)
    ]
    operations += [dist.P2POp(dist.isend, as_bytes(packed(parcel.parts)), parcel.peer, group) for parcel in sends]
    try:
        works = dist.batch_isend_irecv(operations)
    except RuntimeError as error:
        raise waiter.failure(peers, error) from error

    def finish() -> None:
        waiter.wait(works, peers)
        for room, parcel in zip(incoming, receives, strict=True):
            unpack(room, parcel.parts)

    return finish


def by_stage(outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> list[Stage]:
    """The parcels of each stage, in ascending order."""
    if not is_staged(outgoing, incoming):
        return [(list(outgoing), list(incoming))]
    stages: dict[int, Stage] = {}
    for side, parcels in enumerate((outgoing, incoming)):
        for number, group in groupby(parcels, key=lambda parcel: parcel.stage):
            stages.setdefault(number, ([], []))[side].extend(group)
    return [stages[number] for number in sorted(stages)]


def is_staged(outgoing: Sequence[Parcel], incoming: Sequence[Parcel]) -> bool:
    """Whether there is more than one stage."""
    return bool((outgoing and outgoing[-1].stage) or (incoming and incoming[-1].stage))


def run_stages(stages: Sequence[Stage], post: Post) -> None:
    """Post each stage and wait for it."""
    for sends, receives in stages:
        post(sends, receives)()


def run_stages_later(stages: Sequence[Stage], post: Post, in_flight: int) -> Callable[[], None]:
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


def _isend(waiter: Waiter, tensor: torch.Tensor, peer: int, tag: int, peers: Sequence[int]) -> dist.Work:
    try:
        return waiter.group.send([tensor], dist.get_group_rank(waiter.group, peer), tag)
    except RuntimeError as error:
        raise waiter.failure(peers, error) from error


def _irecv(waiter: Waiter, tensor: torch.Tensor, peer: int, tag: int, peers: Sequence[int]) -> dist.Work:
    try:
        return waiter.group.recv([tensor], dist.get_group_rank(waiter.group, peer), tag)
    except RuntimeError as error:
        raise waiter.failure(peers, error) from error


def _nothing() -> None:
    pass
