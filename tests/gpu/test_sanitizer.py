"""The programs of `tests/test_streams.py` on a device, under torch's own sanitizer.

It sees operators and events, but forgets memory that is freed: of the planted bugs it finds those that wait too little.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mfsdp_func.effects.torch_internals import RECORDERS
from mfsdp_func.values.mesh import Mesh
from tests.stream_programs import PLANTS, PROGRAMS, WRONG, planted

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]

WAITS = [name for name, plant in PLANTS.items() if plant.kind == "missing wait"]


@pytest.fixture
def errors() -> Iterator[type[Exception]]:
    """What the sanitizer, which is on, raises."""
    from torch.cuda import _sanitizer

    torch.cuda.synchronize()
    before = RECORDERS.set(RECORDERS.get() + 1)
    _sanitizer.cuda_sanitizer.enable()
    yield _sanitizer.CUDASanitizerErrors
    _sanitizer.cuda_sanitizer.disable()
    RECORDERS.reset(before)
    torch.cuda.synchronize()


def run(program: Any) -> None:
    program(Mesh(1, rank=0), "cuda")


@pytest.mark.parametrize("name", PROGRAMS)
def test_clean(name: str, errors: type[Exception]) -> None:
    run(PROGRAMS[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_program_that_forgets_something_is_told(name: str, errors: type[Exception]) -> None:
    with pytest.raises(errors):
        run(WRONG[name])


@pytest.mark.parametrize("name", WAITS)
def test_planted_bugs_of_the_library_are_found(name: str, errors: type[Exception]) -> None:
    with planted(PLANTS[name]), pytest.raises(errors):
        run(PROGRAMS[PLANTS[name].program])
