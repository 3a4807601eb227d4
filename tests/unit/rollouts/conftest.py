"""NumPy, and PyTorch where it is installed."""

from __future__ import annotations

from typing import Any

import pytest
from rollouts import DEVICES, arrays_of


@pytest.fixture(params=DEVICES, ids=["numpy", "torch"])
def device(request: pytest.FixtureRequest) -> Any:
    arrays_of(request.param)  # skips
    return request.param


@pytest.fixture
def make(device: Any) -> Any:
    """Return what makes arrays of the device."""
    return arrays_of(device)
