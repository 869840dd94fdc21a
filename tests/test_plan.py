"""Laws of plans, against a brute-force loop over tensors and ranks that shares no arithmetic with them."""

import base64
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard

from mfsdp_func.plans.plan import Plan, gather_plan, join_plans, scatter_plan
from mfsdp_func.plans.rank_view import group_messages
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import build_for_row_atomic, build_for_row_atomic_unpadding
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout, assign_owner_work
from mfsdp_func.values.placement import RowAtomic
from tests import strategies
from tests.spawn import RankPool

ROOT = Path(__file__).parent.parent
HUGE = 1 << 60

owner_layouts = strategies.owner_layouts()
thresholds = st.sampled_from([1, 2, 5, 20, HUGE])


def shard_axes(owners: GroupOwnerLayout) -> list[int]:
    return [axis for axis, placement in enumerate(owners.placements) if isinstance(placement, Shard)]


def coordinate(owners: GroupOwnerLayout, rank: int) -> tuple[int, ...]:
    (found,) = np.argwhere(np.array(owners.mesh.ranks).reshape(owners.mesh.shape) == rank).tolist()
    return tuple(found)


def held(owners: GroupOwnerLayout, rank: int, tensor: int) -> range:
    """The elements of a tensor that a rank holds."""
    layout, index, count = owners.layout, 0, 1
    for axis in reversed(shard_axes(owners)):
        index = index * owners.mesh.shape[axis] + coordinate(owners, rank)[axis]
        count *= owners.mesh.shape[axis]
    bounds = [*layout.rank_to_offset, layout.size][:: len(layout.rank_to_offset) // count]
    offset, numel = layout.tensor_to_offset[tensor], layout.tensor_shapes[tensor].numel()
    start, end = (min(max(bound - offset, 0), numel) for bound in bounds[index : index + 2])
    return range(start, max(start, end))


def group_of(owners: GroupOwnerLayout, rank: int) -> list[int]:
    """The ranks that share one copy of the buffer with a rank."""
    fixed = [axis for axis in range(owners.mesh.ndim) if axis not in shard_axes(owners)]
    mine = coordinate(owners, rank)
    return [r for r in owners.mesh.ranks if all(coordinate(owners, r)[axis] == mine[axis] for axis in fixed)]


def owner_in_group(owners: GroupOwnerLayout, tensor: int, rank: int) -> int:
    """The rank that owns a tensor for the copy of the buffer to which `rank` belongs."""
    wanted = coordinate(owners, owners.tensor_to_owner[tensor])
    axes = shard_axes(owners)
    (found,) = [r for r in group_of(owners, rank) if all(coordinate(owners, r)[a] == wanted[a] for a in axes)]
    return found


def brute_force(owners: GroupOwnerLayout) -> list[tuple[int, int, int, range]]:
    """(tensor, holder, owner, elements) of everything a gather brings together, own parts too."""
    return [
        (tensor, rank, owner_in_group(owners, tensor, rank), part)
        for tensor in owners.tensor_to_owner
        for rank in owners.mesh.ranks
        if (part := held(owners, rank, tensor))
    ]


def pieces_of(plan: Plan) -> list[tuple[int, int, int, range]]:
    return sorted(((p.tensor, p.src, p.dst, range(p.part.start, p.part.end)) for p in plan.pieces()), key=repr)


def plans_of(owners: GroupOwnerLayout) -> list[Plan]:
    name = owners.name
    return [gather_plan(owners, name), scatter_plan(owners, name), scatter_plan(owners, name, include_own=False)]


def identities(plan: Plan, tensor: int) -> np.ndarray:
    """A different number for every element of every tensor."""
    return tensor * 1_000_000 + np.arange(plan.groups[0].shapes[tensor].numel())


def execute(plan: Plan, direct: int = 1, packed: int = 1) -> dict[int, list[np.ndarray]]:
    """Move the numbers of elements as the ranks' messages say; -1 where nothing was written, no element twice."""
    views = {rank: plan.view(rank) for rank in plan.mesh.ranks}
    inputs = {
        rank: [identities(plan, slot.tensor)[slot.part.start : slot.part.end] for slot in view.inputs]
        for rank, view in views.items()
    }
    outputs = {rank: [np.full(slot.part.numel, -1) for slot in view.outputs] for rank, view in views.items()}

    def write(rank: int, slot: int, start: int, values: np.ndarray) -> None:
        target = outputs[rank][slot][start : start + len(values)]
        assert len(target) == len(values)
        assert (target == -1).all(), "an element arrives twice"
        target[:] = values

    for rank, view in views.items():
        for slot, start, to, at, numel in view.copies:
            write(rank, to, at, inputs[rank][slot][start : start + numel])
    messages = {rank: group_messages(view, direct, packed) for rank, view in views.items()}
    for src in plan.mesh.ranks:
        for dst in plan.mesh.ranks:
            sent = [m for m in messages[src][0] if m.peer == dst]
            received = [m for m in messages[dst][1] if m.peer == src]
            assert [m.stage for m in sent] == [m.stage for m in received]
            for mine, theirs in zip(sent, received, strict=True):
                assert [t.numel for t in mine.transfers] == [t.numel for t in theirs.transfers]
                for out, into in zip(mine.transfers, theirs.transfers, strict=True):
                    write(dst, into.slot, into.start, inputs[src][out.slot][out.start : out.start + out.numel])
    return outputs


@given(owner_layouts)
def test_pieces_are_those_of_the_brute_force(owners: GroupOwnerLayout) -> None:
    moved = [(t, src, dst, part) for t, src, dst, part in brute_force(owners) if src != dst]
    gather, scatter, without_own = plans_of(owners)
    assert pieces_of(gather) == sorted(moved, key=repr)
    back = sorted(((t, dst, src, part) for t, src, dst, part in moved), key=repr)
    assert pieces_of(scatter) == back
    assert pieces_of(without_own) == back


@given(owner_layouts)
def test_views_are_those_of_the_brute_force(owners: GroupOwnerLayout) -> None:
    gather, scatter, without_own = plans_of(owners)
    for rank in owners.mesh.ranks:
        mine = {t: held(owners, rank, t) for t in owners.tensor_to_owner if held(owners, rank, t)}
        owned = {
            t: range(owners.layout.tensor_shapes[t].numel())
            for t in owners.tensor_to_owner
            if owner_in_group(owners, t, rank) == rank and owners.layout.tensor_shapes[t].numel()
        }
        empty = {  # a gather has results for them too
            t: range(0)
            for t in owners.tensor_to_owner
            if owner_in_group(owners, t, rank) == rank and not owners.layout.tensor_shapes[t].numel()
        }
        elsewhere = {t: part for t, part in mine.items() if t not in owned}
        shared = {t: part for t, part in owned.items() if mine.get(t) != part}
        for plan, inputs, outputs in (
            (gather, mine, owned | empty),
            (gather.transpose, owned | empty, mine),
            (scatter, owned, mine),
            (without_own, owned, elsewhere),
            (without_own.transpose, elsewhere, owned),
        ):
            view = plan.view(rank)
            assert [(s.tensor, range(s.part.start, s.part.end)) for s in view.inputs] == sorted(inputs.items())
            assert [(s.tensor, range(s.part.start, s.part.end)) for s in view.outputs] == sorted(outputs.items())
            if rank == owners.mesh.rank:
                assert plan.input_numels == tuple(len(inputs[t]) for t in sorted(inputs))
                assert plan.output_numels == tuple(len(outputs[t]) for t in sorted(outputs))
            for slot in (*view.inputs, *view.outputs):
                assert np.prod(slot.shape, dtype=int) == slot.part.numel
            order = [(t.slot, t.start) for t in view.sends]
            assert order == sorted(order)
            order = [(t.slot, t.start) for t in view.receives]
            assert order == sorted(order)
        own = sum(len(part) for t, part in mine.items() if t in owned)
        assert sum(copy.numel for copy in gather.view(rank).copies) == own
        assert sum(copy.numel for copy in scatter.view(rank).copies) == own
        assert without_own.view(rank).copies == ()
        assert {t.slot for t in scatter.view(rank).sends} == {sorted(owned).index(t) for t in shared}


@given(owner_layouts, thresholds, thresholds)
def test_every_element_arrives_exactly_once(owners: GroupOwnerLayout, direct: int, packed: int) -> None:
    gather, scatter, without_own = plans_of(owners)
    for plan in (gather, scatter, without_own):
        for rank, arrays in execute(plan, direct, packed).items():
            for slot, array in zip(plan.view(rank).outputs, arrays, strict=True):
                wanted = identities(plan, slot.tensor)[slot.part.start : slot.part.end]
                np.testing.assert_array_equal(array, wanted)


@given(owner_layouts)
def test_transpose_without_own_leaves_exactly_own_elements_unwritten(owners: GroupOwnerLayout) -> None:
    plan = plans_of(owners)[2].transpose
    for rank, arrays in execute(plan).items():
        for slot, array in zip(plan.view(rank).outputs, arrays, strict=True):
            wanted = identities(plan, slot.tensor)
            wanted[list(held(owners, rank, slot.tensor))] = -1
            np.testing.assert_array_equal(array, wanted)


@given(owner_layouts)
def test_transpose_swaps_everything_and_is_its_own_inverse(owners: GroupOwnerLayout) -> None:
    for plan in plans_of(owners):
        back = plan.transpose
        assert back.transpose is plan
        assert back != plan
        assert back.digest != plan.digest
        rebuilt = replace(back).transpose
        assert rebuilt == plan
        assert hash(rebuilt) == hash(plan)
        assert rebuilt.digest == plan.digest
        assert pieces_of(back) == sorted(((t, dst, src, part) for t, src, dst, part in pieces_of(plan)), key=repr)
        for rank in plan.mesh.ranks:
            there, here = plan.view(rank), back.view(rank)
            assert (there.inputs, there.outputs) == (here.outputs, here.inputs)
            assert (sorted(there.sends), sorted(there.receives)) == (sorted(here.receives), sorted(here.sends))
            swapped = [type(copy)(copy[2], copy[3], copy[0], copy[1], copy.numel) for copy in there.copies]
            assert sorted(swapped) == sorted(here.copies)


@given(owner_layouts)
def test_gather_and_scatter_are_transposes(owners: GroupOwnerLayout) -> None:
    gather, scatter, _ = plans_of(owners)
    there, back = gather.transpose, scatter
    (group,) = there.groups
    assert Plan("", there.mesh, (replace(group, empty=()),)) == replace(back, operation="")


@given(owner_layouts)
def test_messages_and_elements_meet_the_lower_bound(owners: GroupOwnerLayout) -> None:
    everything = brute_force(owners)
    pairs = {(src, dst) for _, src, dst, _ in everything if src != dst}
    # Each owner misses what it does not hold of its tensors, and no less can reach it.
    missing = sum(
        owners.layout.tensor_shapes[t].numel() - len(held(owners, owner, t))
        for t in owners.tensor_to_owner
        for owner in {owner_in_group(owners, t, rank) for rank in owners.mesh.ranks}
    )
    for plan in plans_of(owners):
        sent = [m for rank in plan.mesh.ranks for m in group_messages(plan.view(rank), HUGE, HUGE)[0]]
        assert sum(t.numel for m in sent for t in m.transfers) == missing
        assert len(sent) == len(pairs)


@given(owner_layouts, thresholds, thresholds)
def test_messages_keep_to_their_thresholds(owners: GroupOwnerLayout, direct: int, packed: int) -> None:
    for plan in plans_of(owners):
        for rank in plan.mesh.ranks:
            view = plan.view(rank)
            for messages, transfers in zip(
                group_messages(view, direct, packed), (view.sends, view.receives), strict=True
            ):
                assert sorted(t for m in messages for t in m.transfers) == sorted(transfers)
                assert all(t.peer == m.peer for m in messages for t in m.transfers)
                for message in messages:
                    alone = len(message.transfers) == 1
                    assert alone or all(t.numel < direct for t in message.transfers)
                    assert alone or sum(t.numel for t in message.transfers) <= packed
                    assert (message.stage == 0) == alone
                stages = [m.stage for m in messages]
                assert stages == sorted(stages)
                for peer in {m.peer for m in messages}:
                    numbered = [m.stage for m in messages if m.peer == peer and m.stage]
                    assert all(a < b for a, b in pairwise(numbered)), "one packed message per pair and stage"


@given(owner_layouts)
def test_part_shapes_are_alike_on_all_ranks(owners: GroupOwnerLayout) -> None:
    scatter = plans_of(owners)[1]
    for tensor in owners.tensor_to_owner:
        shape = tuple(owners.layout.tensor_shapes[tensor])
        row = int(np.prod(shape[1:], dtype=int))
        parts = [held(owners, rank, tensor) for rank in owners.mesh.ranks]
        rows = all(part.start % row == 0 for part in parts if part)
        for rank in owners.mesh.ranks:
            for slot in scatter.view(rank).outputs:
                if slot.tensor == tensor:
                    wanted = (slot.part.numel // row, *shape[1:]) if rows else (slot.part.numel,)
                    assert slot.shape == wanted
            for slot in plans_of(owners)[0].view(rank).outputs:
                assert slot.shape == tuple(owners.layout.tensor_shapes[slot.tensor])


@given(owner_layouts)
def test_table_lists_every_piece_and_the_totals(owners: GroupOwnerLayout) -> None:
    for plan in plans_of(owners):
        lines = str(plan).splitlines()
        pieces = pieces_of(plan)
        parsed = []
        for line in lines[2 : 2 + len(pieces)]:
            tensor, rest = line.split(maxsplit=1)
            shape, _, rest = rest.partition(")")
            src, dst, span, numel = rest.split()
            start, end = map(int, span.split(".."))
            assert shape + ")" == str(tuple(plan.groups[0].shapes[int(tensor)]))
            assert numel == f"({end - start})"
            parsed.append((int(tensor), int(src), int(dst), range(start, end)))
        assert sorted(parsed, key=repr) == pieces
        pairs = {(src, dst) for _, src, dst, _ in pieces}
        total = sum(len(part) for *_, part in pieces)
        assert plan.operation in lines[0]
        assert owners.name in lines[0]
        assert f"{len(pieces)} pieces between {len(pairs)} pairs of ranks, {total} elements" in "\n".join(lines[2:])


def test_table_of_an_example() -> None:
    layout = build_for_row_atomic_unpadding([(4, 2), (2, 3)], 2)
    owners = GroupOwnerLayout(Mesh(2, ranks=(5, 3)), layout, {0: 3, 1: 5}, name="block")
    assert (layout.tensor_to_offset, layout.rank_to_offset) == ((0, 8), (0, 6))
    assert pieces_of(gather_plan(owners, "block")) == [(0, 5, 3, range(6)), (1, 3, 5, range(6))]
    rows = [line.split() for line in str(gather_plan(owners, "block")).splitlines()]
    assert rows[0][:2] == ["gather", "'block'"]
    assert rows[2] == ["0", "(4,", "2)", "5", "3", "0..6", "(6)"]
    assert rows[3] == ["1", "(2,", "3)", "3", "5", "0..6", "(6)"]
    rows = [line.split() for line in str(scatter_plan(owners, "block")).splitlines()]
    assert rows[0][:2] == ["scatter", "'block'"]
    assert ["0", "(4,", "2)", "3", "5", "0..6", "(6)"] in rows[2:4]
    assert ["1", "(2,", "3)", "5", "3", "0..6", "(6)"] in rows[2:4]


# The value: equality, digests, caches.


@given(owner_layouts)
def test_digest_leaves_out_who_we_are(owners: GroupOwnerLayout) -> None:
    for number, plan in enumerate(plans_of(owners)):
        for rank in (*owners.mesh.ranks, None):
            seen = GroupOwnerLayout(
                owners.mesh.with_rank(rank), owners.layout, owners.tensor_to_owner, owners.placements, owners.name
            )
            other = plans_of(seen)[number]
            assert other.digest == plan.digest
            assert (other == plan) == (rank == owners.mesh.rank)
            assert (other.key == plan.key) == (rank == owners.mesh.rank)


def base_owners(**changes: object) -> GroupOwnerLayout:
    values: dict[str, object] = {
        "mesh": Mesh((2, 2), rank=0),
        "layout": build_for_row_atomic_unpadding([(4, 2), (6, 3), (5,)], 4),
        "tensor_to_owner": {0: 1, 1: 3},
        "placements": None,
        "name": "",
    }
    return GroupOwnerLayout(**(values | changes))  # type: ignore[arg-type]


DIFFERENT = {
    "owner": base_owners(tensor_to_owner={0: 1, 1: 2}),
    "owners swapped": base_owners(tensor_to_owner={0: 3, 1: 1}),
    "fewer tensors": base_owners(tensor_to_owner={0: 1}),
    "other tensors": base_owners(tensor_to_owner={0: 1, 2: 3}),
    "none": base_owners(tensor_to_owner={}),
    "name": base_owners(name="other"),
    "rank order": base_owners(mesh=Mesh((2, 2), ranks=(1, 0, 2, 3), rank=0)),
    "mesh shape": base_owners(mesh=Mesh((4,), rank=0)),
    "axis names": base_owners(mesh=Mesh((2, 2), ("dp", "tp"), rank=0)),
    "replicate": base_owners(placements=(Replicate(), RowAtomic())),
    "offsets": base_owners(layout=GlobalLayout([(4, 2), (6, 3), (5,)], (0, 8, 27), 32, (0, 8, 14, 23))),
    "boundaries": base_owners(layout=GlobalLayout([(4, 2), (6, 3), (5,)], (0, 8, 26), 31, (0, 8, 14, 20))),
    "shapes": base_owners(layout=build_for_row_atomic_unpadding([(4, 2), (3, 6), (5,)], 4)),
}


def all_digests() -> dict[str, str]:
    variants = {"base": base_owners()} | DIFFERENT
    return {
        f"{label}: {kind}": plan.digest
        for label, owners in variants.items()
        for kind, plan in zip(("gather", "scatter", "without own"), plans_of(owners), strict=True)
    }


def test_digests_of_different_plans_differ() -> None:
    digests = all_digests()
    assert len(digests) == 3 * (1 + len(DIFFERENT))
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("label", DIFFERENT)
def test_plans_are_equal_by_value_only(label: str) -> None:
    base = plans_of(base_owners())
    for plan, same, other in zip(base, plans_of(base_owners()), plans_of(DIFFERENT[label]), strict=True):
        assert plan == same
        assert hash(plan) == hash(same)
        assert plan != other
        assert plan.key != other.key
    assert len({*base, *plans_of(DIFFERENT[label])}) == 6


def test_equal_owners_share_one_plan_and_a_name_does_not_leak() -> None:
    plan = gather_plan(base_owners(), "")
    assert gather_plan(base_owners(), "") is plan
    assert plan.local is plan.local
    named = gather_plan(base_owners(name="named"), "named")
    assert base_owners(name="named") == base_owners()
    assert (plan.label, named.label) == ("gather", "gather 'named'")


def test_digests_are_equal_in_a_process_with_another_hash_seed() -> None:
    code = "from tests.test_plan import all_digests; import pickle, sys; pickle.dump(all_digests(), sys.stdout.buffer)"
    environment = os.environ | {"PYTHONHASHSEED": "271828", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True, timeout=120
    )
    assert pickle.loads(done.stdout) == all_digests()


def plans_used() -> list[Plan]:
    """Plans whose derived values have all been asked for."""
    layout = build_for_row_atomic([(4, 2)], 2)
    plans = tuple(gather_plan(GroupOwnerLayout(Mesh(2, rank=0), layout, {0: 1}), name) for name in "ab")
    found: list[Plan] = [*plans, join_plans(plans)]
    for plan in found:
        assert hash(plan) == hash(plan.transpose.transpose)
        assert plan.local.sends
    return found


def test_plans_from_a_process_with_other_hashes_are_equal() -> None:
    code = "from tests.test_plan import plans_used; import pickle, sys; pickle.dump(plans_used(), sys.stdout.buffer)"
    environ = os.environ | {"PYTHONHASHSEED": "12345", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, check=True, timeout=120)
    received, here = pickle.loads(done.stdout), plans_used()
    assert received == here
    assert [hash(plan) for plan in received] == [hash(plan) for plan in here]


def digests_of_rank(rank: int, encoded: str) -> list[str]:
    owners = pickle.loads(base64.b64decode(encoded))
    mesh = owners.mesh.with_rank(rank)
    mine = GroupOwnerLayout(mesh, owners.layout, owners.tensor_to_owner, owners.placements, owners.name)
    return [plan.digest for plan in plans_of(mine)]


@pytest.mark.distributed
def test_digests_are_equal_on_real_ranks(ranks2: RankPool) -> None:
    layout = build_for_row_atomic([(6, 4), (3,), (0, 2)], 2)
    mesh = Mesh(2, ranks=(1, 0))
    owners = GroupOwnerLayout(mesh, layout, assign_owner_work(layout, mesh, [0, 1]), name="g")
    first, second = ranks2.run(digests_of_rank, base64.b64encode(pickle.dumps(owners)).decode())
    assert first == second == [plan.digest for plan in plans_of(owners)]


@given(owner_layouts)
@settings(max_examples=25)
def test_plans_survive_pickling_of_their_owners(owners: GroupOwnerLayout) -> None:
    copy = pickle.loads(pickle.dumps(owners))
    assert [plan.digest for plan in plans_of(copy)] == [plan.digest for plan in plans_of(owners)]
    assert plans_of(copy) == plans_of(owners)


def test_a_rank_outside_the_mesh_has_no_view() -> None:
    plan = gather_plan(base_owners(), "")
    with pytest.raises(ValueError, match=r"rank 4 is not in Mesh"):
        plan.view(4)
    with pytest.raises(ValueError, match="with_rank"):
        _ = gather_plan(base_owners(mesh=Mesh((2, 2))), "").local


def test_one_view_of_a_large_plan() -> None:
    """One rank's view of what would be millions of pieces: no loop over ranks and tensors together."""
    count = 2048
    layout = build_for_row_atomic_unpadding([(64, 64)] * 5000, count)
    mesh = Mesh(count, rank=1000)
    owners = GroupOwnerLayout(mesh, layout, assign_owner_work(layout, mesh, range(5000)))
    view = gather_plan(owners, "").local
    own = layout.get_segment(1000, count)
    assert sum(slot.part.numel for slot in view.inputs) == own.numel
    assert sum(copy.numel for copy in view.copies) + sum(t.numel for t in view.sends) == own.numel
    assert {t.peer for t in view.sends} <= {999, 1001}


@pytest.mark.slow
@given(owner_layouts, thresholds, thresholds)
@settings(max_examples=3000)
def test_conservation_at_length(owners: GroupOwnerLayout, direct: int, packed: int) -> None:
    test_every_element_arrives_exactly_once.hypothesis.inner_test(owners, direct, packed)
    test_messages_and_elements_meet_the_lower_bound.hypothesis.inner_test(owners)
