"""Random sessions on one `apply`: steps, evaluations, accumulations and changes of mode, against the module whole."""

import copy
import random
from collections import Counter
from typing import Any

import torch
from torch.func import functional_call, grad
from torch.utils._pytree import tree_map

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests import fsdp_cases as cases

SHAPES = {"one": (1,), "two": (2,), "hsdp": (2, 2), "both": (2, 2), "zero1": (4,), "zero2": (4,), "four": (4,)}


def draw_roles(rng: random.Random, world: int) -> str:
    """Placements for a mesh of at most `world` ranks."""
    return rng.choice([roles for roles, shape in SHAPES.items() if torch.Size(shape).numel() <= world])


class ApplySession:
    """One session on one rank."""

    def __init__(self, mesh: Mesh, seed: int, roles: str) -> None:
        self.mesh, self.rng, self.counts = mesh, random.Random(seed), Counter[str]()
        self.module = cases.net(blocks=self.rng.randint(1, 3), tie=self.rng.random() < 0.5)
        context = mf.FsdpContext(shard_layout=self.rng.choice(list(mf.ShardLayout)), prefetch=self.rng.random() < 0.7)
        self.apply, self.params = mf.fully_shard(self.module, mesh, cases.place(mesh, roles), context=context)
        self.weights = {name: param.detach().clone() for name, param in self.module.named_parameters()}

    def run(self, steps: int) -> Counter[str]:
        """That many calls; the parameters, compared at the end."""
        calls = [self.step, self.plain_step, self.evaluate, self.accumulate, self.change_mode, self.copy, self.fail]
        for _ in range(steps):
            call = self.rng.choice(calls)
            call()
            self.counts[call.__name__] += 1
        gathered = self.apply.gather_parameters(self.params)
        for name, weight in self.weights.items():
            torch.testing.assert_close(gathered[name], weight, rtol=1e-9, atol=1e-9)
        return self.counts

    def _batches(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.rng.randrange(2**40))
        return torch.randint(0, cases.WORDS, (self.mesh.size(), 3, cases.LENGTH), generator=generator)

    def _mine(self, data: torch.Tensor) -> torch.Tensor:
        return data[cases.number(self.mesh)]

    def _dense(self, data: torch.Tensor) -> Any:
        def loss(weights: Any) -> torch.Tensor:
            return torch.stack([cases.loss_of(functional_call(self.module, weights, (x,)), x) for x in data]).mean()

        return grad(loss)(self.weights)

    def _update(self, gradients: Any, expected: Any) -> None:
        for key, gradient in gradients.items():
            spec = self.params[key].spec
            self.params[key] = mf.DBuffer(spec, self.params[key].local_buffer - 0.1 * gradient.local_buffer)
        self.weights = tree_map(lambda weight, gradient: weight - 0.1 * gradient, self.weights, expected)

    def step(self) -> None:
        data = self._batches()
        x = self._mine(data)
        gradients = grad(lambda params: cases.loss_of(self.apply(params, x), x))(self.params)
        self._update(gradients, self._dense(data))

    def plain_step(self) -> None:
        data = self._batches()
        x = self._mine(data)
        leaves = cases.leaves_of(self.params)
        cases.loss_of(self.apply(leaves, x), x).backward()
        found = {key: mf.DBuffer(leaf.spec, leaf.local_buffer.grad) for key, leaf in leaves.items()}
        self._update(found, self._dense(data))

    def evaluate(self) -> None:
        data = self._batches()
        x, mode = self._mine(data), self.rng.choice([torch.no_grad, torch.inference_mode, torch.enable_grad])
        expected = functional_call(self.module, self.weights, (x,))
        with mode():
            found = self.apply(self.params, x)
        torch.testing.assert_close(found.detach().clone(), expected.detach(), rtol=1e-9, atol=1e-9)

    def accumulate(self) -> None:
        rounds = [self._batches() for _ in range(2)]
        accumulator = self.apply.init_accumulator(self.params)
        for data in rounds:
            x = self._mine(data)
            more = grad(lambda a, x=x: cases.loss_of(self.apply.accumulate(self.params, a, x), x))(
                self.apply.init_accumulator(self.params)
            )
            accumulator = tree_map(torch.add, accumulator, more)
        gradients = self.apply.reduce(accumulator)
        dense = [self._dense(data) for data in rounds]
        self._update(gradients, tree_map(torch.add, *dense))

    def change_mode(self) -> None:
        self.apply.train(self.rng.random() < 0.5)

    def copy(self) -> None:
        self.apply = copy.deepcopy(self.apply)

    def fail(self) -> None:
        """A call that is refused, or whose forward raises on all ranks, leaves nothing behind."""
        x = self._mine(self._batches())
        for wrong in (lambda: self.apply({}, x), lambda: self.apply(self.params, x[:, :2])):
            try:
                wrong()
            except (ValueError, RuntimeError):
                continue
            raise AssertionError("nothing was raised")


def apply_session(mesh: Mesh, seed: int, roles: str, steps: int = 6) -> Counter[str]:
    """Run one session; the number of calls of each kind."""
    return ApplySession(mesh, seed, roles).run(steps)
