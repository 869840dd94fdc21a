"""Training whose ranks are killed at random moments, restarted by torchrun: it ends with the weights of a quiet run."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mfsdp_func import checkpoint

ROOT = Path(__file__).parent.parent
STEPS, RANKS, KILLS = 60, 4, 5
OPTIONS = ["--dim", "32", "--layers", "2", "--heads", "2", "--context", "32", "--batch", "1", "--streams", "12"]
OPTIONS += ["--dtype", "float64", "--no-reference", "--steps", str(STEPS), "--every", "7"]


def start(ranks: int, folder: Path, log: Path, restarts: int = 0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), "--monitor-interval", "0.2", str(ROOT / "examples" / "train_gpt.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    with log.open("wb") as out:
        return subprocess.Popen(
            [*command, *OPTIONS, "--checkpoint", str(folder)],
            env=environment | {"GLOO_SOCKET_IFNAME": "lo"},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], log: Path, timeout: float = 400) -> None:
    try:
        code = process.wait(timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert code == 0, log.read_text()[-5000:]


def ranks_of(agent: int) -> list[int]:
    """The process ids of the ranks that torchrun's agent has started."""
    try:
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
        return [pid for pid in map(int, children) if b"train_gpt" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:
        return []


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for processes in /proc")
def test_killed_ranks_end_with_the_weights_of_a_quiet_run(tmp_path: Path) -> None:
    log = tmp_path / "log"
    end(start(RANKS, tmp_path / "quiet", log), log)
    last = f"step-{STEPS:06d}"
    checkpoint.verify(tmp_path / "quiet" / last)

    generator, killed = random.Random(time.time_ns()), 0
    process = start(RANKS, tmp_path / "killed", log, restarts=KILLS + 1)
    seen: set[int] = set()
    deadline = time.monotonic() + 400
    while killed < KILLS and process.poll() is None and time.monotonic() < deadline:
        ranks = ranks_of(process.pid)
        if len(ranks) < RANKS or seen & set(ranks):
            time.sleep(0.1)
            continue
        before = len(list((tmp_path / "killed").glob("step-*")))
        while len(list((tmp_path / "killed").glob("step-*"))) == before and process.poll() is None:
            if time.monotonic() > deadline or generator.random() < 0.0002:  # now and then before anything is saved
                break
            time.sleep(0.02)
        time.sleep(generator.uniform(0, 0.3))
        seen |= set(ranks)
        os.kill(generator.choice(ranks), signal.SIGKILL)
        killed += 1
    end(process, log)
    assert killed == KILLS, log.read_text()[-5000:]
    assert not checkpoint.diff(tmp_path / "quiet" / last, tmp_path / "killed" / last)
    resumptions = log.read_text().count("resumed from")
    print(f"{killed} kills, {resumptions} resumptions: the final state is bitwise equal")
    assert resumptions >= 2

    for ranks in (2, 3):
        folder = tmp_path / f"on{ranks}"
        folder.mkdir()
        shutil.copytree(tmp_path / "quiet" / "step-000028", folder / "step-000028")
        end(start(ranks, folder, log), log)
        found = checkpoint.diff(tmp_path / "quiet" / last, folder / last)
        assert (found.only_first, found.only_second, found.kinds) == ((), (), {})
        most = max((value for name, value in found.values.items() if value is not None), default=0.0)
        print(f"continued on {ranks} ranks: the largest difference is {most:.1e}")
        assert most < 1e-9
