"""The recipes, run as their docstrings say: on simulated ranks and under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "examples" / "recipes"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(command: list[str]) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.distributed
@pytest.mark.parametrize(("launcher", "ranks"), [([sys.executable], 4), (TORCHRUN, 2)], ids=["simulated", "torchrun"])
def test_functional_step_learns(launcher: list[str], ranks: int) -> None:
    losses = re.findall(r"rank \d+: loss ([\d.]+) -> ([\d.]+)", run([*launcher, str(RECIPES / "functional_step.py")]))
    assert len(losses) == ranks
    assert sum(float(last) for _, last in losses) < 0.8 * sum(float(first) for first, _ in losses)


@pytest.mark.distributed
def test_compiled_step_equals_eager() -> None:
    differences = re.findall(r"weights ([\d.]+e[+-]\d\d)", run([*TORCHRUN, str(RECIPES / "compiled_step.py")]))
    assert len(differences) == 2
    assert all(float(difference) < 1e-5 for difference in differences)


@pytest.mark.distributed
@pytest.mark.parametrize(("launcher", "ranks"), [([sys.executable], 4), (TORCHRUN, 2)], ids=["simulated", "torchrun"])
def test_checkpoint_on_other_ranks(launcher: list[str], ranks: int) -> None:
    shown = run([*launcher, str(RECIPES / "checkpoint.py")])
    assert "every byte has a hash" in shown
    assert len(re.findall(r"rank \d+: step 20, parameters equal", shown)) == ranks


@pytest.mark.distributed
def test_survivors_of_a_killed_rank() -> None:
    shown = run([sys.executable, str(RECIPES / "survivors.py")])
    assert "launcher: rank 2 died" in shown
    assert len(re.findall(r"rank [013]: step 3 not taken", shown)) == 3
    lines = re.findall(r"rank [013], now [012] of 3: 6 steps, norm ([\d.]+)", shown)
    assert len(lines) == 3
    assert len(set(lines)) == 1


def test_unit_test_on_a_simulated_mesh() -> None:
    path = RECIPES / "test_simulated_mesh.py"
    assert "10 passed" in run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(path)])
