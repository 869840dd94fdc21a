"""Cases: gradients, tangents and batches. The objective is the sum over ranks of their losses."""

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, grad_and_value, jvp, vjp, vmap

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout
from tests.movement.groups import (
    Group,
    Run,
    Tensors,
    assert_close,
    assert_same,
    case,
    groups_for,
    linked_owner_compute,
    mix_rows,
    normal,
    one_group,
    owner_compute,
)


def weights(group: Group) -> Tensors:
    return {i: normal(shape, 100 + i) for i, shape in enumerate(group.shapes)}


def inputs_for(group: Group, full: Tensors) -> Tensors:
    return group.shards({i: full[i] for i in group.owners.tensor_to_owner})


def loss_of(group: Group, *, after: Callable[[Tensors], Any] = lambda _: ()) -> Callable[[Tensors], torch.Tensor]:
    weight = group.parts(weights(group))

    def loss(source: Tensors) -> torch.Tensor:
        parts, token = linked_owner_compute(group, source, dtype=torch.float64, after=after(source))
        total = token.link.double()
        for i, part in parts.items():
            total = total + (weight[i] * part).sum()
        return total

    return loss


def dense_loss(group: Group) -> Callable[[Tensors], torch.Tensor]:
    weight = weights(group)
    return lambda full: sum((weight[i] * mix_rows(full[i])).sum() for i in group.owners.tensor_to_owner)


def dense_inputs(group: Group, full: Tensors) -> Tensors:
    return {i: full[i] for i in group.owners.tensor_to_owner}


def like(parts: Tensors, source: Tensors) -> Tensors:
    return {i: parts[i].reshape(source[i].shape) for i in source}


@case(compiled=True)
def func_grad(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full = group.normal()
    source = inputs_for(group, full)
    wanted = group.parts(grad(dense_loss(group))(dense_inputs(group, full)))
    gradient = run(grad(loss_of(group)), source)
    assert_close(gradient, like(wanted, source))
    return gradient


@case
def func_grad_and_value(mesh: Mesh, run: Run) -> Any:
    group = groups_for(mesh)["unpadded rotated"]
    full = group.normal()
    source = inputs_for(group, full)
    wanted = group.parts(grad(dense_loss(group))(dense_inputs(group, full)))
    gradient, value = run(grad_and_value(loss_of(group, after=linked)), source)
    assert_close(gradient, like(wanted, source))
    return gradient, value


def linked(source: Tensors) -> Any:
    return (
        mf.Token.linked_to(torch.zeros((), requires_grad=True)) if not source else mf.Token.linked_to(*source.values())
    )


@case(compiled=True)
def func_vjp(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full = group.normal()
    source, cotangents = inputs_for(group, full), group.parts(weights(group))
    step = owner_compute(group, dtype=torch.float64)

    def pull_back(source: Tensors, cotangents: Tensors) -> tuple[Tensors, Tensors]:
        parts, pull = vjp(step, source)
        return parts, pull(cotangents)[0]

    parts, gradient = run(pull_back, source, cotangents)
    assert_close(parts, group.parts({i: mix_rows(tensor) for i, tensor in dense_inputs(group, full).items()}))
    assert_close(gradient, like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source))
    return parts, gradient


@case(compiled=True)
def func_jvp(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full, directions = group.normal(), weights(group)
    step = owner_compute(group, dtype=torch.float64)

    def push_forward(source: Tensors, tangents: Tensors) -> tuple[Tensors, Tensors]:
        return jvp(step, (source,), (tangents,))

    _, tangents = run(push_forward, inputs_for(group, full), inputs_for(group, directions))
    dense = {i: jvp(mix_rows, (full[i],), (directions[i],))[1] for i in group.owners.tensor_to_owner}
    assert_close(tangents, group.parts(dense))
    return tangents


@case(compiled=True)
def func_vmap(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    fulls = [{i: tensor * k for i, tensor in group.normal().items()} for k in (1.0, -2.0, 0.5)]
    batched = stack([inputs_for(group, full) for full in fulls])
    parts = run(vmap(owner_compute(group, dtype=torch.float64)), batched)
    wanted = [group.parts({i: mix_rows(t) for i, t in dense_inputs(group, full).items()}) for full in fulls]
    assert_close(parts, stack(wanted))
    return parts


def stack(dicts: list[Tensors], dim: int = 0) -> Tensors:
    return {i: torch.stack([tensors[i] for tensors in dicts], dim) for i in dicts[0]}


@case
def func_vmap_over_other_dims(mesh: Mesh, run: Run) -> Any:
    """Batched along the last dim in and out, and where one entry of the dict is not batched at all."""
    group = one_group(mesh)
    fulls = [{i: tensor * k for i, tensor in group.normal().items()} for k in (1.0, 3.0)]
    step = owner_compute(group, dtype=torch.float64)
    wanted = [group.parts({i: mix_rows(t) for i, t in dense_inputs(group, full).items()}) for full in fulls]
    parts = vmap(step, in_dims=-1, out_dims=1)(stack([inputs_for(group, full) for full in fulls], -1))
    assert_close(parts, stack(wanted, 1))
    mixed = stack([inputs_for(group, full) for full in fulls])
    dims = dict.fromkeys(mixed, 0)
    if 0 in mixed:
        mixed[0], dims[0] = mixed[0][0], None
    if any(dim == 0 for dim in dims.values()):
        partly = vmap(step, in_dims=(dims,))(mixed)
        for i, tensor in partly.items():
            expected = stack([wanted[0], wanted[0]])[i] if i == 0 else stack(wanted)[i]
            torch.testing.assert_close(tensor, expected)
    else:
        vmap(lambda _: (step(mixed), torch.zeros(()))[1])(torch.zeros(2))
    return parts


@case
def func_vmap_of_grad(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    fulls = [{i: tensor * k for i, tensor in group.normal().items()} for k in (1.0, -2.0, 0.5)]
    gradient = vmap(grad(loss_of(group)))(stack([inputs_for(group, full) for full in fulls]))
    wanted = [like(group.parts(grad(dense_loss(group))(dense_inputs(group, f))), inputs_for(group, f)) for f in fulls]
    assert_close(gradient, stack(wanted))
    return gradient


@case
def func_grad_of_vmap(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    fulls = [{i: tensor * k for i, tensor in group.normal().items()} for k in (1.0, -2.0, 0.5)]
    batched = stack([inputs_for(group, full) for full in fulls])
    gradient = grad(lambda source: vmap(loss_of(group))(source).sum())(batched)
    wanted = [like(group.parts(grad(dense_loss(group))(dense_inputs(group, f))), inputs_for(group, f)) for f in fulls]
    assert_close(gradient, stack(wanted))
    return gradient


@case
def func_second_derivatives(mesh: Mesh, run: Run) -> Any:
    """grad of grad, and jvp of grad: a product with the Hessian of the sum over ranks."""
    group = one_group(mesh)
    full, directions = group.normal(), weights(group)
    source, tangents = inputs_for(group, full), inputs_for(group, directions)
    loss = loss_of(group)
    dense = jvp(grad(dense_loss(group)), (dense_inputs(group, full),), (dense_inputs(group, directions),))[1]
    forward_over_reverse = jvp(grad(loss), (source,), (tangents,))[1]
    assert_close(forward_over_reverse, like(group.parts(dense), source))

    def along(values: Tensors) -> torch.Tensor:
        gradient = grad(loss)(values)
        return sum((gradient[i] * tangents[i]).sum() for i in gradient)

    reverse_over_reverse = grad(along)(source)
    assert_close(reverse_over_reverse, like(group.parts(dense), source))
    return forward_over_reverse, reverse_over_reverse


@case
def backward(mesh: Mesh, run: Run) -> Any:
    """Leaves that require grad; twice, so that gradients add up."""
    group = one_group(mesh)
    full = group.normal()
    source = {i: tensor.requires_grad_() for i, tensor in inputs_for(group, full).items()}
    loss = loss_of(group)
    loss(source).backward()
    once = {i: tensor.grad.clone() for i, tensor in source.items()}
    assert_close(once, like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source))
    loss(source).backward()
    assert_same({i: tensor.grad for i, tensor in source.items()}, {i: 2 * tensor for i, tensor in once.items()})
    assert all(tensor.is_leaf for tensor in source.values())
    return once


@case
def backward_through_one_operation(mesh: Mesh, run: Run) -> Any:
    """Each operation alone is linear, with the other's pieces as its transpose; `include_own` too."""
    group, results = groups_for(mesh)["unpadded balanced"].of(torch.float64), []
    full, weight = group.normal(), weights(group)
    source = {i: tensor.requires_grad_() for i, tensor in group.shards(full).items()}
    gathered, token = group.gather(source)
    total = token.link.double() + sum((weight[i] * tensor).sum() for i, tensor in gathered.items())
    total.backward()
    gradient = {i: tensor.grad for i, tensor in source.items()}
    assert_close(gradient, group.shards(weight))
    results.append(gradient)
    for include_own in (True, False):
        owned = {i: tensor.clone().requires_grad_() for i, tensor in group.full(full).items()}
        after = mf.Token.linked_to(*(owned.values() or [torch.zeros((), requires_grad=True)]))
        parts, token = group.scatter(owned, include_own=include_own, after=after)
        weighted = group.parts(weight)
        (token.link.double() + sum((weighted[i] * part).sum() for i, part in parts.items())).backward()
        expected = {i: weight[i].clone() for i in owned}
        if not include_own:
            for i, (low, high) in group.spans().items():
                if i in expected:
                    expected[i].view(-1)[low:high] = 0
        assert_close({i: tensor.grad for i, tensor in owned.items()}, expected)
        results.append({i: tensor.grad for i, tensor in owned.items()})
    return results


@case
def gradients_through_an_owner_that_holds_nothing(mesh: Mesh, run: Run) -> Any:
    """It has no tensor to differentiate: its call is linked to something else that it differentiates."""
    layout = mf.GlobalLayout([(4, 3), (2, 5)], [0, 12], 22, [0, *range(8, 6 + mesh.size()), 22])
    group = Group(GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0], 1: mesh.ranks[-1]}))
    full = group.normal()
    source = inputs_for(group, full)
    wanted = like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source)

    def loss(source: Tensors, other: torch.Tensor) -> torch.Tensor:
        return loss_of(group, after=lambda _: mf.Token.linked_to(other))(source)

    gradient, zero = grad(loss, argnums=(0, 1))(source, torch.ones(3))
    assert_close(gradient, wanted)
    assert torch.equal(zero, torch.zeros(3))
    leaf = torch.ones(3, requires_grad=True)
    leaves = {i: tensor.clone().requires_grad_() for i, tensor in source.items()}
    loss(leaves, leaf).backward()
    assert_same({i: tensor.grad for i, tensor in leaves.items()}, gradient)
    return gradient


@case
def shards_that_require_grad(mesh: Mesh, run: Run) -> Any:
    """The same bits with grad mode on, off, and in inference mode; results require grad only where they must."""
    group = one_group(mesh).of(torch.float32)
    full = group.fill()
    source = {i: tensor.requires_grad_() for i, tensor in inputs_for(group, full).items()}
    gathered, token = group.gather(source)
    parts, _ = group.scatter(gathered, after=token)
    assert all(tensor.requires_grad for tensor in (*gathered.values(), *parts.values()))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            plain = group.gather(source)[0]
            assert not any(tensor.requires_grad for tensor in plain.values())
            assert_same(plain, group.full(full))
            again = group.scatter(plain)[0]
            assert_same(again, group.parts(full))
    assert_same({i: tensor.detach() for i, tensor in parts.items()}, group.parts(full))
    return {i: tensor.detach() for i, tensor in parts.items()}


@case
def asynchronous_gradients(mesh: Mesh, run: Run) -> Any:
    group = one_group(mesh)
    full, weight = group.normal(), group.parts(weights(one_group(mesh)))
    source = {i: tensor.requires_grad_() for i, tensor in inputs_for(group, full).items()}
    gathered, token = group.gather(source, async_op=True)
    token.wait()
    parts, last = group.scatter({i: mix_rows(t) for i, t in gathered.items()}, after=token, async_op=True)
    last.wait()
    (last.link.double() + sum((weight[i] * part).sum() for i, part in parts.items())).backward()
    gradient = {i: tensor.grad for i, tensor in source.items()}
    assert_close(gradient, like(group.parts(grad(dense_loss(group))(dense_inputs(group, full))), source))
    return gradient
