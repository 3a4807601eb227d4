"""Trajectories in the files of instinct_rl's savers, which are pickles.

    DIR/metadata.json
    DIR/trajectory_7/traj_000000_000064.pickle       frames 0..63: a dict of arrays [64, ...]
    DIR/trajectory_7/traj_000064_000100.pickle

Keys are `observations`, or `obs_NAME` for each component that `metadata.json` lists under `obs_segments`, and
`privileged_observations`, `actions`, `rewards`, `dones`, `values`, `timeouts`. A file name may have any
ending.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.files.manifest import End, Manifest
from reverb_writer.files.step_layout import StepLayout
from reverb_writer.files.trajectory_file import PREFIX, StoredTrajectory, sort_by_time
from reverb_writer.files.trajectory_file import list_trajectories as list_stored
from reverb_writer.instinct_rl.restricted_pickle import load_arrays

_FILE = re.compile(r"[^._]+_(\d+)_(\d+)(\..*)?")
_LARGEST = 255


def frame_range(filename: str) -> tuple[int, int]:
    """Return the frames [start, stop) that a file's name states.

    >>> frame_range("traj_100_200.pkl")
    (100, 200)
    """
    found = _FILE.fullmatch(filename)
    if not found:
        raise FormatError(f"`{filename}` names no frames, expected a name such as traj_000000_000064.pickle.")
    return int(found[1]), int(found[2])


def list_trajectories(data_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the trajectories under `data_dir`, files of this project and folders of the original, oldest first."""
    folders = [path for path in Path(data_dir).rglob(f"{PREFIX}*") if path.is_dir()]
    return sort_by_time([*list_stored(data_dir), *folders])


def open_trajectory(path: Path) -> StoredTrajectory | PickledTrajectory:
    """Open the trajectory at `path`, a file of this project or a folder of the original.

    Raises:
        FormatError: it is torn or damaged; names it.
    """
    return PickledTrajectory(path) if path.is_dir() else StoredTrajectory(path)


class PickledTrajectory:
    """A trajectory of pickle files, with `manifest` and `load` of `StoredTrajectory`.

    Attributes:
        path: its folder.
        manifest: what the file names tell about it.
    """

    def __init__(self, path: Path) -> None:
        """Read the file names.

        Raises:
            FormatError: they are not one after the other.
        """
        self.path = path
        self._files = sorted((*frame_range(file.name), file) for file in path.iterdir() if _FILE.fullmatch(file.name))
        if not self._files:
            raise FormatError(f"trajectory `{path.name}`: it has no files.")
        first = at = self._files[0][0]
        for start, stop, file in self._files:
            if start != at or stop <= at:
                raise FormatError(f"trajectory `{path.name}`: `{file.name}` does not follow frame {at}.")
            at = stop
        no_layout = StepLayout(None, (), "")  # it is known only when the files are read
        self.manifest = Manifest(at - first, False, End.STEP, None, None, no_layout)

    def __repr__(self) -> str:
        return f"<PickledTrajectory in {self.path}: {self.manifest.num_steps} steps>"

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    def load(self) -> dict[str, Any]:
        """Return the arrays of all files, [T, ...] by key, the components of observations put together.

        Raises:
            FormatError: a file is torn, or its arrays are not what its name says, or not those of the other files.
            UnsafeDataError: a file asks for more than arrays.
        """
        chunks = []
        for start, stop, file in self._files:
            try:
                chunks.append(self._assemble_components(_frames(load_arrays(file.read_bytes()), stop - start)))
            except (FormatError, OSError) as error:
                raise FormatError(f"trajectory `{self.name}`, `{file.name}`: {error}") from error
            except UnsafeDataError as error:
                raise UnsafeDataError(f"trajectory `{self.name}`, `{file.name}`: {error}") from error
        try:
            return {key: np.concatenate([chunk[key] for chunk in chunks]) for key in chunks[0]}
        except (KeyError, ValueError) as error:
            raise FormatError(f"trajectory `{self.name}`: its files do not have the same arrays ({error}).") from error

    def _assemble_components(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Put `obs_NAME` arrays together to `observations` [T, D], in the order that `metadata.json` lists."""
        if "observations" in arrays:
            return arrays
        path = self.path.parent / "metadata.json"
        try:
            metadata = json.loads(path.read_bytes())
            segments, compressors = list(metadata["obs_segments"]), metadata.get("obs_disassemble_mapping") or {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise FormatError(
                f"there are no `observations`, and `metadata.json` lists no `obs_segments`: {error!r}"
            ) from None
        rest = dict(arrays)
        parts: list[npt.NDArray[Any]] = []
        for segment in segments:
            component = rest.pop(f"obs_{segment}", None)
            if component is None:
                raise FormatError(f"component `obs_{segment}` is missing.")
            compressor = compressors.get(segment)
            if compressor not in (None, "normalized_image"):
                raise FormatError(
                    f"component `obs_{segment}` is compressed by {compressor!r}, expected normalized_image."
                )
            column = component.reshape(len(component), -1).astype(np.float32)
            parts.append(column / np.float32(_LARGEST) if compressor else column)
        return {"observations": np.concatenate(parts, axis=1), **rest}


def _frames(arrays: Any, num_frames: int) -> dict[str, Any]:
    """Return the arrays by key; the original's savers leave some arrays in a tuple of one, which is removed."""
    if not isinstance(arrays, dict):
        raise FormatError(f"it has a {type(arrays).__name__}, expected a dict of arrays.")
    found = {
        str(key): value[0] if isinstance(value, tuple) and len(value) == 1 else value for key, value in arrays.items()
    }
    for key, value in found.items():
        if not isinstance(value, np.ndarray) or value.shape[:1] != (num_frames,):
            raise FormatError(f"`{key}` is no array of {num_frames} frames.")
    return found
