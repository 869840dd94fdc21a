"""Compiled ranks leave torch's settings as they found them."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def settings_stay() -> Iterator[None]:
    """Before torch 2.13 a setting belongs to the process, and ranks that take turns restore one another's."""
    before = torch._dynamo.config.error_on_recompile
    yield
    torch._dynamo.config.error_on_recompile = before
