"""Running cells of the matrix on one rank."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import init_device_mesh

import mfsdp_func as mf
from mfsdp_func.values.mesh import Mesh
from tests.composition.operations import OPERATIONS
from tests.composition.transforms import TRANSFORMS, Expected, Program

MODES = ("eager", "aot_eager", "inductor")
CARRIERS = ("simulated", "gloo")
EQUAL, REFUSED = "equal", "refused"


class Cell(NamedTuple):
    """An operation under a transform in a mode."""

    operation: str
    transform: str
    mode: str


def expected_outcome(cell: Cell) -> str:
    transform = TRANSFORMS[cell.transform]
    return REFUSED if transform.refusal and (transform.local or cell.operation != "view") else EQUAL


def compiler(mode: str) -> Callable[..., Any]:
    if mode == "eager":
        return lambda fn: fn
    return partial(torch.compile, fullgraph=True, backend=mode)


def run_cell(cell: Cell, mesh: Mesh) -> str:
    """What came of a cell on this rank: one of the outcomes, or what went wrong."""
    torch._dynamo.reset()
    operation, transform = OPERATIONS[cell.operation], TRANSFORMS[cell.transform]
    with torch._dynamo.config.patch(error_on_recompile=cell.mode != "eager" and cell.transform != "export"):
        try:
            found = transform.run(Program(operation, mesh), compiler(cell.mode))
        except Exception as error:
            # A compilation that fails inside `grad` leaves them disabled for all that follows in this thread.
            torch._C._autograd._saved_tensors_hooks_enable()
            told = transform.refusal and transform.refusal in str(error)
            return REFUSED if told else f"raised {type(error).__name__}: {error}"
    try:
        expected = transform.expected(Expected(operation, mesh))[mesh.ranks.index(mesh.get_rank())]
        torch.testing.assert_close(list(found), expected, rtol=1e-10, atol=1e-10)
    except AssertionError as error:
        return f"wrong: {error}"
    return EQUAL


def run_cells(mesh: Mesh, cells: Iterable[Cell]) -> dict[Cell, str]:
    return {cell: run_cell(cell, mesh) for cell in cells}


def run_cells_on_gloo(rank: int, cells: list[Cell]) -> dict[Cell, str]:
    return run_cells(mf.as_mesh(init_device_mesh("cpu", (2,))), cells)
