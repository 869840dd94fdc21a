import math
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import mfsdp_func as mf
from mfsdp_func.operations.dtensor import chunk_plan, from_dtensor
from mfsdp_func.values.mesh import Mesh
from tests.buffers import AVG, FULL, KINDS, ROWS, SHAPES, SUM, layout_of, local_of, shard_of, tensors_of
from tests.meshes import mesh_on_rank
from tests.spawn import RankPool

pytestmark = pytest.mark.distributed


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]


def chunk_of(tensor: torch.Tensor, sizes: tuple[int, ...], coordinate: tuple[int, ...]) -> torch.Tensor:
    """Chunks of chunks."""
    for size, k in zip(sizes, coordinate, strict=True):
        mine = tensor.chunk(size)[k:][:1] if tensor.numel() else ()
        tensor = mine[0] if mine else tensor[:0]
    return tensor


def whole_again(rank: int, mesh: Any, axes: int = 1) -> None:
    """Every tensor of every layout, whole again through PyTorch's own collectives; gradients back to the buffer."""
    value, full = mesh_on_rank(rank, mesh), tensors()
    for kind in KINDS:
        shard, sizes = shard_of(kind), value.shape[value.ndim - axes :]
        layout = layout_of(kind, math.prod(sizes))
        placements = [*[FULL] * (value.ndim - axes), *[shard] * axes]
        buffer = mf.DBuffer.distribute_tensors(full, value, placements, layout)
        leaf = buffer.local_buffer.clone().requires_grad_()
        loss = torch.zeros((), dtype=torch.float64)
        for i, tensor in enumerate(full):
            found = buffer.get_dtensor(i)
            assert found.placements == (*[Replicate()] * (value.ndim - axes), *[Shard(0)] * axes)
            assert (found.shape, found.stride()) == (tensor.shape, tensor.stride())
            mine = chunk_of(tensor, sizes, value.coordinate()[value.ndim - axes :])
            assert torch.equal(found.to_local(), mine), f"tensor {i} of {kind}"
            assert torch.equal(found.full_tensor(), tensor), f"tensor {i} of {kind}"
            back = chunk_plan(value, tuple(range(value.ndim - axes, value.ndim)), layout, i).transpose
            assert torch.equal(from_dtensor(found, back), buffer.get_tensor_view(i).reshape(-1))
            loss = loss + (mf.DBuffer(buffer.spec, leaf).get_dtensor(i).to_local().sin() * (i + 1)).sum()
        loss.backward()
        expected = [tensor.cos() * (i + 1) for i, tensor in enumerate(full)]
        gradient = mf.DBuffer.distribute_tensors(expected, value, placements, layout)
        torch.testing.assert_close(tensors_of(mf.DBuffer(buffer.spec, leaf.grad)), tensors_of(gradient))

        replicated = buffer.redistribute([FULL] * value.ndim)
        pending = mf.DBuffer(replicated.spec.replace(0, SUM), replicated.local_buffer * (rank + 1))
        factor = sum(other + 1 for other in value.axis_ranks(0))
        for i, tensor in enumerate(full):
            assert torch.equal(replicated.get_dtensor(i).full_tensor(), tensor)
            torch.testing.assert_close(pending.get_dtensor(i).full_tensor(), tensor * factor)


@pytest.mark.parametrize("times", [1, 2])
def test_two_ranks(times: int, ranks2: RankPool) -> None:
    """Twice in the same processes: nothing remembers the process groups of the first time."""
    ranks2.run(whole_again, ((2,), (0, 1)))


@pytest.mark.parametrize(("shape", "axes"), [((4,), 1), ((2, 2), 1), ((1, 4), 1), ((2, 2), 2), ((1, 2, 2), 2)], ids=str)
def test_four_ranks(shape: tuple[int, ...], axes: int, ranks4: RankPool) -> None:
    ranks4.run(whole_again, (shape, tuple(range(4))), axes)


def refused(rank: int, mesh: Any) -> str:
    spec = mf.BufferSpec(mesh_on_rank(rank, mesh), [ROWS], layout_of("padded", 4))
    with pytest.raises(NotImplementedError) as caught:
        local_of(spec, torch.zeros(spec.layout.size)).get_dtensor(0)
    return str(caught.value)


def test_refused_where_it_would_lie(ranks4: RankPool) -> None:
    for message in ranks4.run(refused, ((4,), (2, 0, 3, 1))):
        assert "its full_tensor() would be wrong. Use a mesh in ascending order" in message


@pytest.mark.parametrize("placement", [ROWS, FULL, AVG])
def test_refused_without_process_groups(placement: Any) -> None:
    def program(mesh: Mesh) -> None:
        spec = mf.BufferSpec(mesh, [placement], layout_of("unpadded", 2))
        local_of(spec, torch.zeros(spec.layout.size)).get_dtensor(0)

    with pytest.raises(
        RuntimeError, match="has no process groups; DTensors live on a mesh made from a torch DeviceMesh"
    ):
        mf.simulate(program, 2, ranks=(61, 62))
