"""Saves that are killed: whatever the moment, the last whole checkpoint loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def kills(tmp_path: Path, every: int) -> list[list[object]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint_victim", str(tmp_path / "runs"), str(every)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stderr
    outcomes = [json.loads(line) for line in run.stdout.splitlines()]
    assert [what for _, what, *_ in outcomes].count("done") == 2  # saved at once, and in the background
    assert all(left == ["step1", "step2"] for *_, left in outcomes)
    killed = [outcome for outcome in outcomes if outcome[1] != "done"]
    print(f"{len(killed)} of {len(killed)} kills left the last whole checkpoint loadable")
    return killed


@pytest.mark.distributed
def test_some_points(tmp_path: Path) -> None:
    assert len(kills(tmp_path, 17)) >= 6


@pytest.mark.slow
@pytest.mark.distributed
def test_every_point(tmp_path: Path) -> None:
    killed = kills(tmp_path, 1)
    assert len(killed) >= 40
    assert {what for _, what, *_ in killed} == {"mkdir", "_write_entry", "fsync", "replace", "rename", "unlink"}
    # Step 2 is there from its rename on, and not before.
    assert {step for _, what, step, _ in killed if what == "_write_entry"} == {1}
    assert 2 in {step for _, _, step, _ in killed}
