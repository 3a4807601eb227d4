"""From disk to a replay server: trajectories through an observer, so that the windows are those of live writing."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import tree

from reverb_writer.errors import (
    FormatError,
    ReplayTimeoutError,
    ServerUnavailableError,
    SpecError,
    StructureError,
    UnsafeDataError,
)
from reverb_writer.files.journal import Journal
from reverb_writer.files.manifest import End
from reverb_writer.files.opening import open_trajectory

__all__ = ["Imported", "import_trajectories", "send_trajectory"]

_LOG = logging.getLogger("reverb_writer")
_CONFIRM_S = 2.0


class Imported(NamedTuple):
    """What became of one trajectory.

    Attributes:
        name: its folder's name.
        num_steps: steps sent; 0 if it was left out.
        error: why it was left out; empty if it was not.
    """

    name: str
    num_steps: int
    error: str = ""


def send_trajectory(trajectory: Any, observer: Any) -> int:
    """Give an observer the steps of a trajectory as they were given to the writer, and end its episode as it ended.

    Args:
        trajectory: a `StoredTrajectory`, or the like.
        observer: any observer of one environment of this package.

    Returns:
        The number of steps.

    Raises:
        StructureError: its steps are not those that the observer had before.
        ReplayTimeoutError, ServerUnavailableError: as for the observer.
    """
    manifest = trajectory.manifest
    for part in manifest.parts:
        steps = trajectory.pack(trajectory.columns(part))
        is_last = part.stop == manifest.num_steps and manifest.end is End.STEP
        rest = tree.map_structure(lambda leaf: leaf[:-1], steps) if is_last else steps
        if part.stop - part.start > is_last:
            observer.extend(rest)
        if is_last:
            observer(tree.map_structure(lambda leaf: leaf[-1], steps), end_of_episode=True)
    if manifest.end is End.RESET:
        try:
            observer.reset(write_cached_steps=True)
        except SpecError:  # fewer steps than a window, which live writing does not write either
            observer.reset(write_cached_steps=False)
    elif manifest.end is End.CUT:
        observer.reset(write_cached_steps=False)
    return int(manifest.num_steps)


def import_trajectories(
    paths: Iterable[Path],
    observer: Any,
    *,
    journal: Journal | None = None,
    allow_pickle: bool = False,
    before: Callable[[Any], None] | None = None,
) -> Generator[Imported, None, None]:
    """Send trajectories one after the other, and confirm them with the server every two seconds and at the end.

    One that is damaged is left out, by name in the log. Close the iterator to stop between two trajectories: what was
    sent is confirmed then, too, and written to the journal, so that the next import goes on without a window twice. If
    the process is killed instead, or the server does not answer, the next one sends again what was not confirmed.

    Args:
        paths: folders of trajectories.
        observer: any observer of one environment.
        journal: what was imported before, which is left out, and where to write down what is now.
        allow_pickle: whether trajectories of the original's pickle files are read, too.
        before: is called with each trajectory before its first step.

    Yields:
        What became of each, once it is sent.

    Raises:
        StructureError: the steps of one differ from those before, or from the table's; names it.
        ReplayTimeoutError, ServerUnavailableError: as for the observer.
    """
    unconfirmed: list[str] = []
    confirmed_at = time.monotonic()
    try:
        for path in paths:
            if journal is not None and path.name in journal.done:
                continue
            try:
                num_steps = _send(open_trajectory(path, allow_pickle=allow_pickle), observer, before)
            except (FormatError, UnsafeDataError) as error:
                _LOG.warning("Left out: %s", error)
                yield Imported(path.name, 0, str(error))
                continue
            unconfirmed.append(path.name)
            if time.monotonic() - confirmed_at > _CONFIRM_S:
                _confirm(observer, journal, unconfirmed)
                confirmed_at = time.monotonic()
            yield Imported(path.name, num_steps)
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


def _send(trajectory: Any, observer: Any, before: Callable[[Any], None] | None) -> int:
    """Send a trajectory; one that is damaged raises before its first step is sent."""
    if before is not None:
        before(trajectory)
    try:
        return send_trajectory(trajectory, observer)
    except StructureError as error:
        raise StructureError(f"trajectory `{trajectory.name}`: {error}") from error
    except FormatError:  # if it was damaged since it was opened, some of its steps may be sent
        observer.reset(write_cached_steps=False)
        raise


def _confirm(observer: Any, journal: Journal | None, names: list[str]) -> None:
    observer.flush()
    if journal is not None and names:
        journal.add(names)
    names.clear()
