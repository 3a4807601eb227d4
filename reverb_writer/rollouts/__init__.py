"""Rollouts: trajectories on disk, and between disk and replay server."""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "RolloutDataset": "files.dataset",
    "RolloutFileBase": "files.base",
    "RolloutTee": "files.tee",
    "RolloutWriter": "files.writer",
    "StoredTrajectory": "files.stored",
    "list_trajectories": "files.stored",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first touch (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
