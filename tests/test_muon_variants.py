"""Muon with a period, and with rows of one size: the values, what moves, and that states travel."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_func as mf
from mfsdp_func import checkpoint, optim
from mfsdp_func.optim.block_layout import block_layout
from tests.block_cases import CASES
from tests.test_block_muon import TWELVE, randn
from tests.test_decisions import Graphs

ROWS = [mf.RowAtomic()]
RATE, STEPS, BETA = 0.1, 7, 0.9
SHAPES = [(8, 4), (5, 6), (4, 12)]
COLUMNS = optim.blocks("m (q + k) -> m q | m k", q=8)


def layout_of(count: int) -> mf.GlobalLayout:
    return mf.build_for_row_atomic_unpadding(SHAPES, count)


def shards(mesh: mf.Mesh, seed: int) -> dict[int, torch.Tensor]:
    full = [randn(*shape, seed=seed + i) for i, shape in enumerate(SHAPES)]
    return mf.DBuffer.distribute_tensors(full, mesh, ROWS, layout_of(mesh.size())).tensor_views()


def muon_on(mesh: mf.Mesh, **options: Any) -> optim.GradientTransformation[Any]:
    owners = mf.GroupOwnerLayout.from_params(mesh, layout_of(mesh.size()))
    return optim.muon(RATE, weight_decay=0.1, owner_layout=owners, blocks={2: COLUMNS}, **options)


def train(mesh: mf.Mesh, make: Any, steps: int = STEPS, state: Any = None, first: int = 0) -> tuple[Any, Any]:
    params = shards(mesh, 0)
    optimizer = make(mesh)
    state = optimizer.init(params) if state is None else state
    for step in range(first, first + steps):
        updates, state = optimizer.update(shards(mesh, 10 * (step + 1)), state, params)
        params = optim.apply_updates(params, updates)
    return params, state


def test_a_period_of_local_updates() -> None:
    """In between, each rank's rows are matrices of their own: as muon on separately stored ones."""

    def dense(mesh: mf.Mesh) -> dict[int, torch.Tensor]:
        """By hand: the momentum of each rank's rows; every third time on whole matrices, else on the rows."""
        held = shards(mesh, 0)
        whole = {i: randn(*shape, seed=i) for i, shape in enumerate(SHAPES)}
        full, local = (optim.scale_by_muon(blocks={2: COLUMNS}, adjust_lr_fn="match_rms_adamw") for _ in range(2))
        of_whole, of_rows = full.init(whole), local.init(held)
        for step in range(STEPS):
            grads = {i: randn(*shape, seed=10 * (step + 1) + i) for i, shape in enumerate(SHAPES)}
            updates, of_whole = full.update(grads, of_whole, whole)
            local_updates, of_rows = local.update(shards(mesh, 10 * (step + 1)), of_rows, held)
            for i, part in layout_of(mesh.size()).tensors_in(layout_of(mesh.size()).get_segment(mesh.get_rank(), 3)):
                own = updates[i].flatten()[part.start : part.end].view(held[i].shape)
                change = own if step % 3 == 0 else 0.5 * local_updates[i]
                held[i] = held[i] - RATE * (change + 0.1 * held[i])
        return held

    def program(mesh: mf.Mesh) -> None:
        make = partial(muon_on, period=3, local_scale=0.5, adjust_lr_fn="match_rms_adamw", stack_equal_shapes=False)
        params, state = train(mesh, make)
        assert state.since_exchange == 1 + (STEPS - 1) % 3
        expected = dense(mesh)
        assert params.keys() == expected.keys()
        for i, param in params.items():
            torch.testing.assert_close(param, expected[i], rtol=0, atol=1e-12)

    mf.simulate(program, 3)


def test_nothing_moves_in_between() -> None:
    def messages(period: int, steps: int) -> int:
        return len(mf.simulate(lambda mesh: train(mesh, partial(muon_on, period=period), steps)[1].step, 3).trace)

    once = messages(1, 1)
    assert once > 0
    assert [messages(4, steps) for steps in (1, 4, 5, 9)] == [once, once, 2 * once, 3 * once]
    assert messages(1, 4) == 4 * once


@pytest.mark.parametrize("case", TWELVE, ids=str)
def test_local_blocks_of_all_specs(case: Any) -> None:
    """One rank that holds all: local updates are full ones, bit for bit; on three, those of the rows, or refused."""
    weight = {0: randn(*case.shape, seed=1)}

    def program(mesh: mf.Mesh) -> list[dict[int, torch.Tensor]]:
        layout = mf.build_for_row_atomic_unpadding([case.shape], mesh.size())
        owners = mf.GroupOwnerLayout.from_params(mesh, layout)
        params = mf.DBuffer.distribute_tensors([weight[0]], mesh, ROWS, layout).tensor_views()
        found: list[dict[int, torch.Tensor]] = []
        for period in (1, 2):
            muon = optim.muon(
                RATE, owner_layout=owners, blocks={0: case.blocks}, period=period, stack_equal_shapes=False
            )
            state = muon.init(params)
            for _ in range(2):
                updates, state = muon.update(params, state, params)
            found.append(updates)
        return found

    full, local = mf.simulate(program, 1).results[0]
    assert torch.equal(full[0], local[0])
    if case.name == "grouped projections":
        with pytest.raises(ValueError, match=r"no multiple of \d+, so that a rank's part is no block of its own"):
            mf.simulate(program, 5)
    else:
        for full, local in mf.simulate(program, 3).results.values():
            assert full.keys() == local.keys()
            assert all(bool(update.isfinite().all()) and bool(update.any()) for update in local.values())


def test_cuts_inside_rows_of_blocks_are_refused_alike_on_all_ranks() -> None:
    case = next(case for case in CASES if case.name == "grouped projections")
    layout = mf.build_for_row_atomic_unpadding([case.shape], 5)
    for rank in range(5):
        owners = mf.GroupOwnerLayout(mf.Mesh(5, rank=rank), layout, {0: 0})
        with pytest.raises(ValueError, match="cut the buffer by BlockAtomic"):
            optim.muon(RATE, owner_layout=owners, blocks={0: case.blocks}, period=2)


def test_wrong_arguments_are_refused() -> None:
    for options, message in [
        ({"period": 0}, "period must be at least 1"),
        ({"row_beta": 1.5}, r"row_beta must lie in \[0, 1\]"),
        ({"period": 2, "row_beta": 0.9}, "give one of the two"),
    ]:
        with pytest.raises(ValueError, match=message):
            optim.muon(RATE, **options)


def test_a_period_has_two_graphs() -> None:
    def program(mesh: mf.Mesh) -> int:
        graphs = Graphs()
        optimizer = optim.apply_if_finite(muon_on(mesh, period=4))
        update = torch.compile(optimizer.update, fullgraph=True, backend=graphs)
        params = shards(mesh, 0)
        state = expected_state = optimizer.init(params)
        for step in range(9):
            grads = shards(mesh, 10 * (step + 1))
            updates, state = update(grads, state, params)
            expected, expected_state = optimizer.update(grads, expected_state, params)
            for i in expected:
                torch.testing.assert_close(updates[i], expected[i], rtol=0, atol=1e-12)
        return graphs.count

    assert max(mf.simulate(program, 2).results.values()) <= 2


def test_skipped_updates_count_for_the_period() -> None:
    """The host does not know that they are skipped; all else of the state stays, bit for bit."""
    optimizer = optim.apply_if_finite(optim.muon(RATE, owner_layout=owners_of_one(), period=3))
    params = {0: randn(4, 6, seed=0)}
    state = optimizer.init(params)
    _, before = optimizer.update(params, state, params)
    _, after = optimizer.update({0: params[0] * torch.inf}, before, params)
    assert (before.inner_state.since_exchange, after.inner_state.since_exchange) == (1, 2)
    assert torch.equal(before.inner_state.momentum[0], after.inner_state.momentum[0])
    assert torch.equal(before.inner_state.step, after.inner_state.step)


def owners_of_one() -> mf.GroupOwnerLayout:
    return mf.GroupOwnerLayout.from_params(mf.Mesh(1, rank=0), mf.build_for_row_atomic([(4, 6)], 1))


def by_rows(steps: int = STEPS) -> dict[int, torch.Tensor]:
    """NorMuon as the paper has it, on whole matrices: rows over the root of their running mean square."""
    matrices = {(i, 0): randn(*shape, seed=i) for i, shape in enumerate(SHAPES[:2])}
    last = randn(*SHAPES[2], seed=2)
    matrices |= {(2, 0): last[:, :8], (2, 1): last[:, 8:]}
    momenta = {key: torch.zeros_like(matrix) for key, matrix in matrices.items()}
    second = {key: torch.zeros(len(matrix), 1, dtype=torch.float64) for key, matrix in matrices.items()}
    for step in range(steps):
        grads = {i: randn(*shape, seed=10 * (step + 1) + i) for i, shape in enumerate(SHAPES)}
        for (i, n), matrix in matrices.items():
            grad = grads[i] if i < 2 else grads[2].split([8, 4], 1)[n]
            momenta[i, n] = 0.95 * momenta[i, n] + 0.05 * grad
            direction = optim.newton_schulz((0.05 * grad + 0.95 * momenta[i, n]).contiguous())
            second[i, n] = BETA * second[i, n] + (1 - BETA) * direction.square().mean(1, keepdim=True)
            rows = direction / (second[i, n].sqrt() + 1e-8)
            rows = rows * direction.norm() / rows.norm()
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrices[i, n] = matrix - RATE * (scale * rows + 0.1 * matrix)
    return {0: matrices[0, 0], 1: matrices[1, 0], 2: torch.cat([matrices[2, 0], matrices[2, 1]], 1)}


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rows_of_one_size_on_owners(count: int) -> None:
    def program(mesh: mf.Mesh) -> tuple[dict[int, torch.Tensor], set[Any]]:
        params, state = train(mesh, partial(muon_on, row_beta=BETA))
        assert {key: len(rows) for key, rows in state.row_squares.items()}.items() <= {
            (0, 0): 8,
            (1, 0): 5,
            (2, 0): 4 + 4,
        }.items()
        return params, set(state.row_squares)

    results = mf.simulate(program, count).results
    expected, owned = by_rows(), [key for _, keys in results.values() for key in keys]
    assert sorted(owned) == [(0, 0), (1, 0), (2, 0)]
    for i, whole in expected.items():
        found = torch.cat([params[i].flatten() for params, _ in results.values() if i in params])
        torch.testing.assert_close(found.view(whole.shape), whole, rtol=0, atol=1e-12)


def test_rows_of_one_size_on_whole_tensors() -> None:
    params = {i: randn(*shape, seed=i) for i, shape in enumerate(SHAPES)}
    optimizer = optim.muon(RATE, weight_decay=0.1, blocks={2: COLUMNS}, row_beta=BETA)
    state = optimizer.init(params)
    for step in range(STEPS):
        grads = {i: randn(*shape, seed=10 * (step + 1) + i) for i, shape in enumerate(SHAPES)}
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    for i, whole in by_rows().items():
        torch.testing.assert_close(params[i], whole, rtol=0, atol=1e-12)


class Model(nn.Module):
    """Heads of rows, columns, a norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up = nn.Linear(6, 8, bias=False, dtype=torch.float64)
        self.down = nn.Linear(8, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


ROUTE = {"up.weight": optim.blocks("(h d) m -> h d m", d=2), "down.weight": optim.blocks("m (a + b) -> m a | m b", a=4)}
VARIANTS = {"rows": {"row_beta": BETA}, "period": {"period": 3}, "neither": {}}


def trained(mesh: mf.Mesh, variant: str, steps: int, found: tuple[Any, Any] | None = None) -> Any:
    """Through `from_route`: parameters and state after some steps, from the start or from those of a checkpoint."""
    model = Model()
    unpadded = mf.FsdpContext(shard_layout=mf.ShardLayout.UNPADDED)
    apply, params = mf.fully_shard(model, mesh, mf.Placements(0, ROWS, ROWS, ROWS), context=unpadded)
    muon = partial(optim.muon, RATE, **VARIANTS[variant])
    optimizer = optim.from_route(optim.route(model, ROUTE), params, muon=muon, adamw=RATE)
    state = optimizer.init(params)
    if found is not None:
        params, state = found
    for step in range(steps):
        torch.manual_seed(step + (0 if found is None else 2))
        x = torch.randn(5, 6, dtype=torch.float64)

        def loss(params: Any, x: torch.Tensor = x) -> torch.Tensor:
            return (apply(params, x) - 1).square().mean()

        grads = torch.func.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    return apply, params, state


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_go_through_checkpoints(variant: str, tmp_path: Path) -> None:
    """Of 3 ranks, and continued on 1 and 2: the values of a run that was never stopped."""

    def save(mesh: mf.Mesh) -> None:
        apply, params, state = trained(mesh, variant, 2)
        checkpoint.save(tmp_path / "a", {"params": params, "optimizer": state}, names=apply.names)

    def proceed(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        apply, params, state = trained(mesh, variant, 0)
        like = checkpoint.spec_of({"params": params, "optimizer": state})
        got = checkpoint.load(tmp_path / "a", like, names=apply.names)
        apply, params, _ = trained(mesh, variant, 2, (got["params"], got["optimizer"]))
        return apply.state_dict(params, whole=True)

    def straight(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        apply, params, _ = trained(mesh, variant, 4)
        return apply.state_dict(params, whole=True)

    mf.simulate(save, 3)
    names = checkpoint.inspect(tmp_path / "a").tensors
    rows = {name: tuple(found.shape) for name, found in names.items() if "row_squares" in name}
    assert len(rows) == (5 if variant == "rows" else 0)
    counts = (1, 2, 3) if variant != "period" else (3,)  # whose local updates are those of each rank's rows
    for count in counts:
        found = mf.simulate(proceed, count).results[0]
        expected = mf.simulate(straight, count if variant == "period" else 1).results[0]
        for name, whole in expected.items():
            torch.testing.assert_close(found[name], whole, rtol=0, atol=1e-12)


COMPILED = [pytest.param(variant, "aot_eager", marks=pytest.mark.slow) for variant in ("period", "rows")]


@pytest.mark.parametrize(("variant", "compile"), [*((variant, False) for variant in VARIANTS), *COMPILED])
def test_states_live_in_the_torch_optimizer(variant: str, compile: Any) -> None:
    """Steps in place as functional ones, also after its state went through `state_dict`."""

    def program(mesh: mf.Mesh) -> None:
        make = partial(muon_on, **VARIANTS[variant])
        expected, _ = train(mesh, make, 6)
        params = {i: nn.Parameter(shard.clone()) for i, shard in shards(mesh, 0).items()}
        owners = mf.GroupOwnerLayout.from_params(mesh, layout_of(mesh.size()))
        muon = partial(optim.muon, owner_layout=owners, blocks={2: COLUMNS}, **VARIANTS[variant])

        def optimizer() -> optim.TorchOptimizer:
            group = {"params": params, "weight_decay": 0.1}
            return optim.TorchOptimizer([group], muon, lr=RATE, compile=compile, mesh=mesh)

        chosen = optimizer()
        for step in range(6):
            if step == 4:
                packed = chosen.state_dict()
                chosen = optimizer()
                chosen.load_state_dict(packed)
            for i, grad in shards(mesh, 10 * (step + 1)).items():
                params[i].grad = grad
            chosen.step()
        for i, param in expected.items():
            torch.testing.assert_close(params[i].data, param, rtol=0, atol=1e-12)

    mf.simulate(program, 2)


def test_the_torch_optimizer_compiles_a_period_into_two_graphs() -> None:
    stats = torch._dynamo.utils.counters["stats"]
    before, param = stats["unique_graphs"], {0: nn.Parameter(randn(4, 6, seed=0))}
    muon = partial(optim.muon, owner_layout=owners_of_one(), period=5)
    optimizer = optim.TorchOptimizer(param, muon, lr=RATE, compile="eager")
    for step in range(11):
        param[0].grad = randn(4, 6, seed=step)
        optimizer.step()
    assert stats["unique_graphs"] - before == 2
    assert int(optimizer.state["owned"]["0.since_exchange.value"]) == 1


def test_pieces_keep_their_numbers_on_other_meshes() -> None:
    finer = [block_layout(layout_of(count), {0: optim.blocks("(h d) m -> h d m", d=2)}) for count in (1, 3)]
    assert [finer[n].parts_of(0) for n in range(2)] == [range(4)] * 2
