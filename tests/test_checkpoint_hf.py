"""Hugging Face folders: exported by any number of ranks, opened by transformers, imported again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_func as mf
from mfsdp_func import checkpoint
from tests.checkpoint_cases import SHAPES, Way, assert_same, buffers, value_of

pytestmark = pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")
safetensors = pytest.importorskip("safetensors.torch")


def export(path: Path, way: Way, **options: Any) -> None:
    mf.simulate(lambda mesh: checkpoint.export_hf(buffers(mesh, way, 3), path, names=way.names, **options), way.shape)


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize("kind", ["padded", "unpadded", "tensor"])
def test_files_are_those_of_safetensors(shape: tuple[int, ...], kind: str, tmp_path: Path) -> None:
    way = Way(shape, kind, len(kind) % 2)
    export(tmp_path / "one", way)
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    got = safetensors.load_file(tmp_path / "one" / "model.safetensors")
    assert_same(dict(sorted(got.items())), {name: value_of(name, 3) for name in sorted(SHAPES)})
    export(tmp_path / "many", way, max_file_nbytes=100, dtype=torch.bfloat16, config={"model_type": "x"})
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 1
    assert sorted(set(index["weight_map"].values())) == files
    got = {}
    for file in files:
        got |= safetensors.load_file(tmp_path / "many" / file)
    assert_same(dict(sorted(got.items())), {name: value_of(name, 3).bfloat16() for name in sorted(SHAPES)})
    assert json.loads((tmp_path / "many" / "config.json").read_text()) == {"model_type": "x", "dtype": "bfloat16"}

    for other in (Way((3,), "balanced", 1), Way((2, 2), "padded", 0), Way((1,), "unpadded", 0)):

        def load(mesh: mf.Mesh, other: Way = other) -> None:
            like = checkpoint.spec_of(buffers(mesh, other, 0))
            assert_same(checkpoint.import_hf(tmp_path / "one", like, names=other.names), buffers(mesh, other, 3))
            got = checkpoint.import_hf(tmp_path / "many", like, names=other.names, cast=True)
            low = buffers(mesh, other, 3)
            assert_same(got, {group: buffer.cast(torch.bfloat16).cast(torch.float32) for group, buffer in low.items()})

        mf.simulate(load, other.shape)


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    way = Way((2,), "padded")
    export(tmp_path / "a", way)
    with pytest.raises(checkpoint.CheckpointError, match="it exists"):
        export(tmp_path / "a", way)
    with pytest.raises(checkpoint.CheckpointError, match="config is a int"):
        export(tmp_path / "b", way, config=3)
    with pytest.raises(checkpoint.CheckpointError, match="'x' is a int, which safetensors cannot hold"):
        checkpoint.export_hf({"x": 1}, tmp_path / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    file = tmp_path / "a" / "model.safetensors"
    like = {name: value_of(name, 0) for name in SHAPES}
    with pytest.raises(checkpoint.CheckpointError, match=r"'scale': is in the file"):
        checkpoint.import_hf(tmp_path / "a", {name: like[name] for name in SHAPES if name != "scale"})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(checkpoint.CheckpointError, match=r"model\.safetensors cannot be read"):
        checkpoint.import_hf(tmp_path / "a", like)
    with pytest.raises(checkpoint.CheckpointError, match="holds no safetensors"):
        checkpoint.import_hf(tmp_path, like)


def tiny_gpt2() -> tuple[nn.Module, Any]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=37, n_positions=16, n_embd=12, n_layer=2, n_head=2)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval(), config


def test_transformers_opens_what_three_ranks_export(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, config = tiny_gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    config.architectures = ["GPT2LMHeadModel"]
    rows = mf.Placements(("axis0",), [mf.RowAtomic()], [mf.RowAtomic()], [mf.RowAtomic()])

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(model, mesh, rows)
        checkpoint.export_hf(params, tmp_path / "hf", names=apply.names, config=config, max_file_nbytes=4000)
        fresh, _ = tiny_gpt2()
        with torch.no_grad():
            for param in fresh.parameters():
                param.zero_()
        other, like = mf.fully_shard(fresh, mesh, rows)
        assert_same(checkpoint.import_hf(tmp_path / "hf", like, names=other.names), params)
        # By way of a checkpoint, too, which has the tied name for readers of torch.distributed.checkpoint.
        checkpoint.save(tmp_path / "saved", {"params": params}, names=apply.names)
        assert checkpoint.inspect(tmp_path / "saved").aliases == {
            "params.lm_head.weight": "params.transformer.wte.weight"
        }

    mf.simulate(program, 3)
    opened, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    words = torch.arange(8).view(1, 8)
    assert torch.equal(opened.eval()(words).logits, model(words).logits)
