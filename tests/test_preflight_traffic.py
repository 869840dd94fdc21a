"""Pre-flight against runs: the same bytes, messages and peers, rank by rank and link by link."""

from typing import Any

import pytest
import torch
from torch import nn

import mfsdp_func as mf
from tests import fsdp_cases
from tests.meshes import run_real
from tests.preflight_cases import BLOCKS, counted, foretold, step_of_shapes, step_on_gloo, train, units_of

HALF = torch.bfloat16


def check_shapes(name: str, mesh: tuple[int, ...], **settings: Any) -> None:
    result = mf.preflight(units_of(name), mesh, carrier="simulated", **settings)
    run = mf.simulate(lambda each: step_of_shapes(each, result), mesh)
    assert counted(run.trace, result) == foretold(result.operations)


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("owners", ["planned", "per group", "round robin"])
def test_owners_and_models(name: str, owners: Any) -> None:
    check_shapes(name, (8,), node=4, owners=owners, travel_dtype=torch.float32)


@pytest.mark.parametrize("layout", list(mf.ShardLayout))
@pytest.mark.parametrize("mesh", [(8,), (2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_layouts_and_meshes(layout: mf.ShardLayout, mesh: tuple[int, ...]) -> None:
    check_shapes("Qwen2.5 0.5B", mesh, node=2, layout=layout, param_dtype=HALF, reduce_dtype=torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("mesh", [(64,), (8, 8)], ids=str)
def test_64_ranks(name: str, mesh: tuple[int, ...]) -> None:
    check_shapes(name, mesh, layout=mf.ShardLayout.BALANCED)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "mesh"), [*((name, (4,)) for name in BLOCKS), ("GPT-2", (2,)), ("Llama-3 8B", (2, 2))], ids=str
)
def test_on_gloo(request: pytest.FixtureRequest, name: str, mesh: tuple[int, ...]) -> None:
    """What is handed to gloo, counted at the carrier's door; what it makes of a reduction is its own affair."""
    pool = request.getfixturevalue("ranks2" if mesh == (2,) else "ranks4")
    settings = {"node": 2, "travel_dtype": torch.float32}
    counted_there = run_real(pool, step_on_gloo, mesh, name, settings)
    told = foretold(mf.preflight(units_of(name), mesh, carrier="gloo", **settings).operations)
    for rank, found in counted_there.items():
        of_rank = {
            label: (
                [[link[rank] for link in side] for side in b],
                [[link[rank] for link in side] for side in m],
                p[rank],
            )
            for label, (b, m, p) in told.items()
        }
        assert found == {label: figures for label, figures in of_rank.items() if figures[2]}


def test_messages_larger_than_a_pack() -> None:
    """Small pieces of a pair that need several packed messages, and pieces that travel alone."""
    result = mf.preflight([(300, 1000)] * 5 + [(4, 4)], 2, carrier="simulated", owners="round robin")
    run = mf.simulate(lambda each: step_of_shapes(each, result), 2)
    assert counted(run.trace, result) == foretold(result.operations)
    many = mf.preflight([(60, 500)] * 120, 2, carrier="simulated", owners="round robin")
    run = mf.simulate(lambda each: step_of_shapes(each, many), 2)
    assert counted(run.trace, many) == foretold(many.operations)
    assert many.operation("optimizer gather").messages > 2


def transformer(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "GPT2":
        config = transformers.GPT2Config(n_embd=24, n_layer=2, n_head=2, n_positions=16, vocab_size=50, use_cache=False)
    else:
        config = transformers.LlamaConfig(
            hidden_size=16,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            vocab_size=40,
            use_cache=False,
        )
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("kind", ["GPT2", "Llama", "net"])
@pytest.mark.parametrize("mesh", [(8,), (2, 2)], ids=str)
def test_a_training_step_of_a_module(kind: str, mesh: tuple[int, ...]) -> None:
    """Layouts too are those of `fully_shard`; tied weights are gathered for each unit that uses them."""
    if kind == "net":

        def make() -> nn.Module:
            torch.manual_seed(0)
            return fsdp_cases.Net()

        data = fsdp_cases.batches(1)[0]
    else:

        def make() -> nn.Module:
            return transformer(kind)

        data = torch.zeros(1, 4, dtype=torch.int64)
    result = mf.preflight(make(), mesh, node=2, carrier="simulated", layout=mf.ShardLayout.BALANCED)
    run = mf.simulate(lambda each: train(each, result, make, data), mesh)
    assert counted(run.trace, result) == foretold(result.operations)
