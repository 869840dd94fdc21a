"""Units: what is gathered when, how much of it is alive, and what may not pass their borders."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import grad, grad_and_value

import mfsdp_func as mf
from mfsdp_func.fsdp import Escape
from tests import fsdp_cases as cases
from tests.fsdp_cases import FULL, ROWS, WHOLE, loss_of, net, number, on_each, place
from tests.meshes import RunOnMesh
from tests.spawn import RankPool

pytestmark = pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("how", ["grad", "backward", "accumulate", "grad of grad"])
def test_at_most_two_units_are_alive(prefetch: bool, how: str) -> None:
    """Besides the held unit, which owns the position table: counted in every whole buffer that is allocated."""
    module, x = net(blocks=6, tie=False), cases.batches(1)[0]

    def program(mesh: mf.Mesh) -> None:
        context = mf.FsdpContext(prefetch=prefetch)
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"), context=context)
        sizes = cases.bytes_of(apply)
        held, largest = sizes.pop("root"), max(sizes.values())

        def loss(params: Any) -> torch.Tensor:
            return loss_of(apply(params, x), x)

        steps = {
            "grad": lambda: grad_and_value(loss)(params),
            "backward": lambda: loss(cases.leaves_of(params)).backward(),
            "accumulate": lambda: grad(lambda a: loss_of(apply.accumulate(params, a, x), x))(
                apply.init_accumulator(params)
            ),
            "grad of grad": lambda: grad(lambda p: grad(loss)(p)["norm"].local_buffer.sum())(params),
        }
        for _ in range(3):
            with cases.gathers_watched() as seen:
                steps[how]()
            assert not seen.alive
            if how != "grad of grad":  # which keeps what it differentiates, once
                assert seen.peak <= held + (2 if prefetch else 1) * largest
                # Every unit gathers once in each direction; the held one forward only.
                assert seen.count == 1 + 2 * len(sizes)

    on_each((1,), program)


class Wide(nn.Module):
    """Makes an activation that the backward pass needs, and tells when that goes and when its own turn has come."""

    alive: set[int] = set()  # noqa: RUF012
    seen: list[tuple[int, int]] = []  # noqa: RUF012

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.fc, self.back = number, nn.Linear(4, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.fc(x))
        Wide.alive.add(self.number)
        weakref.finalize(wide.untyped_storage(), Wide.alive.discard, self.number)
        y = self.back(wide)
        y.register_hook(lambda gradient: Wide.seen.append((self.number, len(Wide.alive))))
        return y


@pytest.mark.parametrize(("how", "parameter"), [("grad", ROWS), ("backward", ROWS), ("backward", FULL)], ids=repr)
def test_activations_are_freed_unit_by_unit(how: str, parameter: Any) -> None:
    """When a unit's turn comes in the backward pass, those after it have given theirs back."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Wide(n) for n in range(5)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x.square().sum()

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(Stack(), mesh, mf.Placements(0, [parameter], [ROWS], [ROWS]))
        Wide.alive, Wide.seen = set(), []
        if how == "grad":
            grad(lambda params: apply(params, torch.ones(3, 4)))(params)
        else:
            apply(cases.leaves_of(params), torch.ones(3, 4)).backward()
        assert Wide.seen == [(n, n + 1) for n in reversed(range(5))]
        assert not Wide.alive

    on_each((1,), program)


def calls_of_a_step(roles: str, how: str) -> tuple[int, dict[int, list[str]]]:
    """Number of groups, and the operations of each rank."""
    module, data = net(blocks=3, tie=False), cases.batches(4)

    def program(mesh: mf.Mesh) -> int:
        apply, params = mf.fully_shard(module, mesh, place(mesh, roles))

        def loss(params: Any) -> torch.Tensor:
            return loss_of(apply(params, data[number(mesh)]), data[number(mesh)])

        grad(loss)(params) if how == "grad" else loss(cases.leaves_of(params)).backward()
        return len(apply.groups)

    with cases.calls_watched() as labels:
        groups = on_each(cases.ROLES[roles][0], program)[0]
    return groups, labels


@pytest.mark.parametrize("how", ["grad", "backward"])
@pytest.mark.parametrize("roles", ["zero1", "zero2"])
def test_whole_parameters_are_gathered_once(roles: str, how: str) -> None:
    groups, labels = calls_of_a_step(roles, how)
    for own in labels.values():
        assert sorted(own) == ["allgather over 'axis0'"] * groups + ["reduce_scatter over 'axis0'"] * groups


@pytest.mark.parametrize("how", ["grad", "backward"])
def test_an_outer_axis_is_gathered_once(how: str) -> None:
    """And the inner one by every unit, in both directions; by the held unit in one."""
    groups, labels = calls_of_a_step("outer", how)
    for own in labels.values():
        assert own.count("allgather over 'axis0'") == groups
        assert own.count("allgather over 'axis1'") == 2 * groups - 1
        assert own.count("reduce_scatter over 'axis0'") == own.count("reduce_scatter over 'axis1'") == groups


def test_whole_parameters_are_reduced_as_soon_as_a_unit_is_done() -> None:
    """In a plain backward pass, not at its end."""
    module, x, events = net(blocks=3, tie=False), cases.batches(1)[0], []

    class Told(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, n: int) -> torch.Tensor:
            ctx.n = n
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            events.append(f"before {ctx.n}")
            return gradient, None

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "zero2"))
        for n, block in enumerate(apply._skeleton.blocks):
            block.register_forward_pre_hook(lambda _, args, n=n: Told.apply(args[0], n))
        loss_of(apply(cases.leaves_of(params), x), x).backward()

    class Listed(list[str]):
        def append(self, label: str) -> None:
            events.append(label)

    with cases.calls_watched() as labels:
        labels[0] = Listed()
        on_each((1,), program)
    backward = [event.partition(" over")[0] for event in events if "gather" not in event]
    reduced = ["reduce_scatter"]
    assert backward == [
        *(*reduced * 3, "before 2"),  # head, norm, block 2
        *(*reduced, "before 1", *reduced, "before 0"),
        *reduced * 2,  # embedding, and the held table
    ]


class Probe(nn.Module):
    """Tells how many gathers are in flight while it computes."""

    seen: list[int] = []  # noqa: RUF012
    cache: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Probe.seen.append(Probe.cache.in_flight)
        y = self.fc(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: Probe.seen.append(Probe.cache.in_flight))
        return torch.tanh(y)


def count_gathers_in_flight(rank: int, world_size: int) -> tuple[list[int], list[int]]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.ModuleList([Probe() for _ in range(4)])[0], *[Probe() for _ in range(3)])
    mesh = init_device_mesh("cpu", (world_size,))
    apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [ROWS], [ROWS], [ROWS]), units=[Probe])
    x, passes = torch.randn(2, 4), []
    Probe.cache = apply._cache
    for _ in range(2):
        Probe.seen = []
        gradients = grad(lambda params: apply(params, x).square().mean())(params)
        passes.append(Probe.seen)
    assert all(buffer.local_buffer.isfinite().all() for buffer in gradients.values())
    return passes[0], passes[1]


@pytest.mark.distributed
def test_the_next_gather_is_in_flight(ranks2: RankPool) -> None:
    """On real ranks, from the second pass on: while a unit computes, forward and again in backward."""
    for first, second in ranks2.run(count_gathers_in_flight, 2):
        assert first[:4] == [0, 0, 0, 0]
        assert second == [1, 1, 1, 0, 1, 1, 1, 0]


def test_an_order_that_changes_is_followed() -> None:
    """Gathers started for nothing are waited for, and results stay right."""
    torch.manual_seed(0)

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3) for _ in range(3)])

        def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
            for n in order:
                x = torch.tanh(self.layers[n](x))
            return x.square().mean()

    module, x = Either().double(), torch.randn(2, 3, dtype=torch.float64)
    weights = {name: param.detach() for name, param in module.named_parameters()}

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        for order in [(0, 1, 2), (0, 1, 2), (2, 0), (1, 1, 0), (0, 1, 2), ()]:
            expected = grad(lambda w, o=order: torch.func.functional_call(module, w, (x, o)))(weights)
            got = grad(lambda p, o=order: apply(p, x, o))(params)
            cases.assert_same(apply.gather_parameters(got), expected)

    mf.simulate(program, 2)


class Experts(nn.Module):
    """Runs the units that it is told. No number of ranks divides their rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5, bias=False), nn.Linear(5, 5, bias=False)
        self.experts = nn.ModuleList([nn.Linear(5, 5, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor, which: tuple[int, ...]) -> torch.Tensor:
        x = self.first(x)
        for n in which:
            x = torch.tanh(self.experts[n](x))
        return self.last(x).sum()


def skipped_on_one_rank(mesh: mf.Mesh, ours: tuple[int, ...], theirs: tuple[int, ...]) -> str:
    torch.manual_seed(0)
    apply, params = mf.fully_shard(Experts(), mesh, mf.Placements(0, [ROWS], [ROWS], [ROWS]))
    apply(params, torch.ones(2, 5), (0, 1, 2))  # from now on, gathers start early
    which = ours if mesh.get_rank() == 0 else theirs
    try:
        grad(lambda params: apply(params, torch.ones(2, 5), which))(params)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ours", "theirs", "names"),
    [
        ((0, 1, 2), (0, 2), ("experts.1", "experts.2")),
        ((0, 2), (0, 1, 2), ("experts.1", "experts.2")),
        ((0, 1, 2), (0, 1), ("experts.2", "last")),
        ((0, 1), (0, 2, 1), ("experts.1", "experts.2")),
    ],
)
def test_a_unit_that_one_rank_skips_is_named(
    ours: tuple[int, ...], theirs: tuple[int, ...], names: tuple[str, str], run_on_mesh: RunOnMesh
) -> None:
    for message in run_on_mesh(skipped_on_one_rank, 2, ours, theirs, check=True).values():
        assert all(f"unit {name!r} on ranks" in message for name in names), message


def interrupted(mesh: mf.Mesh, how: str) -> None:
    torch.manual_seed(0)
    module, x = Experts(), torch.ones(2, 5)
    context = mf.FsdpContext(shard_layout=mf.ShardLayout.BALANCED)
    apply, params = mf.fully_shard(module, mesh, mf.Placements(0, [ROWS], [ROWS], [ROWS]), context=context)
    weights = {name: param.detach() for name, param in module.named_parameters()}
    expected = grad(lambda w: torch.func.functional_call(module, w, (x, (0, 1, 2))))(weights)
    apply(params, x, (0, 1, 2))
    for _ in range(2):  # the gather of what comes next is in flight, and nobody takes it
        if how == "raises":
            with pytest.raises((IndexError, AttributeError)):
                apply(params, x, (0, 1, 7))
        elif how == "raises in grad":
            with pytest.raises((IndexError, AttributeError)):
                grad(lambda params: apply(params, x, (0, 1, 7)))(params)
        else:
            apply(params, x, (0,))
        assert apply._cache._entries
        got = grad(lambda params: apply(params, x, (0, 1, 2)))(params)
        cases.assert_same(apply.gather_parameters(got), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("how", ["ends early", "raises", "raises in grad"])
def test_after_a_pass_that_ended_early(how: str, run_on_mesh: RunOnMesh) -> None:
    run_on_mesh(interrupted, 2, how)


class Bad(nn.Module):
    """A root with two blocks that do something with `x` besides computing."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([block(), block()])
        for inner in self.blocks:
            inner.outer = [self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return (x * self.scale).sum()


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)


class Stashes(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.stash = self.fc(x)
        return self.stash * 2


class Writes(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 1
        return self.fc(x)


class WritesAView(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.view(-1).mul_(2)
        return self.fc(x)


class Captures(Inner):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.outer[0].scale


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Behaves(Inner):
    """Own Functions, writing into one's own results, and keeping what is detached are all right."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(Doubles.apply(x)).add_(1)
        self.stash = y.detach()
        return y


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Stashes, r"unit 'blocks\.0' keeps a differentiable tensor of shape \(2, 4\).*detach"),
        (Writes, r"unit 'blocks\.0' changes one of its arguments in place"),
        (WritesAView, r"unit 'blocks\.0' changes one of its arguments in place"),
        (Captures, r"unit 'blocks\.0' computes with a differentiable tensor of shape \(4,\)"),
        (Behaves, None),
    ],
)
@pytest.mark.parametrize("how", ["grad", "backward"])
def test_what_would_lose_a_gradient_is_refused(block: type[nn.Module], message: str | None, how: str) -> None:
    torch.manual_seed(0)
    module = Bad(block)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "one"))
        x = torch.ones(2, 4)
        assert apply(params, x).isfinite()  # nothing to lose here
        if how == "grad":
            grad(lambda params: apply(params, x))(params)
        else:
            apply(cases.leaves_of(params), x).backward()

    if message is None:
        on_each((1,), program)
        return
    with pytest.raises(Escape, match=message):
        on_each((1,), program)


def shard(module: nn.Module, mesh: Any = None, placements: Any = None, **choices: Any) -> Any:
    rows = mf.Placements(0, [ROWS], [ROWS], [ROWS])
    return mf.fully_shard(module, mesh or mf.Mesh(2, rank=0), placements or rows, **choices)


def owners(mapping: dict[Any, int]) -> dict[str, Any]:
    whole = mf.Placements(0, [WHOLE], [WHOLE], [WHOLE])
    return {"placements": whole, "context": mf.FsdpContext(parameter_to_owner=mapping)}


@pytest.mark.parametrize(
    ("error", "message", "choices"),
    [
        (ValueError, r"unit 'block' is no module of Net; see named_modules", {"units": ["block"]}),
        (ValueError, r"unit 'blocks\.0' lies inside another", {"units": ["blocks", "blocks.0"]}),
        (ValueError, r"unit 'blocks\.0\.dropout' has no parameters", {"units": ["blocks.0.dropout"]}),
        (ValueError, r"dp_axes \(0,\) must be all axes", {"mesh": mf.Mesh((2, 2), rank=0)}),
        (ValueError, r"no axis 'dp'", {"placements": mf.Placements("dp", [ROWS], [ROWS], [ROWS])}),
        (ValueError, r"parameter is RowAtomic\(\), expected Replicate\(\)", {"placements": (ROWS, FULL, FULL)}),
        (ValueError, r"parameter is BlockAtomic\(2\)", {"placements": (mf.BlockAtomic(2), ROWS, ROWS)}),
        (ValueError, r"gradient is RowAtomic\(\), expected Replicate\(\)", {"placements": (FULL, ROWS, FULL)}),
        (ValueError, r"optimizer cannot be Partial\(sum\)", {"placements": (FULL, FULL, mf.Partial("sum"))}),
        (
            ValueError,
            r"Shard\(dim=1\) does not cut a flat buffer",
            {"placements": (torch.distributed.tensor.Shard(1),) * 3},
        ),
        (ValueError, r"needs an owner for parameter 'positions'", owners({"words.weight": 0})),
        (ValueError, r"parameter_to_owner has a parameter 'word'", owners({"word": 0})),
        (ValueError, r"parameter of shape \(3,\)", owners({nn.Parameter(torch.ones(3)): 0})),
        (ValueError, r"owners 0 and 1; tied names share one", owners({"words.weight": 0, "head.weight": 1})),
        (
            ValueError,
            r"is given owner 7, expected a rank of Mesh",
            owners({name: 7 for name, _ in cases.net().named_parameters()}),
        ),
        (
            ValueError,
            r"parameter_to_owner is for TensorAtomic",
            {"context": mf.FsdpContext(parameter_to_owner={"words.weight": 0})},
        ),
        (ValueError, r"finer_rows has a parameter 'up'", {"context": mf.FsdpContext(finer_rows=frozenset({"up"}))}),
    ],
)
def test_wrong_choices(error: type[Exception], message: str, choices: dict[str, Any]) -> None:
    placements = choices.get("placements")
    if isinstance(placements, tuple):
        choices = choices | {"placements": mf.Placements(0, *([placement] for placement in placements))}
    with pytest.raises(error, match=message):
        shard(net(), **choices)


def test_a_shard_may_not_stand_before_a_replica() -> None:
    mesh, before = mf.Mesh((2, 2), rank=0), [ROWS, FULL]
    with pytest.raises(ValueError, match="a shard stands before Replicate"):
        shard(net(), mesh, mf.Placements((0, 1), before, before, before))
    mixed = [WHOLE, ROWS]
    with pytest.raises(ValueError, match="must be of one kind"):
        shard(net(), mesh, mf.Placements((0, 1), mixed, mixed, mixed))


def test_block_errors_name_the_group() -> None:
    blocks = [mf.BlockAtomic(4)]
    with pytest.raises(ValueError, match="block") as caught:
        shard(nn.Linear(3, 6), placements=mf.Placements(0, blocks, blocks, blocks))
    assert "'weight', 'bias'" in caught.value.__notes__[0]


def test_wrong_buffers() -> None:
    module, x = net(), cases.batches(1)[0]

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        other, layout = params["words"], params["norm"].layout
        without = {key: buffer for key, buffer in params.items() if key != "norm"}
        elsewhere = mf.DBuffer.empty(mesh, [ROWS], layout, dtype=torch.float64)
        for given, error, message in (
            (without, ValueError, r"has buffers .*, expected .*'norm'.*pass what fully_shard returned"),
            (params | {"norm": other}, ValueError, r"sharded_params\['norm'\] is BufferSpec.*, expected BufferSpec"),
            (
                params | {"norm": elsewhere.cast(torch.float32)},
                TypeError,
                r"is torch\.float32, expected torch\.float64",
            ),
            (params | {"norm": torch.ones(3)}, TypeError, r"is a Tensor, expected a DBuffer"),
            (params | {"norm": mf.DBuffer(elsewhere.spec, torch.ones(99))}, ValueError, r"stores a \(99,\), expected"),
            (params | {"norm": elsewhere.redistribute([FULL])}, ValueError, r"is BufferSpec\(.*Replicate"),
        ):
            with pytest.raises(error, match=message):
                apply(given, x)
            with pytest.raises(error, match=message):
                apply.gather_parameters(given)
        with pytest.raises(ValueError, match=r"accumulator\['.*'\] is BufferSpec"):
            apply.accumulate(params, params | {"norm": elsewhere.redistribute([FULL])}, x)

    on_each((2,), program)


def test_parameters_outside_of_their_unit() -> None:
    """Absent ones raise by name; they may be looked at."""

    class Reaches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(3, 3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.layers[0].weight.shape == (3, 3)
            assert self.layers[0].weight.dtype == torch.float32
            return x @ self.layers[0].weight

    module = Reaches()

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"))
        with pytest.raises(
            RuntimeError, match=r"parameter layers\.0\.weight was used outside of the unit that owns it"
        ):
            apply(params, torch.ones(2, 3))
        apply, params = mf.fully_shard(module, mesh, place(mesh, "two"), units=[module])
        assert torch.equal(apply(params, torch.ones(2, 3)), module(torch.ones(2, 3)))
        with pytest.raises(RuntimeError, match="call apply"):
            apply._skeleton(torch.ones(2, 3))

    on_each((2,), program)


def test_a_module_that_is_a_unit_and_part_of_one() -> None:
    class Owns(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.own, self.inner = nn.Parameter(torch.ones(2)), inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.own

    inner = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"a Linear is part of '1' and is used outside of it too"):
        shard(nn.Sequential(inner, Owns(inner)))
    apply, _ = shard(nn.Sequential(Owns(inner), inner), mf.Mesh(1, rank=0))
    assert list(apply.groups) == ["0"]


@pytest.mark.parametrize("given", ["name", "module", "class"])
def test_units_by(given: str) -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), nn.Sequential(nn.Linear(3, 2)))
    units: Any = {"name": ["0", "1"], "module": list(module), "class": [nn.Linear]}[given]
    apply, _ = shard(module, mf.Mesh(1, rank=0), units=units)
    assert list(apply.groups) == (["0.0", "1.0"] if given == "class" else ["0", "1"])
    assert apply.places == {n: (g, i) for g, group in apply.groups.items() for n, *_, i in group.entries}


def test_names_and_a_table() -> None:
    """What people need of the insides: names by group and index, and a `repr` that shows no weight."""
    apply, _ = shard(net(), mf.Mesh(1, rank=0), units=["blocks"])
    assert apply.names["words"] == ("words.weight",)
    assert {name: apply.names[group][i] for name, (group, i) in apply.places.items()} == {
        name: "words.weight" if name == "head.weight" else name for name in apply.places
    }
    text = repr(apply)
    assert text.startswith("ShardedModule of Net\nunit")
    assert "blocks.0.wide.weight (24, 6)" in text
    assert "(root) (held)" in text


def test_at_rest_nothing_of_the_module_is_kept() -> None:
    """Neither a parameter nor the module, once the caller lets go of it."""
    module = net()
    parts = [weakref.ref(part) for part in (module, *module.parameters())]
    apply, params = shard(module)
    stored = sum(buffer.local_buffer.untyped_storage().nbytes() for buffer in params.values())
    del module
    gc.collect()
    assert not any(part() is not None for part in parts)
    assert stored == sum(bound.spec.local_numel * 8 for bound in apply.param_groups.values())
