"""Each benchmark runs on a tiny size; methods move the same bits, and Muon steps agree."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "examples" / "benchmarks"

SECTIONS = {"movement", "growth", "groups", "steps", "memory"}


def run(tmp_path: Path, *arguments: str) -> dict:
    """The whole command, as a user starts it; returns what it wrote."""
    command = [sys.executable, str(FOLDER / "run.py"), "--out", str(tmp_path), "--rounds", "2", *arguments]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((tmp_path / "results.json").read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_benchmark_runs(tmp_path: Path, ranks: int) -> None:
    """The run itself checks what was moved, bit by bit, and that first updates agree to `steps.TOLERANCE`."""
    pytest.importorskip("matplotlib")
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- tables -->\nold\n<!-- end of tables -->\nafter\n")
    chosen = ("--workloads", "gpt2 blocks bf16", "small fp32", "experts bf16") if ranks == 2 else ()
    results = run(tmp_path, "--scale", "32", "--ranks", str(ranks), *chosen, "--readme", str(readme))
    assert set(results["ranks"]) == {str(ranks)}
    found = results["ranks"][str(ranks)]
    assert set(found) >= SECTIONS
    assert len(found["movement"]) == (3 if ranks == 2 else 13) * 2 * 2
    assert {row["operation"] for row in found["movement"]} == {"gather", "scatter"}
    assert all(row["pure (s)"] > 0 and row["ranks"] == ranks for row in found["movement"])
    for row in found["steps"]:
        assert row["differences"]["full tensor"] == 0
        assert {"ours", "ours, coalesced", "ours, one by one", "ours, pipelined"} <= set(row["differences"])
    assert results["planning"]
    assert results["load"]
    assert [row["ranks"] for row in results["model"]["rows"]] == [2, 4]
    assert (tmp_path / "results.md").read_text().startswith("# Benchmark results")
    assert (tmp_path / "results.png").read_bytes()[:4] == b"\x89PNG"
    tables = readme.read_text()
    assert all(title in tables for title in ("one group after the other", "all groups in one exchange", "Muon step"))
    assert (tables.startswith("before\n"), tables.endswith("\nafter\n"), "old" in tables) == (True, True, False)


@pytest.mark.slow
@pytest.mark.distributed
def test_blocks_write_their_tables(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- blocks -->\nold\n<!-- end of blocks -->\nafter\n")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = ["--rounds", "1", "--layers", "1", "--readme", str(readme)]
    subprocess.run([*command, str(FOLDER / "blocks.py"), *arguments], env=environ, timeout=280, check=True)
    text = readme.read_text()
    assert "per head, gram" in text
    assert "1024 x 4096" in text
    assert "old" not in text


@pytest.mark.slow
@pytest.mark.distributed
def test_steps_beside_fsdp2(tmp_path: Path) -> None:
    """First losses agree, which the run itself checks; at the peak no more is allocated than by FSDP2."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(FOLDER / "fsdp2.py"), "--rounds", "2", "--only", "steps", "--out", str(tmp_path / "found.json")]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads((tmp_path / "found.json").read_text())["steps"]
    assert len(rows) == 5
    assert all(row["peak ratio"] <= 1.05 for row in rows)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.mark.usefixtures("modules")
def test_plain_loop_chooses_the_same_owners() -> None:
    from planning import planning_rows  # pyright: ignore[reportMissingImports]

    assert len(planning_rows(60, 16, 1)) == 4


@pytest.mark.usefixtures("modules")
def test_ratios_are_medians_within_rounds() -> None:
    from measure import medians, ratio  # pyright: ignore[reportMissingImports]

    seconds = {"a": [1.0, 4.0, 9.0], "b": [1.0, 2.0, 1.0]}
    assert ratio(seconds, "a", "b") == 2
    assert medians(seconds) == {"a": 4.0, "b": 1.0}


@pytest.mark.usefixtures("modules")
def test_threshold_and_model_from_a_table() -> None:
    from thresholds import alpha_beta, crossing  # pyright: ignore[reportMissingImports]

    rows = [
        {"nbytes": n, "direct": 64 * (50e-6 + n * 1e-9), "direct / packed": 2 if n < 4096 else 0.5}
        for n in (1024, 4096, 65536)
    ]
    assert crossing(rows) == 4096
    assert alpha_beta(rows) == pytest.approx((50e-6, 1e-9))
    assert crossing([{"nbytes": 1, "direct / packed": 3.0}]) is None


@pytest.mark.usefixtures("modules")
def test_workloads_have_the_models_sizes() -> None:
    from workloads import workloads  # pyright: ignore[reportMissingImports]

    found = workloads()
    assert found["gpt2 fp32"].nbytes == found["gpt2 blocks fp32"].nbytes == 4 * 12 * 12 * 768**2
    assert found["llama blocks bf16"].dtype == torch.bfloat16
    assert len(found["small fp32"].groups[0]) == 2001


@pytest.mark.usefixtures("modules")
def test_preflight_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    import preflight  # pyright: ignore[reportMissingImports]

    small = preflight.LLAMA_70B._replace(values=preflight.LLAMA_70B.values | {"num_hidden_layers": 2})
    monkeypatch.setattr(preflight, "MODELS", {})
    assert preflight.time_rows() == []
    seconds, busy, matrices = preflight.seconds_of(small, 16)
    assert (seconds > 0, busy > 0, matrices) == (True, True, 14)
    one, nodes = preflight.figure_rows(preflight.answers(small, (16,)))
    assert (one["mesh"], nodes["mesh"], nodes["between nodes"]) == ("16", "2x8", "0.0%")
    assert one["bound"] <= one["owner load, max / mean"]
