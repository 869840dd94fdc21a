"""Several groups in one exchange: the bits and the bytes of one call for each."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mfsdp_func as mf
from mfsdp_func import GroupOwnerLayout, Mesh, inplace
from mfsdp_func.operations.gather_scatter import plan_of
from mfsdp_func.plans.plan import join_plans
from mfsdp_func.plans.rank_view import Transfer, group_messages
from tests import strategies
from tests.spawn import RankPool

SIZES = [(17, 9), (40, 128), (3, 4), (1, 7), (64, 600), (0, 4), (5, 5, 2)]


def groups_of(mesh: Mesh, dtype: torch.dtype = torch.float32) -> tuple[list[GroupOwnerLayout], list[torch.Tensor]]:
    """Groups with owners all over, one of them held by one rank alone; and this rank's flat shards."""
    builders = (mf.build_for_row_atomic, mf.build_for_row_atomic_unpadding, mf.build_for_row_atomic_balanced)
    layouts = [builders[n % 3](SIZES[n:] + SIZES[:n], mesh.size()) for n in range(5)]
    layouts.append(mf.GlobalLayout([(6, 2), (3,)], [0, 12], 15, [0] + [15] * (mesh.size() - 1)))
    owners = [
        GroupOwnerLayout(
            mesh,
            layout,
            {i: mesh.ranks[(i * 3 + n) % mesh.size()] for i in range(0, len(layout.tensor_shapes), 1 + n % 2)},
        )
        for n, layout in enumerate(layouts)
    ]
    flats = []
    for n, layout in enumerate(layouts):
        segment = layout.get_segment(mesh.shard_index(range(mesh.ndim)), mesh.size())
        flats.append((torch.arange(segment.start, segment.end) * (n + 1)).remainder(251).to(dtype))
    return owners, flats


def views(owners: GroupOwnerLayout, flat: torch.Tensor) -> dict[int, torch.Tensor]:
    segment = owners.layout.get_segment(owners.mesh.shard_index(range(owners.mesh.ndim)), owners.mesh.size())
    return {
        i: flat[(at := owners.layout.tensor_to_offset[i] + part.start - segment.start) : at + part.numel]
        for i, part in owners.layout.tensors_in(segment)
    }


def same(found: list[dict[int, torch.Tensor]], expected: list[dict[int, torch.Tensor]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for i, tensor in other.items():
            assert one[i].shape == tensor.shape
            assert torch.equal(one[i], tensor), f"tensor {i}"


def all_ways(mesh: Mesh, dtype: torch.dtype) -> int:
    """Compare the coalesced forms with one call per group; returns how many tensors were compared."""
    owners, flats = groups_of(mesh, dtype)
    sources = [views(group, flat) for group, flat in zip(owners, flats, strict=True)]
    expected = [mf.gather(s, owner_layout=o, dtype=dtype)[0] for s, o in zip(sources, owners, strict=True)]
    full, token = mf.gather_coalesced(sources, owner_layouts=owners, dtype=dtype)
    same(full, expected)
    later, pending = mf.gather_coalesced(sources, owner_layouts=owners, dtype=dtype, async_op=True)
    pending.wait()
    same(later, expected)
    rooms = [{i: torch.empty_like(t) for i, t in group.items()} for group in expected]
    inplace.gather_coalesced(sources, rooms, owner_layouts=owners)
    same(rooms, expected)
    compared = sum(map(len, expected))
    for include_own in (True, False):
        back = [
            mf.scatter(s, owner_layout=o, dtype=dtype, include_own=include_own)[0]
            for s, o in zip(full, owners, strict=True)
        ]
        parts, _ = mf.scatter_coalesced(full, owner_layouts=owners, dtype=dtype, after=token, include_own=include_own)
        same(parts, back)
        compared += sum(map(len, back))
    rooms = [{i: torch.empty_like(t) for i, t in group.items()} for group in back]
    inplace.scatter_coalesced(full, rooms, owner_layouts=owners)
    same(rooms, back)
    return compared


def all_ways_on_gloo(rank: int, size: int, dtype: torch.dtype) -> int:
    return all_ways(Mesh(size, rank=rank), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8])
@pytest.mark.parametrize("shape", [1, 2, 3, 4, (2, 2)])
def test_bitwise_one_call_per_group(shape: int | tuple[int, int], dtype: torch.dtype) -> None:
    assert sum(mf.simulate(lambda mesh: all_ways(mesh, dtype), shape).results.values()) > 40


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_two_processes(ranks2: RankPool, dtype: torch.dtype) -> None:
    assert sum(ranks2.run(all_ways_on_gloo, 2, dtype)) > 40


@pytest.mark.distributed
def test_on_four_processes(ranks4: RankPool) -> None:
    assert sum(ranks4.run(all_ways_on_gloo, 4, torch.float32)) > 40


plans = st.integers(1, 3).flatmap(lambda count: st.tuples(strategies.owner_layouts(), st.just(count)))


@given(plans, st.booleans(), st.booleans())
def test_a_joint_view_is_the_views_one_after_the_other(
    case: tuple[GroupOwnerLayout, int], scatter: bool, include_own: bool
) -> None:
    owners, count = case
    operation = "scatter" if scatter else "gather"
    parts = tuple(
        plan_of(
            operation,
            GroupOwnerLayout(owners.mesh, owners.layout, owners.tensor_to_owner, owners.placements, name=f"{n}"),
            include_own,
        )
        for n in range(count)
    )
    joint = join_plans(parts)
    assert joint.transpose.transpose is joint
    assert joint.transpose.label.startswith("transpose of")
    for rank in joint.mesh.ranks:
        view, views_apart = joint.view(rank), [part.view(rank) for part in parts]
        back = joint.transpose.view(rank)
        assert (view.inputs, view.outputs) == (back.outputs, back.inputs)
        for field in ("inputs", "outputs"):
            assert list(getattr(view, field)) == [slot for apart in views_apart for slot in getattr(apart, field)]
        for transfers, slots, field, side in (
            (view.sends, view.inputs, "sends", "inputs"),
            (view.receives, view.outputs, "receives", "outputs"),
        ):
            found = [(t.peer, slots[t.slot], t.start, t.numel) for t in transfers]
            wanted = [
                (t.peer, getattr(apart, side)[t.slot], t.start, t.numel)
                for apart in views_apart
                for t in getattr(apart, field)
            ]
            assert found == wanted
        assert [c.numel for c in view.copies] == [c.numel for apart in views_apart for c in apart.copies]


@given(strategies.owner_layouts(), st.sampled_from([1, 3, 20]), st.sampled_from([5, 50]))
def test_both_ends_pack_alike(owners: GroupOwnerLayout, direct: int, packed: int) -> None:
    named = (
        GroupOwnerLayout(owners.mesh, owners.layout, owners.tensor_to_owner, owners.placements, name=name)
        for name in "ab"
    )
    joint = join_plans(tuple(plan_of("gather", group) for group in named))
    messages = {rank: group_messages(joint.view(rank), direct, packed) for rank in joint.mesh.ranks}

    def sizes(rank: int, side: int, peer: int) -> list[tuple[int, list[int]]]:
        return [(m.stage, [t.numel for t in m.transfers]) for m in messages[rank][side] if m.peer == peer]

    for src in joint.mesh.ranks:
        for dst in joint.mesh.ranks:
            assert sizes(src, 0, dst) == sizes(dst, 1, src)


def one_holder(mesh: Mesh, said: bool) -> list[tuple[torch.dtype, list[float]]]:
    """All elements lie on the first rank; the others own everything and know the dtype from a group, or from the call."""
    size = mesh.size()
    layout = mf.GlobalLayout([(2, 3), (4,)], [0, 6], 10, [0] + [10] * (size - 1))
    owners = [
        GroupOwnerLayout(
            *(mesh, layout, {i: mesh.ranks[(n + i) % size] for i in range(2)}),
            name=f"{n}",
            dtype=torch.float64 if n == 1 and not said else None,
        )
        for n in range(3)
    ]
    mine = mesh.get_rank() == mesh.ranks[0]
    sources = [
        views(group, torch.arange(10.0, dtype=torch.float64) + 100 * n) if mine else {}
        for n, group in enumerate(owners)
    ]
    full, _ = mf.gather_coalesced(sources, owner_layouts=owners, dtype=torch.float64 if said else None)
    return [(tensor.dtype, tensor.reshape(-1).tolist()) for group in full for tensor in group.values()]


def wholes_of_owners(size: int) -> list[list[tuple[torch.dtype, list[float]]]]:
    whole = [[100.0 * n + k for k in range(10)] for n in range(3)]
    found: list[list[tuple[torch.dtype, list[float]]]] = [[] for _ in range(size)]
    for n in range(3):
        for i, part in enumerate((whole[n][:6], whole[n][6:])):
            found[(n + i) % size].append((torch.float64, part))
    return found


def one_holder_on_gloo(rank: int, size: int, said: bool) -> list[tuple[torch.dtype, list[float]]]:
    return one_holder(Mesh(size, rank=rank), said)


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_rank_that_holds_nothing_of_any_group_knows_the_dtype(size: int, said: bool) -> None:
    assert list(mf.simulate(lambda mesh: one_holder(mesh, said), size).results.values()) == wholes_of_owners(size)


@pytest.mark.distributed
def test_a_process_that_holds_nothing_of_any_group_knows_the_dtype(ranks2: RankPool, ranks4: RankPool) -> None:
    assert ranks2.run(one_holder_on_gloo, 2, True) == wholes_of_owners(2)
    assert ranks4.run(one_holder_on_gloo, 4, False) == wholes_of_owners(4)


def test_groups_of_different_dtypes_do_not_move_together() -> None:
    layout = mf.build_for_row_atomic([(2, 2)], 1)
    groups = [GroupOwnerLayout(Mesh(1, rank=0), layout, {0: 0}, dtype=d) for d in (torch.float32, None, torch.float64)]
    with pytest.raises(TypeError, match=r"gather: one group is of torch.float32, another of torch.float64"):
        mf.gather_coalesced([{0: torch.ones(4)}] * 3, owner_layouts=groups)
    full, _ = mf.gather_coalesced([{0: torch.ones(4).half()}] * 3, owner_layouts=groups, dtype=torch.float16)
    assert full[2][0].dtype == torch.float16


class Sharded(torch.Tensor):
    """What has a local part, as a DTensor."""

    def to_local(self) -> torch.Tensor:
        return self


def test_destinations_that_cannot_be_written_are_refused() -> None:
    owners = GroupOwnerLayout(Mesh(1, rank=0), mf.build_for_row_atomic([(2, 2), (3, 1)], 1), {0: 0, 1: 0}, name="g")
    source = {0: torch.ones(4), 1: torch.ones(3)}
    with torch.inference_mode():
        inferred = torch.zeros(3)
    for room, kind, words in (
        (inferred, RuntimeError, "tensor 1 was made in inference mode"),
        (torch.zeros(3).as_subclass(Sharded), TypeError, "tensor 1 must be a strided torch.Tensor, got a Sharded"),
        (torch.zeros(4), ValueError, "tensor 1 has 4 elements"),
        (torch.zeros(3, dtype=torch.int32), TypeError, "tensor 1 is torch.int32"),
    ):
        with pytest.raises(kind, match=words):
            inplace.gather(source, {0: torch.zeros(4), 1: room}, owner_layout=owners)
    with torch.inference_mode():
        inplace.gather(source, {0: torch.zeros(4), 1: inferred}, owner_layout=owners)
    assert inferred.tolist() == [1, 1, 1]


def test_destinations_with_lazy_conjugation_or_negation() -> None:
    owners = GroupOwnerLayout(Mesh(1, rank=0), mf.build_for_row_atomic([(4,)], 1), {0: 0})
    value = torch.tensor([1 + 2j, 3 - 4j, 5j, -6])
    memory = torch.zeros(4, dtype=torch.complex64)
    inplace.gather({0: value}, {0: memory.conj()}, owner_layout=owners)
    assert torch.equal(memory, value.conj().resolve_conj())
    imaginary = torch.zeros(4, dtype=torch.complex64)
    room = imaginary.conj().imag  # a negated view
    assert room.is_neg()
    inplace.gather({0: torch.arange(4.0)}, {0: room}, owner_layout=owners)
    assert imaginary.imag.tolist() == [0, -1, -2, -3]


def receive_what_was_saved(rank: int) -> str:
    """Rank 1 receives straight into a tensor that autograd has saved."""
    owners = GroupOwnerLayout(Mesh(2, rank=rank), mf.GlobalLayout([(4,)], [0], 4, [0, 4]), {0: 1})
    leaf = torch.ones(4, requires_grad=True)
    room = torch.zeros(4)
    saved = (leaf * room).sum()
    inplace.gather({0: torch.ones(4)} if rank == 0 else {}, {0: room}, owner_layout=owners)
    try:
        saved.backward()
    except RuntimeError as error:
        return str(error)
    return f"no error, {room.tolist()}"


@pytest.mark.distributed
def test_autograd_sees_what_is_received_in_place(ranks2: RankPool) -> None:
    sender, receiver = ranks2.run(receive_what_was_saved)
    assert sender == "no error, [0.0, 0.0, 0.0, 0.0]"
    assert "modified by an inplace operation" in receiver


def test_parameters_are_destinations() -> None:
    def program(mesh: Mesh) -> None:
        owners = GroupOwnerLayout(mesh, mf.build_for_row_atomic([(4, 2)], 2), {0: 1})
        room = torch.nn.Parameter(torch.zeros(4, 2))
        inplace.gather({0: torch.full((4,), 1.0 + mesh.get_rank())}, {0: room}, owner_layout=owners)
        assert room.is_leaf
        assert room.requires_grad
        assert room.tolist() == ([[1, 1], [1, 1], [2, 2], [2, 2]] if mesh.get_rank() == 1 else [[0, 0]] * 4)

    mf.simulate(program, 2)


def test_small_pieces_of_many_groups_share_a_message() -> None:
    def program(mesh: Mesh) -> None:
        layout = mf.build_for_row_atomic([(4, 8)] * 4, 2)
        owners = [GroupOwnerLayout(mesh, layout, dict.fromkeys(range(4), 0), name=f"{n}") for n in range(12)]
        flat = torch.zeros(layout.rank_size(mesh.get_rank()))
        mf.gather_coalesced([views(group, flat) for group in owners], owner_layouts=owners)

    (sent,) = mf.simulate(program, 2).trace
    assert (sent.src, sent.dst, sent.nbytes) == (1, 0, 12 * 2 * 32 * 4)


def test_one_plan_is_itself() -> None:
    layout = mf.build_for_row_atomic([(4, 2)], 2)
    plan = plan_of("gather", GroupOwnerLayout(Mesh(2, rank=0), layout, {0: 1}))
    assert join_plans((plan,)) is plan
    assert join_plans((plan, plan)).groups == plan.groups * 2
    assert Transfer(1, 0, 0, 4) in join_plans((plan, plan)).local.sends


def refused(mesh: Mesh) -> list[str]:
    layout = mf.build_for_row_atomic([(4, 2)], mesh.size())
    owners = [GroupOwnerLayout(mesh, layout, {0: 0}, name=name) for name in ("a", "b")]
    other = GroupOwnerLayout(Mesh((1, mesh.size()), rank=mesh.rank), layout, {0: 0}, (mf.Replicate(), mf.RowAtomic()))
    good = {0: torch.ones(4)}
    said: list[str] = []
    calls = [
        lambda: mf.gather_coalesced([good], owner_layouts=owners),
        lambda: mf.gather_coalesced([], owner_layouts=[]),
        lambda: mf.gather_coalesced([good, {}], owner_layouts=owners),
        lambda: mf.gather_coalesced([good, {0: torch.ones(3)}], owner_layouts=owners),
        lambda: mf.gather_coalesced([good, {0: torch.ones(4, dtype=torch.int32)}], owner_layouts=owners),
        lambda: mf.gather_coalesced([good, good], owner_layouts=[owners[0], other]),
        lambda: inplace.gather_coalesced([good, good], [], owner_layouts=owners),
        lambda: inplace.gather_coalesced([good, good], [{0: torch.ones(8)}, {}], owner_layouts=owners),
        lambda: inplace.gather_coalesced([good, good], [{0: torch.ones(8)}, {0: [1]}], owner_layouts=owners),
        lambda: inplace.gather_coalesced(
            [good, good], [{0: torch.ones(8)}, {0: torch.ones(8).to_sparse()}], owner_layouts=owners
        ),
    ]
    for call in calls:
        try:
            call()
        except (KeyError, ValueError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def one_element_of_any_stride(rank: int) -> list[float]:
    owners = GroupOwnerLayout(Mesh(2, rank=rank), mf.build_for_row_atomic_unpadding([(2,)], 2), {0: 0})
    column = (torch.arange(7.0) + 10 * rank).reshape(1, 7)[:, 3]
    full, _ = mf.gather({0: column}, owner_layout=owners)
    room = torch.zeros(3, 8)[:1, 2]
    inplace.scatter(full, {0: room}, owner_layout=owners)
    return [*(full[0].tolist() if full else []), *room.tolist()]


@pytest.mark.distributed
def test_one_element_of_any_stride_travels(ranks2: RankPool) -> None:
    assert ranks2.run(one_element_of_any_stride) == [[3.0, 13.0, 0.0], [13.0]]


def give_freed(rank: int, check: bool) -> str:
    owners = GroupOwnerLayout(Mesh(2, rank=rank), mf.build_for_row_atomic([(4, 2)], 2), {0: 0}, name="freed")
    shard = torch.ones(4)
    if rank == 1:
        shard.untyped_storage().resize_(0)
    with mf.agreement_check(check):
        try:
            mf.gather({0: shard}, owner_layout=owners)
        except (RuntimeError, ValueError) as error:
            return str(error)
    return "no error"


@pytest.mark.distributed
def test_a_freed_shard_is_told_to_all_ranks(ranks2: RankPool) -> None:
    for text in ranks2.run(give_freed, True):
        assert "it was freed" in text
        assert "gather 'freed'" in text


def miscount(rank: int) -> str:
    mesh = Mesh(2, rank=rank)
    owners = [GroupOwnerLayout(mesh, mf.build_for_row_atomic([(4, 2)], 2), {0: 0}, name=name) for name in ("a", "b")]
    with mf.agreement_check():
        try:
            mf.gather_coalesced([{0: torch.ones(4)}] * (2 - rank), owner_layouts=owners)
        except ValueError as error:
            return str(error)
    return "no error"


@pytest.mark.distributed
def test_a_wrong_number_of_groups_is_told_to_all_ranks(ranks2: RankPool) -> None:
    for text in ranks2.run(miscount):
        assert "1 dicts of tensors for 2 owner layouts" in text


def test_errors_name_the_group_before_anything_is_sent() -> None:
    said = refused(Mesh(2, rank=0))  # without a process group, so that any attempt to send would raise something else
    words = [
        ("ValueError", "1 dicts of tensors for 2 owner layouts"),
        ("ValueError", "no owner layout was given"),
        ("KeyError", "gather 'b': source has no entry for tensor 0"),
        ("ValueError", "tensor 0 of group b has 3 elements"),
        ("TypeError", "tensor 0 of group b is torch.int32"),
        ("ValueError", "must lie on one mesh"),
        ("ValueError", "0 destinations for 2 groups"),
        ("KeyError", "gather 'b': destination has no entry"),
        ("TypeError", "must be a strided torch.Tensor, got a list"),
        ("TypeError", "must be a strided torch.Tensor, got a torch.sparse_coo tensor"),
    ]
    assert len(said) == len(words)
    for text, (kind, part) in zip(said, words, strict=True):
        assert text.startswith(kind)
        assert part in text
