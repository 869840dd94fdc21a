"""What a simulation takes from its caller, what it leaves behind, and where it refuses to run."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests.test_simulated import group, shards, step


class Functions(TorchFunctionMode):
    """Counts calls of `torch.ones`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.ones
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts calls of `aten.ones`."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func is torch.ops.aten.ones.default
        return func(*args, **(kwargs or {}))


def look(mesh: Mesh) -> tuple[Any, ...]:
    """What the modes make of a few operators, before and after other ranks have run."""
    found = []
    for _ in range(2):
        product = torch.ones(2, 2, device="cpu") @ torch.ones(2, 2, device="cpu")
        found.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), product.dtype, torch.zeros(1).device))
        step_on_cpu(mesh)
    assert found[0] == found[1]
    return found[0]


def step_on_cpu(mesh: Mesh) -> None:
    with torch.device("cpu"):
        step(mesh)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (nullcontext, (True, False, torch.float32, "cpu")),
        (torch.no_grad, (False, False, torch.float32, "cpu")),
        (torch.inference_mode, (False, True, torch.float32, "cpu")),
        (partial(torch.autocast, "cpu", torch.bfloat16), (True, False, torch.bfloat16, "cpu")),
        (partial(torch.device, "meta"), (True, False, torch.float32, "meta")),
    ],
)
def test_modes_of_the_caller_hold_inside(mode: Callable[[], AbstractContextManager[Any]], expected: Any) -> None:
    with mode():
        before = look_here()
        results = mf.simulate(look, 2).results
        assert look_here() == before
    assert {(*found[:3], found[3].type) for found in results.values()} == {expected}
    assert look_here() == (True, False, torch.device("cpu"), False)


def look_here() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.zeros(1).device,
        torch.is_autocast_enabled("cpu"),
    )


@pytest.mark.parametrize("mode", [Functions, Operators])
def test_modes_that_watch_see_all_ranks(mode: type[Functions | Operators]) -> None:
    with mode() as counting:
        mf.simulate(lambda mesh: torch.ones(2), 3)
        torch.ones(2)
    assert counting.seen == 4
    torch.ones(2)
    assert counting.seen == 4


def test_a_rank_s_own_modes_end_with_it() -> None:
    def program(mesh: Mesh) -> bool:
        with torch.no_grad() if mesh.get_rank() == 0 else nullcontext():
            step(mesh)
            return torch.is_grad_enabled()

    assert mf.simulate(program, 2).results == {0: False, 1: True}
    assert torch.is_grad_enabled()


def in_dual_level(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with forward_ad.dual_level():
        run(torch.ones(1))


@pytest.mark.parametrize(
    ("around", "words"),
    [
        (lambda run: grad(run)(torch.ones(())), "inside a torch.func transform"),
        (lambda run: vmap(run)(torch.ones(3)), "inside a torch.func transform"),
        (lambda run: jvp(run, (torch.ones(()),), (torch.ones(()),)), "inside a torch.func transform"),
        (in_dual_level, "inside forward-mode differentiation"),
        (lambda run: make_fx(run)(torch.ones(())), "inside a tracer"),
        (lambda run: make_fx(run, tracing_mode="fake")(torch.ones(())), "inside a tracer"),
    ],
)
def test_refused_inside_transforms(around: Callable[[Any], Any], words: str) -> None:
    """There the ranks' threads would see plain tensors: gradients would be zero without a word."""

    def run(x: torch.Tensor) -> torch.Tensor:
        return sum(mf.simulate(lambda mesh: x * mesh.get_rank(), 2).results.values())

    with pytest.raises(RuntimeError, match=words):
        around(run)
    assert len(mf.simulate(step, 2).results) == 2


def test_plain_autograd_reaches_through_a_simulation() -> None:
    x = torch.ones((), requires_grad=True)
    sum(mf.simulate(lambda mesh: x * (1 + mesh.get_rank()), 3).results.values()).backward()
    assert x.grad == 6


class Broken(Exception):
    pass


def fails(mesh: Mesh, x: torch.Tensor) -> torch.Tensor:
    owners = group(mesh)
    full, _ = mf.gather({i: t * x for i, t in shards(owners).items()}, owner_layout=owners, dtype=torch.float32)
    if mesh.get_rank() == 1:
        raise Broken
    return sum((t.sum() for t in full.values()), x)


def deadlocks(mesh: Mesh, x: torch.Tensor) -> torch.Tensor:
    owners = group(mesh)
    for _ in range(1 + (mesh.get_rank() == 2)):
        full, _ = mf.gather({i: t * x for i, t in shards(owners).items()}, owner_layout=owners, dtype=torch.float32)
    return sum((t.sum() for t in full.values()), x)


@pytest.mark.parametrize(("loss", "error"), [(fails, Broken), (deadlocks, mf.SimulationError)])
@pytest.mark.parametrize("poison", [False, True])
def test_after_a_failure_inside_jvp_the_process_is_as_before(loss: Any, error: type[Exception], poison: bool) -> None:
    def program(mesh: Mesh) -> Any:
        def twice(x: torch.Tensor) -> Any:
            return jvp(partial(loss, mesh), (x,), (torch.ones(()),))

        return jvp(twice, (torch.ones(()),), (torch.ones(()),))

    for _ in range(2):
        with pytest.raises(error):
            mf.simulate(program, 3, poison=poison)
        assert forward_ad._current_level == -1
        assert jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))[1] == 1
        assert jvp(grad(torch.sin), (torch.zeros(()),), (torch.ones(()),))[1] == 0


# Locks.


def hold_a_lock(mesh: Mesh, lock: Any) -> None:
    with lock:  # held while the other rank runs
        step(mesh)


@pytest.mark.parametrize("number", [2, 3])
def test_a_lock_held_across_an_exchange_is_named(number: int) -> None:
    class Lock:
        """Gives up a while after the warning, so that the test ends."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            self.held = self.lock.acquire(timeout=1.0)

        def __exit__(self, *_: object) -> None:
            if self.lock.locked():
                self.lock.release()

    with pytest.warns(mf.SlowRankWarning, match=r"simulated rank [12] has neither ended nor come") as caught:
        mf.simulate(partial(hold_a_lock, lock=Lock()), number, warn_after=0.2)
    text = str(caught[0].message)
    assert __file__ in text
    assert "simulated rank 1" in text
    assert "rank 0 waits in gather 'group' (call 0) for rank 1" in text


def test_a_barrier_of_threads_is_named() -> None:
    barrier = threading.Barrier(2)

    def program(mesh: Mesh) -> None:
        try:
            barrier.wait(timeout=0.6)
        except threading.BrokenBarrierError:
            step(mesh)

    with pytest.warns(mf.SlowRankWarning, match=r"rank 0 has neither .* it is at .*test_simulated_state.py:\d+"):
        mf.simulate(program, 2, warn_after=0.2)


def test_a_slow_rank_is_not_named_too_early() -> None:
    for warn_after in (60.0, None):
        mf.simulate(lambda mesh: threading.Event().wait(0.2), 2, warn_after=warn_after)


FAKE_TENSORS = """
import torch, mfsdp_func as mf
from torch._subclasses.fake_tensor import FakeTensorMode

def program(mesh):
    with FakeTensorMode():
        return torch.ones(2).add(1).shape

for _ in range(20):
    mf.simulate(program, 4)
"""


@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(), reason="needs a build for CUDA, and no device"
)
def test_fake_tensors_leave_nothing_of_a_rank_behind() -> None:
    subprocess.run([sys.executable, "-c", FAKE_TENSORS], check=True, timeout=120)


# Meshes of others.


def test_a_mesh_of_another_simulation_is_refused() -> None:
    def program(outer: Mesh) -> None:
        mf.simulate(lambda inner: step(inner), 2)  # a simulation of its own is fine
        mf.simulate(lambda inner: step(outer), 1, ranks=outer.ranks[:1])

    with pytest.raises(
        RuntimeError, match=r"gather 'group': simulated rank 0 of Mesh\(axis0=1.* communicates over Mesh"
    ):
        mf.simulate(program, 4)


def test_a_mesh_of_another_rank_is_refused() -> None:
    with pytest.raises(ValueError, match=r"gather 'group': made on rank 1, used on rank 0.*with_rank\(0\)"):
        mf.simulate(lambda mesh: step(mesh.with_rank(1)), 2)


def test_a_thousand_ranks() -> None:
    """One gather and scatter take a few seconds of a core, of which hardly any grows with the pairs of ranks."""
    layout = mf.build_for_row_atomic_unpadding([(1024, 2)] * 2, 1024)
    full = [torch.arange(2048.0).view(1024, 2), -torch.arange(2048.0).view(1024, 2)]

    def program(mesh: Mesh) -> None:
        owners = mf.GroupOwnerLayout(mesh, layout, {0: 3, 1: 1000})
        source = mf.DBuffer.distribute_tensors(full, mesh, owners.placements, layout).tensor_views()
        gathered, token = mf.gather(source, owner_layout=owners, dtype=torch.float32)
        assert all(torch.equal(tensor, full[i]) for i, tensor in gathered.items())
        parts, _ = mf.scatter(gathered, owner_layout=owners, after=token)
        assert all(torch.equal(parts[i], source[i]) for i in source)

    def seconds() -> float:
        before = time.process_time()
        assert len(mf.simulate(program, 1024).results) == 1024
        return time.process_time() - before

    assert seconds() < 5 or seconds() < 5  # 3 on a quiet machine; a busy one has cold caches
