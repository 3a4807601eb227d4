"""The folder of a server's checkpoints.

    DIRECTORY/
      OWNER.json     marks the folder as one of this server; locked while a server uses it
      incoming/      Reverb writes here, keeps the checkpoint of the highest name and deletes all others
      kept/          the newest checkpoints, named by a sequence number and the time at which they were finished
        00000042-20260801T120000.123456Z/
          tables.tfrecord, items.tfrecord, chunks.tfrecord, DONE, MANIFEST.json

A finished checkpoint is moved from `incoming` to `kept`, because Reverb names checkpoints by the clock and would keep
an older one with a higher name. Numbers order `kept`, not the clock. A folder with other content is refused, because
Reverb deletes files that it does not know.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from reverb_writer.errors import FormatError
from reverb_writer.files.saved_replay import KEPT, NAME, OWNER, PARTIAL, checkpoint_name
from reverb_writer.files.tfrecord import DONE
from reverb_writer_server.checkpoints.contents import MANIFEST, Checkpoint, checked, rules_of
from reverb_writer_server.checkpoints.owner import CheckpointError, OwnerFile, UnrestorableError, advice_on_room
from reverb_writer_server.checkpoints.refused import copy_without_refused

_logger = logging.getLogger(__name__)
_INCOMING = "incoming"
_FITTED, _MENDED = f"{PARTIAL}fitted", f"{PARTIAL}mended"  # never adopted, and cleared with the other leftovers
_T = TypeVar("_T")


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, complete or not, newest first; a running server may use the folder."""
    if not _is_ours(directory):
        raise CheckpointError(f"{directory}: is not a folder of checkpoints (it has no {OWNER}). Check the path.")
    return _kept_in(directory)


def finished_in(directory: Path) -> list[Path]:
    """Return the checkpoints that Reverb has finished in a folder and no server has kept yet."""
    return [path for path in _entries(directory / _INCOMING) if path.name[0] != "." and (path / DONE).is_file()]


def first_restorable(directory: Path, restore: str, attempt: Callable[[Checkpoint], _T]) -> _T | None:
    """Return the result of `attempt` for the newest checkpoint for which it succeeds; None to begin empty.

    Args:
        directory: a folder of checkpoints, which may be missing.
        restore: "latest", "none", or the name of the only checkpoint to try.
        attempt: raises FormatError or UnrestorableError if a checkpoint cannot be restored.

    Raises:
        CheckpointError: no checkpoint has this name, or `attempt` succeeds for none.
    """
    if restore == "none":
        return None
    found = checkpoints_in(directory) if directory.exists() and any(directory.iterdir()) else []
    if restore != "latest":
        names = ", ".join(one.name for one in found) or "none"
        found = [one for one in found if one.name == restore]
        if not found:
            raise CheckpointError(f"{directory}: has no checkpoint `{restore}`; found: {names}.")
    faults: list[str] = []
    for number, checkpoint in enumerate(found, 1):
        try:
            return attempt(checkpoint)
        except (FormatError, UnrestorableError) as error:
            faults.append(f"checkpoint {checkpoint.name} cannot be restored: {error}")
        if number < len(found):
            _logger.error(
                "%s. THE NEXT OLDER ONE IS TRIED, %s: newer items are not served. The damaged one stays until newer "
                "ones replace it.",
                faults[-1],
                found[number].name,
            )
    if not faults:
        return None
    more = f" (and {len(faults) - 1} older ones)" if len(faults) > 1 else ""
    remedy = 'Restore its files from a copy, or set checkpoints.restore to another name, or to "none" to begin empty.'
    raise CheckpointError(f"{faults[0]}{more}. {remedy}")


class Adopted(NamedTuple):
    """The finished checkpoints that Reverb had left, kept or refused, by Reverb's names."""

    kept: dict[str, Checkpoint]
    refused: dict[str, str]  # faults of the deleted checkpoints


class Kept(NamedTuple):
    """The complete checkpoints of a folder at one moment, whose files may vanish afterwards."""

    number: int = 0  # of checkpoints
    newest: str | None = None  # name of the newest one
    size_bytes: int = 0  # size of the newest one
    written_at: float | None = None  # Unix time at which the newest one was finished
    left_out: int = 0  # items that Reverb saved or the server restored last, and that Reverb refuses to restore


class CheckpointFolder:
    """The checkpoint folder of a running server; a context manager that holds its lock. Not thread-safe."""

    def __init__(self, directory: Path, keep: int) -> None:
        """Lock the folder, which is created if it does not exist; delete unfinished checkpoints, keep finished ones.

        Raises:
            CheckpointError: the folder contains other files, another server uses it, or it cannot be written.
        """
        self.directory = directory
        self.incoming = directory / _INCOMING  # Reverb writes here
        self.fitted = directory / KEPT / _FITTED  # place of a copy for other tables
        self._left_out: dict[str, int] = {}  # by table, from the checkpoint that was mended last
        self.keep = keep
        self.damaged: set[str] = set()  # names of checkpoints that look complete but could not be restored
        self._kept = directory / KEPT
        with contextlib.ExitStack() as undo:
            try:
                check_directory(directory)
                directory.mkdir(parents=True, exist_ok=True)
                self.owner = OwnerFile(directory)
                undo.callback(self.owner.close)
                self.clear_unfinished()  # first, because they may fill the disk
                self._kept.mkdir(exist_ok=True)
                self.incoming.mkdir(exist_ok=True)
                self.adopt_finished()
                self.clear_incoming()
            except OSError as error:
                raise _unusable(directory, error) from error
            self.owner.update(starts=self.owner.mark.starts + 1)
            self._undo = undo.pop_all()

    def clear_unfinished(self, min_age_s: float = 0.0) -> None:
        """Delete the unfinished files of saves, restores and deletions, except of saves younger than `min_age_s`."""
        for leftover in _entries(self.incoming):
            is_old = min_age_s == 0 or abs(time.time() - Checkpoint(leftover).written_at.timestamp()) >= min_age_s
            if leftover.name.startswith(".") or (is_old and not (leftover / DONE).is_file()):
                _remove(leftover)
        for leftover in self._kept.glob(f"{PARTIAL}*") if self._kept.is_dir() else ():
            _remove(leftover)

    def clear_incoming(self) -> None:
        """Delete all files in Reverb's folder."""
        for leftover in _entries(self.incoming):
            _remove(leftover)

    def adopt_finished(self) -> Adopted:
        """Keep the sound checkpoints that Reverb has finished since the last call, and delete all but the newest."""
        adopted = Adopted({}, {})
        for path in sorted(finished_in(self.directory), key=lambda path: Checkpoint(path).written_at):
            try:
                adopted.kept[path.name] = self._adopt(path)
            except (FormatError, FileNotFoundError) as error:
                if path.exists():  # Reverb may have deleted it for a newer one
                    adopted.refused[path.name] = str(error)
                    _logger.log(logging.ERROR, "Reverb's checkpoint %s is damaged and not kept: %s", path.name, error)
                    _remove(path)
        if adopted.kept:
            self.prune(self.keep)
        return adopted

    def mended(self, path: Path) -> Path | None:
        """Write a copy of a checkpoint without the items that Reverb refuses to restore; None if it refuses none.

        Raises:
            FormatError: the checkpoint is damaged.
        """
        self._kept.mkdir(exist_ok=True)
        copy = self._kept / _MENDED
        _remove(copy)  # of a server that was killed
        left_out = copy_without_refused(Checkpoint(path), copy)
        before, self._left_out = self._left_out, left_out
        for name, count in left_out.items() if left_out != before else ():  # such an item is in each later save
            _logger.error(
                "checkpoint %s, table `%s`: %d items have a priority that is NaN or negative, and are left out, "
                "because Reverb refuses to restore them. Find the writer that sends such priorities.",
                path.name,
                name,
                count,
            )
        return copy if left_out else None

    def prune(self, keep: int) -> int:
        """Delete checkpoints older than the newest `keep` sound ones; return the number of deleted checkpoints.

        A checkpoint whose folder another program has locked, for example by `flock --shared`, stays until it is free.
        """
        found = _kept_in(self.directory)
        sound = [one for one in found if self._is_sound(one)]
        if len(sound) < keep:
            return 0
        pruned = 0
        for old in found[found.index(sound[keep - 1]) + 1 :]:
            partial = self._kept / f"{PARTIAL}{old.name}"
            with contextlib.suppress(FileNotFoundError, BlockingIOError), _locked(old.path):
                old.path.rename(partial)  # renamed first, so that a kill leaves no incomplete checkpoint under its name
                _remove(partial)
                pruned += 1
        return pruned

    def free_bytes(self) -> int:
        """Return the free bytes of its disk."""
        return shutil.disk_usage(self.directory).free

    def latest(self) -> Checkpoint | None:
        """Return the newest sound checkpoint, or None."""
        return next(self._sound(), None)

    def sound(self) -> list[Checkpoint]:
        """Return the sound checkpoints, newest first."""
        return [*self._sound()]

    def kept(self) -> Kept:
        """Return the facts about the sound checkpoints."""
        sound, left_out = list(self._sound()), sum(self._left_out.values())
        if not sound:
            return Kept(left_out=left_out)
        return Kept(len(sound), sound[0].name, sound[0].size_bytes, sound[0].written_at.timestamp(), left_out)

    def close(self) -> None:
        """Unlock the folder, so that another server can use it. Idempotent."""
        self._undo.close()

    def __enter__(self) -> CheckpointFolder:
        """Return the folder."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Unlock it."""
        self.close()

    def _sound(self) -> Iterator[Checkpoint]:
        return (one for one in _kept_in(self.directory) if self._is_sound(one))

    def _is_sound(self, one: Checkpoint) -> bool:
        return one.name not in self.damaged and one.fault() is None

    def _adopt(self, path: Path) -> Checkpoint:
        """Read a checkpoint to its end, write its manifest, sync both to disk, and move the checkpoint.

        Items that Reverb refuses to restore are left out, so each kept checkpoint can be restored.
        """
        for table in Checkpoint(path).tables():
            rules_of(table)  # raises an error if the table could not be restored
        original, path = path, self.mended(path) or path
        one = Checkpoint(path)
        manifest = checked(one)
        try:
            (path / MANIFEST).write_text(json.dumps(manifest))
        except OSError as error:  # a full disk: the checkpoint itself exists
            _logger.warning("%s: is kept without its checksums (%s)", path.name, error)
            (path / MANIFEST).unlink(missing_ok=True)
        for file in path.iterdir():
            _sync(file)  # Reverb does not sync: after a power cut DONE could exist without the other files
        _sync(path)
        number = 1 + max(
            [self.owner.mark.sequence, *(kept.sequence for kept in _kept_in(self.directory))],
        )
        target = self._kept / checkpoint_name(number, one.written_at)
        path.rename(target)
        if original != path:
            _remove(original)
        _sync(self._kept)
        self.owner.update(sequence=number)
        return Checkpoint(target)


def check_directory(directory: Path) -> None:
    """Refuse a folder that cannot hold checkpoints; a folder that does not exist yet is accepted."""
    try:
        for path in (directory, *directory.parents):
            if path.is_file():
                raise CheckpointError(
                    f"{path}: is a file, expected a folder for checkpoints. Name another folder, or move the file away."
                )
        if not directory.exists():
            return
        found = sorted(path.name for path in directory.iterdir())
        others = sorted({*found} - {OWNER, _INCOMING, KEPT})
        if others or (found and not _is_ours(directory)):
            raise CheckpointError(
                f"{directory}: must hold checkpoints and nothing else, found {', '.join(others or found)}. Name an "
                f"empty folder, such as {directory / 'checkpoints'}: Reverb deletes files that it does not know."
            )
    except OSError as error:
        raise _unusable(directory, error) from error


def _is_ours(directory: Path) -> bool:
    """Return whether a folder has the mark, or is a folder of checkpoints that has lost its mark."""
    if (directory / OWNER).is_file():
        return True
    kept = _entries(directory / KEPT)
    is_known = all(NAME.fullmatch(path.name) or path.name.startswith(PARTIAL) for path in kept)
    return (directory / KEPT).is_dir() and is_known


def _kept_in(directory: Path) -> list[Checkpoint]:
    found = [Checkpoint(path) for path in _entries(directory / KEPT) if path.name[0] != "." and path.is_dir()]
    return sorted(found, key=lambda one: (one.sequence, one.name), reverse=True)


def _entries(folder: Path) -> list[Path]:
    """Return the entries of a folder in order; none if it does not exist."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _remove(path: Path) -> None:
    """Delete a file or a folder; log an error and leave it if that fails."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        _logger.warning("%s: cannot be deleted (%s)", path, error)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder within the block."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _unusable(directory: Path, error: OSError) -> CheckpointError:
    advice = advice_on_room(error) or (
        f" This process runs as user {os.getuid()}: make the folder, or its parent, writable for this user, for "
        f"example by `chown {os.getuid()}`."
    )
    return CheckpointError(f"{directory}: cannot be used ({error}).{advice}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
