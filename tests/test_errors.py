"""Faults end in an error that says what to do, or in the right answer: no wrong numbers, no hang, no dead process."""

import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard
from torch.func import grad, jacfwd, jacrev, vmap

import mfsdp_func as mf
from mfsdp_func.effects.agreement import ENVIRONMENT_VARIABLE
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.spawn import RankPool

# torch's forward mode scripts a few decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

Tensors = dict[int, torch.Tensor]
SHORT = 2.0
"""Seconds after which a group gives up, where a test waits for that."""


def assert_says(error: BaseException, *words: str) -> None:
    text = str(error)
    assert all(word in text for word in words), f"missing {[word for word in words if word not in text]} in: {text}"


# One group for all faults. Rank 0 owns both participating tensors; rank 1 holds the last row of tensor 0 and tensor 1.

LAYOUT = mf.GlobalLayout([(4, 2), (4, 2), (3,)], [0, 8, 16], 19, [0, 6])


def full(dtype: torch.dtype = torch.float32) -> Tensors:
    return {
        i: torch.arange(float(s.numel())).view(s).add(100 * i).to(dtype) for i, s in enumerate(LAYOUT.tensor_shapes)
    }


def block(mesh: Mesh, owners: dict[int, int] | None = None, name: str = "block") -> GroupOwnerLayout:
    return GroupOwnerLayout(mesh, LAYOUT, owners or {0: mesh.ranks[0], 1: mesh.ranks[0]}, name=name)


def shards(mesh: Mesh, dtype: torch.dtype = torch.float32) -> Tensors:
    tensors = full(dtype)
    first = {0: tensors[0].view(-1)[:6]}
    last = {0: tensors[0].view(-1)[6:], 1: tensors[1].view(-1), 2: tensors[2]}
    return first if mesh.rank == mesh.ranks[0] else last


def results(mesh: Mesh, dtype: torch.dtype = torch.float32) -> Tensors:
    return {i: full(dtype)[i] for i in (0, 1)} if mesh.rank == mesh.ranks[0] else {}


def check_round_trip(mesh: Mesh) -> str:
    gathered, token = mf.gather(shards(mesh), owner_layout=block(mesh))
    wanted = results(mesh)
    assert list(gathered) == list(wanted)
    assert all(torch.equal(gathered[i], wanted[i]) for i in wanted)
    parts, _ = mf.scatter(gathered, owner_layout=block(mesh), after=token)
    assert list(parts) == [i for i in shards(mesh) if i != 2]
    assert all(torch.equal(part.reshape(-1), shards(mesh)[i]) for i, part in parts.items())
    return "right"


# Values.


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


def catch(function: Callable[..., Any], *args: Any, **keywords: Any) -> BaseException | None:
    try:
        function(*args, **keywords)
    except Exception as error:
        return error
    return None


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


def round_trip_on(rank: int) -> str:
    return check_round_trip(Mesh(2, rank=rank))


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


# Disagreements between ranks.


def call_in_order(mesh: Mesh, names: tuple[str, str]) -> list[Any]:
    return [mf.gather(shards(mesh), owner_layout=block(mesh, name=name))[0] for name in names]


def disagree_owners(mesh: Mesh) -> Any:
    return mf.gather(shards(mesh), owner_layout=block(mesh, {0: mesh.get_rank(), 1: 0}))[0]


def disagree_owners_reversed(mesh: Mesh) -> Any:
    return mf.gather(shards(mesh), owner_layout=block(mesh, {0: 1 - mesh.get_rank(), 1: 0}))[0]


def disagree_dtype(mesh: Mesh) -> Any:
    dtype = torch.float32 if mesh.rank == mesh.ranks[0] else torch.bfloat16
    return mf.gather(shards(mesh, dtype), owner_layout=block(mesh))[0]


def disagree_layout(mesh: Mesh) -> Any:
    layout = mf.GlobalLayout([(4, 2), (4, 2), (3,)], [0, 8, 16], 19 + mesh.get_rank(), [0, 6])
    owners = GroupOwnerLayout(mesh, layout, {0: 0, 1: 0}, name="block")
    return mf.gather(shards(mesh), owner_layout=owners)[0]


def disagree_order(mesh: Mesh) -> Any:
    return call_in_order(mesh, ("a", "b") if mesh.rank == mesh.ranks[0] else ("b", "a"))


def disagree_operation(mesh: Mesh) -> Any:
    if mesh.rank == mesh.ranks[0]:
        return mf.gather(shards(mesh), owner_layout=block(mesh))[0]
    return mf.scatter(results(mesh), owner_layout=block(mesh))[0]


def disagree_include_own(mesh: Mesh) -> Any:
    own = mesh.rank == mesh.ranks[0]
    return mf.scatter(results(mesh), owner_layout=block(mesh), include_own=own)[0]


def disagree_asserted_dtype(mesh: Mesh) -> Any:
    """A bf16 result for a rank that says its shards are fp32."""
    keywords = {} if mesh.rank == mesh.ranks[0] else {"dtype": torch.float32}
    return mf.scatter(results(mesh, torch.bfloat16), owner_layout=block(mesh), **keywords)[0]


DISAGREEMENTS: dict[str, tuple[Callable[[Mesh], Any], tuple[str, ...]]] = {
    "owners": (disagree_owners, ("gather 'block'", "plan: ", "on ranks [0]", "on ranks [1]", "equal layouts, owners")),
    "owners reversed": (disagree_owners_reversed, ("gather 'block'", "plan: ", "on ranks [0]", "on ranks [1]")),
    "dtype": (disagree_dtype, ("gather 'block'", "dtype: float32 on ranks [0], bfloat16 on ranks [1]")),
    "layout": (disagree_layout, ("gather 'block'", "plan: ", "on ranks [0]", "on ranks [1]")),
    "order": (disagree_order, ("operation: gather 'a' on ranks [0], gather 'b' on ranks [1]", "in the same order")),
    "operation": (disagree_operation, ("operation: gather 'block' on ranks [0], scatter 'block' on ranks [1]",)),
    "include_own": (disagree_include_own, ("scatter 'block'", "plan: ", "on ranks [0]", "on ranks [1]")),
    "asserted dtype": (disagree_asserted_dtype, ("scatter 'block'", "bfloat16", "float32")),
}


@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_simulated_ranks_that_disagree(name: str) -> None:
    program, words = DISAGREEMENTS[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        mf.simulate(program, 2)
    assert_says(caught.value, *words)
    assert any("raised on simulated rank" in note for note in caught.value.__notes__)


def disagree_on(rank: int, name: str, check: bool) -> Any:
    mesh = Mesh(2, rank=rank)
    with mf.agreement_check(check):
        outcome = DISAGREEMENTS[name][0](mesh)
    return [outcome, results(mesh)]


def disagree_and_go_on(rank: int, name: str) -> tuple[str, str]:
    error = catch(disagree_on, rank, name, True)
    check_round_trip(Mesh(2, rank=rank))
    return type(error).__name__, str(error)


@pytest.mark.distributed
@pytest.mark.parametrize("name", DISAGREEMENTS)
def test_the_check_names_the_ranks_that_differ(name: str, ranks2: RankPool) -> None:
    for kind, text in ranks2.run(disagree_and_go_on, name):
        assert kind == "ValueError"
        assert_says(ValueError(text), "nothing was sent", *DISAGREEMENTS[name][1])


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["owners", "owners reversed", "dtype", "order", "operation", "asserted dtype"])
def test_without_the_check_no_wrong_numbers(name: str, ranks2: RankPool) -> None:
    outcomes = ranks2.run(disagree_on, name, False, group_timeout=SHORT, timeout=30, return_exceptions=True)
    pids = ranks2.pids
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert errors, f"no rank noticed: {outcomes}"
    for error in errors:
        assert "died" not in str(error), error
        assert isinstance(error, RuntimeError) or (name == "asserted dtype" and isinstance(error, TypeError))
    for outcome in outcomes:
        if not isinstance(outcome, Exception):
            got, wanted = outcome
            got = got[0] if isinstance(got, list) else got
            assert got == {} or all(torch.equal(got[i], wanted[i]) for i in got), "wrong numbers"
    assert ranks2.run(round_trip_on) == ["right", "right"]
    assert ranks2.pids == pids, "a process died"


def check_by_environment(rank: int, value: str, inner: bool | None) -> str:
    os.environ[ENVIRONMENT_VARIABLE] = value
    try:
        if inner is None:
            error = catch(disagree_owners, Mesh(2, rank=rank))
        else:
            with mf.agreement_check(inner):
                error = catch(disagree_owners, Mesh(2, rank=rank))
    finally:
        del os.environ[ENVIRONMENT_VARIABLE]
    return f"{type(error).__name__}: {error}"


@pytest.mark.distributed
@pytest.mark.parametrize(("value", "inner", "checked"), [("1", None, True), ("0", True, True), ("1", False, False)])
def test_the_check_by_environment(value: str, inner: bool | None, checked: bool, ranks2: RankPool) -> None:
    for text in ranks2.run(check_by_environment, value, inner, group_timeout=SHORT):
        assert text.startswith("ValueError: gather 'block': nothing was sent") == checked, text
        assert checked or text.startswith("RuntimeError"), text


def very_long_names(mesh: Mesh, other: bool) -> str:
    name = "x" * 5000 + ("y" if other and mesh.rank == mesh.ranks[1] else "")
    with mf.agreement_check():
        mf.gather(shards(mesh), owner_layout=block(mesh, name=name))
    return "agreed"


def test_the_check_takes_names_of_any_length() -> None:
    assert mf.simulate(lambda mesh: very_long_names(mesh, False), 2).results == {0: "agreed", 1: "agreed"}
    with pytest.raises(ValueError, match="nothing was sent, because the ranks disagree"):
        mf.simulate(lambda mesh: very_long_names(mesh, True), 2)


# Tokens.


def skip_on_rank_1(rank: int) -> list[str]:
    if rank == 1:
        return []
    mesh = Mesh(2, rank=rank)
    _, token = mf.gather(shards(mesh), owner_layout=block(mesh), async_op=True)
    errors = [catch(token.wait) for _ in range(3)]
    assert all(type(error) is type(errors[0]) for error in errors)
    return [f"{type(error).__name__}: {error}" for error in errors]


@pytest.mark.distributed
def test_a_token_raises_its_own_error_at_every_wait(ranks2: RankPool) -> None:
    errors, _ = ranks2.run(skip_on_rank_1, group_timeout=SHORT, return_exceptions=True)
    assert len(errors) == 3
    assert len(set(errors)) == 1
    assert "RuntimeError" in errors[0] or "DistBackendError" in errors[0]


def test_a_token_in_flight_may_not_enter_a_compiled_region() -> None:
    layout = mf.build_for_row_atomic([(4, 2)], 1)
    owners = GroupOwnerLayout(Mesh(1, rank=0), layout, {0: 0}, name="block")

    @partial(torch.compile, fullgraph=True, backend="aot_eager")
    def step(source: torch.Tensor, token: mf.Token) -> torch.Tensor:
        return mf.gather({0: source}, owner_layout=owners, after=token)[0][0] * 2

    gathered, token = mf.gather({0: torch.ones(4, 2)}, owner_layout=owners, async_op=True)
    with pytest.raises(Exception, match="work in flight came into a compiled region") as caught:
        step(torch.ones(4, 2), token)
    assert_says(caught.value, "gather 'block'", "call token.wait() before entering it")
    token.wait()
    assert torch.equal(gathered[0], torch.ones(4, 2))


# Differentiation.


def test_a_rank_without_input_may_not_be_differentiated_unlinked() -> None:
    def loss(source: Tensors, mesh: Mesh) -> torch.Tensor:
        gathered, _ = mf.gather(source, owner_layout=block(mesh))
        parts, token = mf.scatter(gathered, owner_layout=block(mesh))  # forgets after=
        return sum((part.sum() for part in parts.values()), token.link)

    with pytest.raises(RuntimeError, match="scatter 'block'") as caught:
        mf.simulate(lambda mesh: grad(loss)(shards(mesh), mesh), 2, ranks=(1, 0))
    assert_says(caught.value, "no tensor to give", "silently be zero", "after=", "Token.linked_to")
    assert "raised on simulated rank 0 of" in caught.value.__notes__[-1]


def unlinked_grad_on(rank: int) -> str:
    def loss(source: Tensors) -> torch.Tensor:
        mesh = Mesh(2, rank=rank)
        gathered, _ = mf.gather(source, owner_layout=block(mesh))
        parts, token = mf.scatter(gathered, owner_layout=block(mesh))
        return sum((part.sum() for part in parts.values()), token.link)

    with mf.agreement_check():
        error = catch(grad(loss), shards(Mesh(2, rank=rank)))
        check_round_trip(Mesh(2, rank=rank))
    return f"{type(error).__name__}: {error}"


def short_shard_under_grad_on(rank: int) -> str:
    mesh = Mesh(2, rank=rank)
    source = shards(mesh)
    if rank == 1:
        source[1] = source[1][:6]

    def loss(source: Tensors) -> torch.Tensor:
        gathered, token = mf.gather(source, owner_layout=block(mesh))
        return sum((tensor.sum() for tensor in gathered.values()), token.link)

    with mf.agreement_check():
        error = catch(grad(loss), source)
        check_round_trip(mesh)
    return f"{type(error).__name__}: {error}"


@pytest.mark.distributed
def test_the_check_tells_all_ranks_of_a_fault_under_grad(ranks2: RankPool) -> None:
    peer, faulty = ranks2.run(short_shard_under_grad_on, group_timeout=SHORT)
    assert faulty.startswith("ValueError: gather 'block': tensor 1 has 6 elements")
    assert peer.startswith("ValueError: gather 'block': nothing was sent")
    assert "rank 1: ValueError: gather 'block': tensor 1 has 6 elements" in peer


@pytest.mark.distributed
def test_the_check_tells_all_ranks_of_an_unlinked_one(ranks2: RankPool) -> None:
    peer, unlinked = ranks2.run(unlinked_grad_on, group_timeout=SHORT)
    assert unlinked.startswith("RuntimeError: scatter 'block': differentiated on rank 1")
    assert peer.startswith("ValueError: scatter 'block': nothing was sent")
    assert "rank 1: RuntimeError: scatter 'block': differentiated on rank 1" in peer


def unlinked_backward(mesh: Mesh) -> None:
    gathered, _ = mf.gather(shards(mesh), owner_layout=block(mesh))
    source = {i: tensor.requires_grad_() for i, tensor in gathered.items()}
    mf.scatter(source, owner_layout=block(mesh))


def unlinked_backward_on(rank: int) -> None:
    with mf.agreement_check():
        unlinked_backward(Mesh(2, rank=rank))


@pytest.mark.distributed
def test_ranks_that_disagree_about_gradients(ranks2: RankPool) -> None:
    words = ("scatter 'block'", "differentiated: yes on ranks [0], no on ranks [1]", "thread the token", "after=")
    with pytest.raises(ValueError, match="nothing was sent") as caught:
        mf.simulate(unlinked_backward, 2)
    assert_says(caught.value, *words)
    for error in ranks2.run(unlinked_backward_on, return_exceptions=True):
        assert isinstance(error, ValueError)
        assert_says(error, *words)


def unequal_batches(mesh: Mesh) -> Any:
    batch = 2 + mesh.ranks.index(mesh.get_rank())
    source = {i: tensor.expand(batch, -1) for i, tensor in shards(mesh).items()}
    return vmap(lambda source: mf.gather(source, owner_layout=block(mesh))[0])(source)


def unequal_batches_on(rank: int) -> Any:
    return unequal_batches(Mesh(2, rank=rank))


@pytest.mark.distributed
def test_unequal_batches_under_vmap(ranks2: RankPool) -> None:
    """Refused on all ranks, check or no check."""
    words = ("gather 'block'", "batch size under vmap: 2 on ranks [0], 3 on ranks [1]", "equally many elements")
    with pytest.raises(ValueError, match="nothing was sent") as caught:
        mf.simulate(unequal_batches, 2)
    assert_says(caught.value, *words)
    for error in ranks2.run(unequal_batches_on, return_exceptions=True):
        assert isinstance(error, ValueError)
        assert_says(error, *words)


@pytest.mark.parametrize("transform", [jacrev, jacfwd])
def test_jacobians_over_ranks_are_refused_by_name(transform: Callable[..., Any]) -> None:
    """Each rank would put its own unit vectors into one exchange: rows of different ranks would mix."""
    layout = mf.build_for_row_atomic([(4, 2)], 2)

    def program(mesh: Mesh) -> Any:
        owners = GroupOwnerLayout(mesh, layout, {0: 0}, name="block")

        def step(shard: torch.Tensor) -> torch.Tensor:
            gathered, token = mf.gather({0: shard}, owner_layout=owners)
            return mf.scatter({i: t**2 for i, t in gathered.items()}, owner_layout=owners, after=token)[0][0]

        return transform(step)(torch.ones(2, 2))

    with pytest.raises(RuntimeError, match=f"gather 'block': torch.func.{transform.__name__}") as caught:
        mf.simulate(program, 2)
    assert_says(caught.value, "mix the rows of different ranks", "vjp or jvp")


# Dtypes of results and of the shards they are for, in place.


def in_place(mesh: Mesh, result: torch.dtype, shard: torch.dtype) -> tuple[str, Tensors]:
    into = {i: torch.full_like(t, -1, dtype=shard) for i, t in shards(mesh).items() if mesh.rank == mesh.ranks[1]}
    error = catch(mf.inplace.scatter, results(mesh, result), into, owner_layout=block(mesh))
    return f"{type(error).__name__}: {error}" if error else "", into


def in_place_on(rank: int, result: torch.dtype, shard: torch.dtype, check: bool) -> tuple[str, Tensors]:
    with mf.agreement_check(check):
        return in_place(Mesh(2, rank=rank), result, shard)


TWO_DTYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]


@pytest.mark.distributed
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize(("result", "shard"), TWO_DTYPES)
def test_result_into_a_shard_of_another_dtype(
    result: torch.dtype, shard: torch.dtype, check: bool, ranks2: RankPool
) -> None:
    (owner, _), (holder, into) = ranks2.run(in_place_on, result, shard, check, group_timeout=SHORT)
    words = (str(result).removeprefix("torch."), str(shard).removeprefix("torch."))
    assert_says(ValueError(holder), "scatter 'block'", *words)
    assert owner.startswith("ValueError: scatter 'block': nothing was sent" if check else "RuntimeError")
    assert holder.startswith("ValueError" if check else "TypeError")
    assert all(torch.equal(tensor, torch.full_like(tensor, -1)) for tensor in into.values()), "written all the same"
    owner, holder = mf.simulate(lambda mesh: catch_in_place(mesh, result, shard), 2).results.values()
    assert "float32" in holder
    assert "bfloat16" in holder


def catch_in_place(mesh: Mesh, result: torch.dtype, shard: torch.dtype) -> str:
    with mf.agreement_check():
        return in_place(mesh, result, shard)[0]


def test_destinations_of_the_in_place_form() -> None:
    layout = mf.build_for_row_atomic([(4, 2), (2, 2)], 1)
    owners = GroupOwnerLayout(Mesh(1, rank=0), layout, {0: 0, 1: 0}, name="block")
    source = {0: torch.ones(8), 1: torch.ones(4)}
    gather = partial(mf.inplace.gather, source, owner_layout=owners)
    with pytest.raises(KeyError) as missing:
        gather({0: torch.zeros(8)})
    assert_says(missing.value, "gather 'block'", "destination", "no entry for tensor 1")
    with pytest.raises(ValueError, match="destination of tensor 1 has 3 elements") as wrong:
        gather({0: torch.zeros(8), 1: torch.zeros(3)})
    assert_says(wrong.value, "gather 'block'", "expected 4")
    with pytest.raises(TypeError, match=r"torch\.float64") as mixed:
        gather({0: torch.zeros(8), 1: torch.zeros(4).double()})
    assert_says(mixed.value, "gather 'block'", "tensor 1", "torch.float32")
    with pytest.raises(TypeError, match=r"torch\.float64"):
        gather({0: torch.zeros(8).double(), 1: torch.zeros(4).double()})
    with pytest.raises(RuntimeError, match=r"use mfsdp_func\.gather, which returns new tensors"):
        vmap(lambda x: gather({0: x, 1: torch.zeros(4)}) or x)(torch.zeros(2, 8))


# What must simply be right.


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
