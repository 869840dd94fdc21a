"""Laws over random cases that no single module's tests hold: chunks, pipelines, whole modules, optimizer states."""

import copy
import io
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from mfsdp_func import optim
from mfsdp_func.operations.dtensor import chunk_plan
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests import strategies
from tests.fsdp_cases import dense_step
from tests.movement.groups import Group, assert_same

pytestmark = pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")

Tensors = dict[int, torch.Tensor]


# DTensor's chunks.


@given(st.data())
def test_the_plan_to_dtensors_ends_in_the_chunks_of_torch(data: st.DataObject) -> None:
    """Rank k of a line gets the k-th of `Tensor.chunk`, whatever rows it held; of two axes, chunks of chunks."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    count = math.prod(sizes)
    layout = data.draw(strategies.layouts(count).filter(lambda layout: len(layout.tensor_shapes) > 0))
    i = data.draw(st.integers(0, len(layout.tensor_shapes) - 1))
    shape = layout.tensor_shapes[i]
    elements = torch.arange(shape.numel()).view(shape)
    for rank in range(count):
        mesh, chunk = Mesh(sizes, rank=rank), elements
        for size, k in zip(sizes, mesh.coordinate(), strict=True):
            mine = chunk.chunk(size)[k:][:1] if chunk.numel() else ()
            chunk = mine[0] if mine else chunk[:0]
        (group,) = chunk_plan(mesh, tuple(range(len(sizes))), layout, i).groups
        k = mesh.shard_index(tuple(range(len(sizes))))
        held = group.target.tensors_in(group.target.get_segment(k, count))
        starts = [group.source.tensor_to_offset[n] + part.start for n, part in held]
        assert [list(range(s, s + part.numel)) for s, (_, part) in zip(starts, held, strict=True)] == (
            [chunk.flatten().tolist()] if chunk.numel() else []
        )


# Pipelines.


def scaled(n: int, tensors: Tensors) -> Tensors:
    return {i: tensor * (n + 2) for i, tensor in tensors.items()}


def pipelined(mesh: Mesh, groups: list[GroupOwnerLayout], depth: int, include_own: bool) -> None:
    own = [
        Group(GroupOwnerLayout(mesh, g.layout, g.tensor_to_owner, g.placements, f"group {n}"))
        for n, g in enumerate(groups)
    ]
    fulls = [group.normal() for group in own]
    sources = [group.shards(full) for group, full in zip(own, fulls, strict=True)]
    results, token = mf.pipeline(
        scaled, iter(sources), [g.owners for g in own], depth=depth, include_own=include_own, dtype=torch.float64
    )
    assert token.pending == ()
    for n, (group, full, result) in enumerate(zip(own, fulls, results, strict=True)):
        assert_same(result, group.parts(scaled(n, full), include_own=include_own), f"group {n}")


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_pipeline_gives_what_one_group_after_the_other_gives(data: st.DataObject) -> None:
    mesh = data.draw(strategies.meshes(max_ranks=4, nobody=True))
    groups = data.draw(st.lists(strategies.owner_layouts(mesh=st.just(mesh)), max_size=4))
    depth, include_own = data.draw(st.integers(0, 3)), data.draw(st.booleans())
    mf.simulate(lambda mesh: pipelined(mesh, groups, depth, include_own), mesh.shape, ranks=mesh.ranks)


# Whole modules.


class Tower(nn.Module):
    """Layers of any widths, so that rows and segments meet in odd ways; the first and the last may share a weight."""

    def __init__(self, widths: list[int], tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        pairs = list(itertools.pairwise(widths))
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in pairs)
        self.first = nn.Linear(3, widths[0], dtype=dtype)
        self.last = nn.Linear(widths[-1], 2, dtype=dtype)
        if tied and len(pairs) > 1 and pairs[0] == pairs[-1]:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x.mean(-1, keepdim=True)
        return self.last(x)


def half_square(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return outputs.square().mean() / 2


ROLES = ["shard", "whole parameters", "zero1", "replicas", "hsdp"]


@st.composite
def modules(draw: st.DrawFn) -> dict[str, Any]:
    """A module, how it is cut, and in which dtypes it computes and reduces."""
    roles = draw(st.sampled_from(ROLES))
    shape = draw(st.sampled_from([(2, 1), (1, 2), (2, 2)])) if roles == "hsdp" else (draw(st.integers(1, 5)),)
    return {
        "roles": roles,
        "shape": shape,
        "shard": draw(st.sampled_from([mf.RowAtomic(), mf.TensorAtomic()])),
        "widths": draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)),
        "tied": draw(st.booleans()),
        "units": draw(st.sampled_from([None, (), ("layers.0",), (nn.Linear,), ("first", "last")])),
        "shard_layout": draw(st.sampled_from([mf.ShardLayout.UNPADDED, mf.ShardLayout.BALANCED])),
        "param_dtype": draw(st.sampled_from([None, None, torch.float32])),
        "reduce_dtype": draw(st.sampled_from([None, torch.float64])),
    }


def placements_of(case: dict[str, Any]) -> mf.Placements:
    whole, shard = mf.Replicate(), case["shard"]
    parameter, gradient, optimizer = {
        "shard": (shard, shard, shard),
        "whole parameters": (whole, shard, shard),
        "zero1": (whole, whole, shard),
        "replicas": (whole, whole, whole),
        "hsdp": (shard, shard, shard),
    }[case["roles"]]
    outer = [whole] * (len(case["shape"]) - 1)
    axes = range(len(case["shape"]))
    return mf.Placements(axes, *([*outer, role] for role in (parameter, gradient, optimizer)))


def gradients_of(mesh: Mesh, case: dict[str, Any], data: torch.Tensor) -> dict[str, torch.Tensor]:
    """Whole gradients by name, on every rank."""
    module = Tower(case["widths"], case["tied"], torch.float64)
    choices = {name: case[name] for name in ("shard_layout", "param_dtype", "reduce_dtype")}
    if isinstance(case["shard"], mf.TensorAtomic) and case["roles"] != "replicas":
        names = [name for name, _ in module.named_parameters()]
        choices["parameter_to_owner"] = {name: mesh.ranks[(3 * n + 1) % mesh.size()] for n, name in enumerate(names)}
    context = mf.FsdpContext(**choices)
    apply, params = mf.fully_shard(module, mesh, placements_of(case), units=case["units"], context=context)
    mine = data[mesh.ranks.index(mesh.get_rank())]
    gradients = torch.func.grad(lambda params: half_square(apply(params, mine), mine))(params)
    found = {}
    for key, buffer in gradients.items():
        assert buffer.spec == params[key].spec
        assert buffer.dtype == torch.float64
        whole = buffer.redistribute([mf.Replicate()] * mesh.ndim)
        shapes = dict(module.named_parameters())
        for i, name in enumerate(apply.names[key]):
            found[name] = whole.get_tensor_view(i).reshape(shapes[name].shape)
    return found


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(modules())
def test_gradients_of_any_sharded_module_are_those_of_the_dense_one(case: dict[str, Any]) -> None:
    count = torch.Size(case["shape"]).numel()
    data = torch.randn(count, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected, _ = dense_step(Tower(case["widths"], case["tied"], torch.float64), data, half_square)
    tolerance = 1e-10 if case["param_dtype"] is None else 1e-4
    for found in mf.simulate(lambda mesh: gradients_of(mesh, case, data), case["shape"]).results.values():
        assert set(found) == set(expected)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=tolerance, atol=tolerance, msg=name)


# Optimizer states, there and back.


def saved(state: Any) -> Any:
    """Through `torch.save`, as checkpoints of one process do it."""
    leaves, structure = pytree.tree_flatten(state)
    buffer = io.BytesIO()
    torch.save(leaves, buffer)
    buffer.seek(0)
    return pytree.tree_unflatten(torch.load(buffer, weights_only=True), structure)


WAYS = {"torch.save": saved, "pickle": lambda state: pickle.loads(pickle.dumps(state)), "deepcopy": copy.deepcopy}


@settings(max_examples=30)
@given(
    st.sampled_from(["adamw", "muon", "partition"]),
    st.sampled_from(list(WAYS)),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_a_state_that_was_saved_goes_on_bitwise(name: str, way: str, steps: int, dtype: torch.dtype) -> None:
    make = {
        "adamw": lambda: optim.adamw(0.1),
        "muon": lambda: optim.muon(0.1, weight_decay=0.1),
        "partition": lambda: optim.partition((("a",), optim.muon(0.1)), (("b",), optim.adamw(0.01))),
    }[name]
    generator = torch.Generator().manual_seed(steps)
    params = {key: torch.randn(4, 3, generator=generator).to(dtype) for key in ("a", "b")}
    gradients = [{key: torch.randn(4, 3, generator=generator).to(dtype) for key in params} for _ in range(steps + 2)]
    transformation, state, other = make(), make().init(params), None
    for n, gradient in enumerate(gradients):
        if n == steps:
            other = WAYS[way](state), {key: value.clone() for key, value in params.items()}
        updates, state = transformation.update(gradient, state, params)
        params = optim.apply_updates(params, updates)
    again, restored = other
    for gradient in gradients[steps:]:
        updates, again = make().update(gradient, again, restored)
        restored = optim.apply_updates(restored, updates)
    assert_same(restored, params)
    assert_same(pytree.tree_leaves(again), pytree.tree_leaves(state))
