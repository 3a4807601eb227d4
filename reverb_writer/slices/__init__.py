"""Slices of trajectories that are laid end to end in flat arrays [N, ...].

    kinds ───> find_trajectories ──> Trajectories ──> SliceSampler ──> Slices ──> gather ──> Batch
    of rows    or Trajectories.from_lengths           (integers only)             from the steps

docs/how-to/slices.md draws slices. The semantics are those of TorchRL's `SliceSampler`; docs/how-to/from-torchrl.md
lists the differences.
"""

from __future__ import annotations

from reverb_writer.slices.boundaries import Trajectories, find_trajectories
from reverb_writer.slices.gather import PaddedTrajectories, gather, pad_trajectories, split_trajectories
from reverb_writer.slices.sampler import Slices, SliceSampler

__all__ = [
    "PaddedTrajectories",
    "SliceSampler",
    "Slices",
    "Trajectories",
    "find_trajectories",
    "gather",
    "pad_trajectories",
    "split_trajectories",
]
