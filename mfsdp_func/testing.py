"""A pytest fixture: distributed code in one line of a test, without processes.

In a project's tests::

    pytest_plugins = ["mfsdp_func.testing"]  # in conftest.py

    def test_my_step(simulated):
        results, trace = simulated(my_program, 8)

It takes the keywords of `simulate`, ``simulated(my_program, 8, carrier="nccl", choices=7)``, and writes the line that
replays the run, which pytest shows where the test fails.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from mfsdp_func.simulation.results import Simulation
from mfsdp_func.simulation.simulate import simulate


@pytest.fixture
def simulated() -> Callable[..., Simulation[Any]]:
    """`mfsdp_func.simulate` that also fails a test in which a result is read before its token was waited for."""

    def run(program: Callable[..., Any], shape: Any, *, poison: bool = True, **keywords: Any) -> Simulation[Any]:
        found = simulate(program, shape, poison=poison, **keywords)
        if found.replay:
            sys.stdout.write(f"{found.replay}\n")
        return found

    return run
