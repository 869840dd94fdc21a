"""What torch keeps private: each name that the library needs still does what it is used for."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.autograd import forward_ad
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


PRIVATE = re.compile(r"torch\._(?!foreach|_)\w+|_functorch\b|_python_dispatch\._|_current_level|_mode_key|import _\w+")


def test_effects_keep_to_the_room() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{n}: {line.strip()}"
        for file in sorted((ROOT / "effects").glob("*.py"))
        if file.name != "torch_internals.py"
        for n, line in enumerate(file.read_text().splitlines(), 1)
        if (match := PRIVATE.search(line)) and match.group() != "import _pytree"
    ]
    assert found == []
