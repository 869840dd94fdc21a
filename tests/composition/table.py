"""The outcomes of all cells as a Markdown table."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from tests.composition.cells import CARRIERS, MODES, REFUSED, Cell
from tests.composition.operations import OPERATIONS
from tests.composition.transforms import TRANSFORMS

MATRIX = Path(__file__).parent / "MATRIX.md"

ALL_CELLS = [Cell(*names) for names in product(OPERATIONS, TRANSFORMS, MODES)]

_HEAD = """# What composes

Written by the run of `python -m pytest -m slow tests/composition`.

Every entry stands for {runs} runs: {modes}, each on {carriers} ranks. *Equal* means: on every rank, ranks that hold or
own nothing and empty pieces included, the numbers are those of the same transform around a plain dense function of all
ranks' tensors in one process (float64, 1e-10). Each function runs its operation twice, on unlike groups, between
something nonlinear; the objective is the sum over ranks. *Refused* means: an error that names the transform, on every
rank, before any communication. Compiled functions are one graph (`fullgraph=True`) and compile once.

"""

_FOOT = """
Why something is refused:

- `jacrev`, `jacfwd`, `hessian`: they batch one unit vector per element of a rank, so that one exchange would mix the
  rows of different ranks. Operations without communication do not care.
- `vmap` with unequal batches: an exchange needs equally many elements on all ranks.
- `checkpoint` in `grad`: torch refuses saved-tensor hooks under `torch.func` ("don't yet support saved tensor hooks").

What the names mean:

- `checkpoint`: `torch.utils.checkpoint` around the function, non-reentrant, then `.backward()`. In eager mode the
  recomputation exchanges again, alike on all ranks; in a compiled region results of exchanges are kept.
- `make_fx`, `export`: the traced graph, run (or compiled) on other numbers than those it was traced with.
"""


def render(outcomes: Mapping[tuple[str, Cell], str]) -> str:
    """The table; an entry is the one outcome of its runs, or all of them where they differ."""
    lines = [
        _HEAD.format(
            runs=len(MODES) * len(CARRIERS),
            modes="eager, `torch.compile` with `aot_eager` and with Inductor",
            carriers="two simulated and two gloo",
        ),
        f"| | {' | '.join(f'`{name}`' for name in OPERATIONS)} |\n",
        f"|---|{'---|' * len(OPERATIONS)}\n",
    ]
    for transform in TRANSFORMS:
        entries: list[str] = []
        for operation in OPERATIONS:
            found = {
                f"{carrier} {mode}": outcomes[carrier, Cell(operation, transform, mode)].splitlines()[0][:80]
                for carrier, mode in product(CARRIERS, MODES)
            }
            same = len(set(found.values())) == 1
            entries.append(next(iter(found.values())) if same else "; ".join(f"{k}: {v}" for k, v in found.items()))
        lines.append(f"| {transform} | {' | '.join(entries)} |\n")
    counts = [outcome == REFUSED for outcome in outcomes.values()]
    lines.append(f"\n{len(counts)} cells: {len(counts) - sum(counts)} equal, {sum(counts)} refused.\n")
    return "".join(lines) + _FOOT
