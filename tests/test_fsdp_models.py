"""Models of a third party, built from their configurations: trained sharded, and whole in one process."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.func import functional_call, grad, grad_and_value

import mfsdp_func as mf
from mfsdp_func.fsdp import Escape
from mfsdp_func.optim import adamw, apply_updates
from tests import fsdp_cases as cases
from tests.fsdp_cases import FULL, ROWS, number
from tests.spawn import RankPool

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()
pytestmark = pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning")

STEPS = 3
SMALL = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = SMALL | {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def gpt2(**choices: Any) -> nn.Module:
    sizes = {"n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 2}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SMALL | sizes | dropout | choices))


def llama(**choices: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA | choices))


def mixtral(**choices: Any) -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**LLAMA | experts | choices))


MODELS: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "llama": llama, "mixtral": mixtral}


def model_of(name: str, dtype: torch.dtype = torch.float64, **choices: Any) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name](use_cache=False, **choices).to(dtype)


def words(count: int) -> torch.Tensor:
    """For each of `count` ranks, two lines of eight."""
    return torch.randint(3, 61, (count, 2, 8), generator=torch.Generator().manual_seed(1))


def optimizer_of(dtype: torch.dtype) -> Any:
    # Where a gradient is zero but for rounding (biases of keys), a small eps would blow the rounding up.
    return adamw(1e-2, eps=1e-8 if dtype == torch.float64 else 1e-3)


def train(loss: Callable[[Any], torch.Tensor], params: Any, dtype: torch.dtype) -> tuple[list[float], Any]:
    optimizer, losses = optimizer_of(dtype), []
    state = optimizer.init(params)
    for _ in range(STEPS):
        gradients, value = grad_and_value(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        params = apply_updates(params, updates)
        losses.append(value.item())
    return losses, params


def train_sharded(
    mesh: Any, name: str, dtype: torch.dtype, placements: list[Any]
) -> tuple[list[float], dict[str, Any]]:
    """This rank's losses, and full weights."""
    model = model_of(name, dtype)
    value = mf.as_mesh(mesh)
    roles = mf.Placements(tuple(range(value.ndim)), placements, placements, placements)
    apply, params = mf.fully_shard(model, mesh, roles, context=mf.FsdpContext(shard_layout=mf.ShardLayout.BALANCED))
    x = words(value.size())[number(value)]
    losses, params = train(lambda params: cases.loss_of(apply(params, x).logits, x), params, dtype)
    return losses, apply.gather_parameters(params)


def train_whole(name: str, dtype: torch.dtype, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, data = model_of(name, dtype), words(count)
    weights = {name: param.detach() for name, param in model.named_parameters()}

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        each = [cases.loss_of(functional_call(model, weights, (x,)).logits, x) for x in data]
        return torch.stack(each).mean()

    return train(loss, weights, dtype)


def check(results: list[Any], name: str, dtype: torch.dtype) -> None:
    """float64 to 1e-10; float32 to 1e-4 of a loss and 1e-4 of a weight (after steps of 1e-2)."""
    losses, weights = train_whole(name, dtype, len(results))
    within = 1e-10 if dtype == torch.float64 else 1e-4
    means = [sum(step) / len(results) for step in zip(*(result[0] for result in results), strict=True)]
    assert means == pytest.approx(losses, rel=within)
    for _, given in results:
        cases.assert_same(given, weights, rtol=0, atol=within)
    if name == "gpt2":
        assert torch.equal(results[0][1]["lm_head.weight"], results[0][1]["transformer.wte.weight"])


def train_on_a_rank(rank: int, shape: tuple[int, ...], names: tuple[str, ...], dtype: torch.dtype) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", shape)
    placements = [FULL] * (len(shape) - 1) + [ROWS]
    return {name: train_sharded(mesh, name, dtype, placements) for name in names}


@pytest.mark.parametrize("name", MODELS)
def test_simulated_hsdp(name: str) -> None:
    run = mf.simulate(lambda mesh: train_sharded(mesh, name, torch.float64, [FULL, ROWS]), (2, 2))
    check(list(run.results.values()), name, torch.float64)


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_two_real_ranks(dtype: torch.dtype, ranks2: RankPool) -> None:
    results = ranks2.run(train_on_a_rank, (2,), tuple(MODELS), dtype, timeout=120)
    for name in MODELS:
        check([result[name] for result in results], name, dtype)


@pytest.mark.distributed
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_four_real_ranks(shape: tuple[int, ...], ranks4: RankPool) -> None:
    names = tuple(MODELS) if len(shape) == 1 else ("gpt2",)
    results = ranks4.run(train_on_a_rank, shape, names, torch.float64, timeout=180)
    for name in names:
        check([result[name] for result in results], name, torch.float64)


def test_a_llama_from_the_meta_device() -> None:
    """By the model's own initialisation, rotary buffers included."""
    with torch.device("meta"):
        model = llama(use_cache=False)
    whole, x = llama(use_cache=False), words(1)[0]

    def program(mesh: mf.Mesh) -> dict[str, torch.Tensor]:
        context = mf.FsdpContext(init=lambda name, module: model._init_weights(module))
        apply, params = mf.fully_shard(model, mesh, cases.place(mesh, "two"), context=context)
        weights = apply.gather_parameters(params)
        expected = functional_call(whole, weights, (x,)).logits
        torch.testing.assert_close(apply(params, x).logits, expected, rtol=0, atol=0)
        return weights

    results = mf.simulate(program, 2).results
    cases.assert_same(results[0], results[1], rtol=0, atol=0)
    assert results[0]["model.embed_tokens.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def test_what_a_model_keeps_beside_its_results() -> None:
    """Caches and recorded router logits would lose gradients: refused, unless units are small enough; inference may."""
    x = words(2)

    def gradients_of(apply: Any, params: Any, n: int, **kwargs: Any) -> Any:
        return grad(lambda params: apply(params, input_ids=x[n], labels=x[n], **kwargs).loss)(params)

    def program(mesh: mf.Mesh) -> None:
        apply, params = mf.fully_shard(plain, mesh, cases.place(mesh, "two"))
        assert apply(params, x[0], use_cache=True).past_key_values.get_seq_length() == 8
        with pytest.raises(Escape, match=re.escape("unit 'model.layers.0' keeps a differentiable tensor")):
            gradients_of(apply, params, 0, use_cache=True)
        apply, params = mf.fully_shard(model, mesh, cases.place(mesh, "two"))
        with pytest.raises(Escape, match="name smaller units"):
            gradients_of(apply, params, 0)
        classes = {type(module) for module in model.modules() if "Mixtral" in type(module).__name__}
        small = [c for c in classes if c.__name__.endswith(("Attention", "Router", "Experts", "Norm"))]
        apply, params = mf.fully_shard(model, mesh, cases.place(mesh, "two"), units=small)
        given = gradients_of(apply, params, number(mesh))
        cases.assert_same(apply.gather_parameters(given), expected, rtol=1e-10, atol=1e-12)

    plain, model = model_of("llama"), model_of("mixtral", output_router_logits=True)
    expected = grad(
        lambda w: torch.stack([functional_call(model, w, (), {"input_ids": y, "labels": y}).loss for y in x]).mean()
    )({name: param.detach() for name, param in model.named_parameters()})
    mf.simulate(program, 2)
