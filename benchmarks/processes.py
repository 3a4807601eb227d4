"""An object in its own process, and a replay server as one.

Every contender gets a fresh interpreter, so none pays for what another has imported. A process ends when its parent's
end of the line closes, so it never outlives the benchmark.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import psutil

import reverb_writer as rw

TABLE = "replay"

_TIMEOUT_S = 600.0
_FRESH = multiprocessing.get_context("spawn")
_FORKED = multiprocessing.get_context("forkserver")
# A server that has TensorFlow loaded forks the others: one takes 40 ms to start instead of seconds.
_FORKED.set_forkserver_preload(["reverb_writer_server"])


class Remote:
    """What `factory(*arguments, **options)` makes, in another process; its methods are called by name.

    Attributes:
        process: for memory and CPU time.
    """

    _context: Any = _FRESH

    def __init__(self, factory: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Return when the object is made."""
        self._name = factory.__name__
        self._line, theirs = self._context.Pipe()
        # A daemon: if the benchmark fails, it ends with it.
        self._child = self._context.Process(target=_serve, args=(theirs, factory, arguments, options), daemon=True)
        self._child.start()
        theirs.close()
        self.process = psutil.Process(self._child.pid)
        self.result()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result."""
        self.start(method, *arguments)
        return self.result()

    def start(self, method: str, *arguments: Any) -> None:
        """Call a method, and fetch its result later: several processes can be busy at once."""
        self._line.send((method, arguments))

    def result(self) -> Any:
        """Return the result of the call that was started."""
        if not self._line.poll(_TIMEOUT_S):
            raise TimeoutError(f"the process of `{self._name}` did not answer within {_TIMEOUT_S:.0f} s")
        try:
            error, value = self._line.recv()
        except EOFError:
            self._child.join()
            raise RuntimeError(f"the process of `{self._name}` ended with exit code {self._child.exitcode}") from None
        if error:
            raise RuntimeError(f"in the process of `{self._name}`:\n{error}")
        return value

    def cpu_s(self) -> float:
        """Return the CPU time that the process has taken so far, seconds."""
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def rss_bytes(self) -> int:
        """Return the memory that the process has resident."""
        return int(self.process.memory_info().rss)

    def close(self) -> None:
        """End the process."""
        self._line.close()
        self._child.join(20)
        if self._child.is_alive():
            self._child.kill()
            self._child.join()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Server(Remote):
    """A replay server with one table, empty: uniform sampling, oldest item removed first.

    Attributes:
        address: where clients find it.
    """

    _context = _FORKED

    def __init__(self, max_size: int = 10_000_000, **options: Any) -> None:
        """Start to serve a table of `max_size` items; the default is more than any turn writes."""
        super().__init__(Served, max_size, **options)
        self.address: str = self.call("address")
        self._client = rw.Client(self.address)

    def num_items(self) -> int:
        """Return how many items the table holds."""
        return self._client.server_info()[TABLE].current_size

    def close(self) -> None:
        """Stop it."""
        self._client.close()
        super().close()


class Served:
    """A replay server of dm-reverb with one table; for `Remote`."""

    def __init__(self, max_size: int = 10_000_000, **options: Any) -> None:
        from reverb_writer_server import ReplayServer  # brings TensorFlow, so only where it is needed

        self._server = ReplayServer([rw.TableConfig(TABLE, max_size, **options)])

    def address(self) -> str:
        return self._server.address

    def close(self) -> None:
        self._server.stop()


def _serve(line: Connection, factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Make the object and answer calls until the connection is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's: it closes the line
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Reverb's writers warn thousands of times a second
    with contextlib.ExitStack() as ending, contextlib.suppress(EOFError):
        try:
            subject = ending.enter_context(contextlib.closing(factory(*arguments, **options)))
        except Exception:  # noqa: BLE001  # the parent raises it
            line.send((traceback.format_exc(), None))
            return
        line.send((None, None))
        while True:
            method, values = line.recv()
            try:
                line.send((None, getattr(subject, method)(*values)))
            except Exception:  # noqa: BLE001  # the parent raises it
                line.send((traceback.format_exc(), None))
