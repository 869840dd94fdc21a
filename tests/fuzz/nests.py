"""Random nests of transforms around every operation, against the same nest around the dense function of all ranks."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.func import grad, jvp, vmap
from torch.utils._pytree import tree_leaves, tree_map

from mfsdp_func.values.mesh import Mesh
from tests.composition.operations import OPERATIONS, Values
from tests.composition.transforms import Program, batch_of, results_of, tangents_of, weights_of

Tensors = list[torch.Tensor]
OfOne = Callable[[Values], Tensors]
OfAll = Callable[[list[Values]], list[Tensors]]
SCALES = (1.0, 0.5)
TRANSFORMS = ("grad", "jvp", "vmap")


def total(tensors: Tensors) -> torch.Tensor:
    return sum(((tensor * weights_of(tensor)).sum() for tensor in tensors), torch.zeros((), dtype=torch.float64))


def around_one(transform: str, fn: OfOne) -> OfOne:
    """A transform of one rank's function."""
    if transform == "grad":
        return lambda values: tree_leaves(grad(lambda values: total(fn(values)))(values))
    if transform == "jvp":
        return lambda values: jvp(fn, (values,), (tangents_of(values),))[1]
    return lambda values: vmap(fn)(batch_of(values, SCALES))


def around_all(transform: str, fn: OfAll) -> OfAll:
    """The same transform of the function of all ranks; the objective is the sum over ranks."""
    if transform == "grad":
        objective = lambda values: sum(total(tensors) for tensors in fn(values))  # noqa: E731
        return lambda values: [tree_leaves(gradients) for gradients in grad(objective)(values)]
    if transform == "jvp":
        return lambda values: jvp(fn, (values,), (tangents_of(values),))[1]

    def stacked(values: list[Values]) -> list[Tensors]:
        elements = [fn(tree_map(lambda tensor, scale=scale: scale * tensor, values)) for scale in SCALES]
        return [[torch.stack(same) for same in zip(*ranks, strict=True)] for ranks in zip(*elements, strict=True)]

    return stacked


def draw_nest(seed: int) -> tuple[str, tuple[str, ...]]:
    """An operation, and up to three transforms, the innermost first."""
    rng = random.Random(seed)
    return rng.choice(sorted(OPERATIONS)), tuple(rng.choices(TRANSFORMS, k=rng.randint(1, 3)))


def nest(mesh: Mesh, seed: int) -> Counter[str]:
    """Run one drawn nest and compare; its name, counted."""
    return run_nest(mesh, *draw_nest(seed))


def run_nest(mesh: Mesh, name: str, transforms: tuple[str, ...]) -> Counter[str]:
    """An operation under transforms, the innermost first, against the dense function."""
    operation = OPERATIONS[name]
    program, dense = Program(operation, mesh), partial(operation.dense, mesh=mesh)

    def of_one(values: Values) -> Tensors:
        outputs, token = program.run(values)
        return [*results_of(outputs), token.link.double()]

    def of_all(values: list[Values]) -> list[Tensors]:
        # A zero that depends on the input stands for the link.
        zeros = [sum(0.0 * leaf.sum() for leaf in tree_leaves(each)) for each in values]
        return [[*results_of(outputs), zero] for outputs, zero in zip(dense(values), zeros, strict=True)]

    for transform in transforms:
        of_one, of_all = around_one(transform, of_one), around_all(transform, of_all)
    found: Any = of_one(program.values)
    expected = of_all(operation.inputs(mesh))[mesh.ranks.index(mesh.get_rank())]
    torch.testing.assert_close(list(found), list(expected), rtol=1e-9, atol=1e-9)
    return Counter([f"depth {len(transforms)}", name])
