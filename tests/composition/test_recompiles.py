"""How often compiled steps compile, what they guard on, and what they say about wrong inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh

ROWS, WHOLE = mf.RowAtomic(), mf.Replicate()
SHAPES = ((5, 4), (2, 6), (6, 2))


def owners_of(mesh: Mesh, shapes: Any = SHAPES, name: str = "") -> mf.GroupOwnerLayout:
    """A new value at every call."""
    layout = mf.build_for_row_atomic_unpadding(shapes, mesh.size())
    return mf.GroupOwnerLayout(mesh, layout, {0: mesh.ranks[0], 2: mesh.ranks[-1]}, name=name)


def shards_of(owners: mf.GroupOwnerLayout, scale: float = 1.0) -> dict[int, torch.Tensor]:
    held = owners.layout.get_local_range(owners.mesh, [ROWS])
    return {i: torch.full((part.numel,), scale) for i, part in owners.layout.tensors_in(held) if i != 1}


def owner_step(
    shards: dict[int, torch.Tensor], rate: torch.Tensor, owners: mf.GroupOwnerLayout
) -> tuple[dict[int, torch.Tensor], mf.Token]:
    full, token = mf.gather(shards, owner_layout=owners, dtype=torch.float32)
    parts, token = mf.scatter({i: tensor * 2 for i, tensor in full.items()}, owner_layout=owners, after=token)
    return {i: shard - rate * parts[i].reshape(-1) for i, shard in shards.items()}, token


def buffer_of(mesh: Mesh, shapes: Any = SHAPES, scale: float = 1.0) -> mf.DBuffer:
    layout = mf.build_for_row_atomic_unpadding(shapes, mesh.size())
    return mf.DBuffer.distribute_tensors([torch.full(shape, scale) for shape in shapes], mesh, [ROWS], layout)


def buffer_step(buffer: mf.DBuffer, rate: torch.Tensor) -> tuple[mf.DBuffer, mf.Token]:
    whole, token = mf.allgather(buffer, 0)
    gradient = mf.DBuffer(whole.view([mf.Partial("avg")]).spec, whole.local_buffer * 2)
    mean, token = mf.reduce_scatter(gradient, 0, ROWS, after=token)
    return mf.DBuffer(buffer.spec, buffer.local_buffer - rate * mean.local_buffer), token


def run_counted(program: Callable[[Mesh], None], ranks: int = 2) -> tuple[int, dict[str, int]]:
    """Number of compiled graphs on all ranks, and the graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    mf.simulate(program, ranks)
    return counters["stats"]["unique_graphs"], dict(counters["graph_break"])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kind", ["owner", "buffer"])
def test_a_step_compiles_once_per_layout(kind: str, ranks: int) -> None:
    """Equal layouts and owners, made anew for every step, and a learning rate that changes compile nothing."""
    other = ((7, 4), (2, 6), (6, 2))

    def program(mesh: Mesh) -> None:
        owner_compiled = torch.compile(owner_step, fullgraph=True, backend="aot_eager")
        buffer_compiled = torch.compile(buffer_step, fullgraph=True, backend="aot_eager")
        for step, shapes in enumerate([SHAPES, SHAPES, SHAPES, other, SHAPES, other]):
            rate = torch.tensor(0.1 / (step + 1))
            if kind == "owner":
                owners = owners_of(mesh, shapes)
                updated, token = owner_compiled(shards_of(owners), rate, owners)
                for tensor in updated.values():
                    torch.testing.assert_close(tensor, torch.full_like(tensor, 1 - 2 * float(rate)))
            else:
                found, token = buffer_compiled(buffer_of(mesh, shapes), rate)
                assert found.spec == buffer_of(mesh, shapes).spec
                torch.testing.assert_close(found.local_buffer, torch.full_like(found.local_buffer, 1 - 2 * float(rate)))
            token.wait()
            assert token.pending == ()

    graphs, breaks = run_counted(program, ranks)
    assert graphs == 2 * ranks  # of two layouts
    assert breaks == {}


def test_values_that_compiled_code_does_not_see_compile_nothing() -> None:
    """A name that only errors show, and owners in a closure or a list."""

    def program(mesh: Mesh) -> None:
        def step(shards: dict[int, torch.Tensor], groups: list[mf.GroupOwnerLayout]) -> Any:
            return [mf.gather(shards, owner_layout=owners, dtype=torch.float32)[0] for owners in groups]

        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for _ in range(3):
            compiled(shards_of(owners_of(mesh)), [owners_of(mesh), owners_of(mesh, name="second")])

    assert run_counted(program) == (2, {})


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo's own look at inputs that are no leaves
def test_tokens_come_and_go() -> None:
    """A token through the arguments and results of compiled functions, grad's aux, vmap, and an eager call between."""

    def program(mesh: Mesh) -> None:
        owners = owners_of(mesh)

        def there(shards: dict[int, torch.Tensor], token: mf.Token) -> tuple[dict[int, torch.Tensor], mf.Token]:
            return mf.gather(shards, owner_layout=owners, dtype=torch.float32, after=token)

        def back(full: dict[int, torch.Tensor], token: mf.Token) -> tuple[dict[int, torch.Tensor], mf.Token]:
            return mf.scatter(full, owner_layout=owners, after=token)

        def loss(shards: dict[int, torch.Tensor]) -> tuple[torch.Tensor, mf.Token]:
            token = mf.Token.linked_to(*shards.values())
            full, token = torch.compile(there, fullgraph=True, backend="aot_eager")(shards, token)
            parts, token = back({i: tensor**2 for i, tensor in full.items()}, token)
            full, token = torch.compile(there, fullgraph=True, backend="aot_eager")(parts, token)
            return sum(((tensor**2).sum() for tensor in full.values()), token.link), token

        shards = {i: shard.requires_grad_() for i, shard in shards_of(owners, 0.5).items()}
        value, token = loss(shards)
        assert token.dtype == torch.float32
        value.backward()
        for shard in shards.values():
            torch.testing.assert_close(shard.grad, 4 * shard.detach() ** 3)

        step = torch.vmap(torch.func.grad(loss_in_one(owners), has_aux=True))
        batch = {i: torch.stack([shard.detach(), 2 * shard.detach()]) for i, shard in shards.items()}
        gradients, token = torch.compile(step, fullgraph=True, backend="aot_eager")(batch)
        assert token.link.tolist() == [0.0, 0.0]
        for i, shard in shards.items():
            torch.testing.assert_close(gradients[i], torch.stack([2 * shard, 4 * shard]).detach())

    mf.simulate(program, 2)


def loss_in_one(owners: mf.GroupOwnerLayout) -> Callable[..., Any]:
    def loss(shards: dict[int, torch.Tensor]) -> tuple[torch.Tensor, mf.Token]:
        full, token = mf.gather(shards, owner_layout=owners, dtype=torch.float32)
        return sum(((tensor**2).sum() for tensor in full.values()), token.link), token

    return loss


@pytest.mark.parametrize("kind", ["owner", "buffer"])
def test_guards_do_not_grow_with_the_plan(kind: str) -> None:
    """A plan over 2,000 tensors costs as many guards as one over three."""

    def count_guards(count: int) -> int:
        mesh = Mesh(1, rank=0)
        shapes = [(2 + i % 3, 2) for i in range(count)]
        owners = mf.GroupOwnerLayout(mesh, mf.build_for_row_atomic_unpadding(shapes, 1), {0: 0})
        buffer = mf.DBuffer(mf.BufferSpec(mesh, [ROWS], owners.layout), torch.zeros(owners.layout.size))

        def gather(shard: torch.Tensor) -> torch.Tensor:
            return mf.gather({0: shard}, owner_layout=owners)[0][0]

        def view(buffer: mf.DBuffer) -> torch.Tensor:
            return buffer.view([WHOLE] if buffer is None else [ROWS]).get_tensor_view(1) * 2

        torch._dynamo.reset()
        step, argument = (gather, torch.zeros(4)) if kind == "owner" else (view, buffer)
        torch.compile(step, fullgraph=True, backend="eager")(argument)
        (entry,) = _debug_get_cache_entry_list(step.__code__)
        return str(entry.guard_manager).count("\n")

    assert count_guards(2000) == count_guards(3)


# Wrong inputs: the text of the library's own error is in what the caller gets, before any rank communicates.


def raises(fn: Callable[..., Any], *args: Any) -> str:
    torch._dynamo.reset()
    with pytest.raises(Exception) as caught:  # noqa: PT011  # the compiler wraps errors in classes of its own
        torch.compile(fn, fullgraph=True, backend="aot_eager")(*args)
    return str(caught.value)


def wrong_owner_calls(mesh: Mesh) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]]:
    owners, shards = owners_of(mesh, name="blocks"), shards_of(owners_of(mesh))

    def gather(source: dict[int, torch.Tensor], owners: Any = owners, **keywords: Any) -> Any:
        return mf.gather(source, owner_layout=owners, **keywords)

    pending = mf.gather(shards, owner_layout=owners, async_op=True)[1]
    first = min(shards)
    alone = mf.GroupOwnerLayout(mesh, mf.build_for_row_atomic_unpadding([(2,), (2,)], 2), {0: 0, 1: 0}, [WHOLE])
    both = {0: torch.ones(2), 1: torch.ones(2)}
    return {
        "missing": (gather, ({},), f"gather 'blocks': source has no entry for tensor {first}"),
        "short": (
            gather,
            ({**shards, first: shards[first][1:]},),
            f"tensor {first} has {shards[first].numel() - 1} el",
        ),
        "dtypes": (gather, ({**both, 0: both[0].double()}, alone), "one call moves one dtype"),
        "asserted": (lambda source: gather(source, dtype=torch.float64), (shards,), "dtype=torch.float64 was asserted"),
        "list": (gather, ({**shards, first: [1.0]},), "must be a torch.Tensor"),
        "owners": (gather, (shards, owners.layout), "owner_layout must be a GroupOwnerLayout"),
        "after": (lambda source: gather(source, after=[source]), (shards,), "after= takes a Token"),
        "inplace": (
            lambda s: mf.inplace.gather(s, s, owner_layout=owners),
            (shards,),
            "inplace.gather cannot run under",
        ),
        "made inside": (lambda s: gather(s, owners_of(mesh)), (shards,), "made inside a compiled region"),
        "pending": (lambda source, token: gather(source, after=token), (shards, pending), "call token.wait() before"),
    }


def wrong_buffer_calls(mesh: Mesh) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]]:
    buffer = buffer_of(mesh)
    ints = mf.DBuffer(buffer.spec, buffer.local_buffer.long())
    short = mf.DBuffer(buffer.spec, buffer.local_buffer[1:])
    return {
        "sharded": (lambda b: mf.allreduce(b, 0), (buffer,), "expected a Partial"),
        "axis": (lambda b: mf.allgather(b, "rows"), (buffer,), "has no axis 'rows'"),
        "view": (lambda b: b.view([WHOLE]), (buffer,), "only Replicate can be viewed otherwise"),
        "sum": (lambda b: b.redistribute([mf.Partial("sum")]), (buffer,), "multiply the value by the number of ranks"),
        "ints": (lambda b: b.redistribute([mf.Partial("avg")]), (ints,), "cannot be averaged"),
        "short": (lambda b: b.allgather(0), (short,), "tensor local_buffer has"),
        "made inside": (lambda b: buffer_of(mesh), (buffer,), "made inside a compiled region"),
        "dtensor": (lambda b: b.get_dtensor(0), (buffer,), "use get_tensor_view inside"),
        "tensor": (lambda b: b.get_tensor_view(9), (buffer,), "tensor 9 is not one of the layout's 3 tensors"),
    }


@pytest.mark.parametrize("calls", [wrong_owner_calls, wrong_buffer_calls])
def test_errors_keep_their_text(calls: Callable[[Mesh], Any]) -> None:
    def program(mesh: Mesh) -> None:
        for name, (fn, args, text) in calls(mesh).items():
            assert text in raises(fn, *args), name

    mf.simulate(program, 2)


def test_error_where_a_dtype_cannot_be_known_while_tracing() -> None:
    def program(mesh: Mesh) -> None:
        owners = mf.GroupOwnerLayout(mesh, mf.GlobalLayout([(2, 2)], [0], 4, [0, 0]), {0: mesh.ranks[0]})
        source = {0: torch.ones(4)} if mesh.get_rank() == mesh.ranks[1] else {}
        if not source:
            assert "cannot know the dtype of its results; pass dtype=" in raises(
                lambda source: mf.gather(source, owner_layout=owners), source
            )
        fn = torch.compile(
            lambda source: mf.gather(source, owner_layout=owners, dtype=torch.float32),
            fullgraph=True,
            backend="aot_eager",
        )
        torch._dynamo.reset()
        found, _ = fn(source)
        assert len(found) == (mesh.get_rank() == mesh.ranks[0])

    mf.simulate(program, 2)


def test_disagreement_is_found_at_run_time() -> None:
    """The agreement check runs inside compiled code, on all ranks."""

    def program(mesh: Mesh) -> str:
        owners = owners_of(mesh, name=f"group {mesh.get_rank()}")
        fn = torch.compile(lambda source: mf.gather(source, owner_layout=owners), fullgraph=True, backend="aot_eager")
        with mf.agreement_check(), pytest.raises(ValueError, match="the ranks disagree") as caught:
            fn(shards_of(owners))
        return str(caught.value)

    first, second = mf.simulate(program, 2).results.values()
    assert "group 0" in first
    assert "group 1" in second


def test_make_fx_on_real_tensors_is_refused_in_a_simulated_mesh() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def program(mesh: Mesh) -> None:
        buffer = buffer_of(mesh)
        make_fx(lambda local: mf.DBuffer(buffer.spec, local).allgather(0).local_buffer)(buffer.local_buffer)

    with pytest.raises(mf.SimulationError, match="tracing_mode="):
        mf.simulate(program, 2)
