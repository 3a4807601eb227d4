"""On-policy rollouts: storages in memory, and trajectories on disk. Names load when they are first touched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reverb_writer.lazy import lazy_names

if TYPE_CHECKING:
    from reverb_writer.rollouts.files.base import RolloutFileBase as RolloutFileBase
    from reverb_writer.rollouts.files.dataset import RolloutDataset as RolloutDataset
    from reverb_writer.rollouts.files.exporting import export_items as export_items
    from reverb_writer.rollouts.files.importing import import_trajectories as import_trajectories
    from reverb_writer.rollouts.files.importing import send_trajectory as send_trajectory
    from reverb_writer.rollouts.files.minari import from_minari as from_minari
    from reverb_writer.rollouts.files.minari import to_minari as to_minari
    from reverb_writer.rollouts.files.stored import StoredTrajectory as StoredTrajectory
    from reverb_writer.rollouts.files.stored import list_trajectories as list_trajectories
    from reverb_writer.rollouts.files.tee import RolloutTee as RolloutTee
    from reverb_writer.rollouts.files.writer import RolloutWriter as RolloutWriter
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
    "RolloutDataset": "files.dataset",
    "RolloutFileBase": "files.base",
    "RolloutStorage": "storage",
    "RolloutTee": "files.tee",
    "RolloutWriter": "files.writer",
    "SarsaRolloutStorage": "sarsa",
    "StoredTrajectory": "files.stored",
    "export_items": "files.exporting",
    "from_minari": "files.minari",
    "import_trajectories": "files.importing",
    "list_trajectories": "files.stored",
    "send_trajectory": "files.importing",
    "split_and_pad_trajectories": "trajectories",
    "to_minari": "files.minari",
    "unpad_trajectories": "trajectories",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _MODULE_OF)
