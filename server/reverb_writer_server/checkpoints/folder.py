"""The folder of a server's checkpoints.

    DIRECTORY/
      OWNER.json     marks the folder as one of this server; locked while a server uses it
      incoming/      where Reverb writes. It keeps the checkpoint of the highest name and deletes everything else there
      kept/          the newest checkpoints, named by the time at which they were finished
        20260801T120000.123456Z/
          tables.tfrecord, items.tfrecord, chunks.tfrecord, DONE, MANIFEST.json

A finished checkpoint in `incoming` gets a second name in `kept`: hard links, no copy, so that Reverb may delete its
own. A folder with anything else in it is refused: Reverb takes the last name in alphabetical order for its newest
checkpoint, so next to `lost+found` it would delete the checkpoint that it has just written.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator
from datetime import timezone
from pathlib import Path
from typing import Any

from reverb_writer.errors import ReverbWriterError, SpecError
from reverb_writer_server.checkpoints.contents import MANIFEST, Checkpoint
from reverb_writer_server.checkpoints.tfrecord import DONE, FILES

__all__ = ["CheckpointError", "CheckpointFolder", "check_directory", "checkpoints_in", "select_checkpoint"]

_logger = logging.getLogger(__name__)
_OWNER, _INCOMING, _KEPT = "OWNER.json", "incoming", "kept"
_PARTIAL = ".partial-"


class CheckpointError(ReverbWriterError):
    """A folder of checkpoints or a checkpoint that cannot be used."""


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, complete or not, newest first; a running server may use the folder.

    Raises:
        CheckpointError: it is not a folder of checkpoints.
    """
    if not (directory / _OWNER).is_file():
        raise CheckpointError(f"{directory}: is not a folder of checkpoints (it has no {_OWNER}). Check the path.")
    return sorted((Checkpoint(path) for path in (directory / _KEPT).iterdir()), key=lambda one: one.name, reverse=True)


def select_checkpoint(directory: Path, restore: str) -> Checkpoint | None:
    """Return the checkpoint that `restore` names: "latest", "none" or a name.

    Raises:
        CheckpointError: no checkpoint has that name, or it is incomplete; or with "latest", all are incomplete.
    """
    found = checkpoints_in(directory) if directory.exists() and any(directory.iterdir()) else []
    if restore == "none":
        return None
    if restore == "latest":
        for one in found:
            fault = one.fault()
            if fault is None:
                return one
            _logger.warning("checkpoint %s is incomplete and not restored: %s.", one.name, fault)
        if found:
            raise CheckpointError(
                f"{directory}: all {len(found)} checkpoints are incomplete; of the newest, {found[0].name}: "
                f'{found[0].fault()}. Restore its files, or set checkpoints.restore = "none" to begin empty.'
            )
        return None
    named = next((one for one in found if one.name == restore), None)
    if named is None:
        names = ", ".join(one.name for one in found) or "none"
        raise CheckpointError(f"{directory}: there is no checkpoint `{restore}`; found: {names}.")
    fault = named.fault()
    if fault:
        raise CheckpointError(f"{named.path}: {fault}. It is incomplete; choose another one.")
    return named


class CheckpointFolder:
    """The checkpoint folder of a running server; a context manager that holds its lock.

    Attributes:
        directory: the folder.
        incoming: the folder that Reverb writes to.
        starts: how often a server has started on the folder, this time included.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        """Lock the folder, which is created if it does not exist.

        Args:
            directory: an empty folder, or one that this server has used before.
            keep: how many checkpoints to keep, >= 1.

        Raises:
            CheckpointError: the folder contains other files, another server uses it, or it cannot be written.
        """
        self.directory = directory
        self.incoming = directory / _INCOMING
        self._kept = directory / _KEPT
        self._keep = keep
        self._kept_names: set[str] = set()
        with contextlib.ExitStack() as undo:
            try:
                check_directory(directory)
                directory.mkdir(parents=True, exist_ok=True)
                owner = undo.enter_context((directory / _OWNER).open("a+"))
                _lock(owner, directory)
                self.starts = _count_start(owner)
                self._kept.mkdir(exist_ok=True)
                self.incoming.mkdir(exist_ok=True)
                self.keep_finished()
                for leftover in [*self.incoming.iterdir(), *self._kept.glob(f"{_PARTIAL}*")]:
                    shutil.rmtree(leftover)
            except OSError as error:
                raise _unusable(directory, error) from error
            self._undo = undo.pop_all()

    def keep_finished(self) -> list[Checkpoint]:
        """Keep what Reverb has finished since the last call, delete all but the newest, and return the new ones."""
        new = []
        for path in sorted(self.incoming.iterdir()) if self.incoming.is_dir() else []:
            if path.name in self._kept_names or not (path / DONE).is_file():
                continue
            with contextlib.suppress(
                FileNotFoundError
            ):  # Reverb has deleted it meanwhile, because there is a newer one
                new.append(self._keep_one(path))
                self._kept_names.add(path.name)
        if new:
            for old in list(self._complete())[self._keep :]:
                shutil.rmtree(old.path)
        return new

    def latest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint, if there is one."""
        return next(self._complete(), None)

    def count(self) -> int:
        """Return the number of complete checkpoints."""
        return sum(1 for _ in self._complete())

    def close(self) -> None:
        """Unlock the folder, so that another server can use it. Idempotent."""
        self._undo.close()

    def __enter__(self) -> CheckpointFolder:
        """Return the folder."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Unlock it."""
        self.close()

    def _complete(self) -> Iterator[Checkpoint]:
        return (one for one in checkpoints_in(self.directory) if one.fault() is None)

    def _keep_one(self, path: Path) -> Checkpoint:
        finished = Checkpoint(path).written_at.astimezone(timezone.utc)
        target = self._kept / finished.strftime("%Y%m%dT%H%M%S.%fZ")
        partial = self._kept / f"{_PARTIAL}{target.name}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        sizes = {}
        for name in FILES:
            _link(path / name, partial / name)
            sizes[name] = (partial / name).stat().st_size
        (partial / MANIFEST).write_text(json.dumps(sizes))
        for file in partial.iterdir():
            _sync(file)  # Reverb does not sync: after a power cut DONE could exist without the other files
        _sync(partial)
        if target.exists():
            shutil.rmtree(partial)
        else:
            partial.rename(target)
        _sync(self._kept)
        return Checkpoint(target)


def check_directory(directory: Path) -> None:
    """Refuse a folder that cannot hold checkpoints; one that does not exist yet can.

    Raises:
        CheckpointError: it contains other files, or is not a folder.
    """
    if not directory.exists():
        return
    try:
        _refuse_other_files(directory)
    except OSError as error:
        raise _unusable(directory, error) from error


def _unusable(directory: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{directory}: cannot be used ({error}). This process runs as user {os.getuid()}: make the folder, or the one "
        f"that it is in, writable for that user, as `chown {os.getuid()}` does."
    )


def _refuse_other_files(directory: Path) -> None:
    others = sorted({path.name for path in directory.iterdir()} - {_OWNER, _INCOMING, _KEPT})
    if others or (any(directory.iterdir()) and not (directory / _OWNER).is_file()):
        found = ", ".join(others or sorted(path.name for path in directory.iterdir()))
        raise CheckpointError(
            f"{directory}: must hold checkpoints and nothing else, found {found}. Name a folder of its own, such as "
            f"{directory / 'checkpoints'}: Reverb deletes what it does not know."
        )


def _lock(owner: Any, directory: Path) -> None:
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(
            f"{directory}: another server uses it. Stop that server, or use another folder."
        ) from error


def _count_start(owner: Any) -> int:
    owner.seek(0)
    try:
        starts = int(json.loads(owner.read() or "{}").get("starts", 0)) + 1
    except (ValueError, AttributeError, TypeError) as error:
        raise SpecError(
            f"{owner.name}: is damaged ({error}). Delete that file; the checkpoints are not affected."
        ) from error
    owner.seek(0)
    owner.truncate()
    owner.write(json.dumps({"owner": "reverb-writer-server", "starts": starts}))
    owner.flush()
    return starts


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
