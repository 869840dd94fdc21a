"""Parameters that are not trained, for a while or ever, and parameters that are not sharded."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import mfsdp_func as mf
from tests import fsdp_cases as cases
from tests.fsdp_cases import ROLES, loss_of, net, number, on_each, place
from tests.meshes import RunOnMesh

pytestmark = pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")

FROZEN = ("blocks.0", "blocks.1.wide", "positions", "head.weight")
"""A unit, a part of one, a held parameter, and a tied one by its second name."""


def dense_gradients(module: nn.Module, data: torch.Tensor) -> dict[str, torch.Tensor]:
    return cases.dense_step(module, data)[0]


def freeze_dense(module: nn.Module, names: Any) -> nn.Module:
    for name, param in module.named_parameters(remove_duplicate=False):
        if any(name == given or name.startswith(f"{given}.") for given in names):
            param.requires_grad_(False)
    return module


def gathered(apply: Any, buffers: Any) -> dict[str, torch.Tensor]:
    """Those parameters of which there are buffers, whole, by their first names."""
    return {
        name: buffer.redistribute([mf.Replicate()] * buffer.mesh.ndim).get_tensor_view(i)
        for key, buffer in buffers.items()
        for i, name in enumerate(apply.names[key])
    }


def check_freezing(mesh: mf.Mesh, roles: str, shard_layout: mf.ShardLayout) -> None:
    module, data = net(), cases.batches(4)
    expected = dense_gradients(freeze_dense(net(), FROZEN), data[: mesh.size()])
    context = mf.FsdpContext(shard_layout=shard_layout)
    apply, params = mf.fully_shard(module, mesh, place(mesh, roles), context=context)
    before, groups = apply.gather_parameters(params), dict(apply.groups)
    x = data[number(mesh)]
    output = apply(params, x)

    with cases.calls_watched() as labels:
        fewer = apply.freeze(params, FROZEN)
    assert not labels.get(mesh.get_rank())
    assert "blocks.0" in apply.frozen_params
    assert {"blocks.1", "blocks.1:now frozen"} <= set(apply.groups)
    cases.assert_same(apply.gather_parameters(fewer), before, rtol=0, atol=0)
    torch.testing.assert_close(apply(fewer, x), output, rtol=0, atol=0)
    state = apply.state_dict(fewer, whole=True)
    cases.assert_same(state, before if state else {}, rtol=0, atol=0)
    loaded = apply.load({name: value + 1 for name, value in before.items()}, fewer)
    cases.assert_same(apply.gather_parameters(loaded), {n: v + 1 for n, v in before.items()}, rtol=0, atol=0)
    fewer = apply.load(before, loaded)

    gradients = grad(lambda params: loss_of(apply(params, x), x))(fewer)
    found = gathered(apply, gradients)
    assert set(found) == set(expected)
    cases.assert_same({n: t.view(expected[n].shape) for n, t in found.items()}, expected)
    norm = torch.stack([g.square().sum() for g in expected.values()]).sum().sqrt()
    torch.testing.assert_close(mf.global_norm(gradients), norm.to(torch.float64))
    zeros = apply.init_accumulator(fewer)
    added = apply.reduce(grad(lambda zeros: loss_of(apply.accumulate(fewer, zeros, x), x))(zeros))
    cases.assert_same_buffers(added, gradients)

    optimizer = mf.optim.adamw(learning_rate=0.1)
    updates, _ = optimizer.update(gradients, optimizer.init(fewer), fewer)
    stepped = mf.optim.apply_updates(fewer, updates)
    for name, value in apply.gather_parameters(stepped).items():
        trained = name in expected
        assert torch.equal(value, before[name]) != trained, name

    more = apply.thaw(fewer, ["positions", "blocks.1"])
    assert "positions" in gathered(apply, more)
    back = apply.thaw(more, FROZEN)
    assert apply.groups == groups
    assert not apply.frozen_params
    cases.assert_same_buffers(back, params, rtol=0, atol=0)
    assert list(back) == list(params)
    with pytest.raises(ValueError, match=r"sharded_params has buffers .* expected"):
        apply(fewer, x)


@pytest.mark.parametrize("roles", ["two", "hsdp", "both", "zero2", "zero2 hsdp", "outer", "replicas"])
@pytest.mark.parametrize("shard_layout", mf.ShardLayout)
def test_freezing_and_thawing(roles: str, shard_layout: mf.ShardLayout) -> None:
    on_each(ROLES[roles][0], lambda mesh: check_freezing(mesh, roles, shard_layout))


def on_real_ranks(mesh: mf.Mesh) -> None:
    check_freezing(mesh, "two", mf.ShardLayout.PADDED)
    check_freezing(mesh, "two", mf.ShardLayout.BALANCED)


@pytest.mark.distributed
def test_freezing_and_thawing_on_real_ranks(ranks2: Any) -> None:
    from tests.meshes import run_real

    run_real(ranks2, on_real_ranks, 2)


def test_owners_keep_what_they_own() -> None:
    module = net(tie=False)
    owners = {name: n % 2 for n, (name, _) in enumerate(module.named_parameters())}

    def program(mesh: mf.Mesh) -> None:
        whole = [cases.WHOLE]
        context = mf.FsdpContext(parameter_to_owner=owners)
        apply, params = mf.fully_shard(module, mesh, mf.Placements(0, whole, whole, whole), context=context)
        fewer = apply.freeze(params, ["blocks.0.wide", "blocks.1.narrow.bias"])
        for key, buffer in (fewer | apply.frozen_params).items():
            for i, name in enumerate(apply.names[key]):
                held = buffer.get_local_part(i).numel
                assert held == (module.get_parameter(name).numel() if owners[name] == mesh.get_rank() else 0)
        cases.assert_same_buffers(apply.thaw(fewer, ["blocks"]), params, rtol=0, atol=0)

    on_each((2,), program)


def test_thawing_what_was_frozen_from_the_start() -> None:
    """A unit of which some parameters were frozen: they are trained in a buffer of their own."""
    module, data = freeze_dense(net(), ["blocks.0.wide", "blocks.1"]), cases.batches(2)
    expected = dense_gradients(net(), data)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        assert "blocks.1" not in params
        some = apply.thaw(params, ["blocks.0.wide.bias"])
        assert apply.names["blocks.0:frozen:now trained"] == ("blocks.0.wide.bias",)
        assert apply.names["blocks.0:frozen"] == ("blocks.0.wide.weight",)
        every = apply.thaw(some, ["blocks"])
        x = data[number(mesh)]
        gradients = gathered(apply, grad(lambda params: loss_of(apply(params, x), x))(every))
        assert set(gradients) == set(expected)
        cases.assert_same({n: t.view(expected[n].shape) for n, t in gradients.items()}, expected)

    on_each((2,), program)


def test_nothing_is_reduced_of_what_is_frozen() -> None:
    module, data = net(), cases.batches(2)

    def program(mesh: mf.Mesh) -> int:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        fewer = apply.freeze(params, ["blocks", "words"])
        loss_of(apply(cases.leaves_of(fewer), data[0]), data[0]).backward()
        return len(fewer)

    with cases.calls_watched() as labels:
        trained = on_each((2,), program)[0]
    for own in labels.values():
        assert sum("reduce_scatter" in label for label in own) == trained == 2  # norm, and the held table


def test_frozen_and_compiled() -> None:
    """What was compiled before is compiled again."""
    module, data = net(), cases.batches(2)
    expected = [dense_gradients(net(), data), dense_gradients(freeze_dense(net(), FROZEN), data)]

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        step = torch.compile(
            lambda params, x: grad(lambda params: loss_of(apply(params, x), x))(params),
            backend="aot_eager",
            fullgraph=True,
        )
        x = data[number(mesh)]
        for names in ((), FROZEN):
            params = apply.freeze(params, names)
            found = gathered(apply, step(params, x))
            wanted = expected[bool(names)]
            assert set(found) == set(wanted)
            cases.assert_same({n: t.view(wanted[n].shape) for n, t in found.items()}, wanted)

    on_each((2,), program)


def test_wrong_names() -> None:
    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(ignored=("norm.weight",))
        apply, params = mf.fully_shard(net(), mesh, place(mesh, "one"), context=context)
        for change, names, message in (
            (apply.freeze, ["blocks.7"], r"apply\.freeze: 'blocks\.7' is neither a parameter nor a module"),
            (apply.thaw, ["block"], r"apply\.thaw: 'block' is neither"),
            (
                apply.freeze,
                ["norm.weight"],
                r"'norm\.weight' is not sharded; use requires_grad_ of apply\.ignored_params",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                change(params, names)
        with pytest.raises(ValueError, match="sharded_params has buffers"):
            apply.freeze({}, ["blocks"])
        with pytest.raises(ValueError, match=r"ignored names 'norm\.weights', which is no parameter of Net"):
            mf.fully_shard(net(), mesh, place(mesh, "one"), context=mf.FsdpContext(ignored=("norm.weights",)))

    on_each((1,), program)


IGNORED = ("blocks.0.wide.weight", "blocks.1.norm.weight", "blocks.1.norm.bias", "positions", "head.weight")
"""In units, all that a module owns, a held one, and a tied one by its second name."""


def local_gradients(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """One rank's own."""
    return dense_gradients(module, x[None])


def ignored_step(mesh: mf.Mesh, roles: str) -> None:
    module, data = net(), cases.batches(mesh.size())
    averaged, x = dense_gradients(module, data), data[number(mesh)]
    own = local_gradients(module, x)
    apply, params = mf.fully_shard(module, mesh, place(mesh, roles), context=mf.FsdpContext(ignored=IGNORED))
    whole = apply.ignored_params
    assert set(whole) == {"words.weight", *IGNORED[:-1]}
    assert not any(name in names for names in apply.names.values() for name in whole)
    for name, param in whole.items():
        assert isinstance(param, nn.Parameter)
        assert torch.equal(param, module.get_parameter(name))
        assert param.data_ptr() != module.get_parameter(name).data_ptr()

    # By `backward()`: each rank's own gradients, as of a plain parameter.
    leaves = cases.leaves_of(params)
    loss_of(apply(leaves, x), x).backward()
    cases.assert_same({name: param.grad for name, param in whole.items()}, {name: own[name] for name in whole})
    sharded = {key: mf.DBuffer(buffer.spec, buffer.local_buffer.grad) for key, buffer in leaves.items()}
    expected = {name: value for name, value in averaged.items() if name not in whole}
    cases.assert_same({n: t.view(expected[n].shape) for n, t in gathered(apply, sharded).items()}, expected)

    # By `torch.func`: among the parameters, or constants.
    gradients = grad(lambda params: loss_of(apply(params, x), x))(params | whole)
    cases.assert_same({name: gradients.pop(name) for name in whole}, {name: own[name] for name in whole})
    cases.assert_same_buffers(gradients, sharded)
    alone = grad(lambda params: loss_of(apply(params, x), x))(params)
    cases.assert_same_buffers(alone, sharded)
    assert not any(buffer.local_buffer.requires_grad for buffer in alone.values())

    # Other values in their places.
    doubled = {name: param.detach() * 2 for name, param in whole.items()}
    weights = {name: param.detach() for name, param in module.named_parameters()}
    torch.testing.assert_close(apply(params | doubled, x), functional_call(module, weights | doubled, (x,)))
    for param in whole.values():
        param.grad = None
    accumulator = apply.init_accumulator(params)
    mf.inplace.accumulate(lambda logits: loss_of(logits, x), apply, params, accumulator, x)
    cases.assert_same({name: param.grad for name, param in whole.items()}, {name: own[name] for name in whole})
    cases.assert_same_buffers(apply.reduce(accumulator), sharded)

    # State in and out.
    full = apply.gather_parameters(params)
    cases.assert_same(full, dict(module.named_parameters(remove_duplicate=False)), rtol=0, atol=0)
    state = apply.state_dict(params, whole=True)
    cases.assert_same(state, module.state_dict() if state else {}, rtol=0, atol=0)
    changed = apply.load({name: value + 1 for name, value in full.items()}, params)
    cases.assert_same(apply.gather_parameters(changed), {name: value + 1 for name, value in weights.items()})
    assert apply.ignored_params["positions"] is whole["positions"]


@pytest.mark.parametrize("roles", ["two", "zero2", "hsdp"])
def test_ignored_parameters(roles: str) -> None:
    on_each(ROLES[roles][0], lambda mesh: ignored_step(mesh, roles))


def on_two(mesh: mf.Mesh) -> None:
    ignored_step(mesh, "two")


def test_ignored_parameters_on_every_carrier(run_on_mesh: RunOnMesh) -> None:
    run_on_mesh(on_two, 2)


@pytest.mark.parametrize("choices", [{}, pytest.param({"recompute": True}, marks=pytest.mark.slow)], ids=str)
def test_ignored_and_compiled(choices: Any) -> None:
    """Inputs of the graph: values that change are seen, gradients go to the leaves or to what is given."""
    module, x = net(), cases.batches(1)[0]
    own = local_gradients(module, x)

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(ignored=IGNORED, **choices)
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"), context=context)
        whole = apply.ignored_params
        loss = torch.compile(lambda p, x: loss_of(apply(p, x), x), backend="aot_eager", fullgraph=True)
        loss(cases.leaves_of(params), x).backward()
        cases.assert_same({name: param.grad for name, param in whole.items()}, {name: own[name] for name in whole})
        step = torch.compile(
            lambda p, x: grad(lambda p: loss_of(apply(p, x), x))(p), backend="aot_eager", fullgraph=True
        )
        found = step({**params, **whole}, x)
        cases.assert_same({name: found[name] for name in whole}, {name: own[name] for name in whole})
        with torch.no_grad():
            whole["positions"].mul_(3)
            torch.testing.assert_close(loss(params, x), loss_of(apply(params, x), x))

    on_each((1,), program)


@pytest.mark.parametrize("how", ["grad of grad", "vmap", "checkpoint", "recompute"])
def test_ignored_otherwise(how: str) -> None:
    module, data = net(), cases.batches(2)
    weights = {name: param.detach() for name, param in module.named_parameters()}
    name = IGNORED[0]

    def dense(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return loss_of(functional_call(module, weights | {name: value}, (x,)), x)

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(ignored=(name,), recompute=how == "recompute")
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"), context=context)

        def loss(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return loss_of(apply(params | {name: value}, x), x)

        value = weights[name]
        if how == "grad of grad":
            twice = [grad(lambda v: grad(f)(v, data[0]).square().sum())(value) for f in (loss, dense)]  # noqa: B023
            torch.testing.assert_close(*twice)
        elif how == "vmap":
            values = torch.stack([value, value * 2])
            torch.testing.assert_close(*(torch.func.vmap(grad(f), (0, 0))(values, data) for f in (loss, dense)))
        elif how == "checkpoint":
            leaf = value.clone().requires_grad_()
            torch.utils.checkpoint.checkpoint(loss, leaf, data[0], use_reentrant=False).backward()
            torch.testing.assert_close(leaf.grad, grad(dense)(value, data[0]))
        else:
            torch.testing.assert_close(*(grad(f)(value, data[0]) for f in (loss, dense)))

    on_each((1,), program)


def test_ignored_parameters_from_the_meta_device() -> None:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        module[1].bias = module[0].bias

    def program(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        apply, params = mf.fully_shard(
            module, mesh, place(mesh, "two"), context=mf.FsdpContext(ignored=("1.weight", "1.bias"))
        )
        assert set(apply.ignored_params) == {"1.weight", "0.bias"}
        full = apply.gather_parameters(params)
        assert all(value.isfinite().all() for value in full.values())
        x = torch.ones(2, 3)
        torch.testing.assert_close(apply(params, x), functional_call(nn.Sequential(*map(copy_of, module)), full, (x,)))
        return full

    one, other = on_each((2,), program).values()
    cases.assert_same(one, other, rtol=0, atol=0)


def copy_of(linear: nn.Module) -> nn.Module:
    return nn.Linear(linear.in_features, linear.out_features)


def test_a_unit_of_which_all_is_ignored() -> None:
    """It is no unit; named as one, it is refused."""
    names = [name for name, _ in net().named_parameters() if name.startswith("blocks.0.")]

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(ignored=tuple(names))
        apply, params = mf.fully_shard(net(), mesh, place(mesh, "one"), context=context)
        assert "blocks.0" not in {unit.name for unit in apply.units}
        x = cases.batches(1)[0]
        torch.testing.assert_close(apply(params, x), net()(x))
        with pytest.raises(ValueError, match=r"unit 'blocks\.0' has no parameters to shard"):
            mf.fully_shard(net(), mesh, place(mesh, "one"), units=["blocks.0"], context=context)

    on_each((1,), program)
