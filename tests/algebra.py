"""Training the same small problem with Optax, with plain tensors, and with buffers on a mesh.

What real ranks run is here, so that their processes need no jax.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy
import torch

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.values.mesh import Mesh

GROUPS = {"a": [(8, 4), (5,), (4, 6)], "b": [(6, 6), (3,)]}
KEYS = [(name, i) for name, shapes in GROUPS.items() for i in range(len(shapes))]
MATRICES = [(name, i) for name, i in KEYS if len(GROUPS[name][i]) == 2]
VECTORS = [key for key in KEYS if key not in MATRICES]
STEPS = 20
SCHEDULE = (0.0, 0.1, 4, 16, 0.01)

# Jax reads it when it computes for the first time: compiling takes longer than all that is computed here.
_FLAGS = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ.setdefault("XLA_FLAGS", f"{_FLAGS} --xla_cpu_use_fusion_emitters=false")

Tensors = dict[Any, torch.Tensor]
Gradients = Callable[[int], dict[Any, numpy.ndarray]]


def draw(seed: int) -> dict[Any, numpy.ndarray]:
    """One array per tensor, in float64."""
    generator = numpy.random.default_rng(seed)
    return {(name, i): generator.standard_normal(GROUPS[name][i]) for name, i in KEYS}


def gradients(step: int) -> dict[Any, numpy.ndarray]:
    return draw(1000 + step)


def tensors(arrays: dict[Any, numpy.ndarray], dtype: torch.dtype = torch.float64) -> Tensors:
    return {key: torch.from_numpy(array).to(dtype) for key, array in arrays.items()}


def with_optax(optimizer: Any, dtype: torch.dtype, grads_at: Gradients = gradients, steps: int = STEPS) -> Tensors:
    """Parameters after training with an Optax transformation."""
    import jax
    import optax

    name = str(dtype).removeprefix("torch.")
    with jax.enable_x64(True):
        optimizer = optimizer() if callable(optimizer) else optimizer

        def arrays(given: dict[Any, numpy.ndarray]) -> dict[str, Any]:
            return {f"{group}.{i}": jax.numpy.asarray(array, dtype=name) for (group, i), array in given.items()}

        @jax.jit
        def advance(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params = arrays(draw(0))
        state = optimizer.init(params)
        for step in range(steps):
            params, state = advance(params, state, arrays(grads_at(step)))
        return {(group, i): torch.from_numpy(numpy.array(params[f"{group}.{i}"])) for group, i in KEYS}


def with_tensors(
    optimizer: optim.GradientTransformation[Any],
    dtype: torch.dtype = torch.float64,
    grads_at: Gradients = gradients,
    steps: int = STEPS,
    **given: Any,
) -> Tensors:
    """Parameters after training whole tensors under the keys of buffers."""
    params = tensors(draw(0), dtype)
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(tensors(grads_at(step), dtype), state, params, **given)
        params = optim.apply_updates(params, updates)
    return params


def buffers(mesh: Mesh, given: Tensors, placements: list[Any]) -> dict[str, mf.DBuffer]:
    shards = len(mesh.shard_ranks([n for n, placement in enumerate(placements) if placement == mf.RowAtomic()]))
    return {
        name: mf.DBuffer.distribute_tensors(
            [given[name, i] for i in range(len(shapes))],
            mesh,
            placements,
            mf.build_for_row_atomic_unpadding(shapes, shards),
        )
        for name, shapes in GROUPS.items()
    }


def owners_of(params: dict[str, mf.DBuffer]) -> dict[str, mf.GroupOwnerLayout]:
    return {
        name: mf.GroupOwnerLayout.from_params(buffer.mesh, buffer.layout, placements=buffer.placements, name=name)
        for name, buffer in params.items()
    }


Make = Callable[[dict[str, mf.GroupOwnerLayout] | None], optim.GradientTransformation[Any]]


def on_mesh(
    make: Make,
    shape: Any,
    dtype: torch.dtype = torch.float64,
    grads_at: Gradients = gradients,
    steps: int = STEPS,
) -> mf.Simulation[Tensors]:
    """Whole parameters on each rank, after training the dict of buffers. Axes but the last one replicate."""

    def program(mesh: Mesh) -> Tensors:
        return train_buffers(mesh, make, dtype, grads_at, steps)

    return mf.simulate(program, shape)


def train_buffers(mesh: Mesh, make: Make, dtype: torch.dtype, grads_at: Gradients, steps: int) -> Tensors:
    placements = [*[mf.Replicate()] * (mesh.ndim - 1), mf.RowAtomic()]
    params = buffers(mesh, tensors(draw(0), dtype), placements)
    optimizer = make(owners_of(params))
    state = optimizer.init(params)
    for step in range(steps):
        grads = buffers(mesh, tensors(grads_at(step), dtype), placements)
        updates, state = optimizer.update(grads, state, params)
        params = optim.apply_updates(params, updates)
    whole = {name: buffer.redistribute([mf.Replicate()] * mesh.ndim) for name, buffer in params.items()}
    return {(name, i): whole[name].get_tensor_view(i) for name, i in KEYS}


def matrices_of(params: dict) -> dict:
    return {key: param.ndim > 1 for key, param in params.items()}


def with_nans(step: int) -> dict[Any, numpy.ndarray]:
    """Not finite at step 3, and at steps 8 to 13: more than two in a row."""
    grads = gradients(step)
    if step == 3 or 8 <= step <= 13:
        grads["b", 1][0] = numpy.inf if step % 2 else numpy.nan
    return grads


def late_nans(step: int) -> dict[Any, numpy.ndarray]:
    """Not finite twice in a row only."""
    return gradients(step) if step % 3 == 0 else with_nans(8)


def corrected_muon(owners: Any) -> optim.GradientTransformation[Any]:
    muon = optim.scale_by_muon(
        owner_layout=owners,
        bias_correction=True,
        orthogonalize=lambda x: optim.newton_schulz(x, eps=0.0),
        stack_equal_shapes=False,
    )
    rate = optim.scale_by_learning_rate(0.1)
    return optim.partition((MATRICES, optim.chain(muon, rate)), (VECTORS, rate))


def decayed_adam(_: Any) -> optim.GradientTransformation[Any]:
    return optim.chain(
        optim.clip_by_global_norm(5.0),
        optim.scale_by_adam(),
        optim.add_decayed_weights(0.3, matrices_of),
        optim.scale_by_learning_rate(optim.warmup_cosine_decay_schedule(*SCHEDULE)),
    )


def skipping(_: Any) -> optim.GradientTransformation[Any]:
    return optim.apply_if_finite(optim.chain(optim.clip_by_global_norm(5.0), optim.adamw(0.1)), 5)


def train_on_ranks(rank: int, make: Make, grads_at: Gradients) -> Tensors:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = mf.as_mesh(init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return train_buffers(mesh, make, torch.float64, grads_at, STEPS)


def assert_equal(actual: Tensors, expected: Tensors, atol: float) -> None:
    assert actual.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(
            actual[key], expected[key], rtol=0, atol=atol, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
        )
