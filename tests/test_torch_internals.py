"""What torch keeps private: each name that the library needs still does what it is used for."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from mfsdp_func.effects import torch_internals
from mfsdp_func.effects.torch_internals import (
    active_transforms,
    batched_zero,
    is_traced,
    is_transformed,
    is_untransformed,
    is_watched,
    outside_transforms,
    process_group_named,
    unwrapped,
)
from mfsdp_func.fsdp import torch_internals as units

ROOT = Path(torch_internals.__file__).parents[1]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def seen_by(run: Callable[[Callable[[torch.Tensor], torch.Tensor]], object]) -> tuple[bool, bool, bool, bool]:
    """What the four questions answer while `run` runs a function."""
    found: list[tuple[bool, bool, bool, bool]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append((is_transformed(), is_traced(), is_watched(), is_untransformed()))
        return (x * x).sum()

    run(function)
    return found[0]


def under_watch(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with Watching():
        function(torch.ones(2))


def dual(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with forward_ad.dual_level():
        function(torch.ones(2))


@pytest.mark.parametrize(
    ("run", "answers"),
    [
        (lambda f: f(torch.ones(2)), (False, False, False, True)),
        (lambda f: f(torch.ones(2, requires_grad=True)).backward(), (False, False, False, True)),
        (lambda f: grad(f)(torch.ones(2)), (True, False, False, False)),
        (lambda f: vmap(f)(torch.ones(3, 2)), (True, False, False, False)),
        (lambda f: jvp(f, (torch.ones(2),), (torch.ones(2),)), (True, False, False, False)),
        (dual, (False, False, False, False)),
        (under_watch, (False, False, True, True)),
        (lambda f: make_fx(f)(torch.ones(2)), (False, True, True, False)),
        (lambda f: make_fx(f, tracing_mode="fake")(torch.ones(2)), (False, True, True, False)),
    ],
    ids=["eager", "autograd", "grad", "vmap", "jvp", "dual level", "watched", "make_fx", "fake"],
)
def test_who_looks_on(run: Callable[..., object], answers: tuple[bool, bool, bool, bool]) -> None:
    assert seen_by(run) == answers


def test_active_transforms() -> None:
    found: list[list[str]] = [active_transforms()]

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append(active_transforms())
        return x.square().sum()

    vmap(grad(function))(torch.ones(3, 2))
    jvp(function, (torch.ones(2),), (torch.ones(2),))
    assert found == [[], ["Vmap", "Grad"], ["Jvp"]]


def test_outside_transforms() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with outside_transforms():
            assert not is_transformed()
            assert torch.zeros(2).tolist() == [0.0, 0.0]
        assert is_transformed()
        return x.sum()

    assert torch.equal(grad(function)(torch.ones(2)), torch.ones(2))


def test_batched_zero() -> None:
    shapes: list[tuple[int, ...]] = []

    def inner(x: torch.Tensor) -> torch.Tensor:
        zero = batched_zero(x.device)
        assert zero is not None
        shapes.append(tuple(zero.shape))
        return x + zero

    assert vmap(vmap(inner))(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2
    assert vmap(lambda x: batched_zero(x.device))(torch.ones(4)).shape == (4,)
    assert shapes == [()]
    assert batched_zero(torch.device("cpu")) is None
    grad(lambda x: x * (batched_zero(x.device) is None))(torch.tensor(1.0))


def test_unwrapped() -> None:
    given = torch.arange(3.0)

    def function(x: torch.Tensor) -> torch.Tensor:
        assert unwrapped(x).data_ptr() == given.data_ptr()
        return x.sum()

    vmap(grad(lambda x: function(x)))(given.view(3, 1))
    assert unwrapped(given) is given


def test_no_group_of_that_name() -> None:
    assert process_group_named("there is none") is None


def test_hooks_allowed() -> None:
    """Where transforms forbid saved-tensor hooks they count all the same; afterwards it is as before."""
    packed: list[torch.Tensor] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        with (
            units.hooks_allowed(),
            torch.enable_grad(),
            saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t),
        ):
            (torch.ones(2, requires_grad=True) * 2).square()
        with pytest.raises(RuntimeError, match="saved tensor hooks"), saved_tensors_hooks(lambda t: t, lambda t: t):
            pass
        return x.sum()

    grad(function)(torch.ones(2))
    assert packed
    packed.clear()
    make_fx(lambda x: (function_of_hooks(packed), x.sum())[1])(torch.ones(2))
    assert packed


def function_of_hooks(packed: list[torch.Tensor]) -> None:
    with units.hooks_allowed(), saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        torch.ones(2, requires_grad=True).square()


def test_hooks_above() -> None:
    assert units.hooks_above() is None
    pair = (lambda t: t, lambda t: t * 2)
    with saved_tensors_hooks(*pair):
        pack, unpack = units.hooks_above()
        assert float(unpack(pack(torch.tensor(3.0)))) == 6
    assert units.hooks_above() is None


def test_the_backward_pass_that_runs() -> None:
    found: list[tuple[bool, str]] = []

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            found.append((units.keeps_graph(), units.current_node().name()))
            return gradient

    y = Looks.apply(torch.ones(2, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert found == [(True, "LooksBackward"), (False, "LooksBackward")]
    assert units.current_node() is None


def test_wrapped() -> None:
    found: list[tuple[bool, bool]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        found.append((units.is_wrapped(x), units.is_batched(x)))
        inner = units.inner_of(x)
        found.append((units.is_wrapped(inner), units.is_batched(inner)))
        return x.sum()

    vmap(grad(function))(torch.ones(3, 2))
    assert found == [(True, False), (True, True)]
    assert not units.is_wrapped(torch.ones(2))


def test_storage_of() -> None:
    one = torch.arange(6.0)
    assert units.storage_of(one) == units.storage_of(one.view(2, 3)[1]) == units.storage_of(one.detach())
    assert units.storage_of(one) != units.storage_of(one.clone())
    assert units.storage_of(torch.eye(2).to_sparse()) == 0


def test_version_of() -> None:
    one = torch.zeros(4)
    one[1:].add_(1)
    assert units.version_of(one) == 1
    assert units.version_of(one.data) == 0
    with torch.inference_mode():
        assert units.version_of(torch.zeros(1).add_(1)) == 0


def test_negative_views() -> None:
    one = torch.ones(2)
    negative = units.negative_view(one)
    assert negative.is_neg()
    assert negative.tolist() == [-1, -1]
    assert units.storage_of(negative) == units.storage_of(one)


def test_fake_tensors() -> None:
    found: list[bool] = []
    make_fx(lambda x: (found.append(units.is_any_fake([x])), x + 1)[1], tracing_mode="fake")(torch.ones(2))
    assert found == [True]
    assert not units.is_any_fake([torch.ones(2)])


PRIVATE = re.compile(r"torch\._(?!foreach|_)\w+|_functorch\b|_python_dispatch\._|_current_level|_mode_key|import _\w+")


@pytest.mark.parametrize("room", ["effects", "fsdp"])
def test_a_room_keeps_to_its_module(room: str) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{n}: {line.strip()}"
        for file in sorted((ROOT / room).glob("*.py"))
        if file.name != "torch_internals.py"
        for n, line in enumerate(file.read_text().splitlines(), 1)
        if (match := PRIVATE.search(line)) and match.group() != "import _pytree"
    ]
    assert found == []


class Told(units.Guarded):
    number = 1


def test_guards_of_ones_own() -> None:
    units.guard_on_facts(Told, lambda told: told.number)
    told, counter = Told(), torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    double = torch.compile(lambda x: x if told is None else x * 2, fullgraph=True, backend=counter)
    for number, graphs in ((1, 1), (1, 1), (2, 2), (1, 2)):
        told.number = number
        double(torch.ones(2))
        assert counter.frame_count == graphs
