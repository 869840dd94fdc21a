"""Settings of the whole suite: few threads, reproducible hypothesis runs, pools of real ranks."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.spawn import RankPool  # sets the thread count, before torch is imported

import torch  # isort: skip

from tests.meshes import RunOnMesh, run_real, run_simulated  # isort: skip

torch.set_num_threads(1)
settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Two ranks that live as long as the session."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Four ranks that live as long as the session."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(params=["simulated", pytest.param("gloo", marks=pytest.mark.distributed)])
def run_on_mesh(request: pytest.FixtureRequest) -> RunOnMesh:
    """Run a program of a mesh on simulated ranks, and then the same test once more on real ones."""
    if request.param == "simulated":
        return run_simulated

    def run(program: Any, shape: Any, *args: Any, ranks: Any = None, **options: Any) -> dict[int, Any]:
        largest = max(ranks) if ranks else torch.Size(shape if isinstance(shape, tuple) else (shape,)).numel() - 1
        return run_real(
            request.getfixturevalue(f"ranks{2 if largest < 2 else 4}"), program, shape, *args, ranks=ranks, **options
        )

    return run
