"""One decision for all ranks: what is communicated, what is left as it was, and what is refused."""

from typing import Any

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.values.mesh import Mesh
from tests.algebra import KEYS, MATRICES, buffers, draw, gradients, on_mesh, owners_of, tensors, with_tensors

ROWS = mf.RowAtomic()
VECTORS = [key for key in KEYS if key not in MATRICES]


def muon_and_adamw(owners: Any) -> optim.GradientTransformation[Any]:
    muon = optim.muon(0.05, owner_layout=owners, weight_decay=0.1)
    return optim.partition((MATRICES, muon), (VECTORS, optim.adamw(0.1)))


def clipped_and_skipped(owners: Any) -> optim.GradientTransformation[Any]:
    parts = [optim.divide_by_count(), optim.clip_by_global_norm(0.1), muon_and_adamw(owners)]
    return optim.apply_if_finite(optim.chain(*parts))


def bits(tree: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in torch.utils._pytree.tree_leaves(tree)]


def same_bits(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    def raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return all(torch.equal(raw(a), raw(b)) for a, b in zip(one, other, strict=True))


def all_reduces(simulation: mf.Simulation[Any]) -> float:
    """All-reduces of 16 bytes over all ranks: each number goes to the rank that adds it up, and comes back from it."""
    sent = [one for one in simulation.trace if one.operation.startswith("allreduce")]
    ranks = len(simulation.results)
    return sum(one.nbytes for one in sent) / (2 * 16 * (ranks - 1))


def step(
    mesh: Mesh, make: Any, *, spoil: int | None = None, zero: bool = False, **given: Any
) -> tuple[Any, Any, Any, Any]:
    """Parameters and state before and after a step. Of `spoil`, the first gradient is NaN; with `zero`, a weight is -0.0."""
    placements = [*[mf.Replicate()] * (mesh.ndim - 1), ROWS]
    params = buffers(mesh, tensors(draw(0)), placements)
    if zero:
        params["a"].local_buffer[:1] = -0.0
    grads = buffers(mesh, tensors(gradients(0)), placements)
    if mesh.get_rank() == spoil:
        grads["b"].local_buffer[:1] = torch.nan
    optimizer = make(owners_of(params))
    state = optimizer.init(params)
    updates, new = optimizer.update(grads, state, params, **given)
    return params, state, optim.apply_updates(params, updates), new


@pytest.mark.parametrize("shape", [2, 4, (2, 2)], ids=str)
def test_clip_skip_and_count_share_one_all_reduce(shape: Any) -> None:
    def program(mesh: Mesh) -> tuple[float, float]:
        *_, new = step(mesh, clipped_and_skipped, count=10.0 + mesh.get_rank())
        return float(new.inner_state[0].total), int(new.total_notfinite)

    simulation = mf.simulate(program, shape)
    ranks = len(simulation.results)
    assert all_reduces(simulation) == 1
    assert set(simulation.results.values()) == {(sum(10.0 + rank for rank in range(ranks)), 0)}


def test_a_later_value_costs_one_more() -> None:
    def make(owners: Any) -> Any:
        return optim.chain(clipped_and_skipped(owners), optim.clip_by_global_norm(0.1))

    assert all_reduces(mf.simulate(lambda mesh: step(mesh, make, count=1.0) and None, 4)) == 2
    plain = mf.simulate(lambda mesh: step(mesh, muon_and_adamw) and None, 4)
    assert all_reduces(plain) == 0


@pytest.mark.parametrize("spoiled", [0, 5])
def test_a_nan_on_one_rank_of_eight_leaves_everything_as_it_was(spoiled: int) -> None:
    def program(mesh: Mesh) -> None:
        params, state, new_params, new = step(mesh, clipped_and_skipped, spoil=spoiled, zero=True, count=1.0)
        assert same_bits(bits(params), bits(new_params))
        assert same_bits(bits(state.inner_state), bits(new.inner_state))
        assert (int(new.notfinite_count), bool(new.last_finite), int(new.total_notfinite)) == (1, False, 1)

    mf.simulate(program, 8)


@pytest.mark.parametrize("shape", [1, 4, (2, 2)], ids=str)
def test_division_by_the_count_of_all_ranks_and_clip_after_it(shape: Any) -> None:
    """Gradients over 8 samples, clipped: what dividing before gives."""

    def make(owners: Any) -> Any:
        return optim.chain(optim.divide_by_count(), optim.clip_by_global_norm(0.5), optim.scale(-1.0))

    def program(mesh: Mesh) -> dict:
        *_, params, _ = step(mesh, make, count=8.0 / mesh.size())
        whole = {name: buffer.redistribute([mf.Replicate()] * mesh.ndim) for name, buffer in params.items()}
        return {(name, i): whole[name].get_tensor_view(i) for name, i in KEYS}

    start = tensors(draw(0))
    divided = {key: grad / 8 for key, grad in tensors(gradients(0)).items()}
    norm = torch.stack([grad.square().sum() for grad in divided.values()]).sum().sqrt()
    assert norm > 0.5
    for params in mf.simulate(program, shape).results.values():
        expected = {key: start[key] - divided[key] * 0.5 / norm for key in KEYS}
        for key in KEYS:
            torch.testing.assert_close(params[key], expected[key], rtol=0, atol=1e-12)


def test_shards_under_any_keys() -> None:
    """With an owner layout in the chain, plain shards are known to be parts of a whole; with mesh= too."""
    layout = mf.build_for_row_atomic_unpadding([(6, 4), (4,)], 2)
    full = [torch.full((6, 4), 1.0), torch.full((4,), 2.0)]
    norm = 40**0.5

    def program(mesh: Mesh) -> None:
        buffer = mf.DBuffer.distribute_tensors(full, mesh, [ROWS], layout)
        shards = buffer.tensor_views()
        owners = mf.GroupOwnerLayout.from_params(mesh, layout)
        parts = optim.partition(([0], optim.muon(0.1, owner_layout=owners)), ([1], optim.adamw(0.1)))
        seen: list[Any] = []
        see = optim.GradientTransformation(lambda _: (), lambda g, s, _: (seen.append(g), (g, s))[1])
        for optimizer in (
            optim.chain(optim.clip_by_global_norm(1.0), see, parts),
            optim.chain(optim.clip_by_global_norm(1.0, mesh=mesh), see),
        ):
            optimizer.update(shards, optimizer.init(shards), shards)
            for key, update in seen[-1].items():
                torch.testing.assert_close(update, shards[key] / norm)
        with pytest.raises(ValueError, match="2 ranks run this program, and gradients are plain tensors"):
            optim.clip_by_global_norm(1.0).update(shards, optim.ClipState(), shards)
        with pytest.raises(ValueError, match="there are no gradients here to tell"):
            optim.clip_by_global_norm(1.0).update({}, optim.ClipState(), {})
        alone = Mesh(1, ranks=[mesh.get_rank()], rank=mesh.get_rank())
        whole = {"w": torch.full((4,), 3.0)}
        updates, _ = optim.clip_by_global_norm(3.0, mesh=alone).update(whole, optim.ClipState(), whole)
        torch.testing.assert_close(updates["w"], whole["w"] / 2)

    mf.simulate(program, 2)


def test_replicated_shards_count_once() -> None:
    layout = mf.build_for_row_atomic_unpadding([(4, 1)], 2)
    placements = [mf.Replicate(), ROWS]

    def program(mesh: Mesh) -> float:
        owners = mf.GroupOwnerLayout.from_params(mesh, layout, placements=placements)
        shards = mf.DBuffer.distribute_tensors([torch.ones(4, 1)], mesh, placements, layout).tensor_views()
        muon = optim.muon(0.1, owner_layout=owners)
        seen: list[float] = []
        see = optim.GradientTransformation(
            muon.init,
            lambda g, s, p, *, facts=None, **_: (seen.append(float(facts.squares)), (g, s))[1],
            needs=muon.needs._replace(facts=True),
        )
        optimizer = optim.chain(see)
        optimizer.update(shards, optimizer.init(shards), shards)
        return round(seen[0], 9)

    assert set(mf.simulate(program, (2, 2)).results.values()) == {4.0}


def test_large_finite_gradients_are_finite() -> None:
    params = {"w": torch.full((2,), 1e200, dtype=torch.float64)}
    optimizer = optim.apply_if_finite(optim.scale(-1.0))
    _, state = optimizer.update(params, optimizer.init(params), params)
    assert bool(state.last_finite)


def test_dynamic_loss_scale_is_torchs_rule() -> None:
    """Scales, and what is trained, are those of `torch.amp.GradScaler` around the same optimizer."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    leaf = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    theirs = torch.optim.AdamW([leaf], lr=0.1)
    ours = optim.dynamic_loss_scale(optim.adamw(0.1), init_scale=8.0, growth_interval=2)
    params = {"w": torch.ones(3, dtype=torch.float64)}
    state = ours.init(params)
    for number in range(12):
        scaler.scale(torch.ones(1))
        grad = torch.tensor([1.0, -2.0, number], dtype=torch.float64)
        grad[0] = torch.inf if number in (3, 4, 8) else 1.0
        assert state.scale == scaler.get_scale()
        leaf.grad = grad * state.scale
        scaler.step(theirs)
        scaler.update()
        updates, state = ours.update({"w": grad * state.scale}, state, params)
        params = optim.apply_updates(params, updates)
        torch.testing.assert_close(params["w"], leaf.detach(), rtol=0, atol=1e-12)


def test_loss_scale_on_ranks_shares_the_all_reduce() -> None:
    def make(owners: Any) -> Any:
        inner = optim.chain(optim.clip_by_global_norm(3.0), optim.adamw(0.1))
        return optim.dynamic_loss_scale(inner, init_scale=4.0)

    def scaled(number: int) -> dict:
        return {key: 4.0 * grad for key, grad in gradients(number).items()}

    simulation = on_mesh(make, 4, grads_at=scaled, steps=3)
    expected = with_tensors(optim.chain(optim.clip_by_global_norm(3.0), optim.adamw(0.1)), steps=3)
    assert all_reduces(simulation) == 3
    for params in simulation.results.values():
        for key in KEYS:
            torch.testing.assert_close(params[key], expected[key], rtol=0, atol=1e-12)


class Graphs:
    """A backend that counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: object) -> Any:
        self.count += 1
        return graph


def test_one_graph_clips_and_skips() -> None:
    def program(mesh: Mesh) -> int:
        graphs, placements = Graphs(), [ROWS]
        params = buffers(mesh, tensors(draw(0)), placements)
        optimizer = clipped_and_skipped(owners_of(params))
        compiled = torch.compile(optimizer.update, fullgraph=True, backend=graphs)
        state = expected_state = optimizer.init(params)
        for number in range(3):
            grads = buffers(mesh, tensors(gradients(number)), placements)
            if number == 1 and mesh.get_rank() == 1:
                grads["a"].local_buffer[:1] = torch.inf
            count = torch.tensor(2.0 + number)
            updates, state = compiled(grads, state, params, count=count)
            expected, expected_state = optimizer.update(grads, expected_state, params, count=count)
            for name, buffer in expected.items():
                torch.testing.assert_close(updates[name].local_buffer, buffer.local_buffer, rtol=0, atol=1e-12)
        assert int(state.total_notfinite) == 1
        return graphs.count

    assert mf.simulate(program, 2).results == {0: 1, 1: 1}


def test_accumulation_has_two_graphs_and_no_exchange_in_between() -> None:
    def program(mesh: Mesh) -> int:
        graphs = Graphs()
        params = buffers(mesh, tensors(draw(0)), [ROWS])
        optimizer = optim.accumulate(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), 4)
        compiled = torch.compile(optimizer.update, fullgraph=True, backend=graphs)
        state = expected_state = optimizer.init(params)
        for number in range(12):
            grads = buffers(mesh, tensors(gradients(number)), [ROWS])
            updates, state = compiled(grads, state, params)
            expected, expected_state = optimizer.update(grads, expected_state, params)
            assert state.mini_step == expected_state.mini_step == (number + 1) % 4
            for name, buffer in expected.items():
                torch.testing.assert_close(updates[name].local_buffer, buffer.local_buffer, rtol=0, atol=1e-12)
        return graphs.count

    simulation = mf.simulate(program, 2)
    assert max(simulation.results.values()) <= 2
    assert all_reduces(simulation) == 2 * 3  # compiled and eager


def test_states_of_accumulation_are_pytrees_with_the_count() -> None:
    optimizer = optim.accumulate(optim.adamw(0.1), 3)
    params = tensors(draw(0))
    _, state = optimizer.update(params, optimizer.init(params), params)
    leaves, spec = torch.utils._pytree.tree_flatten(state)
    assert leaves[0] == 1
    copy = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert copy.mini_step == 1
    for _ in range(2):
        updates, copy = optimizer.update(params, copy, params)
    assert copy.mini_step == 0
    assert float(updates["b", 1].abs().max()) > 0
