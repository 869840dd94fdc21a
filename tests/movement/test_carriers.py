"""The contract of `gather` and `scatter`: one list of cases, over every carrier, with the same bits."""

import pytest

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests.meshes import MeshFacts
from tests.movement.carriers import (
    FOUR,
    MESHES,
    TWO,
    as_bytes,
    name_of,
    on_real_ranks,
    plain,
    remembered,
    simulated,
)
from tests.movement.groups import CASES, assert_same
from tests.spawn import RankPool

# torch's forward mode scripts a few decompositions when it is first used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", MESHES, ids=name_of)
def test_simulated(name: str, mesh: MeshFacts) -> None:
    assert_same(simulated(name, mesh), remembered(name, mesh), "a second run")


@pytest.mark.parametrize("name", CASES)
def test_simulated_with_poison(name: str) -> None:
    if name == "tokens_and_inputs_may_be_dropped":
        with pytest.raises(mf.SimulationError, match="rank 0 never waited for the token of gather 'dropped'"):
            simulated(name, TWO, poison=True)
    else:
        assert_same(simulated(name, TWO, poison=True), remembered(name, TWO))


@pytest.mark.parametrize("name", CASES)
def test_simulated_with_streams(name: str) -> None:
    assert_same(simulated(name, TWO, streams=True), remembered(name, TWO))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_two_processes(name: str, check: bool, ranks2: RankPool) -> None:
    kind = "DeviceMesh" if check else "Mesh"
    assert_same(on_real_ranks(ranks2, name, TWO, kind, "plain", check), remembered(name, TWO))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", FOUR, ids=name_of)
def test_four_processes(name: str, mesh: MeshFacts, ranks4: RankPool) -> None:
    assert_same(on_real_ranks(ranks4, name, mesh, "DeviceMesh", "plain", False), remembered(name, mesh))


@pytest.mark.distributed
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.compiled])
def test_compiled(name: str, ranks2: RankPool) -> None:
    assert_same(on_real_ranks(ranks2, name, TWO, "Mesh", "aot_eager", False), remembered(name, TWO))


@pytest.mark.distributed
def test_compiled_step_with_inductor(ranks2: RankPool) -> None:
    on_real_ranks(ranks2, "gather_change_scatter", TWO, "Mesh", "inductor", False)


SUB_MESHES: tuple[MeshFacts, ...] = (((2,), (1, 3)), ((3,), (3, 0, 2)))


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["round_trip", "gather_change_scatter", "several_in_flight", "backward"])
@pytest.mark.parametrize("kind", ["Mesh", "DeviceMesh"])
@pytest.mark.parametrize("check", [False, True], ids=["unchecked", "checked"])
def test_sub_meshes_of_four_processes(name: str, kind: str, check: bool, ranks4: RankPool) -> None:
    for mesh in SUB_MESHES:
        assert_same(on_real_ranks(ranks4, name, mesh, kind, "plain", check), remembered(name, mesh))


def test_one_rank_needs_no_process_group() -> None:
    for name in CASES:
        results = as_bytes(CASES[name].function(Mesh(1, ranks=(5,), rank=5), plain))
        assert_same(results, remembered(name, MESHES[0])[5], name)
