"""Pre-flight against runs: the most bytes that live at once in a step of real ranks, functional and in place."""

from functools import partial
from typing import Any

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func import optim
from tests.live_bytes import LiveBytes
from tests.meshes import run_real

pytest.importorskip("transformers")

SMALL = {
    "GPT2Config": {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 64, "vocab_size": 4000},
    "LlamaConfig": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 3000,
    },
}
LARGE = {
    "GPT2Config": {},  # the smallest of those that were published: 124 million parameters
    "LlamaConfig": {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
    },  # 102 million
}
MOMENTS = {"passes": ("backward",), "optimizer": ("exchange", "update")}
BATCH = (2, 64)


def loss_of(apply: Any, params: Any, tokens: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(apply(params, tokens).logits.flatten(0, 1), tokens.flatten())


def make(kind: str, sizes: dict[str, int]) -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    ends = {"bos_token_id": None, "eos_token_id": None}
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**sizes, **ends, use_cache=False))


def two_steps(mesh: mf.Mesh, kind: str, sizes: dict[str, int], how: str, recompute: bool = False) -> dict[str, int]:
    """Peaks of the second step; in the first, state is made that later ones replace."""
    live, rows = LiveBytes(), [mf.RowAtomic()]
    tokens = torch.zeros(BATCH, dtype=torch.int64)
    with live:
        model = make(kind, sizes)
        route = optim.route(model)
        context = mf.FsdpContext(recompute=recompute)
        apply, params = mf.fully_shard(model, mesh, mf.Placements([0], rows, rows, rows), context=context)
        del model
        step = (functional if how == "functional" else in_place)(live, route, apply, params, tokens)
        del params
        for _ in range(2):
            live.peaks.clear()
            next(step)
    return live.peaks


def functional(live: LiveBytes, route: Any, apply: Any, params: Any, tokens: torch.Tensor) -> Any:
    chosen = partial(optim.muon, 0.01, ns_dtype=torch.bfloat16)
    optimizer = optim.from_route(route, params, muon=chosen, adamw=1e-3)
    state = optimizer.init(params)
    while True:
        with live.phase("passes"):
            gradients = torch.func.grad(lambda params: loss_of(apply, params, tokens))(params)
        with live.phase("optimizer"):
            updates, state = optimizer.update(gradients, state, params)
            params = optim.apply_updates(params, updates)
        del gradients, updates
        yield


def in_place(live: LiveBytes, route: Any, apply: Any, params: Any, tokens: torch.Tensor) -> Any:
    plan = optim.plan_route(route, params)
    optimizer = optim.TorchOptimizer(
        params,
        lambda lr: plan.transformation(muon=partial(optim.muon, lr, ns_dtype=torch.bfloat16), adamw=lr),
    )
    while True:
        optimizer.zero_grad()
        with live.phase("passes"):
            loss_of(apply, params, tokens).backward()
        with live.phase("optimizer"):
            optimizer.step()
        yield


def check(pool: Any, ranks: int, kind: str, sizes: dict[str, int], how: str, recompute: bool = False) -> None:
    measured = run_real(pool, two_steps, ranks, kind, sizes, how, recompute, timeout=900.0, group_timeout=600.0)
    memory = mf.preflight(make(kind, sizes), ranks, batch=BATCH, recompute=recompute).memory
    of_rank = {name: memory.total(name, in_place=how == "in place") for name in memory.moments}
    for rank, found in measured.items():
        told = {phase: max(int(of_rank[name][rank]) for name in names) for phase, names in MOMENTS.items()}
        assert max(told.values()) == pytest.approx(max(found.values()), rel=0.03), (rank, told, found)
        assert told["passes"] == pytest.approx(found["passes"], rel=0.03), (rank, told, found)


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["functional", "in place"])
@pytest.mark.parametrize("kind", SMALL)
def test_two_ranks(ranks2: Any, kind: str, how: str) -> None:
    check(ranks2, 2, kind, SMALL[kind], how)


@pytest.mark.distributed
def test_units_that_run_again(ranks2: Any) -> None:
    check(ranks2, 2, "LlamaConfig", SMALL["LlamaConfig"], "in place", recompute=True)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", ["functional", "in place"])
@pytest.mark.parametrize("kind", LARGE)
@pytest.mark.parametrize("ranks", [2, 4])
def test_100_million_parameters(request: pytest.FixtureRequest, ranks: int, kind: str, how: str) -> None:
    check(request.getfixturevalue(f"ranks{ranks}"), ranks, kind, LARGE[kind], how)


def test_live_bytes_are_those_of_distinct_storages() -> None:
    with LiveBytes() as live, live.phase("all"):
        kept = torch.zeros(100)
        view = kept[10:].view(9, 10)
        torch.zeros(50) + 1  # two of 200 bytes, the first freed after
        freed = torch.zeros(1000)
        freed.untyped_storage().resize_(0)
        other = view + 1
    assert live.peaks == {"all": 4400}
    assert other.shape == view.shape
