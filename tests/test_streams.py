"""Simulated streams: the code that runs on CUDA, checked on CPU for what nothing orders."""

import gc
import inspect
import re
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import mfsdp_func as mf
from mfsdp_func import streams
from mfsdp_func.simulation.device import Device, Work
from mfsdp_func.values.mesh import Mesh
from tests.stream_programs import PLANTS, PROGRAMS, WRONG, groups_of, planted, shards_of


def run(program: Any, ranks: int = 2, **keywords: Any) -> dict[int, Any]:
    return mf.simulate(partial(program, device="cpu"), ranks, **keywords).results


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_clean(name: str, ranks: int) -> None:
    found = run(PROGRAMS[name], ranks, streams=True)
    if "new_stream" not in inspect.getsource(PROGRAMS[name]):
        compared = pytree.tree_map(torch.equal, found, run(PROGRAMS[name], ranks))
        assert all(pytree.tree_leaves(compared))


@pytest.mark.parametrize("carrier", ["rendezvous", "nccl"])
def test_clean_on_other_carriers(carrier: Any) -> None:
    for program in PROGRAMS.values():
        run(program, carrier=carrier, streams=True)


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_forgets_something_is_told(name: str) -> None:
    with pytest.raises(mf.SimulationError, match=r"^missing wait: .*stream.* of rank \d .*token\.wait\(\)"):
        run(WRONG[name], streams=True)


@pytest.mark.parametrize("name", PLANTS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_planted_bugs_of_the_library_are_found(name: str, ranks: int) -> None:
    plant = PLANTS[name]
    with planted(plant), pytest.raises(mf.SimulationError, match=rf"^{plant.kind}: "):
        run(PROGRAMS[plant.program], ranks, streams=True)
    run(PROGRAMS[plant.program], ranks, streams=True)


# What is told.


def line_of(function: Any, text: str) -> str:
    """Where in this file a function says something."""
    lines, first = inspect.getsourcelines(function)
    (n,) = (n for n, line in enumerate(lines) if text in line)
    return rf"tests/test_streams\.py:{first + n}"


def read_too_early(mesh: Mesh, device: str) -> None:
    (owners,) = groups_of(mesh)
    gathered, _ = mf.gather(shards_of(owners, device), owner_layout=owners, async_op=True)
    torch.stack([tensor.sum() for tensor in gathered.values()])


def test_a_missing_wait_names_both_sides() -> None:
    call, read = line_of(read_too_early, "mf.gather"), line_of(read_too_early, "sum()")
    with pytest.raises(mf.SimulationError) as caught:
        run(read_too_early, streams=True)
    told = str(caught.value)
    wanted = (
        rf"missing wait: aten::sum on the default stream of rank \d \(at {read}\) reads memory \(made at \S+, called at"
        rf" {call}\) that aten::\w+ on the library's side stream of rank \d \(at effects/\w+\.py:\d+, called at {call}\) may"
        r" still be writing\."
    )
    assert re.match(wanted, told), told


@pytest.mark.parametrize("read", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.item, repr])
def test_the_host_reads_too_early(read: Any) -> None:
    def program(mesh: Mesh, device: str, *, waits: bool) -> None:
        (owners,) = groups_of(mesh)
        _, token = mf.gather(shards_of(owners, device), owner_layout=owners, async_op=True)
        if waits:
            token.wait()
        read(token.link)

    run(partial(program, waits=True), streams=True)
    with pytest.raises(mf.SimulationError, match=r"^missing wait: .* on the default stream of rank \d"):
        run(partial(program, waits=False), streams=True)


def given_away(mesh: Mesh, device: str) -> list[torch.Tensor]:
    side, source = streams.new_stream(device), torch.ones(8)
    side.wait_stream(streams.current_stream(device))
    with streams.on_stream(side):
        doubled = source * 2
    del source
    return [torch.zeros(1000), doubled]


def test_an_early_reuse_names_both_sides() -> None:
    made, read, taken = (line_of(given_away, text) for text in ("torch.ones", "source * 2", "torch.zeros"))
    wanted = (
        rf"^early reuse: aten::zeros on the default stream of rank 0 \(at {taken}\) makes a tensor, which may be given the"
        rf" memory of one that was made on the same stream \(at {made}\) and has been freed, while aten::mul on stream 1 of"
        rf" rank 0 \(at {read}\) still reads it\. .*record_stream"
    )
    with pytest.raises(mf.SimulationError, match=wanted):
        run(given_away, 1, streams=True)


# What orders, and what does not.


class Case(NamedTuple):
    """Work on a side stream, and then on the current one."""

    told: bool = False
    event: bool = False
    host: bool = False
    kept: bool = False


def case_of(mesh: Mesh, device: str, case: Case) -> None:
    side, source = streams.new_stream(device), torch.ones(8)
    side.wait_stream(streams.current_stream(device))
    with streams.on_stream(side):
        total = source.sum()
        if case.host:
            total.item()
    if case.told:
        source.record_stream(side)  # pyright: ignore[reportArgumentType]
    if case.event:
        streams.current_stream(device).wait_event(side.record_event())
    kept = [source] if case.kept else []
    del source
    torch.zeros(8)
    kept.clear()


@pytest.mark.parametrize("name", Case._fields)
def test_what_keeps_memory(name: str) -> None:
    run(partial(case_of, case=Case(**{name: True})), 1, streams=True)
    with pytest.raises(mf.SimulationError, match=r"^early reuse: "):
        run(partial(case_of, case=Case()), 1, streams=True)


def neighbours(mesh: Mesh, device: str, shift: int) -> None:
    side, room = streams.new_stream(device), torch.zeros(8)
    side.wait_stream(streams.current_stream(device))
    with streams.on_stream(side):
        room[:4].fill_(1)
    room[4 - shift :].fill_(2)


def test_neighbours_in_one_storage_are_apart() -> None:
    run(partial(neighbours, shift=0), 1, streams=True)
    with pytest.raises(mf.SimulationError, match=r"^missing wait: aten::fill_"):
        run(partial(neighbours, shift=1), 1, streams=True)


def test_ranks_do_not_share_memory_on_a_device() -> None:
    shared: list[torch.Tensor] = []

    def program(mesh: Mesh) -> float:
        if not shared:
            shared.append(torch.ones(3))
        return shared[0].sum().item()

    assert mf.simulate(program, 3, streams=True).results == {0: 3, 1: 3, 2: 3}


def test_a_token_keeps_no_results() -> None:
    def program(mesh: Mesh) -> bool:
        (owners,) = groups_of(mesh)
        gathered, token = mf.gather(shards_of(owners, "cpu"), owner_layout=owners, async_op=True)
        storages = [torch.multiprocessing.reductions.StorageWeakRef(t.untyped_storage()) for t in gathered.values()]
        del gathered
        gc.collect()
        gone = all(storage.expired() for storage in storages)
        token.wait()
        return gone

    assert all(mf.simulate(program, 2, streams=True).results.values())


def test_settings() -> None:
    with pytest.raises(ValueError, match="streams=True goes with memory='copied', got 'live'"):
        mf.simulate(lambda mesh: None, 2, streams=True, memory="live")
    (owners,) = groups_of(Mesh(1, rank=0))
    with pytest.raises(ValueError, match="stream= is for CUDA tensors"):
        mf.gather(shards_of(owners, "cpu"), owner_layout=owners, stream=torch.Stream(0, 0, 0))  # pyright: ignore[reportCallIssue, reportArgumentType]


# torch's own sanitizer, fed with the same.

STREAMS, TENSORS = 3, 2
steps = st.one_of(
    st.tuples(
        st.just("launch"),
        st.integers(0, STREAMS - 1),
        st.sets(st.integers(0, TENSORS - 1)),
        st.sets(st.integers(0, TENSORS - 1)),
    ),
    st.tuples(st.just("record"), st.integers(0, STREAMS - 1), st.integers(0, 2)),
    st.tuples(st.just("wait"), st.integers(0, STREAMS - 1), st.integers(0, 2)),
)


def first_race_by_torch(program: list[Any]) -> int | None:
    from torch.cuda._sanitizer import EventHandler

    handler, recorded = EventHandler(), set[int]()
    for stream in range(1, STREAMS):
        handler._handle_stream_creation(stream)
    for n, (what, stream, *rest) in enumerate(program):
        if what == "launch":
            reads, writes = rest
            aliases: dict[int, list[str]] = defaultdict(list)
            if handler._handle_kernel_launch(stream, reads - writes, writes, set(), "some", aliases):
                return n
        elif what == "record":
            recorded.add(rest[0])
            handler._handle_event_creation(rest[0])
            handler._handle_event_record(rest[0], stream)
        elif rest[0] in recorded:
            handler._handle_event_wait(rest[0], stream)
    return None


def first_race(program: list[Any]) -> int | None:
    device, tensors = Device(), [torch.zeros(1) for _ in range(TENSORS)]
    device.meet(tensors)
    clocks, moments = device.clocks, {}
    for stream in range(STREAMS):
        device.begin_stream(f"stream {stream}", 0, {})
    for n, (what, stream, *rest) in enumerate(program):
        if what == "launch":
            work = Work(stream, clocks.queue(stream), "some", ())
            reads, writes = ([tensors[i] for i in ids] for ids in (rest[0] - rest[1], rest[1]))
            try:
                device.touch(work, reads, writes=False)
                device.touch(work, writes, writes=True)
            except mf.SimulationError:
                return n
        elif what == "record":
            moments[rest[0]] = clocks.moment(stream)
        elif rest[0] in moments:
            clocks.wait(stream, moments[rest[0]])
    return None


@given(st.lists(steps, max_size=24))
def test_races_are_those_of_torchs_sanitizer(program: list[Any]) -> None:
    assert first_race(program) == first_race_by_torch(program)
