"""Programs that know nothing but ``torch.distributed``, on simulated ranks: torch's own collectives, DTensor, FSDP2, DDP, DCP."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests.spawn import RankPool
from tests.torch_programs import collectives, messages, on_rank

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.distributed.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*type_.* is deprecated:FutureWarning"),
]


def run(program: Callable[[], Any], ranks: int, **keywords: Any) -> dict[int, Any]:
    def started(mesh: Mesh) -> Any:
        dist.init_process_group("gloo")
        try:
            return program()
        finally:
            dist.destroy_process_group()

    return mf.simulate(started, ranks, torch_distributed=True, **keywords).results


# Collectives.


def assert_alike(one: Any, other: Any) -> None:
    assert pytree.tree_structure(one) == pytree.tree_structure(other)
    for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.distributed
@pytest.mark.parametrize("program", [collectives, messages])
def test_collectives_are_those_of_gloo(program: Callable[[], Any], ranks4: RankPool) -> None:
    real = dict(enumerate(ranks4.run(on_rank, program)))
    for settings in ({}, {"choices": 5}, {"carrier": "rendezvous"}, {"carrier": "nccl"}):
        for rank, found in run(program, 4, **settings).items():
            assert_alike(found, real[rank])


def test_functional_collectives() -> None:
    def program() -> list[torch.Tensor]:
        mine = torch.full((2, 2), float(dist.get_rank()))
        group = dist.group.WORLD
        assert group is not None
        return [
            functional.all_reduce(mine, "sum", group) + 1,
            functional.all_gather_single(mine, 0, group),
            functional.reduce_scatter_single(torch.cat([mine, mine + 1]), "avg", 0, group) * 1,
        ]

    for rank, (total, gathered, scattered) in run(program, 2).items():
        assert torch.equal(total, torch.full((2, 2), 2.0))
        assert torch.equal(gathered, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]))
        assert torch.equal(scattered, torch.full((2, 2), 0.5 + rank))


# What others have made of them.


def toy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(ranks: int) -> torch.Tensor:
    return torch.randn(2 * ranks, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def trained(model: nn.Module, inputs: torch.Tensor, steps: int = 3) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    full = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    return {name.removeprefix("module."): tensor.detach() for name, tensor in full.items()}


def my_part() -> torch.Tensor:
    return batch(dist.get_world_size())[2 * dist.get_rank() :][:2]


def fsdp2(*shape: int) -> dict[str, torch.Tensor]:
    model, mesh = toy(), init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return trained(model, my_part())


def ddp() -> dict[str, torch.Tensor]:
    return trained(DistributedDataParallel(toy()), my_part())


@pytest.mark.parametrize(
    ("program", "ranks"),
    [(partial(fsdp2, 2), 2), (partial(fsdp2, 3), 3), (partial(fsdp2, 2, 2), 4), (ddp, 3)],
    ids=["FSDP2 on 2", "FSDP2 on 3", "HSDP on (2, 2)", "DDP on 3"],
)
def test_data_parallel_training_is_dense_training(program: Callable[[], Any], ranks: int) -> None:
    dense = trained(toy(), batch(ranks))
    for found in run(program, ranks).values():
        torch.testing.assert_close(found, dense)


def test_fsdp2_gives_the_same_bits_whatever_comes_first() -> None:
    first = run(partial(fsdp2, 3), 3)
    for tape in range(3):
        for carrier in ("eager", "nccl"):
            assert_alike(run(partial(fsdp2, 3), 3, choices=tape, carrier=carrier), first)


def test_tensor_parallel() -> None:
    def program() -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(toy(), mesh, plan)
        output = model(batch(1))
        output.square().mean().backward()
        return output.detach(), [p.grad.full_tensor() for p in model.parameters()]

    model = toy()
    output = model(batch(1))
    output.square().mean().backward()
    for found in run(program, 4).values():
        torch.testing.assert_close(found, (output.detach(), [p.grad for p in model.parameters()]))


def test_dtensor() -> None:
    def program() -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        values = torch.arange(24.0).view(6, 4)
        one = distribute_tensor(values, mesh, [Shard(0), Shard(1)])
        moved = one.redistribute(mesh, [Shard(1), Replicate()])
        return moved.to_local(), (one @ one.T).full_tensor(), one.sum().full_tensor(), mesh["b"].get_local_rank()

    values = torch.arange(24.0).view(6, 4)
    for rank, (local, product, total, column) in run(program, 4).items():
        assert torch.equal(local, values[:, 2 * (rank // 2) :][:, :2])
        assert torch.equal(product, values @ values.T)
        assert (float(total), column) == (float(values.sum()), rank % 2)


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_checkpoints_of_fsdp2_are_read_on_another_number_of_ranks(tmp_path: Path) -> None:
    def program(*, load: bool) -> dict[str, torch.Tensor]:
        model = fully_shard(toy(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        state = model.state_dict()
        if load:
            torch._foreach_zero_(list(state.values()))
        (dcp.load if load else dcp.save)(state, checkpoint_id=tmp_path / "checkpoint")
        return {name: tensor.full_tensor() for name, tensor in state.items()}

    saved = run(partial(program, load=False), 4)
    assert_alike(run(partial(program, load=True), 3)[2], saved[0])


def test_beside_this_library() -> None:
    def program() -> float:
        mesh = mf.as_mesh(init_device_mesh("cpu", (2,)))
        buffer = mf.DBuffer.from_local(torch.ones(4), mesh, [mf.Partial()], mf.build_for_row_atomic([(2, 2)], 2))
        total = buffer.allreduce(0).local_buffer
        dist.all_reduce(total)
        return total.sum().item()

    assert run(program, 2) == {0: 16.0, 1: 16.0}


def test_a_call_that_has_ended_keeps_no_results() -> None:
    def program() -> bool:
        room = torch.zeros(4)
        work = dist.all_gather_into_tensor(room, torch.ones(2), async_op=True)
        assert work is not None
        work.wait()
        storage = StorageWeakRef(room.untyped_storage())
        del room, work
        return storage.expired()

    assert all(run(program, 2).values())


# What goes wrong.


def left_out() -> None:
    if dist.get_rank() != 1:
        dist.all_reduce(torch.ones(2))


def mixed_up() -> None:
    if dist.get_rank():
        dist.all_reduce(torch.ones(2))
    else:
        dist.broadcast(torch.ones(2), 0)


def other_sizes() -> None:
    dist.all_gather_into_tensor(torch.zeros(6), torch.ones(2 + dist.get_rank()))


def never_sent() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2), 2)


def crossed() -> None:
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    if dist.get_rank() < 2:
        for group in (one, two) if dist.get_rank() else (two, one):
            dist.all_reduce(torch.ones(1), group=group)


@pytest.mark.parametrize(
    ("program", "error", "told"),
    [
        (
            left_out,
            mf.SimulationError,
            r"rank 0 waits in all_reduce .* over ranks 0, 1, 2 .* for rank 1, at .*_torch\.py",
        ),
        (mixed_up, ValueError, r"operation: broadcast on ranks \[0\], all_reduce on ranks \[1, 2\]"),
        (other_sizes, ValueError, r"sizes: \(2,\) of float32 on ranks \[0\], \(3,\) of float32 on ranks \[1\]"),
        (
            never_sent,
            mf.SimulationError,
            r"rank 0 waits in recv from rank 2 .* for rank 2, at tests/test_simulated_torch\.py",
        ),
        (
            crossed,
            mf.SimulationError,
            r"rank 0 waits .* group '2' .* for rank 1(.|\n)*rank 1 waits .* group '1' .* for rank 0",
        ),
    ],
)
def test_what_ranks_do_wrong_is_named(program: Callable[[], None], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        run(program, 3)


def both_send_first() -> None:
    other = 1 - dist.get_rank()
    dist.send(torch.ones(2), other)
    dist.recv(torch.ones(2), other)


def test_rendezvous_finds_senders_that_wait_for_one_another() -> None:
    run(both_send_first, 2)
    with pytest.raises(mf.SimulationError, match=r"rank 0 waits in send to rank 1 .* for rank 1"):
        run(both_send_first, 2, carrier="rendezvous")


@pytest.mark.parametrize("at", [0, 3, 7])
def test_a_rank_that_is_killed_is_named_by_the_others(at: int) -> None:
    def started(mesh: Mesh) -> Any:
        dist.init_process_group("gloo")
        return fsdp2(3)

    simulation = mf.simulate(started, 3, torch_distributed=True, faults=[mf.faults.Kill(rank=1, at=at)])
    assert sorted(simulation.errors) == [0, 2]
    assert all(isinstance(error, mf.ExchangeError) for error in simulation.errors.values())


def test_a_flipped_bit() -> None:
    def program() -> list[float]:
        total = torch.ones(2)
        dist.all_reduce(total)
        return total.tolist()

    assert run(program, 2)[0] == [2.0, 2.0]
    assert run(program, 2, faults=[mf.faults.Corrupt(rank=1, at=0, bit=31)])[0] == [0.0, 2.0]  # the sign


@pytest.fixture
def outside() -> Iterator[None]:
    before = sys.excepthook, dist.distributed_c10d._world
    yield
    assert (sys.excepthook, dist.distributed_c10d._world) == before
    assert not dist.is_initialized()


@pytest.mark.usefixtures("outside")
def test_nothing_is_left_behind() -> None:
    def program(mesh: Mesh) -> tuple[bool, bool]:
        before = dist.is_initialized()
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return before, dist.is_initialized()

    for _ in range(2):
        assert mf.simulate(program, 2, torch_distributed=True).results == {0: (False, True), 1: (False, True)}
    with pytest.raises(ValueError, match=r"torch_distributed=True needs ranks 0 to 1, got \(3, 5\)"):
        mf.simulate(program, 2, ranks=(3, 5), torch_distributed=True)
