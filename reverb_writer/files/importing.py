"""Import trajectories from disk through an observer, which writes the same windows as a live environment."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tree

from reverb_writer import rows
from reverb_writer.errors import (
    FormatError,
    ReplayTimeoutError,
    ServerUnavailableError,
    SpecError,
    StructureError,
    UnsafeDataError,
)
from reverb_writer.files.trajectory_file import StoredTrajectory
from reverb_writer.rows import LastRow

_LOG = logging.getLogger(__package__)
_CONFIRM_S = 2.0


class Transferred(NamedTuple):
    """The outcome of the import or the export of one trajectory or item.

    Attributes:
        name: name of the trajectory's file, or key of the item.
        num_steps: number of transferred steps; 0 if it was skipped.
        error: the reason why it was skipped, or "".
    """

    name: str
    num_steps: int
    error: str = ""


class Journal:
    """A file of the trajectories that the server has confirmed, so that a repeated import sends only the others.

    The file has JSON lines: first the purpose of the import, then the paths of the trajectories. Paths are relative to
    the directory of the trajectories, because it may be moved, and because files of two runs may have the same name. A
    line that a kill or a full disk cut short is ignored: its trajectory is sent again. `done` has the paths of
    confirmed trajectories, as `name_of` returns them.
    """

    def __init__(self, path: Path, purpose: Mapping[str, Any], directory: Path) -> None:
        """Read the file if it exists.

        Args:
            path: the journal's file; it may be missing.
            purpose: names and values that tell imports apart, such as the table; JSON can store them.
            directory: the directory of the trajectories.

        Raises:
            SpecError: the file belongs to another import, or is not a journal.
        """
        self._path, self._purpose, self._directory = path, dict(purpose), directory
        self.done: set[str] = set()
        lines = path.read_bytes().splitlines() if path.exists() else []
        if not lines:
            return
        found = None
        with suppress(ValueError):
            found = json.loads(lines[0])
        if found != self._purpose:
            raise SpecError(
                f"journal {path} belongs to another import, or its first line cannot be read: it has {lines[0]!r}, "
                f"expected {self._purpose}. If an import was cut short while it wrote that line, remove the file: "
                "everything is sent again. Otherwise name another file."
            )
        for line in lines[1:]:
            with suppress(ValueError):  # cut short
                self.done.add(json.loads(line))

    def name_of(self, path: Path) -> str:
        """Return the `path` of a trajectory relative to the directory."""
        return Path(os.path.relpath(path, self._directory)).as_posix()

    def add(self, names: Iterable[str]) -> None:
        """Add the paths of confirmed trajectories: `names`, as `name_of` returns them."""
        names = list(names)
        with self._path.open("a+b") as file:
            size = file.tell()
            file.seek(max(size - 1, 0))
            is_torn = file.read(1) not in (b"", b"\n")
            lines = [""] if is_torn else [] if size else [json.dumps(self._purpose)]
            lines += map(json.dumps, names)
            file.write("\n".join([*lines, ""]).encode())
        self.done.update(names)

    def __repr__(self) -> str:
        return f"<Journal {self._path} of {len(self.done)} trajectories>"


def send_trajectory(trajectory: StoredTrajectory, observer: Any, last_row: LastRow | None = None) -> int:
    """Send the rows of `trajectory` to `observer`, which has one environment; return their number.

    Each episode ends as it ended in the recording. Padding is not sent: the observer pads as it is told.

    Args:
        trajectory: the trajectory; its rows may belong to several episodes.
        observer: any observer of one environment.
        last_row: only for files without kinds of rows, as for `RolloutDataset`.

    Raises:
        FormatError: the trajectory is damaged; no step was sent.
        StructureError: its steps differ in structure from the observer's earlier steps; or as for `load_rows`.
        ReplayTimeoutError, ServerUnavailableError: as for the observer.
    """
    steps, kinds = trajectory.load_rows(last_row)
    starts, stops = (found(kinds).nonzero()[0] for found in (rows.first_rows, rows.last_rows))
    for start, stop in zip(starts.tolist(), (stops + 1).tolist(), strict=True):
        part = slice(start, stop)
        observer.extend(tree.map_structure(lambda leaf, part=part: leaf[part], steps), kinds=kinds[part])
        if not kinds[stop - 1] & rows.LAST:
            _end_cut(observer, discard=not trajectory.manifest.is_reset)
    return len(kinds)


def _end_cut(observer: Any, *, discard: bool) -> None:
    """End an episode whose last row is missing."""
    if not discard:
        with suppress(SpecError):  # fewer steps than a window: live writing also drops them
            observer.reset()
            return
    observer.reset(discard=True)


def import_trajectories(
    paths: Iterable[Path],
    observer: Any,
    *,
    journal: Journal | None = None,
    before: Callable[[Any], None] | None = None,
    last_row: LastRow | None = None,
) -> Generator[Transferred, None, None]:
    """Send trajectories one by one, and yield the outcome of each; confirm them every two seconds and at the end.

    A damaged trajectory is skipped, and the log names it. To stop between two trajectories, close the iterator: sent
    trajectories are then confirmed and added to the journal, and the next import writes no window twice. After a kill,
    or if the server does not answer, the next import sends unconfirmed trajectories again.

    Args:
        paths: files of trajectories.
        observer: any observer of one environment.
        journal: record of confirmed trajectories: earlier ones are skipped, and new ones are added.
        before: called with each trajectory before its first step.
        last_row: only for files without kinds of rows, as for `RolloutDataset`.

    Raises:
        StructureError: a trajectory's steps differ from earlier steps or from the table's; the error names it.
        ReplayTimeoutError, ServerUnavailableError: as for the observer.
    """
    unconfirmed: list[Path] = []
    confirmed_at = time.monotonic()
    try:
        for path in paths:
            if journal is not None and journal.name_of(path) in journal.done:
                continue
            try:
                trajectory = StoredTrajectory(path)
                if before is not None:
                    before(trajectory)
                num_steps = send_trajectory(trajectory, observer, last_row)
            except (FormatError, UnsafeDataError) as error:
                _LOG.warning("Skipped: %s", error)
                yield Transferred(path.name, 0, str(error))
                continue
            except StructureError as error:
                raise StructureError(f"trajectory `{path.name}`: {error}") from error
            unconfirmed.append(path)
            if time.monotonic() - confirmed_at > _CONFIRM_S:
                _confirm(observer, journal, unconfirmed)
                confirmed_at = time.monotonic()
            yield Transferred(path.name, num_steps)
    except GeneratorExit:
        _confirm(observer, journal, unconfirmed)
        raise
    except (ReplayTimeoutError, ServerUnavailableError):
        raise
    except BaseException:
        with suppress(Exception):  # the first error counts
            _confirm(observer, journal, unconfirmed)
        raise
    _confirm(observer, journal, unconfirmed)


def _confirm(observer: Any, journal: Journal | None, paths: list[Path]) -> None:
    observer.flush()
    if journal is not None and paths:
        journal.add(map(journal.name_of, paths))
    paths.clear()
