"""Trajectories on disk: one `.npz` file each, made visible by one rename; zip's CRC-32 finds damage.

Images of uint8 are deflated. No member is a pickle, and none is unpickled.

trajectory_01764000000000000000_1f3a9c2e_00000007.npz
    manifest.json            length, end, structure of the steps
    kinds                    an array: the kinds of the rows, [T] uint8
    observation/rgb.npy      all steps of a leaf: [T, ...]
    reward.npy               format of NumPy's NEP 1, version 1.0
.partial_trajectory_...      in progress, or left by a killed writer; never read
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
import os
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from reverb_writer.errors import FormatError, StructureError
from reverb_writer.files.episode_kinds import kinds_by_rule
from reverb_writer.files.manifest import KINDS, MAX_BYTES, Manifest, member
from reverb_writer.nests import packer
from reverb_writer.rows import LastRow

Array = npt.NDArray[Any]

PREFIX, SUFFIX = "trajectory_", ".npz"

_PARTIAL = ".partial_"
_MANIFEST = "manifest.json"
_ABANDONED_S = 3600.0  # a file in progress changes often: if unchanged for an hour, its writer was killed
_IMAGE_DIMS = 3  # [T, height, width], or more
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_HEADER_ALIGNMENT = 64
_DEFLATE_LEVEL = 1  # writes images twice as fast as 6, to 1/60 of their size instead of 1/100
# Errors of `zipfile` for a file that is damaged, torn or no zip file; RuntimeError if its header says encrypted.
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, KeyError, OverflowError, RuntimeError, ValueError)


def write_trajectory(path: Path, manifest: Manifest, columns: Sequence[Array], kinds: Array | None) -> None:
    """Write a trajectory, columns [T, ...], and the kinds of its rows [T], None if they are not known.

    It becomes visible when it is complete; a failure leaves no file.
    """
    members = {member(name): array for name, array in manifest.layout.encode(columns).items()}
    if kinds is not None:
        members[KINDS] = kinds
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(zipfile.ZipInfo(_MANIFEST), manifest.to_json())  # dated 1980: equal data makes equal files
        for name, array in members.items():
            is_image = array.dtype == np.uint8 and array.ndim >= _IMAGE_DIMS
            method = zipfile.ZIP_DEFLATED if is_image else zipfile.ZIP_STORED
            data = _header(array.dtype, array.shape) + array.tobytes()
            archive.writestr(zipfile.ZipInfo(name), data, method, _DEFLATE_LEVEL)
    path.parent.mkdir(parents=True, exist_ok=True)  # a user may have removed it
    partial = path.with_name(f"{_PARTIAL}{path.name}")
    try:
        partial.write_bytes(out.getbuffer())
        partial.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def remove_abandoned(data_dir: Path) -> None:
    """Remove partial files of killed writers from a directory."""
    for partial in data_dir.glob(f"{_PARTIAL}{PREFIX}*"):
        with contextlib.suppress(OSError):  # another writer does the same
            if time.time() - partial.stat().st_mtime > _ABANDONED_S:
                partial.unlink()


class StoredTrajectory:
    """A trajectory on disk whose manifest is read. Immutable; safe to share between threads.

    Example:
        for path in list_trajectories("demos"):
            steps = StoredTrajectory(path).load()

    Attributes:
        path: path of the file.
        manifest: description of the trajectory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read the manifest; the steps are read later.

        Raises:
            FormatError: the file is torn, damaged, or of another format; the error names it.
        """
        self.path = Path(path)
        with _opened(self.path) as archive:
            self.manifest = Manifest.from_json(_read_manifest(archive))

    def __repr__(self) -> str:
        return f"<StoredTrajectory in {self.path}: {self.manifest.num_steps} steps>"

    def load(self) -> Any:
        """Return all steps, as a nest with leaves [T, ...], owned by the caller.

        Raises:
            FormatError: the file is damaged; the error names it.
        """
        with _opened(self.path) as archive:
            return _steps(archive, self.manifest)

    def load_rows(self, last_row: LastRow | None = None) -> tuple[Any, Array]:
        """Return all steps, leaves [T, ...], and the kinds of their rows, uint8 [T]; the caller owns both.

        Args:
            last_row: whose row the flags of an end stand on; only for files without kinds.

        Raises:
            FormatError: the file is damaged; the error names it.
            StructureError: the file has no kinds, and its leaves contradict themselves, or do not show whose row the
                flags of an end stand on.
        """
        with _opened(self.path) as archive:
            found = _rows(archive, self.manifest)
        return _with_kinds(self.path, self.manifest, last_row, *found)


def load_rows(path: Path, last_row: LastRow | None = None) -> tuple[Any, Array]:
    """Return what `StoredTrajectory(path).load_rows` returns; the file is opened once, not twice.

    Raises:
        FormatError, StructureError: as for `StoredTrajectory`.
    """
    with _opened(path) as archive:
        manifest = Manifest.from_json(_read_manifest(archive))
        found = _rows(archive, manifest)
    return _with_kinds(path, manifest, last_row, *found)


def _rows(archive: zipfile.ZipFile, manifest: Manifest) -> tuple[Any, Array | None]:
    """Return the rows and their kinds; None if the file has no kinds."""
    steps = _steps(archive, manifest)
    if not manifest.has_kinds:
        return steps, None
    return steps, _read_array(archive, KINDS, np.dtype(np.uint8), (manifest.num_steps,)).copy()


def _with_kinds(
    path: Path, manifest: Manifest, last_row: LastRow | None, steps: Any, kinds: Array | None
) -> tuple[Any, Array]:
    if kinds is not None:
        return steps, kinds
    try:
        return steps, kinds_by_rule(steps, manifest.num_steps, manifest.former, last_row)
    except StructureError as error:
        raise StructureError(f"trajectory `{path.name}`: {error}") from error


def _steps(archive: zipfile.ZipFile, manifest: Manifest) -> Any:
    layout = manifest.layout
    columns = layout.decode(functools.partial(_read_array, archive), manifest.num_steps)
    return packer(layout.nest)(columns)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a file; errors of a damaged file name it."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except (FormatError, OSError) as error:
        raise FormatError(f"trajectory `{path.name}`: {error}") from error
    except _DAMAGED as error:
        raise FormatError(f"trajectory `{path.name}`: it is torn or damaged ({error}).") from error


def _read_array(archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    header, count = _header(dtype, shape), math.prod(shape)
    data = _read(archive, name, len(header) + count * dtype.itemsize)
    if not data.startswith(header):
        raise FormatError(f"array `{name}` is not {dtype} {shape}, as the manifest says.")
    return np.frombuffer(data, dtype, count, len(header)).reshape(shape)


@functools.lru_cache(maxsize=1024)
def _header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    """Return the header, which is compared and not parsed: parsing takes most of the time of a short trajectory."""
    text = f"{{'descr': {dtype.str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    size = -(-(10 + len(text) + 1) // _HEADER_ALIGNMENT) * _HEADER_ALIGNMENT - 10
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", size) + text.ljust(size - 1).encode("latin1") + b"\n"


def _read_manifest(archive: zipfile.ZipFile) -> bytes:
    """Return the manifest; raises FormatError before more than `MAX_BYTES` are inflated."""
    data = _read_at_most(archive, _MANIFEST, MAX_BYTES)
    if len(data) > MAX_BYTES:
        raise FormatError(f"its manifest has more than {MAX_BYTES:,} bytes.")
    return data


def _read(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    data = _read_at_most(archive, name, size)
    found = archive.getinfo(name).file_size
    if len(data) != size or found != size:
        raise FormatError(f"`{name}` has {found} bytes, not {size}, as the manifest says.")
    return data


def _read_at_most(archive: zipfile.ZipFile, name: str, size: int) -> bytes:
    """Return a member's bytes, or its first `size` + 1 bytes."""
    info = archive.getinfo(name)
    if info.compress_type not in _METHODS:  # other methods raise other errors
        raise FormatError(f"`{name}` is compressed by method {info.compress_type}, expected one of {_METHODS}.")
    with archive.open(info) as stream:
        return stream.read(size + 1)


def list_trajectories(*data_dirs: str | os.PathLike[str]) -> list[Path]:
    """Return the files of the complete trajectories under one or several directories, oldest first.

    Subfolders are also searched, because each writer may have its own. A missing directory has no trajectories. The
    order is that of the times in the names, so copying does not change it.
    """
    found: list[Path] = []
    for folder, folders, names in itertools.chain.from_iterable(os.walk(each, followlinks=True) for each in data_dirs):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.startswith(PREFIX) and name.endswith(SUFFIX)]
    return sorted(found, key=lambda path: (path.name, path))


def stored_metadata(data_dir: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the metadata of the readable trajectories of a directory."""
    for path in list_trajectories(data_dir):
        with contextlib.suppress(FormatError):
            yield StoredTrajectory(path).manifest.metadata
