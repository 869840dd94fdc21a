from collections.abc import Iterator

import pytest
import torch

from mfsdp_func.effects.token import Token
from mfsdp_func.operations.gather_scatter import gather, scatter
from mfsdp_func.operations.pipeline import pipeline
from mfsdp_func.simulation.simulate import simulate
from mfsdp_func.values.balance import balance_owner_work
from mfsdp_func.values.layout_builder import build_for_row_atomic, build_for_row_atomic_unpadding
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from mfsdp_func.values.ranges import Range
from tests.spawn import RankPool

SHAPES = ([(6, 4), (3, 5)], [(8, 2)], [(5, 3), (2, 2), (4, 4)], [(1, 7)], [(64, 64), (33, 5)])


def groups_of(mesh: Mesh) -> tuple[list[GroupOwnerLayout], list[dict[int, torch.Tensor]]]:
    """Groups whose owners are chosen together, and this rank's shards of random tensors, alike on all ranks."""
    generator = torch.Generator().manual_seed(7)
    layouts = [
        (build_for_row_atomic, build_for_row_atomic_unpadding)[n % 2](shapes, mesh.size())
        for n, shapes in enumerate(SHAPES)
    ]
    owners = balance_owner_work([(layout, mesh, range(len(layout.tensor_shapes))) for layout in layouts]).owners
    groups = [GroupOwnerLayout(mesh, layout, chosen) for layout, chosen in zip(layouts, owners, strict=True)]
    sources = []
    for layout in layouts:
        full = [torch.randn(shape, generator=generator).reshape(-1) for shape in layout.tensor_shapes]
        me = mesh.shard_index(range(mesh.ndim))
        held = {}
        for i, tensor in enumerate(full):
            for k, part in layout.shards_of(i, Range(0, tensor.numel()), mesh.size()):
                if k == me:
                    held[i] = tensor[part.start : part.end].clone()
        sources.append(held)
    return groups, sources


def compute(n: int, tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {i: tensor @ tensor.mT @ tensor * (n + 1) for i, tensor in tensors.items()}


def both(mesh: Mesh, depth: int) -> int:
    """Run pipelined and one after the other; returns the number of results compared."""
    groups, sources = groups_of(mesh)
    expected = []
    for n, (group, source) in enumerate(zip(groups, sources, strict=True)):
        tensors, token = gather(source, owner_layout=group)
        expected.append(scatter(compute(n, tensors), owner_layout=group, after=token)[0])
    results, token = pipeline(compute, iter(sources), groups, depth=depth)
    assert token.pending == ()
    for result, one in zip(results, expected, strict=True):
        assert list(result) == list(one)
        for i in one:
            assert torch.equal(result[i], one[i]), f"tensor {i}"
    return sum(map(len, results))


def both_on_gloo(rank: int, depth: int) -> int:
    return both(Mesh(2, rank=rank), depth)


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bitwise_one_after_the_other(ranks: int, depth: int) -> None:
    compared = simulate(lambda mesh: both(mesh, depth), ranks, poison=True).results
    assert sum(compared.values()) >= sum(map(len, SHAPES))


@pytest.mark.distributed
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_on_gloo(ranks2: RankPool, depth: int) -> None:
    assert sum(ranks2.run(both_on_gloo, depth)) >= sum(map(len, SHAPES))


def test_messages_are_those_of_one_after_the_other() -> None:
    def program(mesh: Mesh, depth: int) -> None:
        groups, sources = groups_of(mesh)
        pipeline(compute, sources, groups, depth=depth)

    traces = [simulate(lambda mesh, depth=depth: program(mesh, depth), 4).trace for depth in (0, 2)]
    assert sorted(traces[0]) == sorted(traces[1])
    assert traces[0] != traces[1]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_sources_are_read_no_further_than_depth(depth: int) -> None:
    def program(mesh: Mesh) -> list[int]:
        groups, sources = groups_of(mesh)
        read = []

        def lazily() -> Iterator[dict[int, torch.Tensor]]:
            for n, source in enumerate(sources):
                read.append(n)
                yield source

        ahead = []

        def watching(n: int, tensors: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            ahead.append(len(read) - n - 1)
            return compute(n, tensors)

        pipeline(watching, lazily(), groups, depth=depth)
        return ahead

    for ahead in simulate(program, 2).results.values():
        assert ahead == [min(depth, len(SHAPES) - n - 1) for n in range(len(SHAPES))]


def test_gradients_reach_the_shards_on_all_ranks() -> None:
    def program(mesh: Mesh) -> list[torch.Tensor]:
        groups, sources = groups_of(mesh)

        def loss(sources: list[dict[int, torch.Tensor]]) -> torch.Tensor:
            start = Token.linked_to(anchor)
            results, token = pipeline(compute, sources, groups, depth=1, after=start)
            return sum((part.pow(2).sum() for result in results for part in result.values()), token.link)

        anchor = torch.zeros(1, requires_grad=True)
        shards = [{i: t.requires_grad_() for i, t in source.items()} for source in sources]
        loss(shards).backward()
        return [t.grad for source in shards for t in source.values()]

    def alone(mesh: Mesh) -> list[torch.Tensor]:
        groups, sources = groups_of(mesh)
        shards = [{i: t.requires_grad_() for i, t in source.items()} for source in sources]
        total = torch.zeros(())
        for n, (group, source) in enumerate(zip(groups, shards, strict=True)):
            full = {i: t.view(group.layout.tensor_shapes[i]) for i, t in source.items()}
            total = total + sum(part.pow(2).sum() for part in compute(n, full).values())
        total.backward()
        return [t.grad for source in shards for t in source.values()]

    (whole,) = simulate(alone, 1).results.values()
    parts = simulate(program, 4).results
    assert all(gradient is not None for gradients in parts.values() for gradient in gradients)
    norm = sum(gradient.double().pow(2).sum() for gradients in parts.values() for gradient in gradients)
    torch.testing.assert_close(norm, sum(gradient.double().pow(2).sum() for gradient in whole), rtol=1e-5, atol=0)


def test_no_groups() -> None:
    results, token = pipeline(compute, [], [])
    assert results == []
    token.wait()


def test_refused() -> None:
    with pytest.raises(ValueError, match="depth must not be negative, got -1"):
        pipeline(compute, [], [], depth=-1)
    with pytest.raises(ValueError, match="5 owner layouts, but 1 sources"):
        simulate(lambda mesh: pipeline(compute, groups_of(mesh)[1][:1], groups_of(mesh)[0]), 1)
