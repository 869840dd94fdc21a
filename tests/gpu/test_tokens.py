"""Tokens on CUDA: order between streams, and memory that lives as long as a stream needs it.

One process and a mesh of one rank (whose operations are copies on a stream), simulated ranks whose tensors are on the
device, or two real devices. Every test delays somebody: without the token's event or its care for memory, it would
read or overwrite what is not there yet.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh, as_mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.spawn import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

Tensors = dict[int, torch.Tensor]
SHAPE = (512, 1024)
CYCLES = 200_000_000
"""About a tenth of a second of a stream's time."""


@pytest.fixture(autouse=True)
def idle_device() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()


def alone(name: str = "alone") -> GroupOwnerLayout:
    """One rank that holds and owns a single tensor: gather and scatter are copies."""
    return GroupOwnerLayout(Mesh(1, rank=0), mf.build_for_row_atomic([SHAPE], 1), {0: 0}, name=name)


def late(value: float) -> torch.Tensor:
    """A tensor that gets its value only after a delay on the current stream."""
    tensor = torch.zeros(SHAPE, device="cuda")
    torch.cuda._sleep(CYCLES)
    return tensor.fill_(value)


def scribble() -> list[torch.Tensor]:
    """Take memory of the same size on the current stream, and write over it."""
    return [torch.full(SHAPE, -7.0, device="cuda") for _ in range(4)]


def assert_full(tensor: torch.Tensor, value: float) -> None:
    torch.cuda.synchronize()
    assert tensor.is_cuda
    assert torch.equal(tensor.cpu(), torch.full(SHAPE, value))


def test_default_is_ordered_on_the_current_stream() -> None:
    gathered, token = mf.gather({0: late(3)}, owner_layout=alone())
    assert token.pending == ()
    doubled = gathered[0] * 2
    assert_full(gathered[0], 3)
    assert_full(doubled, 6)


def test_default_on_a_side_stream_that_is_current() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        gathered, token = mf.gather({0: late(3)}, owner_layout=alone())
        doubled = gathered[0] * 2
    assert token.pending == ()
    assert_full(doubled, 6)


def test_async_starts_after_a_delayed_producer() -> None:
    gathered, token = mf.gather({0: late(3)}, owner_layout=alone(), async_op=True)
    token.wait()
    doubled = gathered[0] * 2
    assert_full(doubled, 6)


def test_the_result_is_waited_for_on_the_device_not_on_the_host() -> None:
    side, source = torch.cuda.Stream(), torch.full(SHAPE, 3.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10 * CYCLES)
    gathered, token = mf.gather({0: source}, owner_layout=alone(), stream=side)
    assert not side.query(), "the host has waited for the operation"
    assert torch.cuda.current_stream().query(), "the current stream waits before it was asked to"
    token.wait()
    doubled = gathered[0] * 2
    assert not side.query(), "the host has waited for the token"
    assert_full(doubled, 6)


def test_a_stream_sees_inputs_that_are_ready_on_it() -> None:
    """Inputs made on the stream that is given need no other stream, not even to make them contiguous."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        wide = torch.zeros(SHAPE[0], 2 * SHAPE[1], device="cuda")
        torch.cuda._sleep(CYCLES)
        wide.fill_(3)
    gathered, token = mf.gather({0: wide[:, ::2]}, owner_layout=alone(), stream=side)
    token.wait()
    assert_full(gathered[0] * 2, 6)


def test_wait_on_another_stream() -> None:
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    source = torch.full(SHAPE, 3.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
    gathered, token = mf.gather({0: source}, owner_layout=alone(), stream=side)
    token.wait(other)
    with torch.cuda.stream(other):
        doubled = gathered[0] * 2
    for stream in (other, None, side, other):  # any number of times, on any stream
        token.wait(stream)
    tripled = gathered[0] * 3
    assert_full(doubled, 6)
    assert_full(tripled, 9)


def test_inputs_may_be_dropped_while_the_operation_still_reads_them() -> None:
    side, source = torch.cuda.Stream(), {0: torch.full(SHAPE, 3.0, device="cuda")}
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
    gathered, token = mf.gather(source, owner_layout=alone(), stream=side)
    source.clear()
    junk = scribble()
    token.wait()
    assert_full(gathered[0], 3)
    assert len(junk) == 4


def test_inputs_that_were_made_contiguous_may_be_dropped_too() -> None:
    side = torch.cuda.Stream()
    source = {0: torch.full((SHAPE[1], SHAPE[0]), 3.0, device="cuda").t()}
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
    gathered, token = mf.gather(source, owner_layout=alone(), stream=side)
    source.clear()
    junk = scribble()
    token.wait()
    assert_full(gathered[0], 3)
    assert len(junk) == 4


def test_results_may_be_dropped_while_the_waiting_stream_still_reads_them() -> None:
    side, source = torch.cuda.Stream(), torch.full(SHAPE, 3.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    gathered, token = mf.gather({0: source}, owner_layout=alone(), stream=side)
    token.wait()
    torch.cuda._sleep(CYCLES)
    doubled = gathered[0] * 2
    del gathered, token
    with torch.cuda.stream(side):  # where the result's memory came from, and would go back to at once
        junk = scribble()
    assert_full(doubled, 6)
    assert len(junk) == 4


def test_results_and_tokens_may_be_dropped_unread() -> None:
    side, source = torch.cuda.Stream(), torch.full(SHAPE, 3.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
    mf.gather({0: source}, owner_layout=alone(), stream=side)
    junk = scribble()
    del source
    junk += scribble()
    torch.cuda.synchronize()
    assert all(torch.equal(tensor.cpu(), torch.full(SHAPE, -7.0)) for tensor in junk)


def test_after_orders_operations_on_different_streams() -> None:
    one, two, source = torch.cuda.Stream(), torch.cuda.Stream(), torch.full(SHAPE, 3.0, device="cuda")
    one.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(one):
        torch.cuda._sleep(CYCLES)
    gathered, first = mf.gather({0: source}, owner_layout=alone(), stream=one)
    parts, second = mf.scatter(gathered, owner_layout=alone(), after=first, stream=two)
    second.wait()
    assert_full(parts[0], 3)


def test_after_is_waited_for_on_the_current_stream_too() -> None:
    side, source = torch.cuda.Stream(), torch.full(SHAPE, 3.0, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(CYCLES)
    gathered, token = mf.gather({0: source}, owner_layout=alone(), stream=side)
    parts, last = mf.scatter(gathered, owner_layout=alone(), after=token)
    assert last.pending == ()
    assert_full(parts[0] * 2, 6)


def test_several_groups_in_flight_on_several_streams() -> None:
    streams = [torch.cuda.Stream() for _ in range(4)]
    pairs = []
    for number, stream in enumerate(streams):
        source = {0: late(number)}
        stream.wait_stream(torch.cuda.current_stream())
        pairs.append(mf.gather(source, owner_layout=alone(f"group {number}"), stream=stream))
        source.clear()
    junk = scribble()
    for number, (gathered, token) in reversed(list(enumerate(pairs))):
        token.wait()
        assert_full(gathered[0] + 1, number + 1)
    assert len(junk) == 4


@pytest.mark.parametrize("how", ["default", "async_op", "stream"])
def test_gradients(how: str) -> None:
    side = torch.cuda.Stream()
    keywords: dict[str, Any] = {"default": {}, "async_op": {"async_op": True}, "stream": {"stream": side}}[how]
    leaf = late(3).requires_grad_()
    side.wait_stream(torch.cuda.current_stream())
    gathered, token = mf.gather({0: leaf}, owner_layout=alone(), **keywords)
    token.wait()
    parts, last = mf.scatter({0: gathered[0] ** 2}, owner_layout=alone(), after=token)
    last.wait()
    (parts[0].sum() + last.link).backward()
    assert leaf.grad is not None
    assert_full(leaf.grad, 6)


@pytest.mark.parametrize("how", ["default", "async_op", "stream"])
def test_func_transforms(how: str) -> None:
    side = torch.cuda.Stream()
    keywords: dict[str, Any] = {"default": {}, "async_op": {"async_op": True}, "stream": {"stream": side}}[how]

    def cubes(source: torch.Tensor) -> torch.Tensor:
        gathered, token = mf.gather({0: source}, owner_layout=alone(), **keywords)
        token.wait()
        return (gathered[0] ** 3).sum()

    batch = torch.stack([late(1), late(2)])
    side.wait_stream(torch.cuda.current_stream())
    gradients = torch.func.vmap(torch.func.grad(cubes))(batch)
    assert_full(gradients[0], 3)
    assert_full(gradients[1], 12)


def test_a_token_in_flight_may_not_enter_a_compiled_region() -> None:
    owners = alone()

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(source: torch.Tensor, token: mf.Token) -> torch.Tensor:
        return mf.gather({0: source}, owner_layout=owners, after=token)[0][0] * 2

    source = torch.full(SHAPE, 3.0, device="cuda")
    _, token = mf.gather({0: source}, owner_layout=owners, async_op=True)
    with pytest.raises(Exception, match=r"call token\.wait\(\) before entering it"):
        step(source, token)
    _, ready = mf.gather({0: source}, owner_layout=owners)
    assert_full(step(source, ready), 6)


def test_a_stream_of_no_use_on_cpu() -> None:
    with pytest.raises(ValueError, match="stream= is for CUDA tensors"):
        mf.gather({0: torch.zeros(SHAPE)}, owner_layout=alone(), stream=torch.cuda.Stream())


# Several ranks.


def exchange(mesh: Mesh, device: torch.device, how: str) -> list[Tensors]:
    """Gather, change and scatter with delays on every rank; results on the host."""
    layout = mf.build_for_row_atomic_unpadding([SHAPE, (6, 5), (300, 700)], mesh.size())
    owners = GroupOwnerLayout(mesh, layout, {i: mesh.ranks[(i + 1) % mesh.size()] for i in range(3)}, name="several")
    local = layout.get_local_range(mesh, owners.placements)
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def keywords(number: int) -> dict[str, Any]:
        current = torch.cuda.current_stream(device)
        if how == "stream":
            streams[number].wait_stream(current)
            return {"stream": streams[number]}
        return {"async_op": how == "async_op"}

    results: list[Tensors] = []
    for turn in range(3):
        source = {}
        for i, part in layout.tensors_in(local):
            torch.cuda._sleep(CYCLES // 10 * (1 + mesh.get_rank() + turn))
            source[i] = torch.arange(part.start, part.end, device=device, dtype=torch.float32) + turn
        gathered, token = mf.gather(source, owner_layout=owners, device=device, dtype=torch.float32, **keywords(0))
        source.clear()
        scribble()
        token.wait()
        changed = {i: tensor * 2 for i, tensor in gathered.items()}
        parts, last = mf.scatter(changed, owner_layout=owners, after=token, device=device, **keywords(1))
        changed.clear()
        scribble()
        last.wait()
        results.append({i: part.cpu() for i, part in parts.items()})
    return results


def check_exchange(results: dict[int, list[Tensors]], shapes: Callable[[int], Mesh]) -> None:
    for rank, turns in results.items():
        mesh = shapes(rank)
        layout = mf.build_for_row_atomic_unpadding([SHAPE, (6, 5), (300, 700)], mesh.size())
        held = layout.tensors_in(layout.get_local_range(mesh, [mf.RowAtomic()]))
        for turn, parts in enumerate(turns):
            assert list(parts) == sorted(i for i, _ in held)
            for i, part in held:
                wanted = 2 * (torch.arange(part.start, part.end, dtype=torch.float32) + turn)
                assert torch.equal(parts[i].reshape(-1), wanted), f"rank {rank}, turn {turn}, tensor {i}"


@pytest.mark.parametrize("how", ["default", "async_op", "stream"])
def test_simulated_ranks_with_tensors_on_the_device(how: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    results = mf.simulate(partial(exchange, device=device, how=how), 4, ranks=(2, 0, 3, 1)).results
    check_exchange(results, lambda rank: Mesh(4, ranks=(2, 0, 3, 1), rank=rank))


def exchange_on(rank: int, how: str) -> list[Tensors]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    mesh = as_mesh(DeviceMesh.from_group(group, "cuda"))
    with mf.agreement_check(how == "default"):
        results = exchange(mesh, device, how)
    torch.cuda.synchronize()
    dist.destroy_process_group(group)
    return results


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("how", ["default", "async_op", "stream"])
def test_two_devices(how: str, ranks2: RankPool) -> None:
    results = ranks2.run(exchange_on, how, timeout=120)
    check_exchange(dict(enumerate(results)), lambda rank: Mesh(2, rank=rank))
