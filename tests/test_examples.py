"""The examples as a user starts them: real processes, real text."""

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
SMALL = ["--dim", "32", "--layers", "2", "--heads", "2", "--context", "32", "--batch", "4"]


def torchrun(ranks: int, script: str, *arguments: str, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    """Run an example on gloo ranks; end all of them where they take too long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [*command, str(EXAMPLES / script), *arguments],
        env=environment | {"GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, error = process.communicate()
        pytest.fail(f"{script} was still running after {timeout} s\n{out}\n{error}")
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def check_report(finished: subprocess.CompletedProcess[str], largest: float) -> None:
    assert finished.returncode == 0, finished.stderr
    lines = finished.stdout.strip().splitlines()
    loss = re.search(r"loss (\S+) -> (\S+) \(one process: (\S+) -> (\S+)\)", finished.stdout)
    assert loss
    first, last, expected_first, expected_last = map(float, loss.groups())
    assert last < first - 0.5
    assert (first, last) == pytest.approx((expected_first, expected_last), abs=1e-3)
    figures = re.search(r"max diff (\S+) .*bytes moved (\d+) of a lower bound of (\d+)$", lines[-1])
    assert figures, lines[-1]
    assert float(figures[1]) <= largest
    assert int(figures[2]) == int(figures[3]) > 0


@pytest.mark.distributed
def test_training_equals_that_of_one_process(tmp_path: Path) -> None:
    plot = tmp_path / "loss.png"
    # Rounding grows over the steps in float32: about 1e-6 here.
    check_report(torchrun(2, "train_gpt.py", "--steps", "30", "--plot", str(plot), *SMALL), 2e-5)
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.distributed
def test_training_on_own_text_and_unequal_segments(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "b.txt").write_text("pack my box with five dozen liquor jugs. " * 200)
    options = ["--data", str(tmp_path), "--layout", "unpadded", "--dtype", "float64", "--seed", "7"]
    check_report(torchrun(3, "train_gpt.py", "--steps", "30", *options, *SMALL), 1e-12)


@pytest.mark.distributed
def test_the_compiled_step_trains_alike() -> None:
    """Balanced segments, in which padding stands only at the ends."""
    options = ["--compile", "--layout", "balanced", "--dtype", "float64", *SMALL, "--layers", "1"]
    finished = torchrun(2, "train_gpt.py", "--steps", "30", *options, timeout=400)
    check_report(finished, 1e-10)
    assert re.search(r"compiled in \S+ s: one graph per rank, without breaks", finished.stdout)


@pytest.mark.distributed
def test_a_wrong_path_ends_all_ranks_with_a_message() -> None:
    finished = torchrun(2, "train_gpt.py", "--data", "/does/not/exist", timeout=90)
    assert finished.returncode != 0
    assert "there is no file or folder /does/not/exist; give an existing one with --data PATH" in finished.stderr
    assert 'train_gpt.py", line' not in finished.stderr, (
        "torchrun reports ranks that fail, the example shows no traceback"
    )


@pytest.fixture
def train_gpt(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The example as a module; its neighbours have short names that nobody else shall meet."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield importlib.import_module("train_gpt")
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == EXAMPLES:
            del sys.modules[name]


def refusal(train_gpt: ModuleType, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as stop:
        train_gpt.parse(list(arguments))
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_refusals(
    train_gpt: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def refused(*arguments: str) -> str:
        return refusal(train_gpt, capsys, *arguments)

    empty, short, folder = tmp_path / "empty", tmp_path / "short", tmp_path / "folder"
    empty.touch()
    short.write_text("a few words")
    folder.mkdir()
    (folder / ".hidden").write_text("x" * 1000)
    assert f"--data: {empty} is empty; give a file or a folder with at least 130 bytes" in refused("--data", str(empty))
    assert f"--data: {folder} is empty" in refused("--data", str(folder))
    assert f"--data: {short} has 11 bytes, but a batch needs 130" in refused("--data", str(short))
    for number in ("0", "-3", "many"):
        assert f"--steps: must be a positive whole number, got '{number}'" in refused(f"--steps={number}")
    assert "--dim 30 must be a multiple of --heads 4" in refused("--dim", "30")
    for plot in ("loss.txt", str(tmp_path / "no" / "loss.png")):
        assert f"--plot {plot}: give a .pdf, .png, .svg file in a folder that exists" in refused("--plot", plot)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else object())
    assert "matplotlib is missing; install what the examples need: pip install '.[examples]'" in refused(
        "--plot", str(tmp_path / "loss.png")
    )


def test_a_compiled_step_never_falls_back(train_gpt: ModuleType) -> None:
    def fine(state: torch.Tensor, tokens: torch.Tensor) -> tuple:
        return state + 1, tokens.sum()

    def breaks(state: torch.Tensor, tokens: torch.Tensor) -> tuple:
        return state + float(tokens.sum()), breakpoint()

    call = train_gpt.compiled(fine, "eager")
    for _ in range(3):
        call(torch.ones(2), torch.ones(3))
    with pytest.raises(torch._dynamo.exc.RecompileError):
        call(torch.ones(2), torch.ones(4))
    with pytest.raises(torch._dynamo.exc.Unsupported):
        train_gpt.compiled(breaks, "eager")(torch.ones(2), torch.ones(3))


def test_text_is_deterministic(train_gpt: ModuleType, tmp_path: Path) -> None:
    args, text = train_gpt.parse([])
    assert (text.dtype, text.dim()) == (torch.uint8, 1)
    assert len(text) > 10**6
    assert torch.equal(text, train_gpt.parse([])[1])
    batch = [train_gpt.batch_at(text, 3, rank, size=2, context=16, seed=args.seed) for rank in (0, 1, 0)]
    assert batch[0].shape == (2, 17)
    assert torch.equal(batch[0], batch[2])
    assert not torch.equal(batch[0], batch[1])
    (tmp_path / "b").write_text("b" * 100)
    (tmp_path / "a").write_text("a" * 100)
    assert bytes(train_gpt.parse(["--data", str(tmp_path)])[1].tolist()) == b"a" * 100 + b"b" * 100
