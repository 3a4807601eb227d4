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
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, UnsafeDataError
from reverb_writer.files.manifest import End, Manifest, Part
from reverb_writer.files.trajectory_folder import MANIFEST, StoredTrajectory
from reverb_writer.files.trajectory_folder import open_trajectory as open_stored_trajectory
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


def open_trajectory(path: Path) -> StoredTrajectory | PickledTrajectory:
    """Open the trajectory in the folder `path`, of this project's format or of the original's.

    Raises:
        FormatError: it is torn, half-written or damaged; names it.
        UnsafeDataError: a pickle asks for more than arrays.
    """
    if not PickledTrajectory.is_at(path):
        return open_stored_trajectory(path)
    pickled = PickledTrajectory(path)
    if len(pickled.manifest.parts) > 1:  # its first step is delivered before its last file is read
        pickled.verify()
    return pickled


class PickledTrajectory:
    """A trajectory of pickle files, with the methods of `StoredTrajectory`.

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
        ranges = sorted((*frame_range(file.name), file) for file in path.iterdir() if _FILE.fullmatch(file.name))
        first = ranges[0][0] if ranges else 0
        parts = [Part(file.name, a - first, b - first, file.stat().st_size, 0) for a, b, file in ranges]
        at = 0
        for part in parts:
            if part.start != at or part.stop <= at:
                raise FormatError(f"trajectory `{path.name}`: `{part.file}` does not follow frame {at + first}.")
            at = part.stop
        if not at:
            raise FormatError(f"trajectory `{path.name}`: it has no files.")
        self.manifest = Manifest(
            num_steps=at,
            boundary_step=False,
            end=End.STEP,
            terminated=None,
            truncated=None,
            structure=None,
            leaves=(),
            parts=parts,
        )

    def __repr__(self) -> str:
        return f"<PickledTrajectory in {self.path}: {self.manifest.num_steps} steps>"

    @staticmethod
    def is_at(path: Path) -> bool:
        """Return whether the folder `path` holds such a trajectory."""
        return not (path / MANIFEST).exists() and any(_FILE.fullmatch(file.name) for file in path.iterdir())

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    def columns(self, part: Part) -> dict[str, Any]:
        """Return the arrays of one file, `part`: [T, ...] by key, the components of observations put together.

        Raises:
            FormatError: it is torn, or its arrays are not what its name says.
            UnsafeDataError: it asks for more than arrays.
        """
        try:
            return self._assemble_components(
                _frames(load_arrays((self.path / part.file).read_bytes()), part.stop - part.start)
            )
        except (FormatError, OSError) as error:
            raise FormatError(f"trajectory `{self.name}`, `{part.file}`: {error}") from error
        except UnsafeDataError as error:
            raise UnsafeDataError(f"trajectory `{self.name}`, `{part.file}`: {error}") from error

    def pack(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return the steps of `columns`, which are a nest already."""
        return columns

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield one frame after the other; holds one file in memory."""
        for part in self.manifest.parts:
            columns = self.columns(part)
            for values in zip(*columns.values(), strict=True):
                yield dict(zip(columns, values, strict=True))

    def verify(self) -> None:
        """Read all files.

        Raises:
            FormatError, UnsafeDataError: as for `columns`.
        """
        for part in self.manifest.parts:
            self.columns(part)

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
