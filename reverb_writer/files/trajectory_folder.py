"""Trajectories on disk: one folder each, made visible by one rename; readers check every checksum."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError
from reverb_writer.files import column_encoding as codec
from reverb_writer.files.manifest import Leaf, Manifest, Part
from reverb_writer.nests import packer, rows

Array = npt.NDArray[Any]

MANIFEST = "manifest.json"
PREFIX = "trajectory_"
PARTIAL = ".partial_"


class TrajectoryFolder:
    """A trajectory that is being written: hidden until `finish()`."""

    def __init__(self, data_dir: Path, name: str, leaves: Sequence[Leaf]) -> None:
        """Set the names; nothing is on disk before the first part."""
        self.final = data_dir / name
        self._partial = data_dir / f"{PARTIAL}{name}"
        self._leaves = leaves
        self.parts: list[Part] = []

    @property
    def num_steps(self) -> int:
        """Steps on disk."""
        return self.parts[-1].stop if self.parts else 0

    def add(self, columns: Sequence[Array]) -> None:
        """Write the next steps, leaves [T, ...], T >= 1.

        Raises:
            OSError: the disk failed, for example because it is full. Nothing changed.
        """
        data = codec.encode(self._leaves, columns)
        start, stop = self.num_steps, self.num_steps + len(columns[0])
        part = Part(f"steps_{start:06d}_{stop:06d}.npz", start, stop, len(data), zlib.crc32(data))
        if not self.parts:
            self._partial.mkdir(parents=True, exist_ok=True)
        (self._partial / part.file).write_bytes(data)
        self.parts.append(part)

    def finish(self, manifest: Manifest) -> Path:
        """Write the manifest, make the trajectory visible, and return its folder."""
        (self._partial / MANIFEST).write_text(manifest.to_json(), "utf-8")
        self._partial.rename(self.final)
        return self.final

    def discard(self) -> None:
        """Remove the unfinished trajectory."""
        shutil.rmtree(self._partial, ignore_errors=True)


class StoredTrajectory:
    """A trajectory on disk whose manifest is read. Immutable; safe to share between threads.

    Example:
        for path in list_trajectories("demos"):
            steps = StoredTrajectory(path).load()

    Attributes:
        path: its folder.
        manifest: its description.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the manifest, and check that all files exist with the right sizes; they are read later.

        Raises:
            FormatError: it is torn, half-written, or not of this format; names the folder.
        """
        self.path = Path(path)
        with self._named():
            self.manifest = Manifest.from_json((self.path / MANIFEST).read_bytes())
            for part in self.manifest.parts:
                size = (self.path / part.file).stat().st_size
                if size != part.size:
                    raise FormatError(f"`{part.file}` has {size} bytes, expected {part.size}.")

    def __repr__(self) -> str:
        return f"<StoredTrajectory in {self.path}: {self.manifest.num_steps} steps>"

    @property
    def name(self) -> str:
        """The folder's name; names sort by time."""
        return self.path.name

    def columns(self, part: Part) -> list[Array]:
        """Return the leaves of one file, `part`: [part.stop - part.start, ...]; some are read-only.

        Raises:
            FormatError: the file differs from the manifest; names it.
        """
        with self._named():
            data = self._read(part)
            return codec.decode(self.manifest.leaves, data, part.stop - part.start)

    def pack(self, columns: Sequence[Any]) -> Any:
        """Return the nest of steps with these leaves, given in the order of `columns`."""
        return packer(self.manifest.structure)(columns)

    def load(self) -> Any:
        """Return all steps, as a nest with leaves [T, ...], owned by the caller.

        Raises:
            FormatError: a file differs from the manifest; names it.
        """
        parts = [self.columns(part) for part in self.manifest.parts]
        return self.pack([np.concatenate(of) if len(of) > 1 else _owned(of[0]) for of in zip(*parts, strict=True)])

    def steps(self) -> Iterator[Any]:
        """Yield the steps one by one, as they were given to the writer; holds one file in memory."""
        for part in self.manifest.parts:
            yield from rows(self.manifest.structure, self.columns(part))

    def verify(self) -> None:
        """Check the checksums of all files.

        Raises:
            FormatError: a checksum is wrong; names the file.
        """
        with self._named():
            for part in self.manifest.parts:
                self._read(part)

    def _read(self, part: Part) -> Array:
        data = np.fromfile(self.path / part.file, np.uint8)
        if data.size != part.size or zlib.crc32(data.data) != part.crc32:
            raise FormatError(f"`{part.file}` is damaged: its checksum is wrong.")
        return data

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except (FormatError, OSError) as error:
            raise FormatError(f"trajectory `{self.path.name}`: {error}") from error


def open_trajectory(path: Path) -> StoredTrajectory:
    """Open a trajectory, and check all its files: its first step is delivered before its last one is read.

    Raises:
        FormatError: it is torn, half-written or damaged; names it.
    """
    stored = StoredTrajectory(path)
    if len(stored.manifest.parts) > 1:
        stored.verify()
    return stored


def list_trajectories(data_dir: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of the complete trajectories under `data_dir`, oldest first.

    Subfolders are searched too, because several writers may each have one. A missing directory has no trajectories. The
    order is that of the times in the names, so copying does not change it.
    """
    found: list[Path] = []
    pending = [os.fspath(data_dir)]
    while pending:
        with contextlib.suppress(FileNotFoundError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if not entry.is_dir() or entry.name.startswith("."):
                    continue
                if entry.name.startswith(PREFIX):
                    found.append(Path(entry.path))
                else:
                    pending.append(entry.path)
    return sorted(found, key=lambda path: (_number(path.name), path.name))


def _number(name: str) -> int:
    digits = re.match(r"\d+", name.removeprefix(PREFIX))
    return int(digits[0]) if digits else -1


def _owned(column: Array) -> Array:
    return column if column.flags.writeable and column.flags.aligned else column.copy()
