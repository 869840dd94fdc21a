"""A unit test of distributed code on eight simulated ranks: no processes, no ports, the same bits every time.

python -m pytest examples/recipes/test_simulated_mesh.py
"""

import torch

import mfsdp_func as mf

pytest_plugins = ["mfsdp_func.testing"]  # in a test suite: in its top conftest.py


def largest_entries(mesh):
    """The largest entry of each matrix, found by its owner; what a program under torchrun would call too."""
    layout = mf.build_for_row_atomic_unpadding([(18, 2), (5, 3), (7, 4)], mesh.size())
    owners = mf.GroupOwnerLayout.from_params(mesh, layout, name="weights")
    full = [torch.arange(float(shape.numel())).view(shape) for shape in layout.tensor_shapes]
    shards = mf.DBuffer.distribute_tensors(full, mesh, [mf.RowAtomic()], layout).tensor_views()
    matrices, token = mf.gather(shards, owner_layout=owners, async_op=True)
    token.wait()  # without this line the fixture fails the test
    return {i: float(matrix.max()) for i, matrix in matrices.items()}


def test_every_matrix_has_one_owner_that_sees_all_of_it(simulated):
    results, trace = simulated(largest_entries, 8)
    found = [(i, value) for entries in results.values() for i, value in entries.items()]
    assert sorted(found) == [(0, 35.0), (1, 14.0), (2, 27.0)]
    assert {message.operation for message in trace} == {"gather 'weights'"}
