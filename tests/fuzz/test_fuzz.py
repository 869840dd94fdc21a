"""Random sessions and nests, a few by default and many with ``-m slow``; a failure names the seed to replay.

FUZZ_SEED=1234 FUZZ_COUNT=1 python -m pytest -m slow tests/fuzz -k sessions_simulated
"""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests.fuzz.applies import SHAPES, apply_session, draw_roles
from tests.fuzz.nests import TRANSFORMS, nest, run_nest
from tests.fuzz.sessions import draw_mesh, session
from tests.meshes import MeshFacts, mesh_on_rank
from tests.spawn import RankPool

pytestmark = [
    pytest.mark.filterwarnings("ignore::mfsdp_func.PaddingWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
]

Program = Callable[..., Counter[str]]


def drawn_session(seed: int, world: int) -> tuple[MeshFacts, Program, tuple[Any, ...]]:
    """The mesh, the program and its further arguments."""
    return draw_mesh(random.Random(seed), world), session, (seed,)


def drawn_nest(seed: int, world: int) -> tuple[MeshFacts, Program, tuple[Any, ...]]:
    return ((2,), tuple(random.Random(seed).sample(range(world), 2))), nest, (seed,)


def drawn_apply(seed: int, world: int) -> tuple[MeshFacts, Program, tuple[Any, ...]]:
    rng = random.Random(seed)
    roles = draw_roles(rng, world)
    shape = SHAPES[roles]
    return (shape, tuple(rng.sample(range(world), torch.Size(shape).numel()))), apply_session, (seed, roles)


DRAWS = {"sessions": drawn_session, "nests": drawn_nest, "applies": drawn_apply}
MANY = {"sessions": 1000, "nests": 400, "applies": 100}
"""Of each kind, with ``-m slow``, on simulated ranks; a third of it on gloo."""


def seeds(kind: str, share: int = 1) -> Iterable[int]:
    start = int(os.environ.get("FUZZ_SEED", "0"))
    return range(start, start + int(os.environ.get("FUZZ_COUNT", str(MANY[kind] // share))))


def simulate_one(kind: str, seed: int, world: int) -> Counter[str]:
    """One drawn case on simulated ranks, with poison where nothing else watches."""
    (shape, ranks), program, args = DRAWS[kind](seed, world)
    poison = kind == "sessions" and seed % 2 == 1
    try:
        results = mf.simulate(lambda mesh: program(mesh, *args), shape, ranks=ranks, poison=poison).results
    except BaseException as error:
        error.add_note(f"replay: FUZZ_SEED={seed} FUZZ_COUNT=1 python -m pytest -m slow tests/fuzz -k {kind}_simulated")
        raise
    return results[ranks[0]]


def run_many_on_rank(rank: int, kind: str, chosen: list[int], world: int) -> Counter[str]:
    """Drawn cases one after the other, on meshes with and without process groups of their own."""
    counts: Counter[str] = Counter()
    for seed in chosen:
        facts, program, args = DRAWS[kind](seed, world)
        mesh: Mesh = mesh_on_rank(rank, facts, "DeviceMesh" if seed % 3 == 0 else "Mesh")
        if rank in facts[1]:
            try:
                with mf.agreement_check(seed % 2 == 0):
                    counts += program(mesh, *args)
            except BaseException as error:
                error.add_note(
                    f"replay: FUZZ_SEED={seed} FUZZ_COUNT=1 python -m pytest -m slow tests/fuzz -k {kind}_gloo"
                )
                raise
    return counts


def say(capsys: pytest.CaptureFixture[str], kind: str, where: str, number: int, counts: Counter[str]) -> None:
    with capsys.disabled():
        print(f"\n{number} {kind} on {where} ranks, all equal: {dict(sorted(counts.items()))}")


@pytest.mark.parametrize("kind", DRAWS)
def test_a_few_simulated(kind: str) -> None:
    for seed in range({"sessions": 20, "nests": 10, "applies": 3}[kind]):
        simulate_one(kind, seed, 6 if kind == "sessions" else 4)


@pytest.mark.parametrize("pair", list(product(TRANSFORMS, repeat=2)), ids="-".join)
def test_every_pair_of_transforms(pair: tuple[str, str]) -> None:
    """Around `gather`, where one rank holds nothing of a group and one owns nothing."""
    mf.simulate(lambda mesh: run_nest(mesh, "gather", pair), 2, ranks=(1, 0))


@pytest.mark.distributed
def test_a_few_on_gloo(ranks4: RankPool) -> None:
    ranks4.run(run_many_on_rank, "sessions", list(range(10)), 4, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS, ids=partial("{}_simulated".format))
def test_many_simulated(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds(kind):
        counts += simulate_one(kind, seed, 8 if kind == "sessions" else 4)
    say(capsys, kind, "simulated", len(list(seeds(kind))), counts)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("kind", DRAWS, ids=partial("{}_gloo".format))
def test_many_on_gloo(kind: str, ranks4: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    chosen, counts = list(seeds(kind, 3)), Counter[str]()
    for start in range(0, len(chosen), 20):  # a group of processes for each twenty
        counts += ranks4.run(run_many_on_rank, kind, chosen[start : start + 20], 4, timeout=600)[0]
    say(capsys, kind, "gloo", len(chosen), counts)
