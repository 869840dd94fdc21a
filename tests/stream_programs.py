"""Programs that use streams, right as they stand, and what can be left out of them or of the library.

They run on simulated streams (`tests/test_streams.py`) and, with tensors on the device, under torch's own sanitizer
(`tests/gpu/test_sanitizer.py`).
"""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

import mfsdp_func as mf
from mfsdp_func import streams
from mfsdp_func.effects import call
from mfsdp_func.effects.streams import Queued, are_ordered
from mfsdp_func.fsdp.param_group import GatherCache
from mfsdp_func.operations import pipeline as pipelines
from mfsdp_func.values.mesh import Mesh

Tensors = dict[int, torch.Tensor]
Program = Callable[[Mesh, str], Any]
SHAPES = ((8, 4), (6, 5), (3, 7))


def groups_of(mesh: Mesh, count: int = 1) -> list[mf.GroupOwnerLayout]:
    """Groups of three tensors, whose owners take turns."""
    layout, ranks = mf.build_for_row_atomic_unpadding(SHAPES, mesh.size()), mesh.ranks
    return [
        mf.GroupOwnerLayout(mesh, layout, {i: ranks[(i + n + 1) % len(ranks)] for i in range(3)}, name=f"group {n}")
        for n in range(count)
    ]


def shards_of(owners: mf.GroupOwnerLayout, device: str, *, plus: float = 0.0) -> Tensors:
    """Made on the current stream."""
    local = owners.layout.get_local_range(owners.mesh, owners.placements)
    return {
        i: torch.arange(part.start, part.end, device=device, dtype=torch.float32) + plus
        for i, part in owners.layout.tensors_in(local)
    }


def scribble(device: str) -> list[torch.Tensor]:
    """Take memory on the current stream, and write over it."""
    return [torch.full((64,), -7.0, device=device) for _ in range(3)]


def used(tensors: Tensors) -> list[torch.Tensor]:
    """What is computed from tensors on the current stream."""
    return [tensor * 2 for tensor in tensors.values()]


def on_streams(program: Callable[..., Any]) -> Callable[..., Any]:
    """Where no streams order the work, the program is another one."""

    @wraps(program)
    def run(mesh: Mesh, device: str, **keywords: Any) -> Any:
        return (program if are_ordered(torch.device(device)) else default)(mesh, device, **keywords)

    return run


def default(mesh: Mesh, device: str, **_: Any) -> Any:
    """Everything on the current stream."""
    (owners,) = groups_of(mesh)
    gathered, token = mf.gather(shards_of(owners, device), owner_layout=owners, device=device)
    parts, _ = mf.scatter({i: t * 2 for i, t in gathered.items()}, owner_layout=owners, after=token, device=device)
    return used(parts)


def in_flight(mesh: Mesh, device: str, *, waits: bool = True) -> Any:
    """`async_op`: results are read after the token was waited for."""
    (owners,) = groups_of(mesh)
    gathered, token = mf.gather(shards_of(owners, device), owner_layout=owners, device=device, async_op=True)
    if waits:
        token.wait()
    return used(gathered)


@on_streams
def on_a_stream(mesh: Mesh, device: str, *, waits: bool = True) -> Any:
    """`stream=`: the inputs are ready on the stream that is given, and results are read elsewhere after the token."""
    (owners,) = groups_of(mesh)
    side, source = streams.new_stream(device), shards_of(owners, device)
    if waits:
        side.wait_stream(streams.current_stream(device))
    gathered, token = mf.gather(source, owner_layout=owners, device=device, stream=side)
    token.wait()
    return used(gathered)


@on_streams
def made_on_the_stream(mesh: Mesh, device: str) -> Any:
    """`stream=`: inputs that are made on that stream need no other."""
    (owners,) = groups_of(mesh)
    side = streams.new_stream(device)
    with streams.on_stream(side):
        source = shards_of(owners, device)
    gathered, token = mf.gather(source, owner_layout=owners, device=device, stream=side)
    token.wait()
    return used(gathered)


@on_streams
def read_on_another_stream(mesh: Mesh, device: str, *, waits: bool = True) -> Any:
    """``token.wait(stream)``: whoever reads, waits."""
    (owners,) = groups_of(mesh)
    gathered, token = mf.gather(shards_of(owners, device), owner_layout=owners, device=device, async_op=True)
    other = streams.new_stream(device)
    token.wait(other if waits else None)
    with streams.on_stream(other):
        doubled = used(gathered)
    streams.current_stream(device).wait_stream(other)
    return [tensor + 1 for tensor in doubled]


@on_streams
def one_after_the_other(mesh: Mesh, device: str) -> Any:
    """``after=`` orders operations on different streams."""
    (owners,) = groups_of(mesh)
    side = streams.new_stream(device)
    gathered, first = mf.gather(shards_of(owners, device), owner_layout=owners, device=device, async_op=True)
    parts, second = mf.scatter(gathered, owner_layout=owners, after=first, device=device, stream=side)
    second.wait()
    return used(parts)


def inputs_dropped(mesh: Mesh, device: str) -> Any:
    """Inputs may be dropped at once."""
    (owners,) = groups_of(mesh)
    source = shards_of(owners, device)
    gathered, token = mf.gather(source, owner_layout=owners, device=device, async_op=True)
    source.clear()
    scribble(device)
    token.wait()
    return used(gathered)


@on_streams
def results_dropped(mesh: Mesh, device: str) -> Any:
    """Results may be dropped while they are still read: their stream may not take the memory back before."""
    (owners,) = groups_of(mesh)
    side, source = streams.new_stream(device), shards_of(owners, device)
    side.wait_stream(streams.current_stream(device))
    gathered, token = mf.gather(source, owner_layout=owners, device=device, stream=side)
    token.wait()
    doubled = used(gathered)
    del gathered
    with streams.on_stream(side):
        scribble(device)
    return doubled


@on_streams
def results_kept_as_views(mesh: Mesh, device: str) -> Any:
    """What is still there of results when the token is waited for counts, whatever it is."""
    (owners,) = groups_of(mesh)
    side, source = streams.new_stream(device), shards_of(owners, device)
    side.wait_stream(streams.current_stream(device))
    gathered, token = mf.gather(source, owner_layout=owners, device=device, stream=side)
    views = {i: tensor.view(-1)[1:] for i, tensor in gathered.items()}
    del gathered
    token.wait()
    doubled = used(views)
    views.clear()
    with streams.on_stream(side):
        scribble(device)
    return doubled


def pipelined(mesh: Mesh, device: str) -> Any:
    """Groups in flight ahead and behind of the one that is computed."""
    groups = groups_of(mesh, 4)
    sources = (shards_of(owners, device, plus=n) for n, owners in enumerate(groups))
    results, _ = mf.pipeline(lambda n, tensors: {i: t * n for i, t in tensors.items()}, sources, groups, device=device)
    return [used(parts) for parts in results]


def buffers(mesh: Mesh, device: str) -> Any:
    """Collectives of a buffer in flight."""
    layout = mf.build_for_row_atomic(SHAPES, mesh.size())
    whole = mf.BufferSpec(mesh, [mf.Partial()], layout)
    local = torch.arange(whole.local_numel, device=device, dtype=torch.float32) + 1
    summed, token = mf.reduce_scatter(mf.DBuffer(whole, local), 0, mf.RowAtomic(), async_op=True)
    gathered, token = mf.allgather(summed, 0, after=token, async_op=True)
    del local, summed
    scribble(device)
    token.wait()
    return gathered.local_buffer * 2


def prefetched(mesh: Mesh, device: str) -> Any:
    """Units that gather the next one's parameters while they compute: two steps, forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
    context = mf.FsdpContext(device=device, prefetch=True, shard_layout=mf.ShardLayout.BALANCED)
    rows = [mf.RowAtomic()]
    apply, params = mf.fully_shard(model, mesh, mf.Placements(0, rows, rows, rows), units=[nn.Linear], context=context)
    found = []
    for _ in range(2):
        leaves = {
            key: mf.DBuffer(buffer.spec, buffer.local_buffer.detach().requires_grad_())
            for key, buffer in params.items()
        }
        apply(leaves, torch.ones(2, 6, device=device)).square().mean().backward()
        grads = {key: buffer.local_buffer.grad for key, buffer in leaves.items()}
        found += [grad * 2 for grad in grads.values()]
        params = {
            key: mf.DBuffer(buffer.spec, buffer.local_buffer - 0.1 * grads[key]) for key, buffer in params.items()
        }
    return found


PROGRAMS: dict[str, Program] = {
    program.__name__: program
    for program in (
        default,
        in_flight,
        on_a_stream,
        made_on_the_stream,
        read_on_another_stream,
        one_after_the_other,
        inputs_dropped,
        results_dropped,
        results_kept_as_views,
        pipelined,
        buffers,
        prefetched,
    )
}

WRONG: dict[str, Program] = {
    "a result is read before its token": partial(in_flight, waits=False),
    "a stream does not wait for the inputs": partial(on_a_stream, waits=False),
    "the token is waited for on another stream": partial(read_on_another_stream, waits=False),
}
"""Programs that forget something."""


class Plant(NamedTuple):
    """A bug of the library: a line of one of its functions is another one.

    Attributes:
        owner: the module or class.
        name: of the function.
        old: what is there, once.
        new: what takes its place.
        program: which finds it.
        kind: how the error begins.
    """

    owner: Any
    name: str
    old: str
    new: str
    program: str
    kind: str


PLANTS: dict[str, Plant] = {
    "an operation in flight does not wait for its inputs": Plant(
        call, "_run_on_streams", "chosen.wait_stream(current)", "pass", "in_flight", "missing wait"
    ),
    "after= is dropped": Plant(
        call, "_run_on_streams", "token.wait(chosen)", "pass", "one_after_the_other", "missing wait"
    ),
    "stream= is dropped": Plant(
        call, "_run_on_streams", "on_stream(chosen)", "on_stream(current)", "made_on_the_stream", "missing wait"
    ),
    "the event is one of another stream": Plant(
        call, "_run_on_streams", "chosen.record_event()", "current.record_event()", "in_flight", "missing wait"
    ),
    "the allocator is not told of the inputs": Plant(
        call, "_run_on_streams", "mark_used(tensor, chosen)", "pass", "inputs_dropped", "early reuse"
    ),
    "a token waits for nothing": Plant(
        Queued, "wait", "waiting.wait_event(self._event)", "pass", "in_flight", "missing wait"
    ),
    "a token waits on another stream": Plant(
        Queued,
        "wait",
        "waiting: Any = stream or streams.current_stream(self._device)",
        "waiting: Any = streams.current_stream(self._device)",
        "read_on_another_stream",
        "missing wait",
    ),
    "the allocator is not told of the results": Plant(
        Queued, "wait", "streams.mark_used(whole, waiting)", "pass", "results_dropped", "early reuse"
    ),
    "the allocator is not told of views of the results": Plant(
        Queued, "wait", "streams.mark_used(whole, waiting)", "pass", "results_kept_as_views", "early reuse"
    ),
    "pipeline: a gather is not waited for": Plant(
        pipelines, "pipeline", "popleft()\n        token.wait()", "popleft()", "pipelined", "missing wait"
    ),
    "pipeline: the last scatters are not waited for": Plant(
        pipelines,
        "pipeline",
        "in scattered:\n        token.wait()",
        "in scattered:\n        pass",
        "pipelined",
        "missing wait",
    ),
    "prefetch: a gather is not waited for": Plant(
        GatherCache, "take", "entry[1].wait()", "pass", "prefetched", "missing wait"
    ),
}


_PLANTED: dict[Any, tuple[int, CodeType]] = {}
"""Function -> how many times something is planted there now, and its code without."""


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """With the bug in the library, whoever has imported the function by name; ranks may do so one in another."""
    function = getattr(plant.owner, plant.name)
    times, code = _PLANTED.get(function, (0, function.__code__))
    _PLANTED[function] = times + 1, code
    if not times:
        function.__code__ = _edited(function, plant)
    try:
        yield
    finally:
        times, code = _PLANTED.pop(function)
        if times > 1:
            _PLANTED[function] = times - 1, code
        else:
            function.__code__ = code


def _edited(function: Any, plant: Plant) -> CodeType:
    lines, first = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    assert source.count(plant.old) == 1, f"{plant.name} has {source.count(plant.old)} times {plant.old!r}"
    names: dict[str, Any] = {}
    source = "\n" * (first - 1) + source.replace(plant.old, plant.new)
    exec(compile(source, inspect.getsourcefile(function) or "", "exec"), function.__globals__, names)
    return names[plant.name].__code__
