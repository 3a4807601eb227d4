"""On-policy rollouts: storages in memory, and trajectories on disk. Names load when they are first touched."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from reverb_writer.rollouts.labels import ActionLabelRollout as ActionLabelRollout
    from reverb_writer.rollouts.queue import QueueRolloutStorage as QueueRolloutStorage
    from reverb_writer.rollouts.replay_buffer import ReplayBuffer as ReplayBuffer
    from reverb_writer.rollouts.sarsa import SarsaRolloutStorage as SarsaRolloutStorage
    from reverb_writer.rollouts.storage import RolloutStorage as RolloutStorage
    from reverb_writer.rollouts.trajectories import split_and_pad_trajectories as split_and_pad_trajectories
    from reverb_writer.rollouts.trajectories import unpad_trajectories as unpad_trajectories

_MODULE_OF = {
    "ActionLabelRollout": "labels",
    "QueueRolloutStorage": "queue",
    "ReplayBuffer": "replay_buffer",
    "RolloutStorage": "storage",
    "SarsaRolloutStorage": "sarsa",
    "split_and_pad_trajectories": "trajectories",
    "unpad_trajectories": "trajectories",
}


def __getattr__(name: str) -> Any:
    """Load a public name at its first touch (PEP 562)."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names, loaded or not."""
    return sorted(globals().keys() | _MODULE_OF.keys())
