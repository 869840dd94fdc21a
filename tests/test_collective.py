"""The operations of a buffer as linear maps: transposes, gradients, what is in flight, what may be padding."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp, vjp, vmap

import mfsdp_func as mf
from mfsdp_func.plans.redistribution import collective_of, redistribution_steps
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.placement import Placement
from tests import strategies
from tests.buffers import (
    AVG,
    FULL,
    KINDS,
    MESHES,
    ROWS,
    SUM,
    all_placements,
    dense,
    is_reachable,
    layout_of,
    local_of,
    shard_of,
    source_of,
    tensors_of,
)
from tests.meshes import RunOnMesh, run_real, run_simulated
from tests.spawn import RankPool

# torch's forward mode scripts a few decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

Operation = Callable[[mf.DBuffer, int, tuple[Placement, ...]], mf.DBuffer]
OPERATIONS: dict[str, Operation] = {
    "allgather": lambda buffer, axis, new: buffer.allgather(axis),
    "reduce_scatter": lambda buffer, axis, new: buffer.reduce_scatter(axis, new[axis]),
    "allreduce": lambda buffer, axis, new: buffer.allreduce(axis),
    "view": lambda buffer, axis, new: buffer.view(new),
}
PADDING = float("nan")


def single_steps(ndim: int, shard: Placement, kind: str) -> list[tuple[Any, Any, int]]:
    """Placements before and after, and the axis, of every use of one operation."""
    found = []
    for old, new in itertools.product(all_placements(ndim, shard), repeat=2):
        if is_reachable(old, new):
            steps = redistribution_steps(old, new)
            if [step[0] for step in steps] == [kind]:
                found.append((old, new, steps[0][1]))
    return found


def stored_equally(layout: mf.GlobalLayout) -> mf.GlobalLayout:
    return mf.GlobalLayout(
        *(layout.tensor_shapes, layout.tensor_to_offset, layout.size, layout.rank_to_offset),
        stores_equal_segments=True,
    )


def random_buffer(spec: mf.BufferSpec, seed: int) -> mf.DBuffer:
    """Elements of this rank's own; NaN where padding is."""
    return local_of(spec, dense(spec.layout, seed + spec.mesh.get_rank()))


def dot(a: mf.DBuffer, b: mf.DBuffer) -> float:
    return float(tensors_of(a) @ tensors_of(b))


@pytest.mark.parametrize("name", [*OPERATIONS, "redistribute"])
@given(data=st.data())
def test_adjoint_law(name: str, data: st.DataObject) -> None:
    """Summed over ranks <A x, w> = <x, A' w>; and a jvp is the map itself. NaN in padding reaches neither."""
    mesh = data.draw(strategies.meshes(max_ranks=6, nobody=True))
    case = data.draw(strategies.cases(mesh.size()))
    layout = stored_equally(case.layout) if data.draw(st.booleans()) else case.layout
    if name == "redistribute":
        choices = st.sampled_from(all_placements(mesh.ndim, case.placement))
        old = data.draw(choices)
        new = data.draw(choices.filter(lambda new: is_reachable(old, new)))
        operation: Callable[[mf.DBuffer], mf.DBuffer] = lambda buffer: buffer.redistribute(new)  # noqa: E731
    else:
        old, new, axis = data.draw(st.sampled_from(single_steps(mesh.ndim, case.placement, name)))
        operation = lambda buffer: OPERATIONS[name](buffer, axis, new)  # noqa: E731

    def program(mesh: Mesh) -> tuple[float, float, bool]:
        x = random_buffer(mf.BufferSpec(mesh, old, layout), 0)
        y, pull_back = vjp(operation, x)
        w = random_buffer(y.spec, 100)
        (gradient,) = pull_back(w)
        assert gradient.spec == x.spec
        assert gradient.local_buffer.shape == x.local_buffer.shape
        tangent = random_buffer(x.spec, 200)
        _, pushed = jvp(operation, (x,), (tangent,))
        torch.testing.assert_close(tensors_of(pushed), tensors_of(operation(tangent)), rtol=1e-12, atol=1e-12)
        return dot(y, w), dot(x, gradient), bool(y.spec.placements == new)

    left, right, reached = zip(*mf.simulate(program, mesh.shape, ranks=mesh.ranks).results.values(), strict=True)
    assert all(reached)
    assert sum(left) == pytest.approx(sum(right), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("kind", ["allgather", "reduce_scatter", "allreduce"])
def test_transpose_is_an_involution(kind: Any) -> None:
    spec = mf.BufferSpec(
        Mesh((2, 2), rank=1), [SUM, ROWS] if kind == "allreduce" else [ROWS, ROWS], layout_of("padded", 4)
    )
    there = collective_of(spec, kind, 0, False, False)
    back = there.transpose
    assert (back.input_numels, back.output_numels) == (there.output_numels, there.input_numels)
    assert back.transpose == there
    assert back.label == f"transpose of {kind} over 'axis0'"
    assert back.digest != there.digest
    others = [collective_of(s, kind, 0, *flags) for s in (spec,) for flags in ((True, False), (False, True))]
    assert len({there.digest, back.digest, *(other.digest for other in others)}) == 4


# Gradients: what torch.func and autograd give has the buffer's own layout, and is the sum over ranks.


def loss_of(mesh: Mesh, buffer: mf.DBuffer, rank: int | None = None) -> torch.Tensor:
    """The loss of one rank, by default this one, of all tensors in full."""
    rank = mesh.get_rank() if rank is None else rank
    whole = buffer.redistribute([FULL] * mesh.ndim, deterministic=True)
    total = torch.zeros((), dtype=torch.float64)
    for i, shape in enumerate(buffer.layout.tensor_shapes):
        weight = torch.arange(shape.numel(), dtype=torch.float64).view(shape) + rank + i
        total = total + (whole.get_tensor_view(i).sin() * weight).sum()
    return total


def expected_gradient(mesh: Mesh, spec: mf.BufferSpec, copies: int) -> torch.Tensor:
    """Of the sum over ranks of their losses, from the dense buffer; each of `copies` is an input of its own."""
    flat = dense(spec.layout, 0).nan_to_num().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    alone = mf.DBuffer.from_local(flat, Mesh(1, ranks=(mesh.get_rank(),), rank=mesh.rank), [FULL], spec.layout)
    for rank in mesh.ranks:
        total = total + loss_of(alone.mesh, alone, rank)
    (gradient,) = torch.autograd.grad(total, flat)
    return tensors_of(local_of(spec, gradient.nan_to_num())) / copies


def gradients(mesh: Mesh, kind: str) -> list[torch.Tensor]:
    spec = mf.BufferSpec(mesh, [shard_of(kind)] * mesh.ndim, layout_of(kind, mesh.size()))
    buffer = local_of(spec, dense(spec.layout, 0))
    functional = grad(lambda buffer: loss_of(mesh, buffer))(buffer)
    assert functional.spec == spec
    torch.testing.assert_close(tensors_of(functional), expected_gradient(mesh, spec, 1), rtol=1e-12, atol=1e-12)
    leaf = buffer.local_buffer.clone().requires_grad_()
    loss_of(mesh, mf.DBuffer(spec, leaf)).backward()
    (backward,) = torch.autograd.grad(loss_of(mesh, mf.DBuffer(spec, leaf)), leaf)
    assert torch.equal(tensors_of(mf.DBuffer(spec, backward)), tensors_of(functional))
    assert torch.equal(tensors_of(mf.DBuffer(spec, leaf.grad)), tensors_of(functional))
    curvature = grad(lambda b: (grad(lambda c: loss_of(mesh, c))(b).local_buffer ** 2).nansum())(buffer)
    assert not tensors_of(curvature).isnan().any()
    return [tensors_of(functional), tensors_of(curvature)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_gradients_simulated(kind: str, count: int) -> None:
    for shape, ranks in MESHES[count]:
        mf.simulate(lambda mesh: gradients(mesh, kind), shape, ranks=ranks)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", MESHES[4], ids=["4", "2x2"])
def test_gradients_on_real_ranks(kind: str, mesh: Any, ranks4: RankPool) -> None:
    """Bitwise as simulated: a deterministic gather has a deterministic transpose."""
    real = run_real(ranks4, gradients, mesh[0], kind, ranks=mesh[1])
    for rank, simulated in run_simulated(gradients, mesh[0], kind, ranks=mesh[1]).items():
        assert all(torch.equal(a, b) for a, b in zip(real[rank], simulated, strict=True)), f"rank {rank}"


def map_over_buffers(mesh: Mesh) -> None:
    for kind in KINDS:
        spec = mf.BufferSpec(mesh, [shard_of(kind)], layout_of(kind, mesh.size()))
        buffers = [random_buffer(spec, seed) for seed in (0, 10, 20)]
        stacked = mf.DBuffer(spec, torch.stack([buffer.local_buffer for buffer in buffers]))
        gathered = vmap(lambda buffer: buffer.allgather(0))(stacked)
        slopes = vmap(grad(lambda buffer: loss_of(mesh, buffer)))(stacked)
        for n, buffer in enumerate(buffers):
            one = mf.DBuffer(gathered.spec, gathered.local_buffer[n])
            assert torch.equal(tensors_of(one), tensors_of(buffer.allgather(0)))
            slope = mf.DBuffer(spec, slopes.local_buffer[n])
            expected = grad(lambda buffer: loss_of(mesh, buffer))(buffer)
            torch.testing.assert_close(tensors_of(slope), tensors_of(expected))


def test_vmap(run_on_mesh: RunOnMesh) -> None:
    shape, ranks = MESHES[4][0]
    run_on_mesh(map_over_buffers, shape, ranks=ranks)


# In flight.


def in_flight(mesh: Mesh, kind: str) -> None:
    layout, shard = layout_of(kind, mesh.size()), shard_of(kind)
    sharded, pending = source_of(mesh, [shard], layout), source_of(mesh, [AVG], layout)
    calls: list[tuple[Any, mf.DBuffer, mf.DBuffer]] = [
        (lambda **how: mf.allgather(sharded, 0, **how), sharded, sharded.allgather(0)),
        (lambda **how: mf.reduce_scatter(pending, 0, shard, **how), pending, pending.reduce_scatter(0, shard)),
        (lambda **how: mf.allreduce(pending, 0, **how), pending, pending.allreduce(0)),
        (lambda **how: mf.redistribute(pending, [shard], **how), pending, pending.redistribute([shard])),
        (lambda **how: mf.redistribute(sharded, [FULL], **how), sharded, sharded.redistribute([FULL])),
        (lambda **how: mf.redistribute(sharded, [AVG], **how), sharded, sharded.redistribute([AVG])),
        (lambda **how: mf.redistribute(sharded, [shard], **how), sharded, sharded),
    ]
    for deterministic in (False, True):
        started = [call(async_op=True, deterministic=deterministic) for call, _, _ in calls]
        for (result, token), (_, _, expected) in zip(reversed(started), reversed(calls), strict=True):
            token.wait()
            token.wait()
            assert result.spec == expected.spec
            torch.testing.assert_close(tensors_of(result), tensors_of(expected), rtol=1e-13, atol=1e-14)
    first, token = mf.allgather(sharded, 0, async_op=True)
    again, token = mf.redistribute(first, [shard], after=token, async_op=True)
    same, token = mf.redistribute(again, [shard], after=token)
    assert torch.equal(tensors_of(same), tensors_of(sharded))
    assert all(work.done for work in token.pending)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("poison", [False, True])
def test_in_flight_simulated(kind: str, poison: bool) -> None:
    mf.simulate(lambda mesh: in_flight(mesh, kind), 4, ranks=(2, 0, 3, 1), poison=poison)


@pytest.mark.distributed
@pytest.mark.parametrize("kind", KINDS)
def test_in_flight_on_real_ranks(kind: str, ranks4: RankPool) -> None:
    shape, ranks = MESHES[4][0]
    run_real(ranks4, in_flight, shape, kind, ranks=ranks)


def test_tokens_link_gradients() -> None:
    """A redistribution without a step passes the link of `after` on."""

    def program(mesh: Mesh) -> float:
        buffer = source_of(mesh, [ROWS], layout_of("padded", 2))
        anchor = torch.ones(2, requires_grad=True)
        _, token = mf.redistribute(buffer, [ROWS], after=mf.Token.linked_to(anchor))
        assert token.link.requires_grad
        return float(token.link.detach())

    assert set(mf.simulate(program, 2).results.values()) == {0.0}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["allgather", "reduce_scatter", "allreduce"])
def test_poison_shows_what_is_read_too_early(name: str, deterministic: bool) -> None:
    def start(mesh: Mesh) -> tuple[mf.DBuffer, mf.Token]:
        layout = layout_of("balanced", 2)
        source = source_of(mesh, [ROWS if name == "allgather" else SUM], layout)
        more = (ROWS,) if name == "reduce_scatter" else ()
        return getattr(mf, name)(source, 0, *more, async_op=True, deterministic=deterministic)

    def early(mesh: Mesh) -> torch.Tensor:
        result, token = start(mesh)
        read = result.get_tensor_view(0) + 1
        token.wait()
        return read

    with pytest.raises(RuntimeError, match=f"uses a result of {name} over 'axis0' before its token was waited for"):
        mf.simulate(early, 2, poison=True)
    with pytest.raises(mf.SimulationError, match=f"never waited for the token of {name} over 'axis0'"):
        mf.simulate(lambda mesh: start(mesh)[0].spec, 2, poison=True)


# Disagreement, and dtypes.


def disagree(mesh: Mesh) -> str:
    buffer = source_of(mesh, [SUM], layout_of("padded" if mesh.rank else "unpadded", 2))
    with pytest.raises(ValueError, match="nothing was sent, because the ranks disagree") as caught:
        buffer.allreduce(0)
    return str(caught.value)


def test_ranks_that_disagree_raise_before_they_communicate(run_on_mesh: RunOnMesh) -> None:
    for text in run_on_mesh(disagree, 2, check=True).values():
        assert "on ranks [0]" in text
        assert "on ranks [1]" in text


MOVED = (torch.bool, torch.uint8, torch.int16, torch.uint64, torch.float8_e4m3fn, torch.complex64, torch.bfloat16)
ADDED = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.bfloat16, torch.float16)


def dtypes(mesh: Mesh) -> list[torch.Tensor]:
    results = []
    layout = layout_of("unpadded", mesh.size())
    for dtype in MOVED:
        raw = torch.arange(layout.size * dtype.itemsize, dtype=torch.uint8)
        flat = raw % 2 == 0 if dtype == torch.bool else raw.view(dtype)
        part = local_of(mf.BufferSpec(mesh, [ROWS], layout), flat[: layout.size])
        bits = part.allgather(0).local_buffer.view(torch.uint8)
        assert torch.equal(bits, flat[: layout.size].view(torch.uint8))
    for dtype in ADDED:
        whole = (torch.arange(layout.size) % 7 + mesh.get_rank()).to(dtype)
        buffer = mf.DBuffer.from_local(whole, mesh, [SUM], layout)
        expected = sum((torch.arange(layout.size) % 7 + rank).to(dtype) for rank in mesh.ranks)
        for result in (buffer.allreduce(0), buffer.reduce_scatter(0, ROWS).allgather(0)):
            assert result.dtype == dtype
            assert torch.equal(result.local_buffer, expected)
        scaled = mf.DBuffer.from_local(whole / 3 if dtype.is_floating_point else whole, mesh, [SUM], layout)
        results.append(scaled.allreduce(0, deterministic=True).local_buffer)
    return results


@pytest.mark.distributed
def test_dtypes(ranks4: RankPool) -> None:
    real = run_real(ranks4, dtypes, 4, ranks=(2, 0, 3, 1))
    for rank, simulated in run_simulated(dtypes, 4, ranks=(2, 0, 3, 1)).items():
        assert all(torch.equal(a, b) for a, b in zip(real[rank], simulated, strict=True)), f"rank {rank}"
