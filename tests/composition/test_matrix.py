"""Every operation under every transform, eager and compiled, on simulated and on real ranks.

`pytest -m slow tests/composition` runs all cells and writes MATRIX.md; the others run a part of them.
"""

from collections.abc import Iterator
from functools import partial

import pytest

import mfsdp_func as mf
from tests.composition.cells import CARRIERS, MODES, Cell, expected_outcome, run_cells, run_cells_on_gloo
from tests.composition.operations import OPERATIONS
from tests.composition.table import ALL_CELLS, MATRIX, render
from tests.composition.transforms import TRANSFORMS
from tests.spawn import RankPool

# torch itself uses what it has deprecated: at the first `jvp`, when Inductor is imported, and where it lowers `diagonal`.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch._prims_common.check`:FutureWarning"),
]

Outcomes = dict[tuple[str, Cell], str]

EAGER = [cell for cell in ALL_CELLS if cell.mode == "eager"]
COMPILED = [
    Cell("gather", "grad", "aot_eager"),
    Cell("gather", "checkpoint", "aot_eager"),
    Cell("scatter", "vmap of grad", "aot_eager"),
    Cell("allgather", "jvp", "aot_eager"),
    Cell("reduce_scatter", ".backward()", "aot_eager"),
    Cell("redistribute", "vjp", "aot_eager"),
    Cell("allreduce", "jacrev", "aot_eager"),
    Cell("view", "plain", "aot_eager"),
    Cell("gather_coalesced", "vjp", "aot_eager"),
    Cell("scatter", "grad", "inductor"),
    Cell("reduce_scatter", "vmap, unequal batches", "inductor"),
]


def check(cells: list[Cell], by_rank: dict[int, dict[Cell, str]]) -> dict[Cell, str]:
    """The outcomes; fails where a rank's is not the expected one."""
    wrong = [
        f"rank {rank}, {' / '.join(cell)}: expected {expected_outcome(cell)}, {outcomes[cell]}"
        for cell in cells
        for rank, outcomes in by_rank.items()
        if outcomes[cell] != expected_outcome(cell)
    ]
    assert not wrong, "\n".join(wrong)
    return {cell: expected_outcome(cell) for cell in cells}


def run_simulated(cells: list[Cell]) -> dict[Cell, str]:
    return check(cells, mf.simulate(partial(run_cells, cells=cells), 2).results)


def run_on_gloo(cells: list[Cell], pool: RankPool, timeout: float) -> dict[Cell, str]:
    return check(cells, dict(enumerate(pool.run(run_cells_on_gloo, cells, timeout=timeout, group_timeout=timeout / 2))))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_eager_on_simulated_ranks(operation: str) -> None:
    run_simulated([cell for cell in EAGER if cell.operation == operation])


@pytest.mark.distributed
def test_eager_on_real_ranks(ranks2: RankPool) -> None:
    run_on_gloo(EAGER, ranks2, 180)


@pytest.mark.parametrize("cell", COMPILED, ids="-".join)
def test_compiled_on_simulated_ranks(cell: Cell) -> None:
    run_simulated([cell])


@pytest.mark.distributed
def test_compiled_on_real_ranks(ranks2: RankPool) -> None:
    run_on_gloo([cell for cell in COMPILED if cell.mode == "inductor" or cell.operation == "gather"], ranks2, 180)


@pytest.fixture(scope="module")
def outcomes() -> Iterator[Outcomes]:
    """What cells came to; written as a table once all of them have run."""
    found: Outcomes = {}
    yield found
    if len(found) == len(ALL_CELLS) * len(CARRIERS):
        MATRIX.write_text(render(found))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_all(carrier: str, mode: str, operation: str, outcomes: Outcomes, ranks2: RankPool) -> None:
    cells = [Cell(operation, transform, mode) for transform in TRANSFORMS]
    found = run_simulated(cells) if carrier == "simulated" else run_on_gloo(cells, ranks2, 1800)
    outcomes |= {(carrier, cell): outcome for cell, outcome in found.items()}


def test_table_is_complete() -> None:
    expected = {(carrier, cell): expected_outcome(cell) for carrier in CARRIERS for cell in ALL_CELLS}
    assert MATRIX.read_text() == render(expected), "run pytest -m slow tests/composition, which writes it"
