"""Rollouts for the tests: the libraries of their arrays, and transitions that are easy to recognise."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

DEVICES = [None, "cpu"]
"""NumPy, and PyTorch where it is installed."""


def arrays_of(device: Any) -> Any:
    """Return what makes arrays of a device; skips the test if its library is not there."""
    if device is None:
        return np.asarray
    torch = pytest.importorskip("torch")
    pytest.importorskip("array_api_compat")
    return torch.as_tensor


def plain(nest: Any) -> Any:
    """Return an array as lists, rounded to what float32 has."""
    return np.asarray(nest, np.float64).round(5).tolist()


def add(storage: Any, make: Any = np.asarray, **columns: Any) -> None:
    """Add transitions, one a row of the columns; what is not given is 0."""
    length = len(next(iter(columns.values())))
    for t in range(length):
        transition = storage.Transition(
            observations=make(np.zeros((storage.num_envs, *storage.observations.shape[2:]), np.float32)),
            actions=make(np.zeros((storage.num_envs, *storage.actions.shape[2:]), np.float32)),
            rewards=make(np.zeros((storage.num_envs, storage.rewards.shape[2]), np.float32)),
            dones=make(np.zeros(storage.num_envs, bool)),
        )
        for name, column in columns.items():
            setattr(transition, name, make(np.asarray(column[t])))
        storage.add_transitions(transition)
