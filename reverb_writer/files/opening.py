"""Open a trajectory for reading, of our own format or of the original's; what is wrong with it shows here."""

from __future__ import annotations

from pathlib import Path

from reverb_writer.files.legacy import LegacyTrajectory
from reverb_writer.files.trajectory_folder import StoredTrajectory

__all__ = ["open_trajectory"]


def open_trajectory(path: Path, *, allow_pickle: bool = False) -> StoredTrajectory | LegacyTrajectory:
    """Open a trajectory, and check all files of one that has several: the first step is given before the last is read.

    Args:
        path: its folder.
        allow_pickle: whether it may be of the original's pickle files.

    Raises:
        FormatError: it is torn, half-written or damaged; names it.
        UnsafeDataError: a pickle asks for more than arrays.
    """
    stored: StoredTrajectory | LegacyTrajectory
    stored = LegacyTrajectory(path) if allow_pickle and LegacyTrajectory.is_at(path) else StoredTrajectory(path)
    if len(stored.manifest.parts) > 1:
        stored.verify()
    return stored
