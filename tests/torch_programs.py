"""Programs of ``torch.distributed``, for real ranks, which import this file, and simulated ones."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def collectives() -> dict[str, Any]:
    """Every collective of torch.distributed that gloo has too."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def mine(numel: int = 3, plus: float = 0.0) -> torch.Tensor:
        return torch.arange(numel, dtype=torch.float32) + 10 * rank + plus

    def rooms(numel: int = 3) -> list[torch.Tensor]:
        return [torch.zeros(numel) for _ in range(size)]

    found: dict[str, Any] = {}
    for op in ("SUM", "PRODUCT", "MIN", "MAX"):
        found[f"all_reduce {op}"] = mine()
        dist.all_reduce(found[f"all_reduce {op}"], getattr(dist.ReduceOp, op))
    found["broadcast"] = mine()
    dist.broadcast(found["broadcast"], src=1)
    reduced = mine()
    dist.reduce(reduced, dst=1)
    found["reduce"] = reduced if rank == 1 else None  # elsewhere, what it holds is nobody's business
    found["all_gather"] = rooms()
    dist.all_gather(found["all_gather"], mine())
    found["all_gather_into_tensor"] = torch.zeros(3 * size)
    dist.all_gather_into_tensor(found["all_gather_into_tensor"], mine())
    found["reduce_scatter_tensor"] = torch.zeros(2)
    dist.reduce_scatter_tensor(found["reduce_scatter_tensor"], mine(2 * size))
    found["gather"] = rooms() if rank == 0 else None
    dist.gather(mine(), found["gather"], dst=0)
    found["scatter"] = torch.zeros(3)
    dist.scatter(found["scatter"], [mine(plus=100 * k) for k in range(size)] if rank == 1 else None, src=1)
    found["all_to_all_single"] = torch.zeros(size)
    dist.all_to_all_single(found["all_to_all_single"], mine(size))
    uneven = [1 + (rank + k) % 2 for k in range(size)]
    found["all_to_all_single, uneven"] = torch.zeros(sum(uneven))
    dist.all_to_all_single(found["all_to_all_single, uneven"], mine(sum(uneven)), uneven, uneven)
    found["all_gather_object"] = [None] * size
    dist.all_gather_object(found["all_gather_object"], {"rank": rank})
    words = [f"from {rank}"]
    dist.broadcast_object_list(words, src=size - 1)
    found["broadcast_object_list"] = words
    pairs = dist.new_group([0, 1])
    if rank < 2:
        found["subgroup"] = mine()
        dist.all_reduce(found["subgroup"], group=pairs)
    dist.barrier()
    return found


def messages() -> dict[str, Any]:
    """Around a ring: in turn, in flight, and in a batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, room, found = torch.full((2,), float(rank)), torch.zeros(2), {}
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank % 2:
        dist.recv(room, before)
        dist.send(mine, after)
    else:
        dist.send(mine, after)
        dist.recv(room, before)
    found["in turn"] = room.clone()
    works = [dist.irecv(room, after, tag=1), dist.irecv(second := torch.zeros(2), after, tag=2)]
    works += [dist.isend(mine + 2, before, tag=2), dist.isend(mine + 1, before, tag=1)]
    for work in works:
        work.wait()
    found["in flight"] = [room.clone(), second]
    batch = [dist.P2POp(dist.isend, mine * 5, after), dist.P2POp(dist.irecv, room, before)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    found["in a batch"] = room
    return found


def on_rank(rank: int, program: Callable[[], Any]) -> Any:
    return program()
