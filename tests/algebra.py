"""Training the same small problem with Optax, with plain tensors, and with buffers on a mesh."""

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
STEPS = 20

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


def assert_equal(actual: Tensors, expected: Tensors, atol: float) -> None:
    assert actual.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(
            actual[key], expected[key], rtol=0, atol=atol, equal_nan=True, msg=lambda text, key=key: f"{key}: {text}"
        )
