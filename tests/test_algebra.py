"""Transformations and their combinations, against Optax: on whole tensors, and on buffers of simulated meshes."""

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.values.mesh import Mesh
from tests.algebra import (
    KEYS,
    MATRICES,
    SCHEDULE,
    VECTORS,
    Make,
    assert_equal,
    corrected_muon,
    decayed_adam,
    draw,
    gradients,
    late_nans,
    matrices_of,
    on_mesh,
    skipping,
    tensors,
    train_on_ranks,
    with_nans,
    with_optax,
    with_tensors,
)
from tests.spawn import RankPool

jax, optax = (pytest.importorskip(name) for name in ("jax", "optax"))

ATOL = {torch.float64: 1e-12, torch.float32: 2e-5}


class Case(NamedTuple):
    ours: Make
    theirs: Any
    grads_at: Any = gradients


def wide(schedule: Any) -> Any:
    """Optax computes schedules of its int32 count in float32."""
    return lambda count: schedule(count.astype("float64"))


def rows_by_columns(params: Any) -> Any:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


ratio_of_shape = optax.stateless_with_tree_map(
    lambda update, _: update * max(1, update.shape[0] / update.shape[1]) ** 0.5
)

CASES = {
    "adamw": Case(lambda _: optim.adamw(0.1, weight_decay=0.2), optax.adamw(0.1, weight_decay=0.2)),
    "adam": Case(
        lambda _: optim.chain(optim.scale_by_adam(0.8, 0.95, 1e-6, 1e-7), optim.scale_by_learning_rate(0.1)),
        optax.adam(0.1, 0.8, 0.95, 1e-6, 1e-7),
    ),
    "nadam": Case(
        lambda _: optim.chain(optim.scale_by_adam(nesterov=True), optim.scale_by_learning_rate(0.1)), optax.nadam(0.1)
    ),
    "clip": Case(
        lambda _: optim.chain(optim.clip_by_global_norm(8.5), optim.scale(-0.1)),
        optax.chain(optax.clip_by_global_norm(8.5), optax.scale(-0.1)),
    ),
    "clip of a later value": Case(
        lambda _: optim.chain(optim.adamw(0.1), optim.clip_by_global_norm(0.5)),
        optax.chain(optax.adamw(0.1, weight_decay=0.01), optax.clip_by_global_norm(0.5)),
    ),
    "decay mask and schedule": Case(
        decayed_adam,
        optax.chain(
            optax.clip_by_global_norm(5.0),
            optax.scale_by_adam(),
            optax.add_decayed_weights(0.3, matrices_of),
            optax.scale_by_learning_rate(wide(optax.warmup_cosine_decay_schedule(*SCHEDULE))),
        ),
    ),
    "skip": Case(
        skipping,
        optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(5.0), optax.adamw(0.1, weight_decay=0.01)), 5),
        late_nans,
    ),
    "skip, then pass": Case(
        lambda _: optim.apply_if_finite(optim.adamw(0.1), 2),
        optax.apply_if_finite(optax.adamw(0.1, weight_decay=0.01), 2),
        with_nans,
    ),
    "accumulate": Case(
        lambda _: optim.accumulate(optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)), 3),
        lambda: optax.MultiSteps(  # whose accumulator is float32 unless told, where float64 is switched on
            optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.01)),
            3,
            accumulator_dtype="float64",
        ),
    ),
    "ema": Case(
        lambda _: optim.chain(optim.ema(0.9), optim.scale(-0.1)), optax.chain(optax.ema(0.9), optax.scale(-0.1))
    ),
    "ema from zero": Case(
        lambda _: optim.chain(optim.ema(0.9, debias=False), optim.scale(-0.1)),
        optax.chain(optax.ema(0.9, debias=False), optax.scale(-0.1)),
    ),
    "masked": Case(
        lambda _: optim.chain(optim.masked(optim.scale_by_adam(), matrices_of), optim.scale(-0.1)),
        optax.chain(optax.masked(optax.scale_by_adam(), matrices_of), optax.scale(-0.1)),
    ),
    "masked clip": Case(
        lambda _: optim.chain(optim.masked(optim.clip_by_global_norm(1.0), matrices_of), optim.scale(-0.1)),
        optax.chain(optax.masked(optax.clip_by_global_norm(1.0), matrices_of), optax.scale(-0.1)),
    ),
    "partition": Case(
        lambda _: optim.partition((MATRICES, optim.adamw(0.1)), (VECTORS, optim.scale(-0.05))),
        optax.partition({True: optax.adamw(0.1, weight_decay=0.01), False: optax.scale(-0.05)}, matrices_of),
    ),
    "hyperparameters": Case(
        lambda _: optim.inject_hyperparams(optim.adamw)(
            optim.cosine_decay_schedule(0.1, 15), betas=(0.8, 0.9), weight_decay=optim.linear_schedule(0.0, 0.3, 10)
        ),
        optax.inject_hyperparams(optax.adamw)(
            wide(optax.cosine_decay_schedule(0.1, 15)),
            b1=0.8,
            b2=0.9,
            weight_decay=wide(optax.linear_schedule(0.0, 0.3, 10)),
        ),
    ),
    "muon": Case(
        corrected_muon,
        optax.partition(
            {
                True: optax.chain(
                    optax.contrib.scale_by_muon(eps=0.0, weight_dimension_numbers=rows_by_columns),
                    ratio_of_shape,
                    optax.scale_by_learning_rate(0.1),
                ),
                False: optax.scale_by_learning_rate(0.1),
            },
            matrices_of,
        ),
    ),
}


@cache
def trained_by_optax(name: str, dtype: torch.dtype) -> dict:
    return with_optax(CASES[name].theirs, dtype, CASES[name].grads_at)


@pytest.mark.parametrize("dtype", ATOL, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_whole_tensors_are_trained_as_by_optax(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    assert_equal(with_tensors(case.ours(None), dtype, case.grads_at), trained_by_optax(name, dtype), ATOL[dtype])


@pytest.mark.parametrize("shape", [1, 2, 4, 8, (2, 2)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_buffers_are_trained_as_by_optax(name: str, shape: Any) -> None:
    case = CASES[name]
    expected = trained_by_optax(name, torch.float64)
    for params in on_mesh(case.ours, shape, torch.float64, case.grads_at).results.values():
        assert_equal(params, expected, ATOL[torch.float64])


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["decay mask and schedule", "skip", "muon"])
def test_real_ranks(ranks2: RankPool, ranks4: RankPool, name: str) -> None:
    expected = trained_by_optax(name, torch.float64)
    for ranks in (ranks2, ranks4):
        for params in ranks.run(train_on_ranks, CASES[name].ours, CASES[name].grads_at):
            assert_equal(params, expected, ATOL[torch.float64])


def test_muon_with_and_without_bias_correction_differ() -> None:
    """By up to 0.04 after 20 steps of rate 0.1: which is why the default is torch's and the other is asked for."""
    with_correction = with_tensors(corrected_muon(None))
    plain = optim.chain(optim.scale_by_muon(), optim.scale_by_learning_rate(0.1))
    without = with_tensors(optim.partition((MATRICES, plain), (VECTORS, optim.scale(-0.1))))
    differences = [float((without[key] - with_correction[key]).abs().max()) for key in MATRICES]
    assert max(differences) == pytest.approx(0.0404, abs=1e-4)


SCHEDULES = {
    "constant_schedule": (0.3,),
    "linear_schedule": (0.0, 1.0, 7, 3),
    "polynomial_schedule": (1.0, 0.1, 2, 9, 2),
    "cosine_decay_schedule": (1.0, 12, 0.1, 1.5),
    "exponential_decay": (1.0, 5, 0.5, 2, True, 0.2),
    "piecewise_constant_schedule": (1.0, {4: 0.5, 9: 0.1}),
    "warmup_constant_schedule": (0.0, 1.0, 5),
    "warmup_cosine_decay_schedule": (0.1, 1.0, 5, 16, 0.2, 1.3),
    "warmup_exponential_decay_schedule": (0.0, 1.0, 4, 3, 0.7, 1),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_optaxs(name: str) -> None:
    with jax.enable_x64(True):
        theirs = [float(getattr(optax, name)(*SCHEDULES[name])(step)) for step in range(25)]
    ours = getattr(optim, name)(*SCHEDULES[name])
    assert [ours(step).item() for step in range(25)] == pytest.approx(theirs, abs=1e-12)
    assert [ours(torch.tensor(step)).item() for step in range(25)] == pytest.approx(theirs, abs=1e-12)


def test_schedules_in_a_row() -> None:
    parts = [(1.0, 0.0, 5), (0.5, 0.2, 3)]
    ours = optim.join_schedules([optim.linear_schedule(*part) for part in parts], [6])
    theirs = optax.join_schedules([optax.linear_schedule(*part) for part in parts], [6])
    assert [ours(step).item() for step in range(12)] == pytest.approx([float(theirs(s)) for s in range(12)], abs=1e-6)
    with pytest.raises(ValueError, match="need 1 boundaries"):
        optim.join_schedules([optim.constant_schedule(1.0)] * 2, [])


def test_mean_of_parameters() -> None:
    """By its definition, and on buffers as on tensors; updates pass as they are."""

    def make(debias: bool) -> Make:
        return lambda _: optim.chain(optim.adamw(0.1), optim.ema_of_params(0.7, debias))

    plain = with_tensors(optim.adamw(0.1))
    for debias in (False, True):
        optimizer = make(debias)(None)
        params = tensors(draw(0))
        state, seen = optimizer.init(params), [params]
        for step in range(5):
            updates, state = optimizer.update(tensors(gradients(step)), state, params)
            params = optim.apply_updates(params, updates)
            seen.append(params)
        weights = [0.3 * 0.7 ** (4 - n) for n in range(5)]
        weights = [0.0, *[w / sum(weights) for w in weights]] if debias else [0.7**5, *weights]
        for key in KEYS:
            expected = sum(weight * old[key] for weight, old in zip(weights, seen, strict=True))
            torch.testing.assert_close(state[1].ema[key], expected, rtol=0, atol=1e-12)
        assert_equal(with_tensors(optimizer), plain, 0)
        assert_equal(on_mesh(make(debias), 2).results[1], plain, 1e-12)


def test_states_of_chains_are_those_of_their_first_part() -> None:
    params = tensors(draw(0))
    for make, kind in ((optim.adamw, optim.AdamWState), (optim.muon, optim.MuonState)):
        given = {key: params[key] for key in MATRICES}
        state = make(lambda step: 0.1 / (1 + step)).init(given)
        assert isinstance(state, kind)
        _, state = make(0.1).update(given, state, given)
        assert int(state.step) == 1


def test_a_buffer_serves_two_transformations() -> None:
    """Matrices of both buffers go to Muon in one exchange, at another rate than the rest; names cover whole buffers."""

    def make(owners: Any) -> optim.GradientTransformation[Any]:
        muon = optim.muon(0.05, owner_layout=owners, weight_decay=0.1, stack_equal_shapes=False)
        return optim.partition((MATRICES, muon), (VECTORS, optim.adamw(0.1)))

    expected = with_tensors(make(None))
    simulation = on_mesh(make, 4)
    for params in simulation.results.values():
        assert_equal(params, expected, 1e-12)
    assert {sent.operation for sent in simulation.trace if "allgather" not in sent.operation} == {
        "gather 'a' and 1 more",
        "scatter 'a' and 1 more",
    }
    by_name = on_mesh(lambda _: optim.partition((["a"], optim.adamw(0.1)), (["b"], optim.adamw(0.2))), 2)
    by_key = with_tensors(
        optim.partition(
            ([key for key in KEYS if key[0] == "a"], optim.adamw(0.1)),
            ([key for key in KEYS if key[0] == "b"], optim.adamw(0.2)),
        )
    )
    assert_equal(by_name.results[0], by_key, 1e-12)


def test_hyperparameters_are_changed_in_the_state() -> None:
    optimizer = optim.inject_hyperparams(optim.muon)(0.1, momentum=0.9, weight_decay=0.5)
    params = {"w": torch.eye(2, dtype=torch.float64)}
    state = optimizer.init(params)
    assert sorted(state.hyperparams) == [
        "eps",
        "learning_rate",
        "local_scale",
        "momentum",
        "ns_coefficients",
        "weight_decay",
    ]
    state.hyperparams["weight_decay"] = torch.tensor(0.0)
    updates, state = optimizer.update(params, state, params)
    plain = optim.muon(0.1, momentum=0.9)
    torch.testing.assert_close(updates, plain.update(params, plain.init(params), params)[0])
    assert state.hyperparams["weight_decay"] == 0


# Wrong input


def test_muon_on_buffers_says_what_is_missing() -> None:
    def program(mesh: Mesh) -> None:
        layout = mf.build_for_row_atomic([(4, 2), (3,)], 2)
        params = {"block": mf.DBuffer.empty(mesh, [mf.RowAtomic()], layout)}
        owners = mf.GroupOwnerLayout.from_params(mesh, layout)
        with pytest.raises(ValueError, match="holds shards, whose owners must be known"):
            optim.muon(0.1).init(params)
        for given in (owners, {"other": owners}, {"block": owners}):
            with pytest.raises(ValueError, match="has no owner in the owner layout"):
                optim.muon(0.1, owner_layout=given).init(params)

    mf.simulate(program, 2)


def test_refusals() -> None:
    params = tensors(draw(0))
    for make, message in (
        (lambda: optim.ema(1.0), r"decay must lie in \[0, 1\), got 1.0"),
        (lambda: optim.ema_of_params(-0.1), "decay must lie"),
        (lambda: optim.accumulate(optim.adamw(0.1), 0), "every must be at least 1, got 0"),
        (lambda: optim.clip_by_global_norm(0.0), "max_norm must be a positive number, got 0.0"),
        (lambda: optim.add_decayed_weights(-1.0), "must be a number >= 0"),
        (lambda: optim.scale_by_adam(1.0), "betas must lie"),
        (lambda: optim.apply_if_finite(optim.accumulate(optim.adamw(0.1), 2)), "put it outside"),
        (lambda: optim.dynamic_loss_scale(optim.adamw(0.1), init_scale=0.0), "init_scale > 0"),
        (lambda: optim.warmup_cosine_decay(0.0, 1.0, 10, 10), "must be more than 10"),
        (lambda: optim.linear_schedule(0.0, 1.0, 0), "expected > 0"),
        (lambda: optim.partition((["a"], optim.adamw(0.1)), ([("a", 0)], optim.adamw(0.1))), "claim the same key"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(KeyError, match=r"tensor \('a', 1\) has no entry"):
        optim.masked(optim.adamw(0.1), {("a", 0): True}).init(params)
    with pytest.raises(TypeError, match="no part of it counts"):
        optim.chain(optim.adamw(0.1)).update(params, (optim.adamw(0.1).init(params),), params, count=3)
    with pytest.raises(TypeError, match="update needs count="):
        optim.divide_by_count().update(params, optim.divide_by_count().init(params), params)

    def program(mesh: Mesh) -> None:
        buffer = mf.DBuffer.empty(mesh, [mf.RowAtomic()], mf.build_for_row_atomic([(4, 2)], 1))
        with pytest.raises(KeyError, match="there is no tensor 'blokc'"):
            optim.masked(optim.adamw(0.1), {"block": True, "blokc": True}).init({"block": buffer})

    mf.simulate(program, 1)
