"""Values in the corners: each a right value or an early error, simulated and on gloo."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import functional
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, vjp, vmap

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests.spawn import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

ROWS, WHOLE, SUM, AVERAGE = mf.RowAtomic(), mf.Replicate(), mf.Partial("sum"), mf.Partial("avg")
Program = Callable[[Mesh], Any]


def on_gloo(rank: int, program: Program, check: bool) -> Any:
    warnings.filterwarnings("ignore", "ComplexHalf support")
    with mf.agreement_check(check):
        return program(mf.as_mesh(init_device_mesh("cpu", (2,))))


def run(program: Program, pool: RankPool) -> list[Any]:
    """The results on two simulated ranks, on gloo, and on gloo with the agreement check; they are the same."""
    found = [*mf.simulate(program, 2).results.values()]
    for check in (False, True):
        assert repr(pool.run(on_gloo, program, check)) == repr(found)
    return found


def group(mesh: Mesh, *, owner: int = 0, **choices: Any) -> mf.GroupOwnerLayout:
    """One matrix, of whose rows each rank holds two."""
    return mf.GroupOwnerLayout(mesh, mf.build_for_row_atomic_unpadding([(4, 2)], 2), {0: owner}, **choices)


def shard(mesh: Mesh) -> torch.Tensor:
    return torch.arange(1.0, 5.0).view(2, 2) + 10 * mesh.get_rank()


def cube(source: torch.Tensor, owners: mf.GroupOwnerLayout) -> dict[int, torch.Tensor]:
    full, token = mf.gather({0: source}, owner_layout=owners)
    return mf.scatter({i: t**3 for i, t in full.items()}, owner_layout=owners, after=token)[0]


def one_element(placement: Any) -> mf.GlobalLayout:
    return mf.GlobalLayout([(1,), (1,)], [0, 1], 2, [0, 1] if placement == ROWS else [0])


def strided(number: float, count: int = 1) -> torch.Tensor:
    """Elements with stride 2."""
    return torch.full((2 * count,), number).index_fill_(0, torch.arange(1, 2 * count, 2), torch.nan)[::2]


def moves_strided_elements(mesh: Mesh) -> list[Any]:
    found = []
    local = mf.DBuffer.from_local(strided(1.0 + mesh.get_rank()), mesh, [ROWS], one_element(ROWS))
    found.append(local.allgather(0).local_buffer.tolist())
    for placement, count in ((SUM, 1), (AVERAGE, 1), (SUM, 2)):
        layout = mf.GlobalLayout([(count,)], [0], count, [0, 1] if count == 2 else [0])
        terms = mf.DBuffer.from_local(strided(1.0 + mesh.get_rank(), count), mesh, [placement], layout)
        found.append(terms.allreduce(0).local_buffer.tolist())
        if count == 2:
            found.append(terms.reduce_scatter(0, ROWS).local_buffer.tolist())
    owners = mf.GroupOwnerLayout(mesh, one_element(ROWS), {0: 1, 1: 0})
    full, token = mf.gather({mesh.get_rank(): strided(5.0 + mesh.get_rank())}, owner_layout=owners)
    found.append([tensor.tolist() for tensor in full.values()])
    source = {1 - mesh.get_rank(): strided(7.0 + mesh.get_rank())}
    parts, _ = mf.scatter(source, owner_layout=owners, after=token)
    found.append([tensor.tolist() for tensor in parts.values()])
    into = {1 - mesh.get_rank(): strided(0.0)}
    mf.inplace.gather({mesh.get_rank(): strided(5.0 + mesh.get_rank())}, into, owner_layout=owners)
    found.append([tensor.tolist() for tensor in into.values()])
    return found


@pytest.mark.distributed
def test_one_element_of_any_stride(ranks2: RankPool) -> None:
    first, second = run(moves_strided_elements, ranks2)
    assert first == [[1.0, 2.0], [3.0], [1.5], [3.0, 3.0], [3.0], [[6.0]], [[8.0]], [[6.0]]]
    assert second == [[1.0, 2.0], [3.0], [1.5], [3.0, 3.0], [3.0], [[5.0]], [[7.0]], [[5.0]]]


def averages_large_halves(mesh: Mesh, dtype: torch.dtype) -> list[Any]:
    found = []
    for deterministic in (False, True):
        for layout in (mf.GlobalLayout([(4,)], [0], 4, [0, 2]), mf.GlobalLayout([(4,)], [0], 4, [0, 1])):
            local = torch.full((4,), 40_000.0, dtype=dtype)
            local[3] = 3e-7  # the smallest numbers that float16 has
            terms = mf.DBuffer.from_local(local, mesh, [AVERAGE], layout)
            found.append(terms.allreduce(0, deterministic=deterministic).local_buffer.tolist())
            found.append(terms.reduce_scatter(0, ROWS, deterministic=deterministic).local_buffer.tolist())
    signs = torch.tensor([60_000.0, -60_000.0], dtype=dtype) * (1 if mesh.get_rank() else 0.5)
    terms = mf.DBuffer.from_local(signs, mesh, [SUM], mf.GlobalLayout([(2,)], [0], 2, [0, 1]))
    found.append(terms.allreduce(0).local_buffer.tolist())
    return found


@pytest.mark.distributed
def test_float16_is_averaged_in_float32_on_every_carrier(ranks2: RankPool) -> None:
    first, second = run(partial(averages_large_halves, dtype=torch.float16), ranks2)
    small = torch.tensor(3e-7, dtype=torch.float16).item()
    whole = [40_000.0, 40_000.0, 40_000.0, small]
    assert first == [whole, whole[:2], whole, whole[:1]] * 2 + [[float("inf"), float("-inf")]]
    assert second == [whole, whole[2:], whole, whole[1:]] * 2 + [[float("inf"), float("-inf")]]


def averages_complex_halves(mesh: Mesh) -> list[Any]:
    local = torch.tensor([40_000.0, 3.0], dtype=torch.complex64).mul(1 + 1j).to(torch.complex32)
    terms = mf.DBuffer.from_local(local, mesh, [AVERAGE], mf.GlobalLayout([(2,)], [0], 2, [0, 1]))
    return [
        terms.allreduce(0).local_buffer.to(torch.complex64).tolist(),
        terms.reduce_scatter(0, ROWS).local_buffer.to(torch.complex64).tolist(),
    ]


@pytest.mark.distributed
def test_complex32_is_averaged_in_complex64(ranks2: RankPool) -> None:
    first, second = run(averages_complex_halves, ranks2)
    assert first == [[40_000 + 40_000j, 3 + 3j], [40_000 + 40_000j]]
    assert second == [[40_000 + 40_000j, 3 + 3j], [3 + 3j]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.bits8])
def test_dtypes_without_sums_are_refused_early(dtype: torch.dtype) -> None:
    def program(mesh: Mesh) -> None:
        layout = mf.GlobalLayout([(2,)], [0], 2, [0, 1])
        terms = mf.DBuffer.from_local(torch.zeros(2, dtype=torch.uint8).to(torch.bool), mesh, [SUM], layout)
        local = torch.empty(2, dtype=dtype)
        mf.DBuffer(terms.spec, local).allreduce(0)

    with pytest.raises(TypeError, match="cannot be added; cast the buffer first"):
        mf.simulate(program, 2)


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float8_e4m3fn, torch.complex32, torch.bool])
def test_padding_of_every_dtype(dtype: torch.dtype) -> None:
    layout = mf.build_for_row_atomic_balanced([(3, 2)], 2)

    def program(mesh: Mesh) -> list[int]:
        full = torch.arange(6 * dtype.itemsize, dtype=torch.uint8)
        full = (full % 2 if dtype == torch.bool else full).view(dtype).view(3, 2)
        whole = mf.DBuffer.distribute_tensors([full], mesh, [WHOLE], layout)
        cut = whole.view([ROWS])
        assert cut.local_buffer.numel() == 4
        again = cut.allgather(0).get_tensor_view(0)
        return (again.contiguous().view(torch.uint8) == full.view(torch.uint8)).flatten().tolist()

    assert all(all(same) for same in mf.simulate(program, 2).results.values())


def gathers_on_meta(mesh: Mesh) -> list[Any]:
    """Rank 1 owns the matrix, rank 0 gives nothing of it, and of the buffer below."""
    layout = mf.GlobalLayout([(4, 2)], [0], 8, [0, 0])
    owners = mf.GroupOwnerLayout(mesh, layout, {0: 0}, dtype=torch.float32)
    source = {0: shard(mesh).repeat(2, 1)} if mesh.get_rank() else {}
    with torch.device("meta"):
        for async_op in (False, True):
            full, token = mf.gather(source, owner_layout=owners, async_op=async_op)
            token.wait()
            parts, last = mf.scatter(full, owner_layout=owners, after=token)
            (both,), _ = mf.gather_coalesced([source], owner_layouts=[owners])
        (pipelined,), _ = mf.pipeline(lambda n, tensors: tensors, [source], [owners])
        ones = torch.ones(2, device="cpu")
        norm = mf.global_norm(mf.DBuffer.from_local(ones, mesh, [ROWS], mf.GlobalLayout([(4,)], [0], 4, [0, 2])))
    found = [*full.values(), *parts.values(), *both.values(), *pipelined.values(), norm, last.link]
    return [(tensor.device.type, tensor.sum().item()) for tensor in found]


@pytest.mark.distributed
def test_a_device_around_a_call_is_that_of_new_tensors_of_the_caller_alone(ranks2: RankPool) -> None:
    first, second = run(gathers_on_meta, ranks2)
    assert first == [("cpu", 100.0), ("cpu", 100.0), ("cpu", 2.0), ("cpu", 0.0)]
    assert second == [("cpu", 100.0), ("cpu", 100.0), ("cpu", 2.0), ("cpu", 0.0)]


def waits_inside_grad(mesh: Mesh) -> list[Any]:
    """Async collectives, gathers and scatters, waited for where `grad` and `vmap` are active."""
    layout = mf.GlobalLayout([(4,)], [0], 4, [0, 1])  # uneven: messages; even below: the backend's own

    def loss(local: torch.Tensor, layout: mf.GlobalLayout) -> torch.Tensor:
        buffer = mf.DBuffer.from_local(local, mesh, [ROWS], layout)
        whole, token = mf.allgather(buffer, 0, async_op=True)
        token.wait()
        again, token = mf.reduce_scatter(
            mf.DBuffer(mf.BufferSpec(mesh, [AVERAGE], layout), whole.local_buffer**2), 0, ROWS, async_op=True
        )
        token.wait()
        return again.local_buffer.sum() + token.link

    def moved(source: torch.Tensor) -> torch.Tensor:
        full, token = mf.gather({0: source}, owner_layout=group(mesh), async_op=True)
        token.wait()
        parts, last = mf.scatter(
            {i: t**3 for i, t in full.items()}, owner_layout=group(mesh), after=token, async_op=True
        )
        last.wait()
        return parts[0].sum() + last.link

    even = mf.GlobalLayout([(4,)], [0], 4, [0, 2])
    found = []
    for chosen in (layout, even):
        local = torch.arange(1.0, 1 + chosen.rank_size(mesh.get_rank())) + 3 * mesh.get_rank()
        found.append(grad(partial(loss, layout=chosen))(local).tolist())
        found.append(vmap(grad(partial(loss, layout=chosen)))(torch.stack([local, -local])).tolist())
    found.append(grad(moved)(shard(mesh)).tolist())
    found.append(vmap(grad(moved))(torch.stack([shard(mesh), 2 * shard(mesh)])).tolist())
    return found


@pytest.mark.distributed
def test_tokens_are_waited_for_inside_transforms(ranks2: RankPool) -> None:
    first, second = run(waits_inside_grad, ranks2)
    assert first[0] == [2.0]
    assert second[0] == [8.0, 10.0, 12.0]
    assert first[1] == [[2.0], [-2.0]]
    assert second[2] == [8.0, 10.0]
    assert second[3] == [[8.0, 10.0], [-8.0, -10.0]]
    for found, rank in ((first, 0), (second, 1)):
        expected = 3 * (torch.arange(1.0, 5.0).view(2, 2) + 10 * rank) ** 2
        assert found[4] == expected.tolist()
        assert found[5] == torch.stack([expected, 4 * expected]).tolist()


# Whole Jacobians.


def takes_a_jacobian(mesh: Mesh, name: str, hold: bool = True) -> str:
    """What each rank is told; with `hold` false, rank 1 gives no tensor to the gather."""
    layout = mf.GlobalLayout([(4, 2)], [0], 8, [0, 4 if hold else 8])
    owners = mf.GroupOwnerLayout(mesh, layout, {0: 0}, dtype=torch.float32)

    def loss(x: torch.Tensor) -> torch.Tensor:
        source = {0: x.repeat(1 if hold else 2, 1)} if hold or not mesh.get_rank() else {}
        full, token = mf.gather(source, owner_layout=owners)
        parts, last = mf.scatter({i: t**3 for i, t in full.items()}, owner_layout=owners, after=token)
        results = torch.cat([part.reshape(-1) for part in parts.values()] or [x.reshape(-1)])
        return results.sum() + last.link if name == "hessian" else results

    with pytest.raises(RuntimeError) as caught:
        getattr(functional, name)(loss, shard(mesh))
    return str(caught.value)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["jacobian", "hessian"])
def test_jacobians_of_autograd_are_refused_by_name(name: str, ranks2: RankPool) -> None:
    for hold in (True, False):
        texts = run(partial(takes_a_jacobian, name=name, hold=hold), ranks2)
        assert all(f"gather: torch.autograd.functional.{name} goes through the elements" in text for text in texts)


def pulls_a_batch(mesh: Mesh) -> list[Any]:
    """Row k is the product of the Jacobian of all ranks' results with row k of all ranks' cotangents."""
    owners = group(mesh)
    parts, pull = vjp(lambda x: cube(x, owners)[0], shard(mesh))
    rows = torch.stack([torch.ones_like(parts), torch.eye(2), torch.zeros_like(parts) + mesh.get_rank()])
    (batched,) = vmap(pull)(rows)
    one_by_one = torch.stack([pull(row)[0] for row in rows])
    assert torch.equal(batched, one_by_one)
    (product,) = functional.vjp(lambda x: cube(x, owners)[0], shard(mesh), rows[1])[1:]
    assert torch.equal(product, batched[1])
    return batched.tolist()


@pytest.mark.distributed
def test_a_batch_of_cotangents_stays_legal(ranks2: RankPool) -> None:
    for rank, found in enumerate(run(pulls_a_batch, ranks2)):
        slope = 3 * (torch.arange(1.0, 5.0).view(2, 2) + 10 * rank) ** 2
        assert found == torch.stack([slope, slope * torch.eye(2), slope * rank]).tolist()


# Early errors.


def test_an_empty_tensor_of_unknown_dtype_is_refused() -> None:
    def program(mesh: Mesh, dtype: torch.dtype | None, of: str) -> torch.dtype:
        layout = mf.GlobalLayout([(0, 2)], [0], 4, [0, 2])
        owners = mf.GroupOwnerLayout(mesh, layout, {0: 1}, dtype=dtype if of == "group" else None)
        full, _ = mf.gather({}, owner_layout=owners, dtype=dtype if of == "call" else None)
        return full[0].dtype if full else torch.float64

    for of in ("group", "call"):
        found = mf.simulate(partial(program, dtype=torch.float64, of=of), 2).results
        assert set(found.values()) == {torch.float64}
    with pytest.raises(TypeError, match=r"gather: rank 1 gives no tensor, so it cannot know the dtype .* pass dtype="):
        mf.simulate(partial(program, dtype=None, of=""), 2)


@pytest.mark.parametrize("kind", [list, iter])
@pytest.mark.parametrize("count", [1, 3])
def test_sources_and_layouts_of_a_pipeline_match(kind: Any, count: int) -> None:
    """A list is refused before anything is sent."""

    def program(mesh: Mesh) -> None:
        sources = kind([{0: shard(mesh)}] * count)
        mf.pipeline(lambda n, tensors: tensors, sources, [group(mesh), group(mesh)])

    words = "2 owner layouts, but (only )?(1|3|more) sources"
    with pytest.raises(ValueError, match=words) as caught:
        mf.simulate(program, 2)
    if kind is list:
        assert f"but {count} sources" in str(caught.value)


def into(mesh: Mesh, destination: dict[int, torch.Tensor], *, fine: bool = False) -> dict[int, torch.Tensor]:
    layout = mf.build_for_row_atomic_unpadding([(4, 2), (2, 2)], 2)
    owners = mf.GroupOwnerLayout(mesh, layout, {0: 0, 1: 0})
    full = [torch.arange(8.0).view(4, 2), torch.arange(4.0).view(2, 2) - 10]
    source = mf.DBuffer.distribute_tensors(full, mesh, owners.placements, layout).tensor_views()
    mf.inplace.gather(source, destination if mesh.get_rank() == 0 else {}, owner_layout=owners)
    return destination


def overlapping() -> dict[str, dict[int, torch.Tensor]]:
    room, square = torch.zeros(16), torch.zeros(4, 2)
    return {
        "one tensor twice": {0: room[:8], 1: room[:4]},
        "two views": {0: room[:8], 1: room[7:11]},
        "rows and columns": {0: room.view(4, 4)[:, :2], 1: room[4:8]},
        "expanded": {0: torch.zeros(1, 2).expand(4, 2), 1: square[:2]},
        "windows": {0: room.as_strided((4, 2), (1, 1)), 1: square[:2]},
    }


@pytest.mark.parametrize("name", overlapping())
def test_destinations_that_share_memory_are_refused(name: str) -> None:
    words = "shares? memory|two elements in one place"
    with pytest.raises(ValueError, match=words) as caught:
        mf.simulate(lambda mesh: into(mesh, overlapping()[name]), 2)
    assert "tensors 0 of gather and 1 of gather" in str(caught.value) or "tensor 0 of gather" in str(caught.value)


def test_destinations_side_by_side_and_interleaved_are_fine() -> None:
    room = torch.zeros(4, 4)
    for destination in (
        {0: room.view(-1)[:8], 1: room.view(-1)[8:12]},
        {0: room[:, ::2], 1: room[:2, 1::2]},
        {0: room.as_strided((2, 4), (3, 2)), 1: torch.zeros(4)},
    ):
        found = mf.simulate(lambda mesh, destination=destination: into(mesh, destination), 2).results[0]
        if found[0].stride() != (3, 2):
            assert found[0].flatten().tolist() == list(range(8))
        assert found[1].flatten().tolist() == [-10, -9, -8, -7]


def test_the_norm_of_zeros_has_gradient_zero() -> None:
    def program(mesh: Mesh, ord: float, deterministic: bool) -> None:
        layout = mf.GlobalLayout([(4,)], [0], 4, [0, 2])

        def norm(local: torch.Tensor) -> torch.Tensor:
            return mf.global_norm(
                mf.DBuffer.from_local(local, mesh, [ROWS], layout), ord=ord, deterministic=deterministic
            )

        assert grad(norm)(torch.zeros(2)).tolist() == [0.0, 0.0]
        assert vmap(grad(norm))(torch.zeros(3, 2)).abs().sum() == 0
        if ord == 2:
            torch.testing.assert_close(grad(norm)(torch.ones(2)), torch.full((2,), 1.0))  # of the sum over both ranks
        assert norm(torch.full((2,), torch.nan)).isnan()

    for ord in (2.0, 1.0, 3.0):
        for deterministic in (False, True):
            mf.simulate(partial(program, ord=ord, deterministic=deterministic), 2)


def test_a_buffer_around_two_dims_is_refused_by_name() -> None:
    layout = mf.GlobalLayout([(4,)], [0], 4, [0, 2])

    def program(mesh: Mesh, old: Any, use: Callable[[mf.DBuffer], Any]) -> None:
        use(mf.DBuffer(mf.BufferSpec(mesh, [old], layout), torch.ones(2, 2 if old == WHOLE else 1)))

    for old, use in (
        (ROWS, lambda b: b.allgather(0)),
        (ROWS, lambda b: b.redistribute([WHOLE])),
        (WHOLE, lambda b: b.view([ROWS])),
        (ROWS, lambda b: b.get_tensor_view(0)),
        (ROWS, lambda b: b.tensor_views()),
    ):
        with pytest.raises(ValueError, match=r"local_buffer has shape \(2, [12]\), expected one dim"):
            mf.simulate(partial(program, old=old, use=use), 2)


@pytest.mark.parametrize("placements", [[ROWS], [AVERAGE], [SUM], [WHOLE], [mf.BlockAtomic(2)], [mf.TensorAtomic()]])
def test_buffers_are_saved_and_loaded_with_weights_only(placements: Any, tmp_path: Path) -> None:
    mesh, layout = Mesh(1, rank=0), mf.build_for_row_atomic([(4, 2)], 1)
    params = {"block": mf.DBuffer.from_local(torch.arange(8.0), mesh, placements, layout)}
    torch.save(params, tmp_path / "params.pt")
    loaded = torch.load(tmp_path / "params.pt", weights_only=True)
    assert loaded["block"].spec == params["block"].spec
    assert torch.equal(loaded["block"].local_buffer, params["block"].local_buffer)
