"""Checkpoints: any number of ranks and layout to any other, bitwise, by simulated ranks."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import checkpoint
from tests.checkpoint_cases import (
    KINDS,
    SHAPES,
    Way,
    all_ways,
    assert_same,
    load_in_simulation,
    save_in_simulation,
    state_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")


def check_pairs(tmp_path: Path, sources: list[Way], targets: list[Way]) -> None:
    count = 0
    for number, source in enumerate(sources):
        path = tmp_path / str(number)
        save_in_simulation(path, source, number)
        for target in targets:
            load_in_simulation(path, target, number)
            count += 1
    print(f"{count} of {len(sources) * len(targets)} pairs bitwise")
    assert count == len(sources) * len(targets)


@pytest.fixture
def filled_memory() -> Iterator[None]:
    """New memory holds NaN, so that what nobody writes is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
def test_a_sample_of_pairs_is_bitwise(tmp_path: Path) -> None:
    ways = all_ways()
    chosen = random.Random(0).sample(ways, 12)
    check_pairs(tmp_path, chosen[:6], chosen[6:])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(6))
def test_every_pair_is_bitwise(part: int, tmp_path: Path) -> None:
    ways = all_ways()
    assert len(ways) == 48  # 6 numbers of ranks, 4 layouts, 2 meshes: 2304 pairs
    check_pairs(tmp_path, ways[part::6], ways)


@pytest.mark.usefixtures("filled_memory")
def test_two_sharded_axes(tmp_path: Path) -> None:
    both = [Way((2, 2), kind, 0, replicas=False) for kind in KINDS]
    check_pairs(tmp_path, [*both[:2], Way((3,), "padded", 1)], [*both[2:], Way((2, 3), "unpadded", 1, replicas=False)])


def test_names_in_the_file(tmp_path: Path) -> None:
    for way in (Way((2,), "padded", 0), Way((3,), "tensor", 1)):
        path = tmp_path / str(way.grouping)
        save_in_simulation(path, way)
        names = set(checkpoint.inspect(path).tensors)
        expected = {f"params.{name}" for name in SHAPES} | {"optimizer.step", "random"}
        for field in ("exp_avg", "exp_avg_sq", "step"):
            expected |= {f"optimizer.{name}.{field}" for name in SHAPES}
        assert names == expected


WAY = Way((3,), "unpadded", 1)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "saved"
    save_in_simulation(path, WAY, 0)
    return path


def flip(path: Path, offset: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(content)


def flips(path: Path, count: int) -> None:
    """Each flip is named by verify, and by load where it reads the byte."""
    files = sorted(file for file in path.iterdir() if file.is_file())
    assert {file.name for file in files} == {"manifest.json", ".metadata", *(f"__{n}_0.distcp" for n in range(3))}
    sizes = [file.stat().st_size for file in files]
    generator = random.Random(count)
    named = loads = 0
    for number in range(count):
        file = generator.choices(files, sizes if number % 2 else None)[0]
        content = file.read_bytes()
        flip(file, generator.randrange(len(content)), generator.randrange(8))
        with pytest.raises(checkpoint.CheckpointError) as caught:
            checkpoint.verify(path)
        named += any(problem.startswith(f"{file.name}:") for problem in caught.value.problems)
        way = Way((1,), "padded", 0)
        with pytest.raises(checkpoint.CheckpointError, match=file.name.replace(".", r"\.")):
            load_in_simulation(path, way)
        loads += 1
        file.write_bytes(content)
    print(f"{named} of {count} flips named by verify, {loads} of {count} by load")
    assert named == loads == count
    checkpoint.verify(path)
    load_in_simulation(path, WAY)


def test_every_flip_is_named(saved: Path) -> None:
    flips(saved, 40)


@pytest.mark.slow
def test_two_hundred_flips_are_named(saved: Path) -> None:
    flips(saved, 200)


def test_a_part_that_reads_no_damage_loads(saved: Path) -> None:
    """Blocks are checked where they are read: the rest of a damaged checkpoint can be had."""
    (saved / "__1_0.distcp").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"__1_0\.distcp: cannot be opened"):
        checkpoint.verify(saved)
    with pytest.raises(checkpoint.CheckpointError, match=r"__1_0\.distcp"):
        load_in_simulation(saved, WAY)
    got = checkpoint.load(saved, {"step": 0}, only="step", rename=None)
    assert got == {"step": 7}


def test_damaged_folders(saved: Path, tmp_path: Path) -> None:
    def broken(act: Any, name: str, message: str, *, load: bool = True) -> None:
        import shutil

        path = tmp_path / "broken"
        shutil.copytree(saved, path)
        act(path)
        with pytest.raises(checkpoint.CheckpointError, match=message) as caught:
            checkpoint.verify(path)
        assert any(name in problem for problem in caught.value.problems)
        if load:
            with pytest.raises(checkpoint.CheckpointError, match=name.replace(".", r"\.")):
                load_in_simulation(path, WAY)
        else:
            load_in_simulation(path, WAY)
        shutil.rmtree(path)

    def truncate(path: Path) -> None:
        file = path / "__0_0.distcp"
        file.write_bytes(file.read_bytes()[:-1])

    def swap(path: Path) -> None:
        (path / "__1_0.distcp").rename(path / "x")
        (path / "__2_0.distcp").rename(path / "__1_0.distcp")
        (path / "x").rename(path / "__2_0.distcp")

    broken(truncate, "__0_0.distcp", "has .* bytes, expected")
    broken(swap, "__1_0.distcp", "has .* bytes, expected|not as written")
    broken(lambda path: (path / "__2_0.distcp").unlink(), "__2_0.distcp", "cannot be opened")
    broken(lambda path: (path / ".metadata").unlink(), ".metadata", "cannot be opened")
    broken(lambda path: (path / "more").write_bytes(b"x"), "more", "not in the manifest", load=False)
    broken(lambda path: (path / "manifest.json").write_bytes(b""), "manifest.json", "own hash")
    (saved / "manifest.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"has no manifest\.json"):
        checkpoint.verify(saved)
    assert not checkpoint.inspect(saved).hashed
    assert "NO HASHES" in str(checkpoint.inspect(saved))
    load_in_simulation(saved, WAY)


class Evil:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("/tmp/mfsdp_func-evil"),)


@pytest.mark.parametrize("hashed", [True, False])
def test_metadata_that_runs_code_is_not_run(saved: Path, hashed: bool) -> None:
    import pickle

    Path("/tmp/mfsdp_func-evil").unlink(missing_ok=True)
    (saved / ".metadata").write_bytes(pickle.dumps(Evil()))
    if not hashed:
        (saved / "manifest.json").unlink()
    with pytest.raises(checkpoint.CheckpointError, match="bytes, expected" if hashed else "no part of metadata"):
        checkpoint.inspect(saved)
    assert not Path("/tmp/mfsdp_func-evil").exists()


def test_existing_paths_are_kept(saved: Path) -> None:
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    with pytest.raises(checkpoint.CheckpointError, match="it exists"):
        save_in_simulation(saved, WAY)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_equal_states_make_equal_files(saved: Path, tmp_path: Path) -> None:
    save_in_simulation(tmp_path / "again", WAY, 0)
    for file in saved.iterdir():
        if file.name != "manifest.json":
            assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()
    assert not checkpoint.diff(saved, tmp_path / "again")


def load_one(path: Path, like: Any, **options: Any) -> Any:
    return checkpoint.load(path, like, **options)


def test_what_does_not_fit_is_named(saved: Path) -> None:
    way = Way((2,), "padded", 0)

    def changed(change: Any, **options: Any) -> Any:
        def program(mesh: mf.Mesh) -> Any:
            like = state_of(mesh, way, 9)
            change(like)
            return checkpoint.load(saved, like, names=way.names, **options)

        return mf.simulate(program, way.shape).results[0]

    def fails(change: Any, message: str, **options: Any) -> None:
        with pytest.raises(checkpoint.CheckpointError, match=message):
            changed(change, **options)

    fails(lambda like: like.update(more=torch.zeros(2)), r"'more': is missing in the file")
    fails(lambda like: like.pop("random"), r"'random': is in the file, but not in the state")
    fails(lambda like: like.pop("params"), r"'params\.layers\.0\.none': is in the file, but not in the state")
    fails(
        lambda like: like.update(step=torch.tensor(1)), r"'step': is no tensor in the file, expected torch.int64 \(\)"
    )
    fails(lambda like: like.update(random=3), r"'random': is a tensor in the file, expected a int")
    fails(
        lambda like: like.update(random=torch.zeros(3)), r"'random': has shape \(5056,\) in the file, expected \(3,\)"
    )
    wrong = lambda like: like.update(random=torch.zeros(5056, dtype=torch.int8))  # noqa: E731
    fails(wrong, r"'random': is torch\.uint8 in the file, expected torch\.int8; cast=True converts")
    assert changed(wrong, cast=True)["random"].dtype == torch.int8
    fails(lambda like: None, r"'a' is no name in the file", rename={"a": "b"})

    # Asked for: other names, a part of the file.
    def keep_params(like: Any) -> None:
        for key in ("optimizer", "random", "step", "words"):
            like.pop(key)

    assert_same(
        changed(keep_params, only="params")["params"],
        mf.simulate(lambda mesh: state_of(mesh, way)["params"], way.shape).results[0],
    )

    def renamed(like: Any) -> None:
        like["model"] = like.pop("params")
        like["count"] = like.pop("step")

    got = changed(renamed, rename={"params": "model", "step": "count"})
    assert got["count"] == 7
    assert_same(got["model"], mf.simulate(lambda mesh: state_of(mesh, way)["params"], way.shape).results[0])
    kept = changed(lambda like: None, only=lambda name: name == "step")
    assert kept["step"] == 7
    assert_same(kept["params"], mf.simulate(lambda mesh: state_of(mesh, way, 9)["params"], way.shape).results[0])
    # A part of a buffer.
    some = changed(lambda like: None, only=["params.words.weight"])["params"]["a"]
    old = mf.simulate(lambda mesh: state_of(mesh, way, 9), way.shape).results[0]["params"]["a"]
    new = mf.simulate(lambda mesh: state_of(mesh, way, 0), way.shape).results[0]["params"]["a"]
    for i, name in enumerate(SHAPES):
        want = new if name == "words.weight" else old
        assert torch.equal(some.get_tensor_view(i), want.get_tensor_view(i)), name


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "new"
    way = Way((2,), "padded", 0)

    def fails(message: str, make: Any, names: Any = None, ranks: int = 2) -> None:
        with pytest.raises(checkpoint.CheckpointError, match=message):
            mf.simulate(lambda mesh: checkpoint.save(path, make(mesh), names=names), ranks)
        assert list(tmp_path.iterdir()) == []

    def owners(mesh: mf.Mesh) -> mf.GroupOwnerLayout:
        return mf.GroupOwnerLayout(mesh, mf.build_for_row_atomic([(4, 2)], 2), {0: 1})

    def sums(mesh: mf.Mesh) -> Any:
        layout = mf.build_for_row_atomic([(4, 2)], 1)
        return {"a": mf.DBuffer.from_local(torch.zeros(8), mesh, [mf.Partial("sum")], layout)}

    fails("has no names: buffers know their tensors by index", lambda mesh: {"p": state_of(mesh, way)["params"]})
    fails("has 6 tensors, but names", lambda mesh: state_of(mesh, way)["params"], {"a": ("x",)})
    fails("no names for the 1 tensors", lambda mesh: checkpoint.Shards({0: torch.zeros(2, 2)}, owners(mesh)))
    fails("goes by 0, an index", lambda mesh: {"momentum": {0: torch.zeros(2, 2)}})
    fails("differs between ranks", lambda mesh: {"w": torch.full((2,), float(mesh.get_rank()))})
    fails("pending sum", sums, {"a": ("w",)})
    fails("two values of the state have the name 'a.b'", lambda mesh: {"a": {"b": torch.ones(1)}, "a.b": torch.ones(1)})
    fails("is a Event|cannot be read again", lambda mesh: {"a": object})
    fails("meta tensor", lambda mesh: {"a": torch.empty(2, device="meta")})
    fails(
        "rank 1: .*shard has 3 elements, its layout gives it 4",
        lambda mesh: checkpoint.Shards({0: torch.zeros(4 - mesh.get_rank())}, owners(mesh), ["w"]),
    )
    # A hole, and an overlap, that no rank alone can see.
    fails(
        "has a hole: its boxes hold 4 of 8",
        lambda mesh: checkpoint.Shards({} if mesh.get_rank() else {0: torch.zeros(4)}, owners(mesh), ["w"]),
    )

    def twice(mesh: mf.Mesh) -> Any:
        alone = mf.Mesh(1, ranks=[mesh.get_rank()], rank=mesh.get_rank())
        return {
            "a": mf.DBuffer.distribute_tensors(
                [torch.ones(2, 2)], alone, [mf.RowAtomic()], mf.build_for_row_atomic([(2, 2)], 1)
            )
        }

    fails("'w' is stored twice", twice, {"a": ("w",)})
    with pytest.raises(checkpoint.CheckpointError, match=r"names: got list, expected apply\.names"):
        checkpoint.save(path, {}, names=["w"])


def test_what_ranks_hold_for_themselves(tmp_path: Path) -> None:
    def save(mesh: mf.Mesh) -> None:
        torch.rand(3)
        checkpoint.save(tmp_path / "a", {"random": torch.get_rng_state(), "place": mesh.get_rank() * 10, "same": 1})

    mf.simulate(save, 3)
    like = {"random": torch.get_rng_state(), "place": 0, "same": 0}

    def load(mesh: mf.Mesh) -> Any:
        return checkpoint.load(tmp_path / "a", like)

    got = mf.simulate(load, 3).results
    expected = mf.simulate(lambda mesh: (torch.rand(3), torch.get_rng_state())[1], 3).results
    for rank in range(3):
        assert got[rank]["place"] == 10 * rank
        assert torch.equal(got[rank]["random"], expected[rank])
    with pytest.raises(
        checkpoint.CheckpointError, match="'random': each of 3 ranks saved a value of its own, and there are 2"
    ):
        mf.simulate(load, 2)
    rest = mf.simulate(lambda mesh: checkpoint.load(tmp_path / "a", {"same": 0}, only="same"), 2).results
    assert rest[1] == {"same": 1}


def test_latest_skips_what_does_not_verify(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    assert checkpoint.latest(tmp_path) is None
    for step in (9, 10, 11):
        checkpoint.save(tmp_path / f"step{step}", {"step": step})
    found = checkpoint.latest(tmp_path)
    assert found == tmp_path / "step11"
    assert found is not None
    assert found.skipped == ()
    flip(tmp_path / "step11" / "__0_0.distcp", 100, 3)
    (tmp_path / ".step12.abc.partial").mkdir()
    found = checkpoint.latest(tmp_path)
    assert found == tmp_path / "step10"
    assert found is not None
    assert [word.partition(":")[0] for word in found.skipped] == [".step12.abc.partial", "step11"]
    assert checkpoint.load(found, {"step": 0}) == {"step": 10}
    answers = mf.simulate(lambda mesh: checkpoint.latest(tmp_path, mesh=mesh), 2).results
    assert answers == {0: found, 1: found}
    for step in (9, 10):
        (tmp_path / f"step{step}" / ".metadata").unlink()
    with pytest.raises(
        checkpoint.CheckpointError, match=r"no checkpoint verifies(.|\n)*step11: __0_0(.|\n)*step9: \.meta"
    ):
        checkpoint.latest(tmp_path)


def test_diff_and_inspect(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(2), "y": torch.ones(3), "z": 1, "same": 2.5})
    checkpoint.save(tmp_path / "b", {"x": torch.tensor([1.0, 3.0]), "y": torch.ones(4), "more": 1, "same": 2.5})
    found = checkpoint.diff(tmp_path / "a", tmp_path / "b")
    assert found
    assert (found.only_first, found.only_second) == (("z",), ("more",))
    assert found.kinds == {"y": "float32 (3,) against float32 (4,)"}
    assert found.values == {"x": 2.0}
    assert str(found) == "- z\n+ more\n! y: float32 (3,) against float32 (4,)\n~ x: differs by up to 2"
    shown = str(checkpoint.inspect(tmp_path / "a"))
    assert "2 tensors, 20 bytes, 2 plain values, written by 1 rank(s)" in shown
    assert "every byte has a hash" in shown


def test_progress_is_told(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    state = {"a": torch.ones(100), "b": torch.ones(50)}
    checkpoint.save(tmp_path / "a", state, progress=lambda *words: calls.append(words))
    assert calls == [(400, 600), (600, 600)]
    calls.clear()
    checkpoint.load(tmp_path / "a", state, progress=lambda *words: calls.append(words))
    assert calls[-1] == (600, 600)
    calls.clear()
    checkpoint.verify(tmp_path / "a", progress=lambda *words: calls.append(words))
    assert calls[-1][0] == calls[-1][1] > 600
