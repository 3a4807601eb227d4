"""`ReplayServer`: a dm-reverb server in this process, as a context manager."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # dm-reverb compares versions with distutils
    import reverb
    import tensorflow as tf
    import tree
    from reverb.platform.default.checkpointers import DefaultCheckpointer

from reverb_writer.arguments import integer
from reverb_writer.errors import SpecError
from reverb_writer.protocol import messages
from reverb_writer.tables import Selector, TableConfig, check_tables
from reverb_writer.tables.saves import saves_table
from reverb_writer.tables.table_messages import write_selector
from reverb_writer_server.checkpoints.new_life import for_new_life
from reverb_writer_server.checkpoints.owner import UnrestorableError
from reverb_writer_server.reverb.sockets import ALL, LOOPBACK, free_port, port_in_use, reserved, restrict_to_loopback


class ReplayServer:
    """Serve tables from this process until `stop()` or the end of the `with` block.

        with ReplayServer([TableConfig("replay")]) as server:
            client = reverb_writer.Client(server.address)

    It has no authentication, and accepts connections from this machine only unless `bind` is "0.0.0.0". Then make sure
    that only trusted machines can reach its port.

    Args:
        tables: The tables to serve: at least one, with unique names.
        port: 1 to 65535, or None for a free port.
        checkpoints: The folder for checkpoints, in which Reverb deletes all but its newest one; None for a temporary
            folder, which is deleted when the server stops.
        restore: The checkpoint to restore if `checkpoints` has none. Its tables keep their old rules; each must be
            among `tables`.
        bind: "127.0.0.1" for clients on this machine, IPv6 included; "0.0.0.0" for clients on all interfaces.

    Attributes:
        port: The port that the server listens on.
        address: "localhost:PORT", for clients on this machine.

    Raises:
        SpecError: A table, `port` or `bind` is invalid, or two tables have the same name.
        PortInUseError: Another process uses the port.
        LoopbackError: This system cannot restrict a port to this machine.
        RuntimeError: The checkpoint cannot be restored; the message is Reverb's.

    Thread safety: any thread.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        port: int | None = None,
        *,
        checkpoints: str | os.PathLike[str] | None = None,
        restore: str | os.PathLike[str] | None = None,
        bind: str = LOOPBACK,
    ) -> None:
        """Start the server; clients can connect when this returns."""
        check_tables(tables)
        self.port = free_port() if port is None else integer("port", port, minimum=1, maximum=65535)
        if bind not in (LOOPBACK, ALL):
            raise SpecError(f'`bind` must be "{LOOPBACK}" or "{ALL}", got {bind!r}: Reverb knows no other addresses.')
        self.address = f"localhost:{self.port}"
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        reverb_tables = [_reverb_table(table) for table in (*tables, saves_table())]
        with contextlib.ExitStack() as undo:
            folder = checkpoints or undo.enter_context(tempfile.TemporaryDirectory(prefix="reverb-writer-server-"))
            fallback = None
            if restore is not None:
                renamed = undo.enter_context(tempfile.TemporaryDirectory(prefix="reverb-writer-server-"))
                fallback = os.fspath(for_new_life(Path(restore), Path(renamed)))
            checkpointer = DefaultCheckpointer(os.fspath(folder), fallback_checkpoint_path=fallback)
            with reserved(self.port):
                try:
                    server = reverb.Server(reverb_tables, self.port, checkpointer)
                except ValueError as error:
                    if "BuildAndStart" not in str(error):
                        raise UnrestorableError(
                            f"the checkpoint {restore or folder} cannot be restored: {error}"
                        ) from error
                    # Reverb writes the reason to its log only; there is no other reason.
                    raise port_in_use(self.port) from error
            undo.callback(server.stop)
            if bind == LOOPBACK:
                restrict_to_loopback(self.port)
            self._undo = undo.pop_all()

    def __repr__(self) -> str:
        """Return the address."""
        return f"<ReplayServer at {self.address}{' (stopped)' if self._stopped.is_set() else ''}>"

    def stop(self) -> None:
        """End all streams, free the port and drop the data. Idempotent."""
        with self._lock:
            self._undo.close()
        self._stopped.set()

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until another thread has called `stop()`, and return whether it has.

        Args:
            timeout_s: time-out in seconds; None for no limit.
        """
        return self._stopped.wait(timeout_s)

    def __enter__(self) -> ReplayServer:
        """Return the running server."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop it."""
        self.stop()


def _reverb_table(config: TableConfig) -> reverb.Table:
    """Return a new, empty table."""
    balance = config.rate_limiter.balance
    return reverb.Table(
        name=config.name,
        sampler=_selector(config.sampler),
        remover=_selector(config.remover),
        max_size=config.max_size,
        rate_limiter=reverb.rate_limiters.RateLimiter(
            samples_per_insert=balance.samples_per_insert,
            min_size_to_sample=balance.min_size,
            min_diff=balance.min_diff,
            max_diff=balance.max_diff,
        ),
        max_times_sampled=config.max_times_sampled,
        signature=_signature(config),
    )


def _selector(selector: Selector) -> Any:
    options = messages.KeyDistributionOptions()
    write_selector(selector, options)
    return reverb.pybind.selector_from_proto(options.SerializeToString())


def _signature(config: TableConfig) -> Any:
    if config.signature is None:
        return None

    def spec(leaf: Any) -> tf.TensorSpec:
        try:
            return tf.TensorSpec(leaf.shape, leaf.dtype, getattr(leaf, "name", None) or None)
        except (AttributeError, TypeError, ValueError) as error:
            where, expected = f"table `{config.name}`: a leaf of `signature`", "an object with `shape` and `dtype`"
            raise SpecError(f"{where} must be {expected}, such as ArraySpec, got {leaf!r}.") from error

    return tree.map_structure(spec, config.signature)
