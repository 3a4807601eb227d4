"""The mark of a folder of checkpoints: its lock, and the facts that must outlive a server.

The mark is a convenience. A damaged mark, or a full disk, stops nothing, because the names of checkpoints contain their
numbers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from reverb_writer.errors import DOCS, ReverbWriterError
from reverb_writer.files.saved_replay import OWNER

_logger = logging.getLogger(__name__)


class CheckpointError(ReverbWriterError):
    """A folder of checkpoints, or a checkpoint, cannot be used."""


class UnrestorableError(RuntimeError):
    """Reverb refuses a checkpoint: it is damaged, or does not fit the tables."""


def advice_on_room(error: Exception) -> str:
    """Return what to do if an error, also one that Reverb reports, is about a full disk; "" for other errors."""
    is_full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
    advice = f" Give the disk more room, or lower max_size of the tables; {DOCS}/deploy/sizing.html has the sizes."
    return advice if is_full else ""


@dataclass(frozen=True)
class Mark:
    """Facts about an owner that remain after its end."""

    owner: str = "reverb-writer-server"
    starts: int = 0  # number of starts on the folder
    sequence: int = 0  # the highest number of any checkpoint so far
    failure: str = ""  # reason of the last start's failure; empty if it succeeded
    failures: int = 0  # number of starts in a row that failed for this reason
    # The end of the last server that served: `stopped` by request, `unhealthy` by itself, `unsaved` if its last
    # checkpoint failed, `died` with Reverb, `oom` if the kernel ended Reverb because memory ran out; `killed` while a
    # server serves, and if it wrote nothing else.
    end: str = "stopped"


class OwnerFile:
    """The file with the mark, locked until it is closed."""

    def __init__(self, directory: Path) -> None:
        """Lock the file, which is created if it does not exist, and read it."""
        self._path = directory / OWNER
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.mark = _read(self._path)
        except BlockingIOError as error:
            self.close()
            raise CheckpointError(
                f"{directory}: another server uses it. Stop that server, or use another folder."
            ) from error
        except BaseException:
            self.close()
            raise

    def update(self, **changed: int | str) -> None:
        """Change the mark; if it cannot be written, log this: the change is then lost with this process."""
        self.mark = replace(self.mark, **changed)  # type: ignore[arg-type]  # the names and types are those of `Mark`
        text = json.dumps(asdict(self.mark)).encode()
        try:
            size = os.fstat(self._descriptor).st_size
            os.pwrite(self._descriptor, text.ljust(size), 0)  # never shorter: a kill leaves no rest of the old text
            os.fsync(self._descriptor)
        except OSError as error:
            _logger.warning("%s: cannot be written (%s); starts are not counted", self._path, error)

    def close(self) -> None:
        """Unlock it. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def is_locked(directory: Path) -> bool:
    """Return whether a server has locked the file."""
    try:
        with (directory / OWNER).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _read(path: Path) -> Mark:
    content = path.read_bytes()
    if not content:
        return Mark()
    found: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(content)
    if not isinstance(found, dict):
        _logger.warning(
            "%s: is damaged and will be replaced; the checkpoints are not affected, starts count from 1", path
        )
        return Mark()
    kinds = {name: type(default) for name, default in asdict(Mark()).items()}
    good = {name: value for name, value in found.items() if type(value) is kinds.get(name)}
    return Mark(**{name: value for name, value in good.items() if isinstance(value, str) or value >= 0})
