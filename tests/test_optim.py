"""Functional optimizers against torch's own, and sharded against dense."""

from collections.abc import Hashable

import pytest
import torch
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from mfsdp_func import optim
from mfsdp_func.operations.gather_scatter import gather
from mfsdp_func.simulation.simulate import simulate
from mfsdp_func.values.balance import balance_owner_work
from mfsdp_func.values.layout import GlobalLayout
from mfsdp_func.values.layout_builder import (
    build_for_row_atomic,
    build_for_row_atomic_unpadding,
    build_for_tensor_atomic,
)
from mfsdp_func.values.mesh import Mesh
from mfsdp_func.values.owner_planning import GroupOwnerLayout, assign_owner_work
from mfsdp_func.values.ranges import intersect_ranges

STEPS = 5
TO_ROUNDING = {torch.float32: 3e-6, torch.float64: 1e-12}


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def gradients(params: dict, step: int) -> dict:
    return {
        key: randn(*param.shape, seed=1000 * step + number, dtype=param.dtype)
        for number, (key, param) in enumerate(params.items())
    }


def train(optimizer: optim.GradientTransformation, params: dict, grads_at=gradients, steps: int = STEPS) -> dict:
    state = optimizer.init(params)
    for step in range(steps):
        updates, state = optimizer.update(grads_at(params, step), state, params)
        params = optim.apply_updates(params, updates)
    return params


def train_torch(make, params: dict) -> dict:
    leaves = {key: torch.nn.Parameter(param.clone()) for key, param in params.items()}
    optimizer = make(list(leaves.values()))
    for step in range(STEPS):
        for key, gradient in gradients(params, step).items():
            leaves[key].grad = gradient
        optimizer.step()
    return {key: leaf.detach() for key, leaf in leaves.items()}


def assert_close(actual: dict, expected: dict, atol: float) -> None:
    assert actual.keys() == expected.keys()
    for key in expected:
        torch.testing.assert_close(actual[key], expected[key], rtol=0, atol=atol)


# Newton-Schulz


@pytest.mark.parametrize("shape", [(16, 16), (8, 40), (40, 8), (1, 9), (3, 8, 20), (2, 3, 20, 8)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_newton_schulz_orthogonalizes(shape: tuple, dtype: torch.dtype) -> None:
    # Singular values of a product of orthogonal factors are known: none of them tiny.
    m, n = shape[-2:]
    u, _, vh = torch.linalg.svd(randn(*shape, seed=0), full_matrices=False)
    matrix = (u * torch.linspace(0.1, 1, min(m, n), dtype=torch.float64)) @ vh
    result = optim.newton_schulz(matrix, dtype=dtype)
    assert (result.shape, result.dtype) == (matrix.shape, matrix.dtype)
    values = torch.linalg.svdvals(result)
    assert float(values.min()) > 0.65
    assert float(values.max()) < 1.25
    if dtype != torch.bfloat16:
        rotation = u.mT @ result @ vh.mT
        off_diagonal = rotation - torch.diag_embed(torch.diagonal(rotation, dim1=-2, dim2=-1))
        assert float(off_diagonal.abs().max()) < 1e-4, "singular vectors must stay"


def test_newton_schulz_of_a_batch_is_that_of_each() -> None:
    batch = randn(2, 3, 6, 10, seed=0)
    expected = torch.stack([optim.newton_schulz(matrix) for matrix in batch.view(6, 6, 10)]).view_as(batch)
    torch.testing.assert_close(optim.newton_schulz(batch), expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(vmap(optim.newton_schulz)(batch), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_newton_schulz_is_the_polynomial_of_singular_values(steps: int) -> None:
    matrix, (a, b, c) = randn(5, 7, seed=1), (2.0, -1.5, 0.5)
    u, values, vh = torch.linalg.svd(matrix, full_matrices=False)
    values = values / torch.linalg.vector_norm(values)
    for _ in range(steps):
        values = a * values + b * values**3 + c * values**5
    result = optim.newton_schulz(matrix, steps, coefficients=(a, b, c))
    torch.testing.assert_close(result, (u * values) @ vh, rtol=0, atol=1e-12)


def test_newton_schulz_of_nothing() -> None:
    assert torch.equal(optim.newton_schulz(torch.zeros(3, 4)), torch.zeros(3, 4))
    assert optim.newton_schulz(torch.zeros(0, 4)).shape == (0, 4)
    gradient = grad(lambda x: optim.newton_schulz(x).sum())(torch.zeros(3, 4))
    assert bool(gradient.isfinite().all())


def test_newton_schulz_refuses() -> None:
    with pytest.raises(ValueError, match=r"shape \(\.\.\., m, n\), got \(3,\)"):
        optim.newton_schulz(torch.zeros(3))
    with pytest.raises(TypeError, match="floating point"):
        optim.newton_schulz(torch.zeros(3, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="negative"):
        optim.newton_schulz(torch.zeros(3, 3), -1)


# Against torch.optim


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("adjust_lr_fn", ["original", "match_rms_adamw"])
def test_muon_is_torchs(dtype: torch.dtype, nesterov: bool, weight_decay: float, adjust_lr_fn: str) -> None:
    shapes = {"wide": (8, 24), "tall": (24, 8), "square": (16, 16)}
    params = {key: randn(*shape, seed=len(key), dtype=dtype) for key, shape in shapes.items()}
    options = {"weight_decay": weight_decay, "nesterov": nesterov, "adjust_lr_fn": adjust_lr_fn}
    expected = train_torch(lambda leaves: torch.optim.Muon(leaves, lr=0.02, **options), params)
    actual = train(optim.muon(0.02, ns_dtype=torch.bfloat16, **options), params)
    assert_close(actual, expected, TO_ROUNDING[dtype])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adamw_is_torchs(weight_decay: float, dtype: torch.dtype) -> None:
    shapes = {"matrix": (8, 24), "vector": (5,), "cube": (2, 3, 4)}
    params = {key: randn(*shape, seed=len(key), dtype=dtype) for key, shape in shapes.items()}
    options = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": weight_decay}
    expected = train_torch(lambda leaves: torch.optim.AdamW(leaves, lr=0.01, **options), params)
    assert_close(train(optim.adamw(0.01, **options), params), expected, TO_ROUNDING[dtype])


# Sharded against dense

SHAPES = [(8, 4), (12, 4), (5,), (8, 4), (4, 8), (3, 2, 6), (2, 24)]
MATRICES = [i for i, shape in enumerate(SHAPES) if len(shape) > 1]


def sharded_layouts() -> dict[str, GlobalLayout]:
    return {
        "padded": build_for_row_atomic(SHAPES, 4),
        "unpadded": build_for_row_atomic_unpadding(SHAPES, 4),
        "tensor": build_for_tensor_atomic(SHAPES, 4, tensor_owners=[3, 0, 0, 3, 1, 1, 0]),
        "one holder": build_for_tensor_atomic(SHAPES, 4, tensor_owners=[2] * len(SHAPES)),
    }


def shards_of(layout: GlobalLayout, shard: int, tensors: dict) -> dict:
    parts = layout.tensors_in(layout.get_segment(shard, layout.dp_size))
    return {i: tensors[i].reshape(-1)[part.start : part.end] for i, part in sorted(parts)}


def full_params(dtype: torch.dtype = torch.float64) -> dict[int, torch.Tensor]:
    return {i: randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(SHAPES)}


def mixed(*, owner_layout: GroupOwnerLayout | None = None, **options) -> optim.GradientTransformation:
    """Muon for the matrices, AdamW for the vector."""
    rest = [i for i in range(len(SHAPES)) if i not in MATRICES]
    muon = optim.muon(0.1, owner_layout=owner_layout, weight_decay=0.1, **options)
    return optim.partition((MATRICES, muon), (rest, optim.adamw(0.1)))


def train_sharded(layout: GlobalLayout, ranks: list[int], dtype: torch.dtype, rotate: int = 0, **options) -> dict:
    """Full parameters after training on four simulated ranks."""

    def program(mesh: Mesh) -> dict:
        owners = assign_owner_work(layout, mesh, MATRICES)
        if rotate:  # owners that hold no part of their tensors
            owners = {i: ranks[(ranks.index(owner) + rotate) % 4] for i, owner in owners.items()}
        owner_layout = GroupOwnerLayout(mesh, layout, owners, dtype=dtype)
        me = mesh.shard_index((0,))
        full = full_params(dtype)
        params = shards_of(layout, me, full)

        def grads_at(_: dict, step: int) -> dict:
            return shards_of(layout, me, gradients(full, step))

        return train(mixed(owner_layout=owner_layout, **options), params, grads_at)

    results = simulate(program, 4, ranks=ranks).results
    parts = {i: [results[rank][i] for rank in ranks if i in results[rank]] for i in range(len(SHAPES))}
    return {i: torch.cat(parts[i]).view(SHAPES[i]) for i in parts}


@pytest.mark.parametrize("name", sharded_layouts())
@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [4, 1, 7, 0]])
@pytest.mark.parametrize("stack", [True, False])
def test_sharded_muon_is_dense_muon(name: str, ranks: list[int], stack: bool) -> None:
    expected = train(mixed(stack_equal_shapes=False), full_params())
    actual = train_sharded(sharded_layouts()[name], ranks, torch.float64, stack_equal_shapes=stack)
    assert_close(actual, expected, 1e-12 if stack else 0)


@pytest.mark.parametrize("name", sharded_layouts())
def test_owners_may_hold_nothing(name: str) -> None:
    expected = train(mixed(stack_equal_shapes=False), full_params())
    actual = train_sharded(sharded_layouts()[name], [0, 1, 2, 3], torch.float64, 1, stack_equal_shapes=False)
    assert_close(actual, expected, 0)


def test_exchange_travels_in_the_dtype_of_newton_schulz() -> None:
    options = {"ns_dtype": torch.bfloat16, "stack_equal_shapes": False}
    expected = train(mixed(**options), full_params(torch.float32))
    layout = sharded_layouts()["unpadded"]
    assert_close(train_sharded(layout, [0, 1, 2, 3], torch.float32, **options), expected, 0)

    def program(mesh: Mesh) -> None:
        optimizer = optim.muon(0.1, owner_layout=GroupOwnerLayout.from_params(mesh, layout), ns_dtype=torch.bfloat16)
        params = shards_of(layout, mesh.get_rank(), full_params(torch.float32))
        optimizer.update(params, optimizer.init(params), params)

    owners = GroupOwnerLayout.from_params(Mesh(4), layout).tensor_to_owner
    segments = {i: layout.get_segment(owner, 4) for i, owner in owners.items()}
    held = sum(intersect_ranges(layout.get_tensor_range(i), segment).numel for i, segment in segments.items())
    bound = sum(layout.tensor_numels[i] for i in owners) - held
    assert sum(sent.nbytes for sent in simulate(program, 4).trace) == 2 * 2 * bound  # there and back, 2 bytes each


def test_batch_of_matrices() -> None:
    experts = {0: randn(3, 4, 6, seed=0)}
    each = {i: experts[0][i] for i in range(3)}

    def grads_of_each(params: dict, step: int) -> dict:
        whole = gradients(experts, step)[0]
        return {i: whole[i] for i in params}

    expected = torch.stack(list(train(optim.muon(0.1, stack_equal_shapes=False), each, grads_of_each).values()))
    actual = train(optim.muon(0.1, batch_of_matrices=True), experts)
    torch.testing.assert_close(actual[0], expected, rtol=0, atol=1e-12)

    def flat(params: dict) -> dict:
        return {0: params[0].reshape(3, 24)}

    as_one = train(optim.muon(0.1), flat(experts), lambda _, step: flat(gradients(experts, step)))
    assert_close(flat(train(optim.muon(0.1), experts)), as_one, 0)


def test_empty_shards_keep_their_place() -> None:
    layout = build_for_tensor_atomic([(2, 3), (0, 3)], 2, tensor_owners=[0, 1])

    def program(mesh: Mesh) -> dict:
        owners = GroupOwnerLayout(mesh, layout, {0: 1, 1: 0})
        params = {0: randn(2 - 2 * mesh.get_rank(), 3, seed=0), 1: torch.zeros(0, 3, dtype=torch.float64)}
        return train(optim.muon(0.1, owner_layout=owners), params, lambda params, _: params)

    results = simulate(program, 2).results
    assert [{i: tuple(p.shape) for i, p in results[rank].items()} for rank in (0, 1)] == [
        {0: (2, 3), 1: (0, 3)},
        {0: (0, 3), 1: (0, 3)},
    ]


# Composition


def test_states_are_pytrees_and_inputs_stay() -> None:
    params, optimizer = full_params(), mixed()
    before = pytree.tree_map(torch.clone, params)
    state = optimizer.init(params)
    leaves = pytree.tree_map(torch.clone, state)
    grads = gradients(params, 0)
    optimizer.update(grads, state, params)
    for kept, copy in ((params, before), (state, leaves), (grads, gradients(params, 0))):
        assert all(torch.equal(a, b) for a, b in zip(pytree.tree_leaves(kept), pytree.tree_leaves(copy), strict=True))
    muon, adamw = state
    assert isinstance(muon, optim.MuonState)
    assert isinstance(adamw, optim.AdamWState)
    assert (muon.step.dtype, muon.step.dim(), list(muon.momentum)) == (torch.int64, 0, MATRICES)


def test_schedule_sees_the_number_of_updates_before() -> None:
    params = {0: randn(4, 6, seed=0)}
    rates = [0.1, 0.05, 0.025, 0.0125, 0.00625]
    for make in (optim.muon, optim.adamw):
        scheduled = train(make(lambda step: 0.1 * 0.5 ** step.double()), params)
        optimizers = [make(rate) for rate in rates]
        expected, state = params, optimizers[0].init(params)
        for step, optimizer in enumerate(optimizers):
            updates, state = optimizer.update(gradients(params, step), state, expected)
            expected = optim.apply_updates(expected, updates)
        assert_close(scheduled, expected, 1e-14)


def test_update_composes_with_torch_func() -> None:
    params = {0: randn(4, 6, seed=0), 1: randn(4, 6, seed=1)}
    grads = [gradients(params, step) for step in range(2)]

    def loss_after(rate: torch.Tensor, params: dict) -> torch.Tensor:
        optimizer = optim.partition(([0], optim.muon(rate)), ([1], optim.adamw(rate)))
        trained = train(optimizer, params, lambda _, step: grads[step], steps=2)
        return sum((param**2).sum() for param in trained.values())

    rate, h = torch.tensor(0.1, dtype=torch.float64), 1e-6
    slope = (loss_after(rate + h, params) - loss_after(rate - h, params)) / (2 * h)
    torch.testing.assert_close(grad(loss_after)(rate, params), slope, rtol=1e-6, atol=1e-6)
    rates = torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)
    expected = torch.stack([loss_after(rate, params) for rate in rates])
    torch.testing.assert_close(vmap(loss_after, (0, None))(rates, params), expected, rtol=1e-12, atol=0)


def test_gradient_through_sharded_updates_is_the_dense_one() -> None:
    """The objective is the sum over ranks of the squared norm of the trained shards."""
    layout = build_for_row_atomic_unpadding([(6, 4), (6, 4), (4, 8)], 2)
    full = {i: randn(*shape, seed=i) for i, shape in enumerate(layout.tensor_shapes)}
    rate = torch.tensor(0.1, dtype=torch.float64)

    def loss(rate: torch.Tensor, params: dict, grads: list, owners: GroupOwnerLayout | None) -> torch.Tensor:
        optimizer = optim.muon(rate, owner_layout=owners, stack_equal_shapes=False)
        return sum((p**2).sum() for p in train(optimizer, params, lambda _, step: grads[step], steps=2).values())

    def program(mesh: Mesh) -> tuple:
        shards, *grads = (shards_of(layout, mesh.get_rank(), t) for t in (full, gradients(full, 0), gradients(full, 1)))
        return grad(loss, (0, 1, 2))(rate, shards, grads, GroupOwnerLayout.from_params(mesh, layout))

    expected = grad(loss, (0, 1, 2))(rate, full, [gradients(full, 0), gradients(full, 1)], None)
    results = simulate(program, 2).results.values()
    torch.testing.assert_close(sum(result[0] for result in results), expected[0], rtol=1e-12, atol=0)
    for pick in (lambda result: result[1], lambda result: result[2][0], lambda result: result[2][1]):
        for i, whole in pick(expected).items():
            parts = [pick(result)[i].flatten() for result in results if i in pick(result)]
            torch.testing.assert_close(torch.cat(parts), whole.flatten(), rtol=0, atol=1e-12)


def test_changing_the_learning_rate_does_not_recompile() -> None:
    params = {0: randn(4, 6, seed=0), 1: randn(5, seed=1)}
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object):
        graphs.append(graph)
        return graph

    def step(state: tuple, params: dict, grads: dict, rate: torch.Tensor) -> tuple:
        optimizer = optim.partition(([0], optim.muon(rate)), ([1], optim.adamw(rate)))
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    state = optim.partition(([0], optim.muon(0.0)), ([1], optim.adamw(0.0))).init(params)
    expected, expected_state = params, state
    for number in range(3):
        rate = torch.tensor(0.1 * (number + 1), dtype=torch.float64)
        grads = gradients(params, number)
        params, state = compiled(state, params, grads, rate)
        expected, expected_state = step(expected_state, expected, grads, rate)
    assert_close(params, expected, 1e-12)
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own imports
def test_sharded_update_compiles(backend: str) -> None:
    layout = build_for_row_atomic_unpadding([(6, 4), (6, 4), (4, 8)], 2)

    def program(mesh: Mesh) -> None:
        owners = GroupOwnerLayout.from_params(mesh, layout)
        optimizer = optim.muon(0.1, owner_layout=owners, ns_dtype=torch.float64)
        full = {i: randn(*shape, seed=i) for i, shape in enumerate(layout.tensor_shapes)}
        params = shards_of(layout, mesh.get_rank(), full)
        state, grads = optimizer.init(params), shards_of(layout, mesh.get_rank(), gradients(full, 0))
        expected, expected_state = optimizer.update(grads, state, params)
        actual, actual_state = torch.compile(optimizer.update, fullgraph=True, backend=backend)(grads, state, params)
        assert_close(actual, expected, 1e-12)
        assert_close(actual_state.momentum, expected_state.momentum, 1e-12)

    simulate(program, 2)


def groups_on(mesh: Mesh, names: str) -> dict[Hashable, GroupOwnerLayout]:
    """One group per name, of unlike layouts, whose owners are chosen together."""
    layouts = [list(sharded_layouts().values())[n % 4] for n in range(len(names))]
    owners = balance_owner_work([(layout, mesh, MATRICES) for layout in layouts]).owners
    found = zip(names, layouts, owners, strict=True)
    return {name: GroupOwnerLayout(mesh, layout, chosen, name=name) for name, layout, chosen in found}


@pytest.mark.parametrize("names", ["a", "abcd", "ab"])
@pytest.mark.parametrize("compiled", [False, True])
def test_muon_of_many_groups_is_that_of_each(names: str, compiled: bool) -> None:
    def program(mesh: Mesh) -> int:
        groups = groups_on(mesh, names)
        full = {name: {i: tensor * (n + 1) for i, tensor in full_params().items()} for n, name in enumerate(names)}
        params = {name: shards_of(groups[name].layout, mesh.get_rank(), full[name]) for name in names}
        params = {name: {i: t for i, t in params[name].items() if i in MATRICES} for name in names}
        flat = {(name, i): tensor for name in names for i, tensor in params[name].items()}
        together = optim.muon(0.1, owner_layout=groups, stack_equal_shapes=False, ns_dtype=torch.float64)
        update = torch.compile(together.update, fullgraph=True, backend="aot_eager") if compiled else together.update
        found, state = update(flat, together.init(flat), flat)
        for name in names:
            alone = optim.muon(0.1, owner_layout=groups[name], stack_equal_shapes=False, ns_dtype=torch.float64)
            expected, expected_state = alone.update(params[name], alone.init(params[name]), params[name])
            assert_close({i: found[name, i] for i in expected}, expected, 1e-12 if compiled else 0)
            assert_close({i: state.momentum[name, i] for i in expected}, expected_state.momentum, 0)
        return len(found)

    assert sum(simulate(program, 4).results.values()) >= len(MATRICES) * len(names)


def test_muon_of_groups_of_unlike_dtypes() -> None:
    def program(mesh: Mesh) -> None:
        groups = groups_on(mesh, "ab")
        dtypes = {"a": torch.float64, "b": torch.float32}
        options = {"ns_dtype": torch.float32, "stack_equal_shapes": False}
        params = {
            name: {
                i: t
                for i, t in shards_of(groups[name].layout, mesh.get_rank(), full_params(dtype)).items()
                if i in MATRICES
            }
            for name, dtype in dtypes.items()
        }
        flat = {(name, i): tensor for name in params for i, tensor in params[name].items()}
        together = optim.muon(0.1, owner_layout=groups, **options)
        found, _ = together.update(flat, together.init(flat), flat)
        for name, dtype in dtypes.items():
            alone = optim.muon(0.1, owner_layout=groups[name], **options)
            expected, _ = alone.update(params[name], alone.init(params[name]), params[name])
            assert_close({i: found[name, i] for i in expected}, expected, 0)
            assert all(found[name, i].dtype == dtype for i in expected)

    simulate(program, 4)


def test_muon_of_many_groups_is_two_exchanges() -> None:
    def program(mesh: Mesh) -> None:
        groups = groups_on(mesh, "abcd")
        muon = optim.muon(0.1, owner_layout=groups)
        params = {
            (name, i): shard
            for name, owners in groups.items()
            for i, shard in shards_of(owners.layout, mesh.get_rank(), full_params()).items()
            if i in MATRICES
        }
        muon.update(params, muon.init(params), params)

    trace = simulate(program, 4).trace
    # These pieces are small: one message for each direction of each pair of ranks.
    assert len({(sent.operation, sent.src, sent.dst) for sent in trace}) == len(trace)
    assert {sent.operation for sent in trace} == {"gather 'a' and 3 more", "scatter 'a' and 3 more"}


def test_map_on_owners_of_many_groups_reads_its_own_keys_alone() -> None:
    groups = {"a": GroupOwnerLayout(Mesh(1, rank=0), build_for_row_atomic([(2, 2)], 1), {0: 0})}
    given = {("a", 0): torch.arange(4.0), ("b", 0): torch.zeros(1), 0: torch.zeros(1)}
    parts, _ = optim.map_on_owners(lambda full: full, given, owner_layout=groups)
    assert parts["a", 0].tolist() == [[0, 1], [2, 3]]
    for key in (0, ("b", 0)):
        with pytest.raises(KeyError, match="source has no entry for tensor 0"):
            optim.map_on_owners(lambda full: full, {key: torch.zeros(4)}, owner_layout=groups)
    with pytest.raises(ValueError, match="give at least one"):
        optim.muon(0.1, owner_layout={})


def test_map_on_owners_is_gather_and_scatter() -> None:
    layout = build_for_row_atomic_unpadding([(6, 4), (5, 3)], 2)

    def program(mesh: Mesh) -> None:
        owners = GroupOwnerLayout.from_params(mesh, layout)
        shards = shards_of(layout, mesh.get_rank(), {0: torch.arange(24.0), 1: torch.arange(15.0)})
        parts, _ = optim.map_on_owners(
            lambda full: {i: x.flip(0) for i, x in full.items()}, shards, owner_layout=owners
        )
        full, _ = gather(parts, owner_layout=owners)
        for i, tensor in full.items():
            shape = layout.tensor_shapes[i]
            torch.testing.assert_close(tensor, torch.arange(float(shape.numel())).view(shape).flip(0))

    simulate(program, 2)


# Errors


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"tensor 'bias' \(3,\) is no matrix; leave it to adamw"):
        optim.muon(0.1).init({"bias": torch.zeros(3)})
    layout = build_for_row_atomic([(4, 2), (3,)], 1)
    with pytest.raises(ValueError, match=r"tensor 1 \(3,\) is no matrix"):
        optim.muon(0.1, owner_layout=GroupOwnerLayout(Mesh(1, rank=0), layout, {0: 0, 1: 0}))
    with pytest.raises(ValueError, match="adjust_lr_fn must be one of original, match_rms_adamw, got 'rms'"):
        optim.muon(0.1, adjust_lr_fn="rms")
    optimizer, params = optim.muon(0.1), {0: torch.zeros(2, 2), 1: torch.zeros(2, 2)}
    with pytest.raises(KeyError, match=r"no gradient or parameter of tensor 1 \(1 missing in all\)"):
        optimizer.update({0: params[0]}, optimizer.init(params), params)
    for make in (optim.muon, optim.adamw):
        with pytest.raises(ValueError, match="number >= 0"):
            make(-0.1)
        with pytest.raises(ValueError, match=r"0-D, got shape \(2,\)"):
            make(torch.ones(2))
        with pytest.raises(ValueError, match="weight_decay"):
            make(0.1, weight_decay=-1)
    with pytest.raises(ValueError, match="betas"):
        optim.adamw(0.1, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="momentum"):
        optim.muon(0.1, momentum=1.5)


def test_partition_refuses() -> None:
    with pytest.raises(ValueError, match="same key"):
        optim.partition(([0, 1], optim.muon(0.1)), ([1], optim.adamw(0.1)))
    optimizer = optim.partition(([0], optim.muon(0.1)), ([1], optim.adamw(0.1)))
    with pytest.raises(KeyError, match="no part claims tensor 2"):
        optimizer.init({2: torch.zeros(2, 2)})
