"""The guided tour runs from top to bottom, and the outputs that are stored in it are those of today."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
TOUR = ROOT / "examples" / "tour.ipynb"


def execute(notebook: Any, folder: Path, patch: pytest.MonkeyPatch) -> Any:
    """Run all cells, by a kernel that is this Python."""
    kernel = folder / "kernels" / "tour"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "tour", "language": "python"}))
    patch.setenv("JUPYTER_PATH", str(folder))
    patch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    patch.setenv("PYTHONPATH", str(ROOT))
    patch.setenv("OMP_NUM_THREADS", "1")
    patch.setenv("IPYKERNEL_CELL_NAME", TOUR.name)  # in place of a file with the number of a process
    client = nbclient.NotebookClient(
        notebook,
        timeout=180,
        startup_timeout=180,
        kernel_name="tour",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute()


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.get("outputs", ()) if output.output_type == "stream")


@pytest.mark.filterwarnings("default")  # of the kernel's client
def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = nbformat.read(TOUR, as_version=4)
    done = execute(nbformat.read(TOUR, as_version=4), tmp_path, monkeypatch)
    text = "".join(map(printed, done.cells))
    for words in (
        "matrix of a block",
        "tensor -> owner",
        "pieces between",
        "deadlock: no rank can go on",
        "for rank 2",
    ):
        assert words in text
    losses = [json.loads(found) for found in re.findall(r"losses (\[.*?\])", text)]
    assert len(losses) == 4
    assert all(each[-1] < each[0] - 0.5 for each in losses)
    assert any("image/png" in output.get("data", {}) for cell in done.cells for output in cell.get("outputs", ()))
    for before, after in zip(stored.cells, done.cells, strict=True):
        if before.cell_type == "code":
            assert before.execution_count == after.execution_count
            # Last digits may differ from machine to machine.
            assert re.sub(r"[\d.,]+ *", "#", printed(before)) == re.sub(r"[\d.,]+ *", "#", printed(after))


if __name__ == "__main__":  # python -m tests.test_tour stores the outputs of today
    import tempfile

    with tempfile.TemporaryDirectory() as place, pytest.MonkeyPatch.context() as patch:
        found = execute(nbformat.read(TOUR, as_version=4), Path(place), patch)
    found.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in found.cells:
        cell.metadata = {}
    nbformat.write(found, TOUR)
