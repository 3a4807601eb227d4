"""A command of the user's that gets each new checkpoint, such as one that copies it to a second place."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from reverb_writer.errors import ReverbWriterError

_logger = logging.getLogger(__name__)
_MAX_OUTPUT = 2000  # characters of its output in the log


class HookError(ReverbWriterError):
    """The command could not be started, has failed, or took too long."""


class Hook:
    """Runs the command in its own thread, once for each checkpoint; of several that wait, only for the newest.

    Attributes:
        running_on: the checkpoint that the command reads now; it must not be deleted meanwhile.
    """

    def __init__(
        self, settings: Callable[[], tuple[str, float]], run: Callable[[str, Callable[[], object]], bool]
    ) -> None:
        """Start the thread.

        Args:
            settings: returns the command and its time-out in seconds; the checkpoint's path becomes its last argument.
            run: runs a job by its name, and counts it if it fails.
        """
        self.running_on: Path | None = None
        self._settings, self._run_job = settings, run
        self._waiting: Path | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._work, name="hook", daemon=True).start()

    def submit(self, checkpoint: Path) -> None:
        """Have the command run for a checkpoint, when it has ended for the one before."""
        with self._changed:
            self._waiting = checkpoint
            self._changed.notify_all()

    def finish(self) -> None:
        """Wait until the command has ended for all that was submitted; each run ends at its time-out."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is None and self.running_on is None)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None)
                self.running_on, self._waiting = self._waiting, None
            checkpoint = self.running_on
            if checkpoint is not None and checkpoint.exists():
                self._run_job("hook", lambda path=checkpoint: self._call(path))  # type: ignore[misc]  # mypy 4226
            with self._changed:
                self.running_on = None
                self._changed.notify_all()

    def _call(self, checkpoint: Path) -> None:
        command, timeout_s = self._settings()
        if not command:
            return
        arguments = [*shlex.split(command), str(checkpoint)]
        try:
            process = subprocess.Popen(  # noqa: S603  # the user's own command, without a shell
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "REVERB_CHECKPOINT": str(checkpoint)},
                start_new_session=True,
            )
        except OSError as error:
            raise HookError(f"checkpoints.hook: `{command}` cannot be started ({error}). Check the command.") from error
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise HookError(
                f"checkpoints.hook: `{command}` took more than {timeout_s:g} s for {checkpoint.name} and was ended. "
                "Raise checkpoints.hook_timeout_s."
            ) from error
        said = output.decode(errors="replace").strip()[-_MAX_OUTPUT:]
        if process.returncode:
            raise HookError(
                f"checkpoints.hook: `{command}` ended with code {process.returncode} for {checkpoint.name}: {said}"
            )
        _logger.info("the hook has ended for checkpoint %s", checkpoint.name)
        _logger.debug("the hook said: %s", said)
