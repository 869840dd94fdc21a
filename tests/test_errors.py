"""Faults end in an error that says what to do, or in the right answer: no wrong numbers, no hang, no dead process."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.faults import (
    LAYOUT,
    SHORT,
    Tensors,
    assert_says,
    block,
    catch,
    check_round_trip,
    results,
    round_trip_on,
    shards,
)
from tests.spawn import RankPool


@pytest.mark.parametrize("owner", [2, 7, -1])
def test_owner_outside_the_mesh(owner: int) -> None:
    with pytest.raises(ValueError, match="GroupOwnerLayout 'block'") as caught:
        block(Mesh(2), {0: 0, 1: owner})
    assert_says(caught.value, "tensor 1", f"owner {owner}", "ranks=(0, 1)", "owners are global ranks of the mesh")
    with pytest.raises(ValueError, match="owner 0"):  # a shard index is not a rank
        block(Mesh(2, ranks=(4, 5)), {0: 0})


@pytest.mark.parametrize("index", [-1, 3, 10])
def test_tensor_index_that_does_not_exist(index: int) -> None:
    with pytest.raises(ValueError, match="GroupOwnerLayout 'block'") as caught:
        block(Mesh(2), {0: 0, index: 0})
    assert_says(caught.value, f"tensor index {index} is given owner 0", "tensors 0..2")
    with pytest.raises(IndexError, match=f"tensor {index} is not one of the layout's 3 tensors"):
        mf.assign_owner_work(LAYOUT, Mesh(2), [0, index])


@pytest.mark.parametrize("cost", [math.nan, -1.0, math.inf, -math.inf])
def test_costs_must_be_finite_and_not_negative(cost: float) -> None:
    def bad_for_matrices(shape: torch.Size) -> float:
        return cost if len(shape) > 1 else 1.0

    for call in (
        lambda: mf.assign_owner_work(LAYOUT, Mesh(2), [2, 1], bad_for_matrices),
        lambda: GroupOwnerLayout.from_params(Mesh(2), LAYOUT, cost_fn=bad_for_matrices),
    ):
        with pytest.raises(ValueError, match="cost_fn returned") as caught:
            call()
        assert_says(caught.value, str(cost), "(4, 2)", "a finite number >= 0")


def test_placements_that_gather_does_not_support() -> None:
    with pytest.raises(ValueError, match="GroupOwnerLayout 'block'") as caught:
        GroupOwnerLayout(Mesh(2), LAYOUT, {0: 0}, [mf.Partial("sum")], name="block")
    assert_says(caught.value, "Partial", "Replicate() or a shard")
    with pytest.raises(ValueError, match="1 placements"):
        GroupOwnerLayout(Mesh(2), LAYOUT, {0: 0}, [mf.RowAtomic(), mf.RowAtomic()])


# Faults that a rank sees in its own arguments.


class Fault(NamedTuple):
    """What goes wrong on one rank, in which operation, and how it is told."""

    operation: Callable[..., Any]
    rank: int
    change: Callable[[Tensors], Any]
    error: type[Exception]
    words: tuple[str, ...]


def replaced(i: int, value: Callable[[torch.Tensor], Any]) -> Callable[[Tensors], Tensors]:
    return lambda source: source | {i: value(source[i])}


def without(i: int) -> Callable[[Tensors], Tensors]:
    return lambda source: {key: tensor for key, tensor in source.items() if key != i}


def resized(numel: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.zeros(numel, dtype=tensor.dtype)


EXACT = "exactly this rank's part"
FAULTS = {
    "shard a row short": Fault(
        *(mf.gather, 1, replaced(1, resized(6)), ValueError),
        ("gather 'block'", "tensor 1", "has 6 elements", "on rank 1", "expected 8", EXACT),
    ),
    "shard a row long": Fault(
        *(mf.gather, 1, replaced(0, resized(4)), ValueError),
        ("gather 'block'", "tensor 0", "has 4 elements", "on rank 1", "expected 2", EXACT),
    ),
    "empty shard": Fault(
        *(mf.gather, 1, replaced(1, resized(0)), ValueError), ("tensor 1", "has 0 elements", "expected 8", EXACT)
    ),
    "result a row short": Fault(
        *(mf.scatter, 0, replaced(1, lambda t: t[:3]), ValueError),
        ("scatter 'block'", "tensor 1", "has 6 elements (3, 2)", "on rank 0", "expected 8", "give the full tensor"),
    ),
    "no shard": Fault(
        *(mf.gather, 1, without(1), KeyError),
        ("gather 'block'", "no entry for tensor 1", "rank 1 must give", "tensors [0, 1]", "but gave [0, 2]"),
    ),
    "no result": Fault(
        *(mf.scatter, 0, without(0), KeyError),
        ("scatter 'block'", "no entry for tensor 0", "every tensor it owns", "tensors [0, 1]", "but gave [1]"),
    ),
    "mixed dtypes in shards": Fault(
        *(mf.gather, 1, replaced(1, lambda t: t.bfloat16()), TypeError),
        ("gather 'block'", "tensor 1 is torch.bfloat16", "tensor 0 is torch.float32", "one group per dtype"),
    ),
    "mixed dtypes in results": Fault(
        *(mf.scatter, 0, replaced(1, lambda t: t.double()), TypeError),
        ("scatter 'block'", "tensor 1 is torch.float64", "tensor 0 is torch.float32", "convert"),
    ),
    "mixed devices": Fault(
        *(mf.gather, 1, replaced(1, lambda t: t.to("meta")), ValueError),
        ("gather 'block'", "tensor 1 is on meta", "tensor 0 on cpu", "to one device"),
    ),
    "not a tensor": Fault(
        *(mf.gather, 1, replaced(0, lambda t: t.tolist()), TypeError),
        ("gather 'block'", "tensor 0", "must be a torch.Tensor", "list"),
    ),
    "sparse": Fault(
        *(mf.gather, 1, replaced(1, lambda t: t.to_sparse()), TypeError),
        ("gather 'block'", "tensor 1", "torch.sparse_coo", "strided"),
    ),
}


def call_with(mesh: Mesh, name: str, **keywords: Any) -> Any:
    fault = FAULTS[name]
    source = shards(mesh) if fault.operation is mf.gather else results(mesh)
    if mesh.rank == mesh.ranks[fault.rank]:
        source = fault.change(source)
    return fault.operation(source, owner_layout=block(mesh), **keywords)[0]


@pytest.mark.parametrize("name", FAULTS)
def test_fault_of_one_rank(name: str) -> None:
    fault = FAULTS[name]
    with pytest.raises(fault.error) as caught:
        mf.simulate(lambda mesh: call_with(mesh, name), 2)
    assert_says(caught.value, *fault.words)
    assert f"raised on simulated rank {fault.rank} of" in caught.value.__notes__[-1]


def fault_under_the_check(mesh: Mesh, name: str) -> tuple[str, str]:
    """What this rank raises; afterwards all ranks go on together."""
    with mf.agreement_check():
        error = catch(call_with, mesh, name)
        check_round_trip(mesh)
    return type(error).__name__, str(error)


def fault_under_the_check_on(rank: int, name: str) -> tuple[str, str]:
    return fault_under_the_check(Mesh(2, rank=rank), name)


def assert_told_by_all(outcomes: dict[int, tuple[str, str]], name: str) -> None:
    fault = FAULTS[name]
    kind, text = outcomes[fault.rank]
    assert kind == fault.error.__name__
    assert_says(ValueError(text), *fault.words)
    kind, text = outcomes[1 - fault.rank]
    assert kind == "ValueError"
    operation = fault.operation.__name__
    assert_says(
        ValueError(text),
        f"{operation} 'block': nothing was sent",
        f"rank {fault.rank}: {fault.error.__name__}: ",
        *fault.words,
    )


@pytest.mark.parametrize("name", FAULTS)
def test_the_check_tells_all_ranks(name: str) -> None:
    assert_told_by_all(mf.simulate(lambda mesh: fault_under_the_check(mesh, name), 2).results, name)


@pytest.mark.distributed
@pytest.mark.parametrize("name", FAULTS)
def test_the_check_tells_all_real_ranks(name: str, ranks2: RankPool) -> None:
    assert_told_by_all(dict(enumerate(ranks2.run(fault_under_the_check_on, name))), name)


def call_with_on(rank: int, name: str) -> Any:
    return call_with(Mesh(2, rank=rank), name)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["shard a row short", "shard a row long", "no result", "mixed dtypes in shards"])
def test_without_the_check_peers_time_out(name: str, ranks2: RankPool) -> None:
    fault = FAULTS[name]
    outcomes = ranks2.run(call_with_on, name, group_timeout=SHORT, return_exceptions=True)
    pids = ranks2.pids
    assert isinstance(outcomes[fault.rank], fault.error)
    assert_says(outcomes[fault.rank], *fault.words)
    peer = outcomes[1 - fault.rank]
    # A receiver waits for what never comes; a rank that only receives may learn no dtype either.
    assert isinstance(peer, RuntimeError), peer
    assert "imed out" in str(peer) or "closed" in str(peer), peer
    assert ranks2.run(round_trip_on) == ["right", "right"]
    assert ranks2.pids == pids, "a process died"


def test_a_fault_that_all_ranks_see_is_raised_on_all() -> None:
    def program(mesh: Mesh) -> str:
        error = catch(mf.gather, {}, owner_layout=block(mesh))
        assert isinstance(error, KeyError)
        assert_says(error, "gather 'block'", "no entry for tensor 0", f"rank {mesh.rank} must give")
        return check_round_trip(mesh)  # nobody had communicated

    assert mf.simulate(program, 2).results == {0: "right", 1: "right"}


# Arguments that are wrong on their own.


def alone(**keywords: Any) -> Any:
    layout = mf.build_for_row_atomic([(4, 2)], 1)
    owners = GroupOwnerLayout(Mesh(1, rank=0), layout, {0: 0}, name="block")
    return mf.gather({0: torch.zeros(4, 2)}, **({"owner_layout": owners} | keywords))


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"dtype": torch.bfloat16}, TypeError, ("dtype=torch.bfloat16 was asserted", "tensor 0 is torch.float32")),
        ({"device": "meta"}, ValueError, ("device=meta was asserted", "tensor 0 is on cpu")),
        ({"after": 3}, TypeError, ()),
        ({"after": [torch.zeros(())]}, TypeError, ("after= takes a Token", "Tensor")),
        ({"owner_layout": {0: 0}}, TypeError, ("gather", "owner_layout must be a GroupOwnerLayout", "dict")),
        ({"stream": torch.Stream("cpu")}, ValueError, ("gather 'block'", "stream= is for CUDA", "async_op=True")),
    ],
)
def test_wrong_keywords(keywords: dict[str, Any], error: type[Exception], words: tuple[str, ...]) -> None:
    with pytest.raises(error) as caught:
        alone(**keywords)
    assert_says(caught.value, *words)


def test_right_assertions_pass() -> None:
    gathered, token = alone(dtype=torch.float32, device="cpu", after=mf.Token.linked_to(torch.ones(2)))
    assert gathered[0].shape == (4, 2)
    assert token.dtype == torch.float32


def test_a_rank_outside_the_mesh_may_not_call() -> None:
    for check in (False, True):
        with mf.agreement_check(check), pytest.raises(ValueError, match="rank 7 is not in Mesh") as caught:
            mf.gather({}, owner_layout=block(Mesh(2, rank=7)))
        assert_says(caught.value, "ranks=(0, 1)", "only the mesh's own ranks")
    with pytest.raises(ValueError, match=r"give it a rank with mesh\.with_rank\(rank\)"):
        mf.gather({}, owner_layout=block(Mesh(2)))


def test_no_process_group() -> None:
    with pytest.raises(RuntimeError, match="no process group is initialised") as caught:
        mf.gather(shards(Mesh(2, rank=1)), owner_layout=block(Mesh(2, rank=1)))
    assert_says(caught.value, "torchrun", "init_process_group", "simulate")


def ranks_beyond_the_world(rank: int) -> None:
    mesh = Mesh(2, ranks=(0, 5), rank=rank)
    if rank == 0:
        mf.gather(shards(mesh), owner_layout=block(mesh))


@pytest.mark.distributed
def test_mesh_larger_than_the_world(ranks2: RankPool) -> None:
    error, _ = ranks2.run(ranks_beyond_the_world, return_exceptions=True)
    assert isinstance(error, RuntimeError)
    assert_says(error, "ranks=(0, 5)", "beyond the 2 ranks")


def give_a_dtensor(rank: int) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    tensor = DTensor.from_local(torch.zeros(2, 2), mesh, [Shard(0)])
    owners = GroupOwnerLayout(mesh, mf.build_for_row_atomic([(4, 2)], 2), {0: 0}, name="block")
    error = catch(mf.gather, {0: tensor}, owner_layout=owners)
    return f"{type(error).__name__}: {error}"


@pytest.mark.distributed
def test_dtensors_are_refused(ranks2: RankPool) -> None:
    for text in ranks2.run(give_a_dtensor):
        assert text.startswith(("TypeError", "ValueError")), text
        assert_says(ValueError(text), "gather 'block'", "tensor 0", "DTensor", "local shard")


def eighteen_rows(mesh: Mesh, layout: mf.GlobalLayout) -> Any:
    owners = GroupOwnerLayout(mesh, layout, {0: mesh.ranks[-1], 1: mesh.ranks[1], 2: mesh.ranks[2]})
    whole = {i: torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(layout.tensor_shapes)}
    local = layout.get_local_range(mesh, owners.placements)
    source = {i: whole[i].view(-1)[part.start : part.end] for i, part in layout.tensors_in(local)}
    gathered, token = mf.gather(source, owner_layout=owners, dtype=torch.float32)
    for i, owner in owners.tensor_to_owner.items():
        assert (i in gathered) == (owner == mesh.rank)
        assert i not in gathered or torch.equal(gathered[i], whole[i])
    parts, _ = mf.scatter(gathered, owner_layout=owners, after=token)
    assert list(parts) == sorted(source)
    assert all(torch.equal(part.reshape(-1), source[i]) for i, part in parts.items())
    return sum(source[0].numel() for i in source if i == 0)


@pytest.mark.parametrize("build", [mf.build_for_row_atomic, mf.build_for_row_atomic_unpadding])
def test_eighteen_rows_over_eight_ranks(build: Callable[..., mf.GlobalLayout]) -> None:
    """Some ranks hold no row of it, or nothing at all; a tensor without rows lies between."""
    for shapes in ([(18, 1), (0, 4), (1, 1)], [(18, 5), (0, 4), (2, 5)], [(3, 2), (0, 4), (2, 2)]):
        layout = build(shapes, 8)
        held = mf.simulate(lambda mesh, layout=layout: eighteen_rows(mesh, layout), 8).results
        assert sum(held.values()) == torch.Size(shapes[0]).numel()


def test_first_tries_of_a_newcomer() -> None:
    def program(mesh: mf.Mesh) -> None:
        layout = mf.build_for_row_atomic([(4, 2)], mesh.size())
        owners = mf.GroupOwnerLayout.from_params(mesh, layout)
        weights = mf.DBuffer.distribute_tensors([torch.ones(4, 2)], mesh, [mf.RowAtomic()], layout)
        for wrong in (weights, [weights.local_buffer]):
            with pytest.raises(TypeError, match=r"source must be a dict.*tensor_views"):
                mf.gather(wrong, owner_layout=owners)
        for wrong in (None, 3):
            with pytest.raises(TypeError, match="after= takes a Token"):
                mf.gather(weights.tensor_views(), owner_layout=owners, after=wrong)
        with pytest.raises(TypeError, match="dp_size must be an int, got Mesh"):
            mf.build_row_atomic_layout([(4, 2)], mesh)

    mf.simulate(program, 2)
    assert mf.Placements(0, mf.RowAtomic(), mf.RowAtomic(), mf.RowAtomic()).gradient == (mf.RowAtomic(),)


# Who knows the dtype where a rank gives no tensor.


def dtype_unknown(mesh: Mesh) -> None:
    """Rank 0 owns what the other holds."""
    layout = mf.GlobalLayout([(2, 2)], [0], 4, [0, 0])
    owners = {known: GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0]}, name="block", dtype=known) for known in DTYPES}
    source = {0: torch.ones(4)} if mesh.rank == mesh.ranks[1] else {}
    token = mf.Token(torch.zeros(()), dtype=torch.float32)
    known = [mf.gather(source, owner_layout=owners[torch.float32])[0]]
    known.append(mf.gather(source, owner_layout=owners[None], dtype=torch.float32)[0])
    known.append(mf.gather(source, owner_layout=owners[None], after=token)[0])
    for gathered in known:
        assert not gathered or torch.equal(gathered[0], torch.ones(2, 2))
    words = {None: ("cannot know the dtype",), torch.float64: ("the group is of torch.float64, but tensor 0 is",)}
    with mf.agreement_check():
        for dtype, said in words.items():
            error = catch(mf.gather, source, owner_layout=owners[dtype])
            assert error is not None
            if dtype is None:
                said = said if not source else ("nothing was sent", *said)
            else:
                said = said if source else ("nothing was sent", *said)
            assert_says(error, *said)
    into = {0: torch.zeros(2, 2)} if not source else {}
    if not source:
        with pytest.raises(TypeError, match=r"the destinations are torch.float32, but the group is of torch.float64"):
            mf.inplace.gather(source, into, owner_layout=owners[torch.float64])


DTYPES = (None, torch.float32, torch.float64)


def dtype_unknown_on(rank: int) -> None:
    dtype_unknown(Mesh(2, rank=rank))


@pytest.mark.distributed
def test_a_rank_without_tensors_must_know_the_dtype(ranks2: RankPool) -> None:
    mf.simulate(dtype_unknown, 2)
    ranks2.run(dtype_unknown_on, group_timeout=SHORT)
