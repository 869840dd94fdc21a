"""Unit tests of distributed code on eight simulated ranks: no processes, no ports, the same bits every time.

The second one searches: hypothesis draws which rank goes on, and which message arrives, wherever that is free. The third
kills a rank. A run that fails says in one line how to replay it.

python -m pytest examples/recipes/test_simulated_mesh.py
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


@given(st.lists(st.integers(0, 9)))
@settings(deadline=None, max_examples=25)
def test_the_numbers_do_not_depend_on_who_comes_first(tape):
    run = mf.simulate(largest_entries, 8, choices=tape, carrier="nccl", memory="live", poison=True)
    assert run.results == mf.simulate(largest_entries, 8).results


@pytest.mark.parametrize("rank", range(8))
def test_a_rank_that_dies_is_named_by_all_others(rank):
    run = mf.simulate(largest_entries, 8, faults=[mf.faults.Kill(rank, at=0)])
    assert run.results == {}
    assert {error.awaited for error in run.errors.values()} == {(rank,)}
