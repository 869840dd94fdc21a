"""Every transform twice: around one rank's function, and, for the expected numbers, around all ranks' at once."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests.composition.operations import Operation, Values

Tensors = list[torch.Tensor]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
BATCH = (1.0, 0.5, -1.0)


def results_of(outputs: Values) -> Tensors:
    """The tensors of one rank's output, without pytree functions, so that compiled code reads it as it is."""
    found: Tensors = []
    for value in outputs.values():
        found += [value.local_buffer] if isinstance(value, mf.DBuffer) else list(value.values())
    return found


def weights_of(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.arange(tensor.numel(), dtype=tensor.dtype)).view(tensor.shape)


def score(outputs: Values) -> torch.Tensor:
    terms = [(tensor * weights_of(tensor)).sum() for tensor in results_of(outputs)]
    return sum(terms, torch.zeros((), dtype=torch.float64))


def tangents_of(values: Any) -> Any:
    return tree_map(torch.cos, values)


def batch_of(values: Any, scales: tuple[float, ...] = BATCH) -> Any:
    return tree_map(lambda tensor: torch.stack([scale * tensor for scale in scales]), values)


class Program:
    """One rank's function of its input, and its loss."""

    def __init__(self, operation: Operation, mesh: Mesh) -> None:
        self.run = run = operation.build(mesh)
        self.mesh = mesh
        self.values = operation.inputs(mesh)[mesh.ranks.index(mesh.get_rank())]

        def loss(values: Values) -> tuple[torch.Tensor, tuple[Values, mf.Token]]:
            outputs, token = run(values)
            return score(outputs) + token.link, (outputs, token)

        self.loss = loss


# Around one rank's function. Each returns tensors in the order in which `Expected` lists them.


def run_plain(program: Program, compiled: Compile) -> Tensors:
    return results_of(compiled(program.run)(program.values)[0])


def run_grad(program: Program, compiled: Compile) -> Tensors:
    gradients, (outputs, token) = compiled(grad(program.loss, has_aux=True))(program.values)
    token.wait()
    return tree_leaves(gradients) + results_of(outputs)


def run_grad_and_value(program: Program, compiled: Compile) -> Tensors:
    gradients, (value, _) = compiled(grad_and_value(program.loss, has_aux=True))(program.values)
    return [*tree_leaves(gradients), value]


def run_vjp(program: Program, compiled: Compile) -> Tensors:
    def fn(values: Values) -> tuple[Values, Values]:
        (outputs, token), pull = vjp(program.run, values)
        return outputs, pull((tree_map(weights_of, outputs), tree_map(torch.zeros_like, token)))[0]

    outputs, gradients = compiled(fn)(program.values)
    return tree_leaves(gradients) + results_of(outputs)


def run_jvp(program: Program, compiled: Compile) -> Tensors:
    def fn(values: Values, tangents: Values) -> Any:
        return jvp(program.run, (values,), (tangents,))

    (outputs, _), (tangents, _) = compiled(fn)(program.values, tangents_of(program.values))
    return results_of(tangents) + results_of(outputs)


def run_vmap(program: Program, compiled: Compile) -> Tensors:
    return results_of(compiled(vmap(program.run))(batch_of(program.values))[0])


def run_vmap_of_grad(program: Program, compiled: Compile) -> Tensors:
    return tree_leaves(compiled(vmap(grad(program.loss, has_aux=True)))(batch_of(program.values))[0])


def run_grad_of_vmap(program: Program, compiled: Compile) -> Tensors:
    def total(values: Values) -> torch.Tensor:
        return vmap(program.loss)(values)[0].sum()

    return tree_leaves(compiled(grad(total))(batch_of(program.values)))


def run_jvp_of_grad(program: Program, compiled: Compile) -> Tensors:
    def fn(values: Values, tangents: Values) -> Any:
        return jvp(lambda values: grad(program.loss, has_aux=True)(values)[0], (values,), (tangents,))[1]

    return tree_leaves(compiled(fn)(program.values, tangents_of(program.values)))


def run_grad_of_jvp(program: Program, compiled: Compile) -> Tensors:
    def fn(values: Values, tangents: Values) -> Values:
        def slope(values: Values) -> torch.Tensor:
            return jvp(lambda values: program.loss(values)[0], (values,), (tangents,))[1]

        return grad(slope)(values)

    return tree_leaves(compiled(fn)(program.values, tangents_of(program.values)))


def run_grad_of_grad(program: Program, compiled: Compile) -> Tensors:
    def directional(values: Values, tangents: Values) -> torch.Tensor:
        gradients, (_, token) = grad(program.loss, has_aux=True)(values)
        terms = [(a * b).sum() for a, b in zip(tree_leaves(gradients), tree_leaves(tangents), strict=True)]
        return sum(terms, token.link)

    return tree_leaves(compiled(grad(directional))(program.values, tangents_of(program.values)))


class Module(nn.Module):
    """A rank's function as a module whose parameters are the leaves of its input."""

    def __init__(self, program: Program, values: Values) -> None:
        super().__init__()
        leaves, self.spec = tree_flatten(values)
        self.leaves = nn.ParameterList([nn.Parameter(leaf.clone()) for leaf in leaves])
        self.program = program

    def forward(self) -> torch.Tensor:
        return self.program.loss(tree_unflatten(list(self.leaves), self.spec))[0]


def run_functional_call(program: Program, compiled: Compile) -> Tensors:
    module = Module(program, tree_map(torch.zeros_like, program.values))
    params = {f"leaves.{i}": leaf for i, leaf in enumerate(tree_leaves(program.values))}
    return list(compiled(grad(lambda params: functional_call(module, params, ())))(params).values())


def backward(fn: Callable[[Values], torch.Tensor], values: Values) -> Tensors:
    values = tree_map(lambda tensor: tensor.clone().requires_grad_(), values)
    fn(values).backward()
    return [leaf.grad for leaf in tree_leaves(values)]


def run_backward(program: Program, compiled: Compile) -> Tensors:
    return backward(compiled(lambda values: program.loss(values)[0]), program.values)


def run_checkpoint(program: Program, compiled: Compile) -> Tensors:
    def fn(values: Values) -> torch.Tensor:
        leaves, spec = tree_flatten(values)

        def inner(*leaves: torch.Tensor) -> torch.Tensor:
            return program.loss(tree_unflatten(list(leaves), spec))[0]

        return checkpoint(inner, *leaves, use_reentrant=False) ** 2

    return backward(compiled(fn), program.values)


def run_make_fx(program: Program, compiled: Compile) -> Tensors:
    leaves, spec = tree_flatten(program.values)

    def fn(leaves: Tensors) -> Tensors:
        return tree_leaves(grad(program.loss, has_aux=True)(tree_unflatten(leaves, spec))[0])

    # Fake tensors: real ones would communicate while tracing, and tracers of several ranks cannot be open in a process.
    graph = make_fx(fn, tracing_mode="fake")([torch.zeros_like(leaf) for leaf in leaves])
    return compiled(graph)(leaves)


class Exported(nn.Module):
    """A rank's function as a module of its input."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program

    def forward(self, values: Values) -> Tensors:
        return results_of(self.program.run(values)[0])


def run_export(program: Program, compiled: Compile) -> Tensors:
    example = tree_map(torch.zeros_like, program.values)
    exported = torch.export.export(Exported(program), (example,))
    return compiled(exported.module())(program.values)


def run_jacobian(program: Program, compiled: Compile, transform: Callable[..., Any]) -> Tensors:
    return tree_leaves(compiled(transform(lambda values: program.loss(values)[0]))(program.values))


def run_hessian(program: Program, compiled: Compile) -> Tensors:
    leaves, spec = tree_flatten(program.values)
    numels = [leaf.numel() for leaf in leaves]

    def fn(flat: torch.Tensor) -> torch.Tensor:
        parts = [part.view(leaf.shape) for part, leaf in zip(flat.split(numels), leaves, strict=True)]
        return program.loss(tree_unflatten(parts, spec))[0]

    return [compiled(hessian(fn))(torch.cat([leaf.reshape(-1) for leaf in leaves])).diagonal()]


def run_unequal_vmap(program: Program, compiled: Compile) -> Tensors:
    scales = BATCH[: 2 + program.mesh.ranks.index(program.mesh.get_rank())]
    return results_of(compiled(vmap(program.run))(batch_of(program.values, scales))[0])


def run_checkpoint_in_grad(program: Program, compiled: Compile) -> Tensors:
    def fn(values: Values) -> torch.Tensor:
        return checkpoint(lambda values: program.loss(values)[0], values, use_reentrant=False)

    return tree_leaves(compiled(grad(fn))(program.values))


# Around all ranks at once: the expected tensors of every rank.


class Expected:
    """What the transforms of the dense function give, rank by rank. The objective is the sum over ranks."""

    def __init__(self, operation: Operation, mesh: Mesh) -> None:
        self.values = operation.inputs(mesh)
        self.run = run = partial(operation.dense, mesh=mesh)

        def loss(values: list[Values]) -> torch.Tensor:
            return sum(score(outputs) for outputs in run(values))

        self.loss = loss

    def plain(self) -> list[Tensors]:
        return [results_of(outputs) for outputs in self.run(self.values)]

    def grad(self) -> list[Tensors]:
        return [tree_leaves(gradients) for gradients in grad(self.loss)(self.values)]

    def grad_then_plain(self) -> list[Tensors]:
        return [a + b for a, b in zip(self.grad(), self.plain(), strict=True)]

    def grad_then_value(self) -> list[Tensors]:
        values = [[score(outputs)] for outputs in self.run(self.values)]
        return [a + b for a, b in zip(self.grad(), values, strict=True)]

    def jvp_then_plain(self) -> list[Tensors]:
        tangents = jvp(self.run, (self.values,), (tangents_of(self.values),))[1]
        return [results_of(a) + b for a, b in zip(tangents, self.plain(), strict=True)]

    def stacked(self, fn: Callable[[list[Values]], list[Tensors]], scales: tuple[float, ...] = BATCH) -> list[Tensors]:
        """`fn` element after element of the batch, stacked."""
        elements = [fn(tree_map(lambda tensor, scale=scale: scale * tensor, self.values)) for scale in scales]
        return [[torch.stack(same) for same in zip(*ranks, strict=True)] for ranks in zip(*elements, strict=True)]

    def vmap(self) -> list[Tensors]:
        return self.stacked(lambda values: [results_of(outputs) for outputs in self.run(values)])

    def vmap_of_grad(self) -> list[Tensors]:
        return self.stacked(lambda values: [tree_leaves(gradients) for gradients in grad(self.loss)(values)])

    def second(self) -> list[Tensors]:
        """The Hessian times the tangents."""
        products = jvp(grad(self.loss), (self.values,), (tangents_of(self.values),))[1]
        return [tree_leaves(product) for product in products]

    def grad_of_square(self) -> list[Tensors]:
        """Of the sum over ranks of the squares of their losses."""

        def squares(values: list[Values]) -> torch.Tensor:
            return sum(score(outputs) ** 2 for outputs in self.run(values))

        return [tree_leaves(gradients) for gradients in grad(squares)(self.values)]

    def hessian_diagonal(self) -> list[Tensors]:
        """For an operation without communication: each rank's own."""
        found: list[Tensors] = []
        for k, values in enumerate(self.values):
            leaves, spec = tree_flatten(values)
            numels = [leaf.numel() for leaf in leaves]

            def fn(flat: torch.Tensor, k: int = k, leaves: Any = leaves, spec: Any = spec, numels: Any = numels) -> Any:
                parts = [part.view(leaf.shape) for part, leaf in zip(flat.split(numels), leaves, strict=True)]
                everything = [*self.values[:k], tree_unflatten(parts, spec), *self.values[k + 1 :]]
                return score(self.run(everything)[k])

            found.append([hessian(fn)(torch.cat([leaf.reshape(-1) for leaf in leaves])).diagonal()])
        return found

    def unequal(self) -> list[Tensors]:
        """For an operation without communication: each rank's own batch."""
        return [
            self.stacked(lambda values: [results_of(outputs) for outputs in self.run(values)], BATCH[: 2 + k])[k]
            for k in range(len(self.values))
        ]


class Transform(NamedTuple):
    """One column of the matrix.

    Attributes:
        run: around one rank's function; the second argument compiles, or leaves as it is.
        expected: around all ranks' at once.
        refusal: what the error says, where the transform is refused; with `local`, also for operations that do not
            communicate.
        local: see `refusal`.
    """

    run: Callable[[Program, Compile], Tensors]
    expected: Callable[[Expected], list[Tensors]]
    refusal: str = ""
    local: bool = False


TRANSFORMS: dict[str, Transform] = {
    "plain": Transform(run_plain, Expected.plain),
    "grad": Transform(run_grad, Expected.grad_then_plain),
    "grad_and_value": Transform(run_grad_and_value, Expected.grad_then_value),
    "vjp": Transform(run_vjp, Expected.grad_then_plain),
    "jvp": Transform(run_jvp, Expected.jvp_then_plain),
    "vmap": Transform(run_vmap, Expected.vmap),
    "vmap of grad": Transform(run_vmap_of_grad, Expected.vmap_of_grad),
    "grad of vmap": Transform(run_grad_of_vmap, Expected.vmap_of_grad),
    "jvp of grad": Transform(run_jvp_of_grad, Expected.second),
    "grad of jvp": Transform(run_grad_of_jvp, Expected.second),
    "grad of grad": Transform(run_grad_of_grad, Expected.second),
    "functional_call": Transform(run_functional_call, Expected.grad),
    "checkpoint": Transform(run_checkpoint, Expected.grad_of_square),
    ".backward()": Transform(run_backward, Expected.grad),
    "make_fx": Transform(run_make_fx, Expected.grad),
    "export": Transform(run_export, Expected.plain),
    "jacrev": Transform(partial(run_jacobian, transform=jacrev), Expected.grad, "torch.func.jacrev"),
    "jacfwd": Transform(partial(run_jacobian, transform=jacfwd), Expected.grad, "torch.func.jacfwd"),
    "hessian": Transform(run_hessian, Expected.hessian_diagonal, "torch.func.jac"),
    "vmap, unequal batches": Transform(run_unequal_vmap, Expected.unequal, "batch size under vmap"),
    "checkpoint in grad": Transform(run_checkpoint_in_grad, Expected.grad, "saved tensor hooks", local=True),
}
