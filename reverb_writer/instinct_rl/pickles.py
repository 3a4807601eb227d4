"""instinct_rl's pickled trajectories: read them like this project's trajectories, or convert them.

    DIR/metadata.json
    DIR/trajectory_7/traj_000000_000064.pickle       frames 0..63: a dict of arrays [64, ...]
    DIR/trajectory_7/traj_000064_000100.pickle

Keys are `observations`, or `obs_NAME` for each component that `metadata.json` lists as `obs_segments`, and
`privileged_observations`, `actions`, `rewards`, `dones`, `values`, `timeouts`. A file name may have any ending.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from reverb_writer import files
from reverb_writer.errors import FormatError, StructureError, UnsafeDataError
from reverb_writer.files.episode_kinds import kinds_by_rule
from reverb_writer.instinct_rl.restricted_pickle import load_arrays
from reverb_writer.rows import LastRow

_FILE = re.compile(r"[^._]+_(\d+)_(\d+)(\.(?!npz$).*)?")  # this project's trajectories are .npz files
_LARGEST = 255


def frame_range(filename: str) -> tuple[int, int]:
    """Return the frames [start, stop) in `filename`.

    >>> frame_range("traj_100_200.pkl")
    (100, 200)

    Raises:
        FormatError: the name has no frames.
    """
    found = _FILE.fullmatch(filename)
    if not found:
        raise FormatError(f"`{filename}` names no frames, expected a name such as traj_000000_000064.pickle.")
    return int(found[1]), int(found[2])


def is_pickled(path: Path) -> bool:
    """Return whether `path` is the folder of a pickled trajectory."""
    return path.is_dir() and any(_FILE.fullmatch(file.name) for file in path.iterdir())


def list_trajectories(*data_dirs: str | os.PathLike[str]) -> list[Path]:
    """Return the trajectories under some directories, pickled ones and this project's, by modification time."""
    return sorted({*files.list_trajectories(*data_dirs), *_pickled(*data_dirs)}, key=_modified)


def load_trajectory(path: Path) -> dict[str, Any]:
    """Return the arrays of a pickled trajectory by key, [T, ...], with assembled components of observations."""
    chunks = sorted((*frame_range(file.name), file) for file in path.iterdir() if _FILE.fullmatch(file.name))
    if not chunks:
        raise FormatError(f"trajectory `{path.name}`: it has no files.")
    parts, at = [], chunks[0][0]
    for start, stop, file in chunks:
        where = f"trajectory `{path.name}`, `{file.name}`"
        if start != at or stop <= at:
            raise FormatError(f"{where}: it does not follow frame {at}.")
        try:
            arrays = _frames(load_arrays(file.read_bytes()), stop - start)
            if "observations" not in arrays:
                arrays = assemble_components(arrays, read_metadata(path.parent))
        except (FormatError, OSError) as error:
            raise FormatError(f"{where}: {error}") from error
        except UnsafeDataError as error:
            raise UnsafeDataError(f"{where}: {error}") from error
        parts.append(arrays)
        forms = {key: (array.dtype, array.shape[1:]) for key, array in arrays.items()}
        if forms != {key: (array.dtype, array.shape[1:]) for key, array in parts[0].items()}:
            raise FormatError(f"{where}: its arrays differ from those of the files before it.")
        at = stop
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def load_rows(path: Path, last_row: LastRow | None) -> tuple[Any, Any]:
    """Return the rows of a pickled trajectory and their kinds, as `RolloutDataset.load_trajectory` does."""
    steps = load_trajectory(path)
    return steps, kinds_by_rule(steps, len(next(iter(steps.values()))), None, last_row)


def convert_trajectories(data_dir: str | os.PathLike[str], target: str | os.PathLike[str]) -> dict[str, str]:
    """Write the pickled trajectories under a directory as trajectories of this project, in the same order.

    Args:
        data_dir: directory of the pickles; not changed.
        target: the new directory, for `RolloutDataset` and `reverb-writer import`. `metadata.json` is stored with each
            trajectory.

    Returns:
        Skipped trajectories, the reason by name: it is damaged, its arrays have other shapes than earlier ones, or the
        pickle has other objects than arrays.

    Raises:
        OSError: the disk failed, for example because it is full.
    """
    left_out = {}
    with files.RolloutWriter(target) as writer:
        for path in sorted(_pickled(data_dir), key=_modified):
            try:
                writer.save(load_trajectory(path), metadata=read_metadata(path.parent))
            except (FormatError, StructureError, UnsafeDataError) as error:
                left_out[path.name] = str(error)
    return left_out


def assemble_components(arrays: dict[str, Any], metadata: dict[str, Any]) -> dict[str, Any]:
    """Return arrays with `observations` [T, D] in place of `obs_NAME`, in the order of `metadata.json`."""
    segments, compressors = metadata.get("obs_segments"), metadata.get("obs_disassemble_mapping") or {}
    if not segments:
        raise FormatError("there are no `observations`, and `metadata.json` lists no `obs_segments`.")
    rest, columns = dict(arrays), []
    for segment in segments:
        component, compressor = rest.pop(f"obs_{segment}", None), compressors.get(segment)
        if component is None:
            raise FormatError(f"component `obs_{segment}` is missing.")
        if compressor not in (None, "normalized_image"):
            raise FormatError(f"component `obs_{segment}` is compressed by {compressor!r}, expected normalized_image.")
        column = np.asarray(component).reshape(len(component), -1).astype(np.float32)
        columns.append(column / np.float32(_LARGEST) if compressor else column)
    return {"observations": np.concatenate(columns, axis=1), **rest}


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the contents of `metadata.json`, or {} if it is missing or damaged."""
    try:
        found = json.loads((folder / "metadata.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _pickled(*data_dirs: str | os.PathLike[str]) -> list[Path]:
    return [path for data_dir in data_dirs for path in Path(data_dir).rglob("trajectory_*") if is_pickled(path)]


def _modified(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name


def _frames(arrays: Any, num_frames: int) -> dict[str, Any]:
    """Return the arrays by key, some of which instinct_rl saves in a tuple of one."""
    if not isinstance(arrays, dict):
        raise FormatError(f"it has a {type(arrays).__name__}, expected a dict of arrays.")
    found = {}
    for key, value in arrays.items():
        array = value[0] if isinstance(value, tuple) and len(value) == 1 else value
        if not isinstance(array, np.ndarray) or array.shape[:1] != (num_frames,):
            raise FormatError(f"`{key}` is no array of {num_frames} frames.")
        found[str(key)] = array.astype(array.dtype.newbyteorder("="), copy=False)
    return found
