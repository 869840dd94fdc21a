"""Muon by blocks: the same update as on separately stored, contiguous matrices, whatever the layout; and who computes."""

from functools import lru_cache

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.optim.block_layout import block_layout
from mfsdp_func.values.layout_builder import ShardLayout
from tests.block_cases import CASES, Case, D

STEPS = 2
RATE = 0.1
TWELVE = [case for case in CASES if case.name not in ("transposed", "any batch", "any matrix")]
BUILDERS = {
    "padded": mf.build_for_row_atomic,
    "unpadded": mf.build_for_row_atomic_unpadding,
    "balanced": mf.build_for_row_atomic_balanced,
}
LAYOUTS = ["padded", "unpadded", "balanced", "blocks", "tensors"]


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def make_layout(name: str, shapes: list[tuple[int, ...]], count: int) -> mf.GlobalLayout:
    if name == "tensors":
        return mf.build_for_tensor_atomic(shapes, count, tensor_owners=[n % count for n in range(len(shapes))])
    if name == "blocks":
        return mf.build_for_row_atomic_unpadding(shapes, count, block_size=2)
    return BUILDERS[name](shapes, count)


def shapes_of(case: Case) -> list[tuple[int, ...]]:
    """The parameter between two others, so that it starts somewhere in the buffer."""
    even = 2 if case.shape[0] % 2 == 0 else 1
    return [(2 * even, 3), case.shape, (4, 4)]


@lru_cache
def by_hand(case: Case, stack: bool, dtype: torch.dtype) -> torch.Tensor:
    """Training on separately stored matrices, put back to where they came from."""
    weight = randn(*case.shape, seed=1, dtype=dtype)
    parts = {n: matrix.contiguous() for n, matrix in enumerate(case.by_hand(weight))}
    optimizer = optim.muon(RATE, weight_decay=0.1, stack_equal_shapes=stack)
    state = optimizer.init(parts)
    for step in range(STEPS):
        grads = dict(enumerate(case.by_hand(randn(*case.shape, seed=10 + step, dtype=dtype))))
        updates, state = optimizer.update({n: grad.contiguous() for n, grad in grads.items()}, state, parts)
        parts = optim.apply_updates(parts, updates)
    numbers = case.by_hand(torch.arange(weight.numel()).view(case.shape))
    result = torch.empty_like(weight).flatten()
    for n, where in enumerate(numbers):
        result[where.flatten()] = parts[n].flatten()
    return result.view(case.shape)


def train(
    mesh: mf.Mesh, case: Case, layout: mf.GlobalLayout, placements: list, dtype: torch.dtype, **options: bool
) -> dict[int, torch.Tensor]:
    shapes = [tuple(shape) for shape in layout.tensor_shapes]
    full = {i: randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)}
    buffer = mf.DBuffer.distribute_tensors(full, mesh, placements, layout)
    owners = mf.GroupOwnerLayout.from_params(mesh, layout, placements=placements)
    optimizer = optim.muon(RATE, weight_decay=0.1, owner_layout=owners, blocks={1: case.blocks}, **options)
    params = buffer.tensor_views()
    state = optimizer.init(params)
    for step in range(STEPS):
        full = {i: randn(*shape, seed=9 * i + 1 + step, dtype=dtype) for i, shape in enumerate(shapes)}
        grads = mf.DBuffer.distribute_tensors(full, mesh, placements, layout).tensor_views()
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    assert {i: state.momentum[i].shape for i in params} == {i: param.shape for i, param in params.items()}
    return params


@pytest.mark.parametrize("axes", [(2,), (2, 2)], ids=["one axis", "HSDP"])
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("case", TWELVE, ids=str)
def test_the_update_of_separate_matrices(case: Case, name: str, axes: tuple[int, ...]) -> None:
    if name == "blocks" and case.shape[0] % 2:
        layout = make_layout("unpadded", shapes_of(case), axes[-1])
    else:
        layout = make_layout(name, shapes_of(case), axes[-1])
    shard = mf.TensorAtomic() if name == "tensors" else mf.RowAtomic()
    placements = [mf.Replicate()] * (len(axes) - 1) + [shard]

    def program(mesh: mf.Mesh) -> list[dict[int, torch.Tensor]]:
        exact = train(mesh, case, layout, placements, torch.float64, stack_equal_shapes=False)
        return [exact, train(mesh, case, layout, placements, torch.float32)]

    results = mf.simulate(program, axes).results
    replicas = [list(results.values())[n : n + axes[-1]] for n in range(0, len(results), axes[-1])]
    for replica in replicas:
        exact, single = (
            torch.cat([rank[n][1].flatten() for rank in replica if 1 in rank[n]]).view(case.shape) for n in range(2)
        )
        assert torch.equal(exact, by_hand(case, False, torch.float64)), "bit for bit"
        torch.testing.assert_close(single, by_hand(case, True, torch.float32), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_tensors_by_blocks(case: Case) -> None:
    weight, grad = ({"w": randn(*case.shape, seed=seed)} for seed in (1, 10))
    for blocks in (case.blocks, {"w": case.blocks}):
        optimizer = optim.muon(RATE, weight_decay=0.1, blocks=blocks, stack_equal_shapes=False)
        params, state = weight, optimizer.init(weight)
        for step in range(STEPS):
            grad = {"w": randn(*case.shape, seed=10 + step)}
            updates, state = optimizer.update(grad, state, params)
            params = optim.apply_updates(params, updates)
        assert torch.equal(params["w"], by_hand(case, False, torch.float64))


def test_the_rate_follows_the_written_matrix() -> None:
    grad = {"w": randn(4, 9, seed=0)}
    params = {"w": torch.zeros(4, 9, dtype=torch.float64)}
    for spec, factors in [("m (q + k) -> m q | m k", (1, 2.0)), ("m (q + k) -> q m | k m", ((8 / 4) ** 0.5, 1))]:
        given = optim.blocks(spec, k=1)
        plain, scaled = (optim.scale_by_muon(blocks=given, adjust_lr_fn=name) for name in ("none", "original"))
        (before, _), (after, _) = (o.update(grad, o.init(params), params) for o in (plain, scaled))
        for part, factor in zip((slice(0, 8), slice(8, 9)), factors, strict=True):
            torch.testing.assert_close(after["w"][:, part], factor * before["w"][:, part])
    double = optim.scale_by_muon(adjust_lr_fn=lambda m, n: m + n)
    one = optim.scale_by_muon(adjust_lr_fn="none")
    (before, _), (after, _) = (o.update(grad, o.init(params), params) for o in (one, double))
    torch.testing.assert_close(after["w"], 13 * before["w"])


HEAD = optim.blocks("(g (q + k + v) d) m -> (g q) d m | (g k) d m | (g v) d m", q=4, k=1, v=1, d=D)


def muon_traffic(mesh: mf.Mesh, block_size: int, blocks: optim.Blocks | None) -> int:
    shapes = [(8 * 6 * D, 5), (4 * D, 5)]
    layout = mf.build_row_atomic_layout(shapes, mesh.size(), block_size=block_size, shard_layout=ShardLayout.BALANCED)
    given = None if blocks is None else {0: blocks, 1: optim.blocks("(h d) m -> h d m", d=D)}
    optimizer = optim.muon(RATE, owner_layout=mf.GroupOwnerLayout.from_params(mesh, layout), blocks=given)
    full = [randn(*shape, seed=0) for shape in shapes]
    params = mf.DBuffer.distribute_tensors(full, mesh, [mf.RowAtomic()], layout).tensor_views()
    optimizer.update(params, optimizer.init(params), params)
    return len(params)


@pytest.mark.parametrize(("block_size", "blocks", "silent"), [(D, HEAD, True), (1, HEAD, False), (D, None, False)])
def test_whole_heads_need_no_message(block_size: int, blocks: optim.Blocks | None, silent: bool) -> None:
    run = mf.simulate(lambda mesh: muon_traffic(mesh, block_size, blocks), 5)
    assert (len(run.trace) == 0) == silent


def test_every_rank_works_on_its_heads() -> None:
    layout = mf.build_row_atomic_layout([(8 * 6 * D, 5)], 8, block_size=D)
    finer = block_layout(layout, {0: HEAD})
    owners = mf.assign_owner_work(finer.fine, mf.Mesh(8), range(48), finer.costs())
    assert sorted(owners.values()) == sorted(list(range(8)) * 6)


def test_mixtral_is_balanced_by_experts() -> None:
    """The cost of experts as one tall matrix says that owners are even, who are not."""
    up, down, attention = (8, 2 * 14336, 4096), (8, 4096, 14336), [(4096, 4096)] * 2 + [(1024, 4096)] * 2
    layer = mf.build_for_row_atomic_unpadding([*attention, up, down], 64)
    mesh, true, layers = mf.Mesh(64), mf.ns_cost_fn(batch_of_matrices=True), range(32)

    def imbalance(owners: tuple[dict[int, int], ...], costs: dict[int, float]) -> float:
        load = [0.0] * 64
        for group in owners:
            for i, owner in group.items():
                load[owner] += costs[i]
        return max(load) / (sum(load) / 64)

    real = {i: true(shape) for i, shape in enumerate(layer.tensor_shapes)}
    tall = mf.balance_owner_work([(layer, mesh, range(6)) for _ in layers])
    assert tall.trade.imbalance < 1.05
    assert imbalance(tall.owners, real) > 1.9
    batches = mf.balance_owner_work([(layer, mesh, range(6)) for _ in layers], true)
    assert imbalance(batches.owners, real) == pytest.approx(batches.trade.imbalance)
    assert batches.trade.imbalance < 1.27
    spec = optim.blocks("e (gate + up) i -> e gate i | e up i", gate=14336)
    finer = block_layout(layer, {**dict.fromkeys(range(4), "m n -> m n"), 4: spec, 5: "e o i -> e o i"})
    costs = finer.costs()
    best = mf.balance_owner_work([(finer.fine, mesh, costs) for _ in layers], [costs] * 32)
    assert imbalance(best.owners, costs) == pytest.approx(best.trade.imbalance)
    assert best.trade.imbalance < 1.1


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(randn(4, 6, 8, seed=0))


@pytest.mark.parametrize("finer", [frozenset(), frozenset({"up"})], ids=["by experts", "finer"])
def test_experts_are_a_batch_whatever_their_rows_are(finer: frozenset[str]) -> None:
    expected = optim.muon(0.1, batch_of_matrices=True)
    whole = {0: randn(4, 6, 8, seed=1)}
    updates, _ = expected.update(whole, expected.init(whole), whole)

    def program(mesh: mf.Mesh) -> torch.Tensor:
        rows = [mf.RowAtomic()]
        context = mf.FsdpContext(finer_rows=finer, shard_layout=ShardLayout.BALANCED)
        _, params = mf.fully_shard(Experts(), mesh, mf.Placements(0, rows, rows, rows), context=context)
        (buffer,) = params.values()
        owners = mf.GroupOwnerLayout.from_params(mesh, buffer.layout)
        muon = optim.muon(0.1, owner_layout=owners, batch_of_matrices=True)
        grads = mf.DBuffer.distribute_tensors([whole[0]], mesh, rows, buffer.layout).tensor_views()
        found, _ = muon.update(grads, muon.init(buffer.tensor_views()), grads)
        return found[0].flatten() if found else torch.empty(0)

    found = torch.cat(list(mf.simulate(program, 3).results.values())).view(4, 6, 8)
    torch.testing.assert_close(found, updates[0], rtol=0, atol=1e-12)


def test_blocks_that_fit_nothing_are_refused() -> None:
    layout = mf.build_for_row_atomic([(4, 4), (6, 2)], 2)
    owners = mf.GroupOwnerLayout(mf.Mesh(2, rank=0), layout, {0: 0})
    with pytest.raises(ValueError, match="a spec for 1, which takes no part"):
        optim.muon(0.1, owner_layout=owners, blocks={1: "a b -> a b"})
    with pytest.raises(ValueError, match="4 is no multiple of 3"):
        optim.muon(0.1, owner_layout=owners, blocks={0: optim.blocks("(a b) c -> a b c", a=3)})
    with pytest.raises(ValueError, match="is of another layout"):
        optim.muon(0.1, owner_layout=owners, blocks=block_layout(layout, {0: "a b -> a 1 b"}))
    with pytest.raises(ValueError, match="goes with an owner layout"):
        optim.muon(0.1, blocks=block_layout(layout, {})).init({0: torch.ones(4, 4)})
    finer = block_layout(layout, {0: optim.blocks("(a b) c -> a b c", a=2)})
    with pytest.raises(ValueError, match="has 2 blocks, of which 1 have an owner"):
        optim.muon(0.1, owner_layout=mf.GroupOwnerLayout(mf.Mesh(2, rank=0), finer.fine, {0: 0}), blocks=finer)


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_blocks_compile(whole: bool) -> None:
    case = next(case for case in CASES if case.name == "nested")
    columns = next(case for case in CASES if case.name == "columns")
    params = {0: randn(*case.shape, seed=0), 1: randn(*columns.shape, seed=1)}
    layout = mf.build_for_row_atomic([case.shape, columns.shape], 1)
    owners = None if whole else mf.GroupOwnerLayout(mf.Mesh(1, rank=0), layout, {0: 0, 1: 0})

    def step(state: optim.MuonState, params: dict, grads: dict, rate: torch.Tensor) -> tuple:
        muon = optim.muon(rate, owner_layout=owners, blocks={0: case.blocks, 1: columns.blocks})
        return muon.update(grads, state, params)

    state = optim.muon(0.1, owner_layout=owners).init(params)
    rate = torch.tensor(0.1, dtype=torch.float64)
    expected, _ = step(state, params, params, rate)
    found, _ = torch.compile(step, fullgraph=True, backend="aot_eager")(state, params, params, rate)
    for i in expected:
        torch.testing.assert_close(found[i], expected[i], rtol=0, atol=1e-12)
