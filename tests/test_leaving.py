"""How examples end: together, with everything written; what does not come to its end fails."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_examples import EXAMPLES, SMALL, torchrun

ENDING = f"""
import sys
sys.path.append({str(EXAMPLES)!r})
import torch.distributed as dist
from leave import leave
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(__import__("torch").ones(3))
print(f"rank {{rank}} wrote this", end="")
sys.stderr.write(f"rank {{rank}} warned")
if "--raise" in sys.argv and rank:
    raise ValueError("broken")
leave()
print("not reached")
"""


@pytest.mark.distributed
def test_ranks_leave_with_everything_written(tmp_path: Path) -> None:
    script = tmp_path / "ending.py"
    script.write_text(ENDING)
    finished = torchrun(2, str(script))
    assert finished.returncode == 0, finished.stderr
    for rank in range(2):
        assert f"rank {rank} wrote this" in finished.stdout
        assert f"rank {rank} warned" in finished.stderr
    assert "not reached" not in finished.stdout
    broken = torchrun(2, str(script), "--raise")
    assert broken.returncode != 0
    assert "ValueError: broken" in broken.stderr


def test_without_a_process_group_nothing_happens() -> None:
    code = f"import sys; sys.path.append({str(EXAMPLES)!r}); from leave import leave; leave(); print('after')"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert finished.stdout == "after\n"


@pytest.mark.parametrize("file", sorted(EXAMPLES.rglob("*.py")), ids=lambda file: file.stem)
def test_whoever_joins_a_process_group_leaves_by_the_helper(file: Path) -> None:
    text = file.read_text()
    helps = "def join()" in text or "def init_process_group(" in text  # its callers leave
    joins = ("init_process_group(" in text or "= join()" in text) and not helps
    assert joins == ("leave(" in text and "def leave(" not in text), (
        f"{file}: end it with leave(), of examples/leave.py"
    )


@pytest.mark.slow
@pytest.mark.distributed
def test_fifty_starts_end_well() -> None:
    codes = [torchrun(2, "train_gpt.py", "--steps", "2", *SMALL).returncode for _ in range(50)]
    assert codes == [0] * 50
