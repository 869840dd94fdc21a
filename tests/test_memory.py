"""Laws of strided blocks, against the elements counted one by one."""

from itertools import accumulate, permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfsdp_func.effects.blocks import (
    Block,
    Pair,
    blocks_of,
    locate,
    packed,
    pair_blocks,
    room_for,
    unpack,
)

ROOM = 400


@st.composite
def runs(draw: st.DrawFn) -> list[tuple[tuple[int, int], int]]:
    """Runs that do not overlap, in any order, of two storages; many of one size, at equal distances, or neighbours."""
    found: list[tuple[tuple[int, int], int]] = []
    ends = [0, 0]
    for _ in range(draw(st.integers(0, 12))):
        storage = draw(st.sampled_from([0, 0, 0, 1]))
        start = ends[storage] + draw(st.sampled_from([0, 0, 2, 2, 5]))
        numel = draw(st.sampled_from([1, 3, 3, 3, 4]))
        ends[storage] = start + numel
        found.append(((storage, start), numel))
    return draw(st.permutations(found)) if draw(st.booleans()) else found


def elements(block: Block) -> list[tuple[int, int]]:
    starts = [block.start + n * block.step for n in range(block.count)]
    return [(block.storage, start + k) for start in starts for k in range(block.numel)]


def elements_of_runs(given_runs: list[tuple[tuple[int, int], int]]) -> list[tuple[int, int]]:
    return [(storage, start + k) for (storage, start), numel in given_runs for k in range(numel)]


@given(runs(), st.booleans())
def test_blocks_cover_the_same_elements_in_order(some: list[tuple[tuple[int, int], int]], join: bool) -> None:
    blocks = blocks_of(some, join=join)
    assert [element for block in blocks for element in elements(block)] == elements_of_runs(some)
    assert len(blocks) <= len(some)
    if not join:
        assert [block.numel for block in blocks for _ in range(block.count)] == [numel for _, numel in some]


@given(runs(), st.data())
def test_pairs_pair_the_same_elements(some: list[tuple[tuple[int, int], int]], data: st.DataObject) -> None:
    targets: list[tuple[int, int]] = []
    at = 0
    for _, numel in some:
        at += data.draw(st.sampled_from([0, 0, 0, 7]))
        targets.append((0, at))
        at += numel
    pairs = [Pair(source, target, numel) for (source, numel), target in zip(some, targets, strict=True)]
    blocks = pair_blocks(pairs)
    for source, target in blocks:
        assert (source.count, source.numel) == (target.count, target.numel)
    assert [e for source, _ in blocks for e in elements(source)] == elements_of_runs(some)
    wanted = [(0, start + k) for (_, start), (_, numel) in zip(targets, some, strict=True) for k in range(numel)]
    assert [e for _, target in blocks for e in elements(target)] == wanted


def test_one_flat_buffer_is_one_block() -> None:
    side_by_side = [((0, n * 5), 5) for n in range(100)]
    assert blocks_of(side_by_side) == (Block(0, 0, 1, 0, 500),)
    every_other = [((0, n * 10), 5) for n in range(100)]
    assert blocks_of(every_other) == (Block(0, 0, 100, 10, 5),)
    in_pairs = [((0, n * 5 + 5 * (n // 2)), 5) for n in range(100)]
    assert blocks_of(in_pairs) == (Block(0, 0, 50, 15, 10),)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=9), st.sampled_from([torch.float32, torch.bfloat16, torch.int8])
)
def test_locate_finds_what_is_there(sizes: list[int], dtype: torch.dtype) -> None:
    flat = torch.arange(ROOM).to(dtype)
    other = torch.zeros(3, dtype=dtype)
    starts = list(accumulate(sizes, initial=2))
    tensors = [flat[start : start + size] for start, size in zip(starts, sizes, strict=False)]
    tensors.insert(1, other)
    memory = locate(tensors)
    assert len(memory.storages) == 2
    for tensor, (storage, start) in zip(tensors, memory.places, strict=True):
        view = memory.view(Block(storage, start, 1, 0, tensor.numel()))
        assert view.data_ptr() == tensor.data_ptr()
        assert torch.equal(view, tensor)
    moved = locate([flat.clone()[start : start + size] for start, size in zip(starts, sizes, strict=False)])
    again = locate([flat.clone()[start : start + size] for start, size in zip(starts, sizes, strict=False)])
    assert len(moved.storages) == len(sizes)
    assert moved.places == again.places


def test_neighbours_by_chance_stay_apart() -> None:
    # Two storages over one piece of memory, the second one right behind the first.
    memory = torch.arange(8, dtype=torch.float32)
    first = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4)
    second = torch.frombuffer(memory.numpy(), dtype=torch.float32, count=4, offset=16)
    assert second.data_ptr() == first.data_ptr() + 16
    found = locate([first, second])
    assert len(found.storages) == 2
    assert len(blocks_of(zip(found.places, [4, 4], strict=True))) == 2


def test_storages_that_overlap_unaligned() -> None:
    memory = torch.arange(41, dtype=torch.uint8).numpy()
    even, odd = (torch.frombuffer(memory, dtype=torch.int16, count=20, offset=offset) for offset in (0, 1))
    found = locate([even[:5], odd[:5], even[5:], odd[5:]])
    for tensor, (storage, start) in zip([even[:5], odd[:5], even[5:], odd[5:]], found.places, strict=True):
        assert torch.equal(found.view(Block(storage, start, 1, 0, tensor.numel())), tensor)


def test_storages_that_share_their_begin() -> None:
    memory = torch.arange(8, dtype=torch.float32).numpy()
    first, behind = torch.frombuffer(memory, dtype=torch.float32, count=4), torch.from_numpy(memory)[4:]
    beyond = torch.frombuffer(memory, dtype=torch.float32, count=6, offset=8)
    for tensors in permutations([first, behind, beyond]):  # `beyond` begins inside of `first` and ends behind it
        found = locate(tensors)
        for tensor, (storage, start) in zip(tensors, found.places, strict=True):
            assert torch.equal(found.view(Block(storage, start, 1, 0, tensor.numel())), tensor)


def test_one_element_of_any_stride() -> None:
    for tensor in (torch.arange(7.0).reshape(1, 7)[:, 3], torch.arange(6.0)[::2][:1], torch.ones(()).expand(1)):
        assert tensor.is_contiguous()
        found = locate([tensor])
        view = found.view(Block(*found.places[0], 1, 0, 1))
        assert view.stride() == (1,)
        assert view.view(torch.uint8).numel() == 4
        assert torch.equal(view, tensor.reshape(1))


def test_freed_storages_are_refused() -> None:
    tensor = torch.ones(10)[2:]
    tensor.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="it was freed"):
        locate([tensor])


def test_one_element_travels_as_a_view_of_its_memory() -> None:
    tensor = torch.arange(7.0)[::5][1:]
    for view in (packed([tensor]), room_for([tensor])):
        assert view.data_ptr() == tensor.data_ptr()
        assert view.view(torch.uint8).shape == (4,)


@pytest.mark.parametrize("shape", [(6,), (3, 2)])
def test_packing_and_unpacking(shape: tuple[int, ...]) -> None:
    flat = torch.arange(40.0)
    one = flat[:6].view(shape)
    assert packed([one]).data_ptr() == one.data_ptr(), "one contiguous part travels as it is"
    assert room_for([one]).data_ptr() == one.data_ptr()
    strided = flat.as_strided((3, 2), (5, 1), 10)
    message = packed([one, strided])
    assert message.tolist() == [0.0, 1, 2, 3, 4, 5, 10, 11, 15, 16, 20, 21]
    target = torch.zeros(40)
    parts = [target.as_strided((2, 3), (8, 1), 0), target[30:36]]
    room = room_for(parts)
    room.copy_(message)
    unpack(room, parts)
    assert target[:3].tolist() + target[8:11].tolist() + target[30:36].tolist() == message.tolist()
    assert target.sum() == message.sum()
