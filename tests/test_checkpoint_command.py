"""The command line: show, verify, diff, to-hf."""

from pathlib import Path

import pytest
import torch

from mfsdp_func import checkpoint
from mfsdp_func.__main__ import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {"params": {"w.weight": torch.arange(6.0).view(2, 3), "count": torch.tensor(3)}, "step": 1}
    checkpoint.save(tmp_path / "a", state)
    return tmp_path / "a"


def test_show_and_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "show", str(saved)]) == 0
    assert "params.w.weight  float32   (2, 3)" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(saved)]) == 0
    assert "every byte is as it was written; 2 tensors, 32 bytes" in capsys.readouterr().out
    file = saved / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[::-1])
    assert main(["checkpoint", "verify", str(saved)]) == 1
    assert "__0_0.distcp: bytes 0 to" in capsys.readouterr().err
    assert main(["checkpoint", "show", str(saved.parent / "none")]) == 1
    assert "there is no such folder" in capsys.readouterr().err


def test_diff(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "diff", str(saved), str(saved)]) == 0
    assert capsys.readouterr().out == "no difference\n"
    checkpoint.save(saved.parent / "b", {"step": 2})
    assert main(["checkpoint", "diff", str(saved), str(saved.parent / "b")]) == 1
    assert capsys.readouterr().out == "- params.count\n- params.w.weight\n~ step\n"


def test_to_hf(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    (saved.parent / "config.json").write_text('{"model_type": "x"}')
    arguments = [
        "checkpoint",
        "to-hf",
        str(saved),
        "--dtype",
        "bfloat16",
        "--config",
        str(saved.parent / "config.json"),
    ]
    assert main(arguments) == 0
    assert "2 tensors in" in capsys.readouterr().out
    got = safetensors.load_file(saved.parent / "a-hf" / "model.safetensors")
    assert got["w.weight"].dtype == torch.bfloat16
    assert torch.equal(got["w.weight"].float(), torch.arange(6.0).view(2, 3))
    assert torch.equal(got["count"], torch.tensor(3))
    assert main(arguments) == 1
    assert "it exists" in capsys.readouterr().err
    assert main(["checkpoint", "to-hf", str(saved), str(saved.parent / "c"), "--prefix", "none"]) == 1
    assert "no tensor's name begins with 'none.'" in capsys.readouterr().err
    assert main(["checkpoint", "to-hf", str(saved), str(saved.parent / "c"), "--dtype", "thing"]) == 1
    assert "'thing' is no torch dtype" in capsys.readouterr().err
