"""What the README shows, run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_there_are_examples():
    assert len(BLOCKS) == 2


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block, tmp_path):
    path = tmp_path / "example.py"
    path.write_text(block)
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_links_exist():
    for document in (ROOT / "README.md", *(ROOT / "mfsdp_func").rglob("README.md")):
        for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
            path = target.partition("#")[0]
            assert target.startswith("https://") or (document.parent / path).exists(), f"{document}: {target}"


@pytest.mark.parametrize(
    ("path", "block"), re.findall(r"\]\((examples/recipes/[^)]+)\).*?```py\n(.*?)```", README, re.DOTALL)
)
def test_recipe_is_as_in_its_file(path: str, block: str) -> None:
    """Every line of it stands there, in this order; a file may say more."""
    lines = iter([line.strip() for line in (ROOT / path).read_text().splitlines()])
    for line in filter(None, map(str.strip, block.splitlines())):
        assert line in lines, f"{path} does not have (here): {line}"


def test_readme_of_the_optimizers_runs() -> None:
    block, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "mfsdp_func/optim/README.md").read_text(), re.DOTALL)
    exec(compile(block, "README.md", "exec"), {})


@pytest.mark.parametrize("room", ["values", "plans", "effects", "operations", "fsdp"])
def test_the_page_of_a_room_names_its_modules(room: str) -> None:
    """Each once, in the first column of its table, and no others."""
    folder = ROOT / "mfsdp_func" / room
    cells = re.findall(r"^\| (`.*?) \|", (folder / "README.md").read_text(), re.MULTILINE)
    named = sorted(name for cell in cells for name in re.findall(r"`(\w+)`", cell))
    assert named == sorted(path.stem for path in folder.glob("*.py") if path.stem != "__init__")
