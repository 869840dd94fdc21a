"""Settings of the whole suite: few threads, reproducible hypothesis runs, pools of real ranks."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.spawn import RankPool  # sets the thread count, before torch is imported

import torch  # isort: skip

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
