"""The simulated mesh: deterministic, and it names what would be a hang or a wrong number on real ranks."""

import math
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.func import grad, vmap

import mfsdp_func as mf
from mfsdp_func.plans.plan import gather_plan
from mfsdp_func.testing import simulated  # noqa: F401  # a fixture
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout

Tensors = dict[int, torch.Tensor]


def group(mesh: Mesh, rows: int = 2, *, owner: int | None = None, name: str = "group") -> GroupOwnerLayout:
    """Two matrices of `rows` rows per rank, all on one owner (by default the last rank)."""
    layout = mf.build_for_row_atomic_unpadding([(rows * mesh.size(), 3)] * 2, mesh.size())
    return GroupOwnerLayout(
        mesh, layout, dict.fromkeys(range(2), mesh.ranks[-1] if owner is None else owner), name=name
    )


def whole(owners: GroupOwnerLayout) -> Tensors:
    return {i: torch.arange(float(s.numel())).view(s) + 1000 * i for i, s in enumerate(owners.layout.tensor_shapes)}


def shards(owners: GroupOwnerLayout) -> Tensors:
    full, layout = whole(owners), owners.layout
    local = layout.get_local_range(owners.mesh, owners.placements)
    return {i: full[i].view(-1)[part.start : part.end].clone() for i, part in layout.tensors_in(local)}


def step(mesh: Mesh) -> Tensors:
    owners = group(mesh)
    full, token = mf.gather(shards(owners), owner_layout=owners, dtype=torch.float32)
    return mf.scatter({i: 2 * tensor for i, tensor in full.items()}, owner_layout=owners, after=token)[0]


def check_step(parts: Tensors, owners: GroupOwnerLayout) -> None:
    wanted = shards(owners)
    assert list(parts) == list(wanted)
    assert all(torch.equal(parts[i].reshape(-1), 2 * wanted[i]) for i in wanted)


# What it returns.


def test_results_in_mesh_order_and_meshes_as_asked() -> None:
    def program(mesh: Mesh) -> tuple[Any, ...]:
        return mesh.get_rank(), mesh.coordinate(), mesh.shape, mesh.axis_names, mesh.ranks

    results, trace = mf.simulate(program, (2, 2), axis_names=("dp", "tp"), ranks=(7, 1, 4, 0))
    assert list(results) == [7, 1, 4, 0]
    assert results[4] == (4, (1, 0), (2, 2), ("dp", "tp"), (7, 1, 4, 0))
    assert trace == ()
    assert mf.simulate(lambda mesh: None, 1).results == {0: None}


def test_the_trace_is_what_the_plan_says() -> None:
    results, trace = mf.simulate(step, 3, ranks=(5, 2, 9))
    for rank, parts in results.items():
        check_step(parts, group(Mesh(3, ranks=(5, 2, 9), rank=rank)))
    plan = gather_plan(group(Mesh(3, ranks=(5, 2, 9))), "group")
    moved = {(piece.src, piece.dst): 0 for piece in plan.pieces()}
    for piece in plan.pieces():
        moved[piece.src, piece.dst] += 4 * piece.part.numel
    sent = {(s.src, s.dst): s.nbytes for s in trace if s.operation == "gather 'group'"}
    assert sent == moved == {(5, 9): 4 * 12, (2, 9): 4 * 12}
    back = {(s.dst, s.src): s.nbytes for s in trace if s.operation == "scatter 'group'"}
    assert back == moved
    assert len(trace) == 4


# Determinism.


def random_step(mesh: Mesh, sleep: Callable[[], None]) -> Any:
    owners = group(mesh)
    noise = []
    for _ in range(3):
        sleep()
        gathered, token = mf.gather(shards(owners), owner_layout=owners, async_op=True, dtype=torch.float32)
        noise.append((torch.rand(2), random.random(), torch.nn.functional.dropout(torch.ones(4))))
        sleep()
        token.wait()
        mf.scatter({i: t * torch.rand(()) for i, t in gathered.items()}, owner_layout=owners, after=token)
    return noise


def flat(results: dict[int, Any]) -> list[Any]:
    return [(a.tolist(), b, c.tolist()) for noise in results.values() for a, b, c in noise]


def test_same_trace_and_bits_whatever_the_load() -> None:
    wild = random.SystemRandom()
    first = mf.simulate(partial(random_step, sleep=lambda: None), (2, 3))
    for _ in range(3):
        again = mf.simulate(partial(random_step, sleep=lambda: time.sleep(wild.random() / 100)), (2, 3))
        assert again.trace == first.trace
        assert flat(again.results) == flat(first.results)


def test_random_states_are_those_of_separate_processes() -> None:
    """A rank draws what it would draw alone, whoever runs between; the caller's own states do not move."""

    def draw(mesh: Mesh, talk: bool) -> list[float]:
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(()).item(), random.random(), torch.randint(100, ()).item()]
            if talk:
                step(mesh)
        return drawn

    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    talking = mf.simulate(partial(draw, talk=True), 4, seed=11).results
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert talking == mf.simulate(partial(draw, talk=False), 4, seed=11).results
    for rank, drawn in talking.items():
        torch.manual_seed(11 + rank)
        random.seed(11 + rank)
        assert drawn == draw(Mesh(1), talk=False)
    assert len({tuple(drawn) for drawn in talking.values()}) == 4
    assert mf.simulate(partial(draw, talk=False), 4, seed=12).results != talking


def test_seeding_inside_a_rank_is_that_rank_s_own() -> None:
    def program(mesh: Mesh) -> float:
        if mesh.get_rank() == 0:
            torch.manual_seed(123)
        step(mesh)
        return torch.rand(()).item()

    seeded, other = mf.simulate(program, 2).results.values()
    assert other == torch.rand((), generator=torch.Generator().manual_seed(1)).item()
    assert seeded == torch.rand((), generator=torch.Generator().manual_seed(123)).item()


# Size, transforms and compiled regions.


def test_256_ranks_with_a_few_hundred_small_tensors() -> None:
    shapes = [(4 + i % 5, 3) for i in range(300)]
    layout = mf.build_for_row_atomic_unpadding(shapes, 256)
    full = {i: torch.full(shape, float(i)) for i, shape in enumerate(shapes)}

    def program(mesh: Mesh) -> tuple[int, int]:
        owners = GroupOwnerLayout(mesh, layout, {i: (i * 7) % 256 for i in full})  # most owners hold nothing of theirs
        local = layout.get_local_range(mesh, owners.placements)
        source = {i: full[i].view(-1)[part.start : part.end] for i, part in layout.tensors_in(local)}
        gathered, token = mf.gather(source, owner_layout=owners)
        assert all(torch.equal(tensor, full[i]) for i, tensor in gathered.items())
        parts, _ = mf.scatter({i: -tensor for i, tensor in gathered.items()}, owner_layout=owners, after=token)
        assert list(parts) == sorted(source)
        assert all(torch.equal(parts[i].reshape(-1), -source[i]) for i in source)
        return len(gathered), len(parts)

    results, trace = mf.simulate(program, (16, 16))
    assert sum(owned for owned, _ in results.values()) == 300
    assert len(trace) > 500


def test_func_on_ten_ranks() -> None:
    def program(mesh: Mesh) -> Tensors:
        owners = group(mesh)

        def loss(source: Tensors) -> torch.Tensor:
            full, token = mf.gather(source, owner_layout=owners)
            parts, last = mf.scatter({i: t**3 for i, t in full.items()}, owner_layout=owners, after=token)
            return sum((part.sum() for part in parts.values()), last.link)

        source = {i: tensor / 1000 for i, tensor in shards(owners).items()}
        batch = {i: torch.stack([tensor, -2 * tensor]) for i, tensor in source.items()}
        for i, gradient in grad(loss)(source).items():
            torch.testing.assert_close(gradient, 3 * source[i] ** 2)
        for i, gradient in vmap(grad(loss))(batch).items():
            torch.testing.assert_close(gradient, 3 * batch[i] ** 2)
        leaves = {i: tensor.clone().requires_grad_() for i, tensor in source.items()}
        loss(leaves).backward()
        for i, leaf in leaves.items():
            torch.testing.assert_close(leaf.grad, 3 * source[i] ** 2)
        return source

    assert len(mf.simulate(program, 10).results) == 10


def test_compiled_region_on_each_of_ten_ranks() -> None:
    frames = []

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        frames.append(module)
        return module.forward

    @partial(torch.compile, fullgraph=True, backend=backend)
    def local(tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor * rank + 1

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def whole_step(source: Tensors, owners: GroupOwnerLayout) -> Tensors:
        full, token = mf.gather(source, owner_layout=owners, dtype=torch.float32)
        return mf.scatter({i: 2 * t for i, t in full.items()}, owner_layout=owners, after=token)[0]

    def program(mesh: Mesh) -> list[float]:
        owners = group(mesh)
        for _ in range(2):
            check_step(whole_step(shards(owners), owners), owners)
        return local(torch.ones(2), mesh.get_rank()).tolist()

    torch._dynamo.reset()
    try:
        results = mf.simulate(program, 10).results
    finally:
        torch._dynamo.reset()
    assert results == {rank: [rank + 1.0] * 2 for rank in range(10)}
    assert frames, "nothing was compiled"


# Meshes inside the mesh.


def test_ranks_may_use_parts_of_the_mesh() -> None:
    """Rows and columns of a 2-D mesh, not equally often on all ranks, and the whole mesh between."""

    def program(mesh: Mesh) -> None:
        row, column = mesh.coordinate()
        rank = mesh.get_rank()
        rows = Mesh(3, ranks=mesh.axis_ranks(1), rank=rank)
        columns = Mesh(2, ranks=mesh.axis_ranks(0), rank=rank)
        for _ in range(1 + row):
            check_step(step(rows), group(rows))
        check_step(step(mesh), group(mesh))
        for _ in range(column):
            check_step(step(columns), group(columns))
        with mf.agreement_check():
            check_step(step(columns), group(columns))
            check_step(step(mesh), group(mesh))

    assert len(mf.simulate(program, (2, 3), ranks=(4, 0, 8, 1, 5, 2)).results) == 6


# Faults.


def test_a_rank_that_does_not_call_is_named() -> None:
    def program(mesh: Mesh) -> None:
        owners = group(mesh)
        if mesh.get_rank() != 1:
            mf.gather(shards(owners), owner_layout=owners)

    with pytest.raises(mf.SimulationError, match="deadlock: no rank can go on") as caught:
        mf.simulate(program, 3)
    text = str(caught.value)
    assert "rank 0 waits in gather 'group' (call 0) for rank 1" in text
    assert "rank 2 waits in gather 'group' (call 0) for rank 1" in text
    assert "finished: ranks [1]" in text
    assert "backward" not in text


def test_the_check_around_a_simulation_holds_inside() -> None:
    with mf.agreement_check():
        with pytest.raises(mf.SimulationError, match="in an agreement check"):
            mf.simulate(lambda mesh: step(mesh) if mesh.get_rank() else None, 2)
        assert len(mf.simulate(step, 2).results) == 2


def test_one_call_too_many_is_named() -> None:
    def program(mesh: Mesh) -> None:
        for _ in range(3 if mesh.get_rank() == 0 else 2):
            step(mesh)

    with pytest.raises(mf.SimulationError, match=r"rank 0 waits in gather 'group' \(call 4\) for rank 1") as caught:
        mf.simulate(program, 2)
    assert "finished: ranks [1]" in str(caught.value)


def test_a_circle_of_waiting_ranks_is_named() -> None:
    """Each rank first meets the next one, who is waiting for somebody else."""

    def program(mesh: Mesh) -> None:
        rank = mesh.get_rank()
        for pair in ((rank, (rank + 1) % 3), ((rank - 1) % 3, rank)):
            step(Mesh(2, ranks=pair, rank=rank))

    with pytest.raises(mf.SimulationError, match="deadlock") as caught:
        mf.simulate(program, 3)
    assert all(f"rank {rank} waits in gather 'group'" in str(caught.value) for rank in range(3))
    assert "finished" not in str(caught.value)


def test_a_rank_that_skips_the_check_is_named() -> None:
    def program(mesh: Mesh) -> None:
        with mf.agreement_check(mesh.get_rank() == 0):
            step(mesh)

    with pytest.raises(mf.SimulationError, match="rank 0 waits in an agreement check") as caught:
        mf.simulate(program, 2)
    assert "rank 1 waits in gather 'group'" in str(caught.value)


def different_operation(mesh: Mesh) -> None:
    owners = group(mesh)
    if mesh.get_rank() == 2:
        mf.scatter(whole(owners) if mesh.rank == mesh.ranks[-1] else {}, owner_layout=owners, dtype=torch.float32)
    else:
        mf.gather(shards(owners), owner_layout=owners)


def different_owner(mesh: Mesh) -> None:
    owners = group(mesh, owner=3 if mesh.get_rank() == 2 else 0)
    mf.gather(shards(owners), owner_layout=owners)


def different_order(mesh: Mesh) -> None:
    for name in ("blocks.0", "blocks.1") if mesh.get_rank() != 2 else ("blocks.1", "blocks.0"):
        owners = group(mesh, name=name)
        mf.gather(shards(owners), owner_layout=owners)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (different_operation, ["operation: gather 'group' on ranks [0, 1, 3], scatter 'group' on ranks [2]"]),
        (different_owner, ["gather 'group'", "plan: ", "on ranks [0, 1, 3]", "on ranks [2]", "owners"]),
        (different_order, ["operation: gather 'blocks.0' on ranks [0, 1, 3], gather 'blocks.1' on ranks [2]"]),
    ],
)
def test_ranks_that_disagree_are_named(program: Callable[[Mesh], None], words: list[str]) -> None:
    with pytest.raises(ValueError, match="the ranks disagree") as caught:
        mf.simulate(program, 4)
    assert all(word in str(caught.value) for word in words), caught.value


def ignoring_loss(mesh: Mesh, ignore: int | None) -> None:
    owners = group(mesh)
    source = {i: tensor.requires_grad_() for i, tensor in shards(owners).items()}
    full, token = mf.gather(source, owner_layout=owners)
    parts, last = mf.scatter({i: t**2 for i, t in full.items()}, owner_layout=owners, after=token)
    if mesh.get_rank() == ignore:
        sum(tensor.sum() for tensor in source.values()).backward()
    else:
        sum((part.sum() for part in parts.values()), last.link).backward()


def test_a_loss_that_ignores_the_results_is_named() -> None:
    mf.simulate(partial(ignoring_loss, ignore=None), 3)
    for ignore in range(3):
        with pytest.raises(mf.SimulationError, match="deadlock") as caught:
            mf.simulate(partial(ignoring_loss, ignore=ignore), 3)
        text = str(caught.value)
        assert "transpose of scatter 'group'" in text
        assert f"for rank {ignore}" in text
        assert f"finished: ranks [{ignore}" in text
        assert "its loss does not depend on the operation's results" in text
        assert "the token's link" in text


class Broken(Exception):
    pass


@pytest.mark.parametrize("error", [Broken("broken"), KeyboardInterrupt(), SystemExit(3)])
def test_an_error_keeps_its_type_and_names_the_rank(error: BaseException) -> None:
    before = threading.active_count()
    ended = []

    def program(mesh: Mesh) -> None:
        try:
            step(mesh)
            if mesh.get_rank() == 4:
                raise error
            step(mesh)
        finally:
            ended.append(mesh.get_rank())

    with pytest.raises(type(error)) as caught:
        mf.simulate(program, 3, ranks=(1, 4, 6))
    assert caught.value is error
    assert "raised on simulated rank 4 of Mesh(axis0=3, ranks=(1, 4, 6), rank=None)" in error.__notes__
    assert sorted(ended) == [1, 4, 6], "the other ranks were not ended"
    assert threading.active_count() == before
    assert len(mf.simulate(step, 3).results) == 3


def test_the_first_error_in_order_of_events_is_raised() -> None:
    def program(mesh: Mesh) -> None:
        if mesh.get_rank() == 0:
            step(mesh)
        raise Broken(f"rank {mesh.get_rank()}")

    with pytest.raises(Broken, match="rank 1"):
        mf.simulate(program, 3)


# Poison.


def read_too_early(mesh: Mesh, use: Callable[[torch.Tensor], Any], wait: bool, ints: bool = False) -> Any:
    owners = group(mesh)
    source = {i: t.long() if ints else t for i, t in shards(owners).items()}
    gathered, token = mf.gather(source, owner_layout=owners, async_op=True)
    if wait:
        token.wait()
    used = [use(tensor) for tensor in gathered.values()]
    token.wait()
    for i, tensor in gathered.items():
        assert torch.equal(tensor, whole(owners)[i].to(tensor.dtype))
    return used


READS: list[Callable[[torch.Tensor], Any]] = [
    lambda t: t + 1,
    lambda t: t.sum(),
    lambda t: t[0, 0].item(),
    lambda t: torch.zeros_like(t).copy_(t),
    lambda t: torch.cat([torch.zeros(1), t.reshape(-1)]),
    lambda t: torch.stack([torch.zeros(3), *t[:1]]),
    lambda t: t.clone(),
    lambda t: t.mul_(2),
    lambda t: t.view(-1)[3:].exp(),
    lambda t: t.T @ t,
]


@pytest.mark.parametrize("number", range(len(READS)))
def test_poison_reports_a_result_that_is_read_too_early(number: int) -> None:
    with pytest.raises(
        mf.SimulationError, match=r"rank 2: .* uses a result of gather 'group' before its token"
    ) as caught:
        mf.simulate(partial(read_too_early, use=READS[number], wait=False), 3, poison=True)
    assert "token.wait()" in str(caught.value)
    assert "raised on simulated rank 2 of" in caught.value.__notes__[-1]


@pytest.mark.parametrize("number", range(len(READS) - 3))
def test_poison_lets_results_be_read_after_the_wait(number: int) -> None:
    mf.simulate(partial(read_too_early, use=READS[number], wait=True), 3, poison=True)


def test_poison_watches_results_that_nobody_sends() -> None:
    """What a rank held all along is in flight as well: elsewhere it may be on a stream."""

    def program(mesh: Mesh) -> None:
        owners = group(mesh)
        gathered, token = mf.gather(shards(owners), owner_layout=owners, async_op=True)
        if mesh.get_rank() == 1:
            assert gathered[1].numel() == owners.layout.rank_size(1)
            gathered[1].sum()
        token.wait()

    with pytest.raises(mf.SimulationError, match=r"rank 1: .* uses a result of gather 'group'"):
        mf.simulate(program, 2, poison=True)


def test_poison_lets_results_be_looked_at() -> None:
    def look(tensor: torch.Tensor) -> tuple[Any, ...]:
        return tensor.shape, tensor.view(-1)[3:].dtype, tensor.numel(), tensor.T.is_contiguous(), tensor.detach().dim()

    mf.simulate(partial(read_too_early, use=look, wait=False), 3, poison=True)


def test_poison_is_nan_or_the_smallest_integer() -> None:
    """For reads that no operator does: what has not come yet cannot be taken for a result."""

    def peek(tensor: torch.Tensor) -> float:
        return tensor.numpy()[0, 0].item()

    # Tensor 0 comes from rank 0; tensor 1 was on its owner all the time.
    floats = mf.simulate(partial(read_too_early, use=peek, wait=False), 2, poison=True).results[1]
    assert math.isnan(floats[0])
    ints = mf.simulate(partial(read_too_early, use=peek, wait=False, ints=True), 2, poison=True).results[1]
    assert ints[0] == torch.iinfo(torch.long).min


@pytest.mark.parametrize("forgetful", [0, 2])
def test_poison_reports_a_token_that_is_never_waited_for(forgetful: int) -> None:
    """On a rank that receives, and on one that only sends."""

    def program(mesh: Mesh) -> None:
        owners = group(mesh)
        _, token = mf.gather(shards(owners), owner_layout=owners, async_op=True)
        if mesh.get_rank() != forgetful:
            token.wait()

    with pytest.raises(mf.SimulationError, match=f"rank {forgetful} never waited for the token of gather 'group'"):
        mf.simulate(program, 3, poison=True)
    mf.simulate(program, 3)


def test_poison_knows_the_tokens_of_several_operations() -> None:
    def program(mesh: Mesh, early: bool) -> None:
        pairs = []
        for name in ("first", "second"):
            owners = group(mesh, name=name)
            pairs.append(mf.gather(shards(owners), owner_layout=owners, async_op=True))
        (one, first), (two, second) = pairs
        first.wait()
        _ = [tensor + 1 for tensor in one.values()]
        if early:
            _ = [tensor + 1 for tensor in two.values()]
        mf.scatter(one, owner_layout=group(mesh, name="first"), after=second)
        _ = [tensor + 1 for tensor in two.values()]

    mf.simulate(partial(program, early=False), 2, poison=True)
    with pytest.raises(mf.SimulationError, match="uses a result of gather 'second'"):
        mf.simulate(partial(program, early=True), 2, poison=True)


def test_poison_does_not_change_what_is_right() -> None:
    for rank, parts in mf.simulate(step, 4, poison=True).results.items():
        check_step(parts, group(Mesh(4, rank=rank)))


def test_fixture(simulated: Callable[..., Any]) -> None:  # noqa: F811
    results, trace = simulated(step, 2)
    assert len(results) == len(trace) == 2
    with pytest.raises(mf.SimulationError, match="uses a result"):
        simulated(partial(read_too_early, use=torch.sum, wait=False), 2)


def test_messages_are_copies() -> None:
    """What a sender does to its inputs while they are under way does not reach anybody."""

    def program(mesh: Mesh) -> None:
        owners = group(mesh, owner=0)
        source = shards(owners)
        gathered, token = mf.gather(source, owner_layout=owners, async_op=True)
        for tensor in source.values():
            tensor.fill_(-1)
        token.wait()
        for i, tensor in gathered.items():
            assert torch.equal(tensor, whole(owners)[i])

    mf.simulate(program, 3)
