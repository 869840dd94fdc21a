"""Cases: what is read, written, shared, in flight, and forgotten."""

import itertools
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.movement.groups import (
    Group,
    Run,
    Tensors,
    assert_same,
    bits,
    case,
    gather_only,
    groups_for,
    one_group,
    scatter_only,
)


class Junk:
    """An object that may not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"an entry that takes no part was read: {name}")


class Watched(Mapping[int, Any]):
    """A dict that remembers which entries were read."""

    def __init__(self, entries: dict[int, Any]) -> None:
        self.entries, self.read = entries, set[int]()

    def __getitem__(self, key: int) -> Any:
        self.read.add(key)
        return self.entries[key]

    def __iter__(self) -> Iterator[int]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@case
def entries_that_take_no_part_are_not_read(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh).of(torch.float32)
    full, spans, taking_part = group.fill(), group.spans(), set(group.owners.tensor_to_owner)
    needed = group.shards({i: full[i] for i in taking_part})
    source = Watched({99: Junk(), -1: Junk(), 2: Junk()} | {i: needed.get(i, Junk()) for i in taking_part})
    gathered = run(gather_only(group), source)
    assert source.read == set(spans) & taking_part
    assert_same(gathered, group.full(full))
    results = Watched({7: Junk(), 2: Junk()} | {i: gathered.get(i, Junk()) for i in taking_part})
    parts = run(scatter_only(group), results)
    assert results.read == set(gathered)
    assert_same(parts, group.parts(full))
    # An entry of another dtype that takes no part, first in the dict.
    source = {2: torch.zeros(3, dtype=torch.int8)} | needed
    assert_same(run(gather_only(group), source), gathered)
    return gathered, parts


@case
def order_of_the_dict_does_not_matter(mesh: Mesh, run: Run) -> Any:
    shapes = [(3, 2)] * 9
    group = one_group(mesh, shapes).of(torch.float32)
    full = group.fill()
    shuffle = random.Random(mesh.get_rank())
    results = []
    for _ in range(3):
        source = list(group.shards(full).items())
        shuffle.shuffle(source)
        gathered = run(gather_only(group), dict(source))
        assert list(gathered) == sorted(gathered)
        assert_same(gathered, group.full(full))
        owned = list(gathered.items())
        shuffle.shuffle(owned)
        parts = run(scatter_only(group), dict(owned))
        assert list(parts) == sorted(parts)
        assert_same(parts, group.parts(full))
        results.append((gathered, parts))
    return results


def memory_of(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes() * bool(tensor.numel()))


def assert_apart(results: Tensors, inputs: Tensors) -> None:
    """No result shares an element with an input or with another result."""
    spans = [range(t.data_ptr(), t.data_ptr() + t.nbytes) for t in results.values()]
    for one, other in itertools.combinations(spans, 2):
        assert one.stop <= other.start or other.stop <= one.start, "results overlap"
    for one, other in itertools.product(spans, map(memory_of, inputs.values())):
        assert one.stop <= other.start or other.stop <= one.start, "a result lies in an input"


@case
def inputs_stay_and_results_are_new_memory(mesh: Mesh, run: Run) -> Any:
    results = {}
    for name in ("padded balanced", "unpadded rotated", "tensor balanced", "tensor one"):
        group = groups_for(mesh)[name].of(torch.float32)
        full = group.fill()
        for function, source in ((gather_only, group.shards(full)), (scatter_only, group.full(full))):
            before = {i: tensor.clone() for i, tensor in source.items()}
            result = run(function(group), source)
            assert result is not source
            assert_same(source, before, name)
            assert_apart(result, source)
            results[name, function.__name__] = {i: tensor.clone() for i, tensor in result.items()}
            for number, tensor in enumerate(result.values()):  # each may be written without a trace elsewhere
                tensor.fill_(number)
            for number, tensor in enumerate(result.values()):
                assert torch.equal(tensor, torch.full_like(tensor, number)), name
            assert_same(source, before, name)
    return results


@case
def several_in_flight(mesh: Mesh, run: Run) -> Any:
    groups = [group.of(torch.float64) for group in (one_group(mesh), *list(groups_for(mesh).values())[::3])]
    fulls = [{i: tensor + n for i, tensor in group.normal().items()} for n, group in enumerate(groups)]
    pairs = [group.gather(group.shards(full), async_op=True) for group, full in zip(groups, fulls, strict=True)]
    meanwhile = torch.ones(50, 50) @ torch.ones(50, 50)
    scattered = []
    for n, (group, full, (gathered, token)) in enumerate(zip(groups, fulls, pairs, strict=True)):
        if n % 2:  # waited for, or handed on
            token.wait()
            token.wait()
            assert_same(gathered, group.full(full), f"group {n}")
            scattered.append(group.scatter(gathered, async_op=True))
        else:
            scattered.append(group.scatter(gathered, after=[token], async_op=True))
    for group, full, (parts, token) in zip(groups, fulls, scattered, strict=True):
        for _ in range(3):
            token.wait()
        assert_same(parts, group.parts(full))
    assert float(meanwhile[0, 0]) == 50
    return [parts for parts, _ in scattered]


@case
def tokens_order_calls_of_other_groups(mesh: Mesh, run: Run) -> Any:
    first, second = one_group(mesh).of(torch.float64), groups_for(mesh)["handmade rotated"].of(torch.int32)
    one, two = first.normal(), second.fill(torch.int32)
    gathered, token = first.gather(first.shards(one), async_op=True)
    others, late = second.gather(second.shards(two), after=token)
    assert_same(gathered, first.full(one))  # `after` waited for it
    assert_same(others, second.full(two))
    late.wait()
    third, last = first.gather(first.shards(one), after=(token, late), async_op=True)
    last.wait()
    assert_same(third, gathered)
    return gathered, others


@case
def tokens_and_inputs_may_be_dropped(mesh: Mesh, run: Run) -> Any:
    """A sender that forgets everything right away, and reuses memory, still sends the right bits."""
    layout = mf.build_for_row_atomic_unpadding([(600, 500), (3, 500), (400, 500)], mesh.size())
    group = Group(GroupOwnerLayout(mesh, layout, dict.fromkeys(range(3), mesh.ranks[0]), name="dropped"))
    full = group.fill()
    source = group.shards(full)
    if mesh.rank == mesh.ranks[0]:
        time.sleep(0.2)
    gathered, token = group.gather(source, async_op=True)
    if mesh.rank != mesh.ranks[0]:
        assert gathered == {}
        source.clear()
        del token, gathered
        for _ in range(5):  # what was freed would be written over here
            torch.full((300_000,), 7.0)
        return {}
    token.wait()
    assert_same(gathered, group.full(full))
    return {i: bits(tensor).long().sum() for i, tensor in gathered.items()}


@case
def forgetting_the_token_is_harmless_by_default(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh).of(torch.float32)
    full = group.fill()
    gathered = group.gather(group.shards(full))[0]
    assert_same(gathered, group.full(full))
    return group.scatter(gathered)[0]


@case
def in_place(mesh: Mesh, run: Run) -> Any:
    """Destinations keep identity, shape and strides; what is not this rank's to fill stays as it was."""
    group, results = one_group(mesh), []
    full = group.fill()
    for strided in (False, True):

        def destination(shape: torch.Size, strided: bool = strided) -> torch.Tensor:
            return torch.full((2, *shape), -5.0).movedim(0, -1)[..., 0] if strided else torch.full(shape, -5.0)

        into = {i: destination(shape) for i, shape in enumerate(group.shapes)}
        before = {i: (id(tensor), tensor.shape, tensor.stride(), tensor.data_ptr()) for i, tensor in into.items()}
        assert mf.inplace.gather(group.shards(full), into, owner_layout=group.owners) is None
        owned = group.full(full)
        untouched = torch.full((), -5.0)
        assert_same(
            {i: t.contiguous() for i, t in into.items()},
            {i: owned.get(i, untouched.expand(shape).contiguous()) for i, shape in enumerate(group.shapes)},
        )
        back = {i: destination(tensor.shape) for i, tensor in group.parts(full).items()}
        mf.inplace.scatter(into, back, owner_layout=group.owners)
        elsewhere = group.parts(full, include_own=False)
        assert_same(
            {i: t.contiguous() for i, t in back.items()},
            {i: elsewhere.get(i, untouched.expand(t.shape).contiguous()) for i, t in back.items()},
        )
        after = {i: (id(tensor), tensor.shape, tensor.stride(), tensor.data_ptr()) for i, tensor in into.items()}
        assert after == before
        results.append((into, back))
    return results
