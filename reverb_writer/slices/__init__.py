"""Slices of trajectories that are laid end to end in flat arrays [N, ...].

    markers ──> find_trajectories ──> Trajectories ──> SliceSampler ──> Slices ──> gather ──> Batch
    of steps    or Trajectories.from_lengths           (integers only)             from the steps

docs/how-to/slices.md draws slices. The semantics are those of TorchRL's `SliceSampler`; docs/how-to/from-torchrl.md
lists the differences.
"""

from __future__ import annotations

from reverb_writer.slices.batch import SliceMarkers
from reverb_writer.slices.boundaries import Trajectories, find_trajectories
from reverb_writer.slices.gather import PaddedTrajectories, gather, pad_trajectories, sample_members, split_trajectories
from reverb_writer.slices.markers import Markers, read_markers
from reverb_writer.slices.sampler import Slices, SliceSampler

__all__ = [
    "Markers",
    "PaddedTrajectories",
    "SliceMarkers",
    "SliceSampler",
    "Slices",
    "Trajectories",
    "find_trajectories",
    "gather",
    "pad_trajectories",
    "read_markers",
    "sample_members",
    "split_trajectories",
]
