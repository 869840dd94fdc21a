"""Pre-flight as a value and as a command: models by name, refusals, figures of known models, comparison, advice."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func.__main__ import main
from mfsdp_func.optim.routed import BYTE_COST
from mfsdp_func.preflight.advice import _others, advise
from mfsdp_func.preflight.command import preflights
from mfsdp_func.preflight.hardware import NUMBERS, TABLE, read_hardware
from mfsdp_func.preflight.models import read_model
from tests.preflight_cases import units_of

SMALL = ["64x32", "32x64", "64"]
LLAMA_70B = [
    *((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192), (28672, 8192), (28672, 8192), (8192, 28672)),
    *((8192,), (8192,)),
]


def answered(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = main(["preflight", *arguments])
    out, error = capsys.readouterr()
    assert status == 0, error
    return out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["preflight", *arguments]) == 2
    return capsys.readouterr().err


def test_the_text_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    out = answered(capsys, *SMALL, "--repeat", "3", "--mesh", "2x4", "--node", "4")
    for word in (
        "fits",
        "MEMORY",
        "functional step",
        "in place",
        "optimizer gather",
        "reduce over replicas",
        "PADDING",
    ):
        assert word in out
    for word in (
        "inside a node",
        "between nodes",
        "OWNERS: 6 matrices",
        "bound",
        "alpha-beta model, no measurement",
        "h100",
    ):
        assert word in out


def test_a_configuration_by_class_and_by_file(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    changes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "vocab_size": 50,
        "num_attention_heads": 2,
    }
    by_class = read_model("LlamaConfig", changes | {"num_key_value_heads": 1})
    assert len(by_class.units) == 3 + 3
    assert all(param.is_meta for param in by_class.module.parameters())
    transformers.LlamaConfig(**changes, num_key_value_heads=1).to_json_file(tmp_path / "config.json")
    for path in (tmp_path, tmp_path / "config.json"):
        assert [g.entries for g in read_model(path).groups.values()] == [g.entries for g in by_class.groups.values()]
    assert read_model(tmp_path, {"num_hidden_layers": 2}).numel < by_class.numel


def test_experts_are_matrices_of_their_own() -> None:
    pytest.importorskip("transformers")
    changes = {
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_experts": 4,
        "vocab_size": 50,
    }
    changes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    result = mf.preflight("Qwen3MoeConfig", 4, changes=changes)
    assert result.parts.matrices == 2 * (4 + 1 + 3 * 4)
    whole = mf.preflight("Qwen3MoeConfig", 4, changes=changes, blocks={"*.experts.gate_up_proj": "e o i -> e o i"})
    assert whole.parts.matrices == 2 * (4 + 1 + 2 * 4)


def test_rows_of_experts_are_those_of_the_run() -> None:
    """Without finer rows, 3 experts on 16 ranks are as badly padded as `fully_shard` pads them; advice finds what helps."""
    shapes = {f"layers.{n}": [(3, 64, 32), (64, 32)] for n in range(2)}
    whole = mf.preflight(shapes, 16)
    assert whole.context == mf.FsdpContext()
    assert whole.padding > 3
    result = mf.preflight(shapes, 16, finer_rows=["layers.*.0"])
    assert result.padding == 1
    assert result.context.finer_rows == {"layers.0.0", "layers.1.0"}
    assert "--finer-rows 'layers.*.0'" in result.command
    tried = [settings.finer_rows for settings in _others(whole)]
    assert tried[0] == ("layers.*.*",)
    with pytest.raises(ValueError, match="finer_rows 'x' matches no parameter"):
        mf.preflight(shapes, 2, finer_rows=["x"])
    with pytest.raises(ValueError, match="must be several patterns"):
        mf.preflight(shapes, 2, finer_rows="x")


def test_a_reader_that_has_seen_enough() -> None:
    command = f"{sys.executable} -m mfsdp_func preflight 64x32 --mesh 4 | head -1; echo ${{PIPESTATUS[0]}}"
    out = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.splitlines()[1] in ("0", "1")  # 0 where all was written before head ended
    assert out.stderr == ""


def build() -> torch.nn.Module:
    return torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(2)])


def test_a_function_and_a_module(capsys: pytest.CaptureFixture[str]) -> None:
    out = answered(capsys, "tests.test_preflight:build", "--mesh", "2")
    assert "144 parameters in 4 tensors" in out
    assert str(mf.preflight(build(), 2)).splitlines()[1:8] == out.splitlines()[1:8]


def test_refusals(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert "needs the network" in refused(capsys, "meta-llama/Llama-3.1-70B", "--mesh", "8")
    assert "no class of configurations" in refused(capsys, "LamaConfig", "--mesh", "8")
    assert "near to it are num_hidden_layers" in refused(
        capsys, "LlamaConfig", "--set", "num_hiden_layers=2", "--mesh", "8"
    )
    assert "there is no file" in refused(capsys, "nothing.json", "--mesh", "8")
    (tmp_path / "x.json").write_text("{}")
    assert "no configuration of transformers" in refused(capsys, str(tmp_path / "x.json"), "--mesh", "8")
    assert "has no 'nothing'" in refused(capsys, "tests.test_preflight:nothing", "--mesh", "8")
    assert "No module named" in refused(capsys, "does.not_exist:build", "--mesh", "8")
    assert "expected an nn.Module" in refused(capsys, "pathlib:Path", "--mesh", "8")
    assert "positive whole numbers" in refused(capsys, *SMALL, "--mesh", "0x4")
    assert "hardware: 'abacus' is unknown" in refused(capsys, *SMALL, "--mesh", "4", "--hardware", "abacus")
    assert "shapes have no forward pass" in refused(capsys, *SMALL, "--mesh", "4", "--batch", "1x8")
    assert "matches no parameter" in refused(capsys, *SMALL, "--mesh", "4", "--blocks", "nothing=m n -> m n")
    assert "max_padding" in refused(capsys, "8x769", "8x1021", "8x2039", "--mesh", "8")
    with pytest.raises(ValueError, match="optimizer must be one of 'muon', 'adamw', got 'sgd'"):
        mf.preflight([(4, 4)], 2, optimizer="sgd")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="expected the name of a configuration"):
        mf.preflight(3, 2)  # pyright: ignore[reportArgumentType]
    for wrong in (["64x64"], ["64", 64], [(2.0, 3)]):
        with pytest.raises(TypeError, match=r"expected whole numbers, such as \(1024, 768\)"):
            mf.preflight(wrong, 2)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(("ranks", "load", "between", "peers"), [(256, 1.171, 0.904, 176), (2048, 6.812, 0.976, 607)])
def test_figures_of_llama_70b(ranks: int, load: float, between: float, peers: int) -> None:
    result = mf.preflight({f"layers.{n}": LLAMA_70B for n in range(80)}, ranks)
    gather, scatter = result.operation("optimizer gather"), result.operation("optimizer scatter")
    assert result.imbalance == pytest.approx(load, abs=1e-3)
    assert result.imbalance_bound <= result.imbalance
    assert gather.between == pytest.approx(between, abs=0.01)
    assert abs(int(gather.peers.max()) - peers) <= 12
    assert (gather.nbytes, gather.messages) == (scatter.nbytes, scatter.messages)
    assert gather.nbytes <= 2 * 560 / 7 * sum(math.prod(shape) for shape in LLAMA_70B if len(shape) > 1) / 1
    inside = mf.preflight({f"layers.{n}": LLAMA_70B for n in range(80)}, (ranks // 8, 8))
    assert inside.operation("optimizer gather").between == 0
    assert int(inside.operation("optimizer gather").peers.max()) == 7
    assert inside.imbalance < 1.01


def test_heat_map_has_at_most_256_bins_and_all_bytes() -> None:
    result = mf.preflight(units_of("GPT-2"), 300)
    for operation in result.operations:
        assert operation.heat.shape == (256, 256)
        assert int(operation.heat.sum()) == operation.nbytes == int(operation.received.sum())


def test_json_is_complete_and_the_command_gives_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--repeat", "2", "--mesh", "2x2", "--layout", "balanced", "--owners", "round robin", "--node", "2"]
    found = json.loads(answered(capsys, *SMALL, *options, "--param-dtype", "bfloat16", "--json", "-"))
    assert len(found["memory"]["functional"]["backward"]["parameters"]) == 4
    assert found["fits"] is True
    import shlex

    again = preflights(shlex.split(found["command"])[4:])
    assert json.loads(again[0].to_json()) == found


def test_comparison_marks_the_better_one(capsys: pytest.CaptureFixture[str]) -> None:
    out = answered(
        capsys, *SMALL, "--repeat", "4", "--mesh", "8", "--mesh", "2x4", "--owners", "planned", "round robin"
    )
    heading, *lines = out.splitlines()
    assert heading.split("  ")[0] == "* is better"
    assert all(word in heading for word in ("8, planned", "8, round robin", "2x4, planned", "2x4, round robin"))
    work = next(line for line in lines if line.startswith("owner work, busiest"))
    assert 0 < work.count("*") < 4
    first, second = preflights([*SMALL, "--mesh", "8", "--mesh", "4"])
    assert first.compare(second).startswith("* is better")
    with pytest.raises(ValueError, match="at least two"):
        first.compare()


def test_advice_is_found_by_trying() -> None:
    def run(settings: Any) -> mf.Preflight:
        from mfsdp_func.preflight import run

        return run(model, settings)

    model = read_model({f"layers.{n}": LLAMA_70B for n in range(4)}, words=["MODEL"])
    result = mf.preflight(model, 64, owners="round robin")
    found = advise(result, run)
    assert found
    for advice in found:
        assert advice.better.value < advice.line.value
        assert advice.step[1] <= advice.step[0]
        assert advice.command.startswith("python -m mfsdp_func preflight MODEL --mesh")


def test_advice_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    out = answered(capsys, "2048x2048", "2048x8192", "--repeat", "4", "--mesh", "32", "--advice")
    assert "ADVICE for the worst line" in out
    assert "python -m mfsdp_func preflight 2048x2048 2048x8192 --repeat 4 --mesh" in out


def test_hardware_is_sourced_and_overridable(tmp_path: Path) -> None:
    for entry in TABLE.values():
        assert set(entry.sources) == set(NUMBERS)
        assert all(
            source.split(":")[0].split(" by")[0] in ("peak", "measured", "assumed") for source in entry.sources.values()
        )
        assert entry.sources["efficiency"].startswith("assumed")
        assert entry.between_bandwidth <= entry.inside_bandwidth
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"h100": {"between_bandwidth": 25e9}, "mine": {"like": "a100", "memory": 1e6}}))
    table = read_hardware(file)
    assert (table["h100"].between_bandwidth, table["h100"].flops) == (25e9, TABLE["h100"].flops)
    assert table["h100"].sources == {**TABLE["h100"].sources, "between_bandwidth": str(file)}
    result = mf.preflight([(2048, 2048)], 4, hardware="mine", hardware_file=file)
    assert not result.fits
    assert "does NOT fit" in str(result)
    for wrong in ('{"h100": {"flop": 1}}', '{"x": {"flops": 1}}', '{"h100": {"flops": -1}}', "[1]", "{"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match="hardware: "):
            read_hardware(file)


def test_the_usual_price_of_a_byte_is_that_of_links_inside_a_node() -> None:
    ratios = {name: one.flops * one.efficiency / one.inside_bandwidth for name, one in TABLE.items() if name != "gloo"}
    assert (min(ratios.values()), max(ratios.values())) == (520.0, pytest.approx(1458.7, abs=0.1))
    assert min(ratios.values()) < BYTE_COST < max(ratios.values())


def test_owner_layouts_are_those_of_the_mesh() -> None:
    result = mf.preflight(units_of("Mixtral 8x7B"), (2, 4))
    owners = result.owner_layouts(mf.Mesh((2, 4), ("replica", "shard")))
    assert set(owners) == set(units_of("Mixtral 8x7B"))
    with pytest.raises(ValueError, match="planned for a mesh of shape"):
        result.owner_layouts(mf.Mesh(8))
