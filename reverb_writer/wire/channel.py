"""One connection to one Reverb server: address, TLS, token, time-outs.

The only module that makes gRPC channels and the border at which gRPC's errors become ours.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc

from reverb_writer.errors import (
    ClosedError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    SpecError,
)
from reverb_writer.wire import lifetime

__all__ = ["TLS", "Channel", "describe", "refused"]

_TARGET = re.compile(r"unix:\S+|(dns:|ipv4:|ipv6:)?[^\s/]*:\d{1,5}|dns:\S+:\d{1,5}")
_TOKEN = re.compile(r"[!-~]+")
_PAUSE_S = 0.1
_FOR_EVER_S = 1e9  # longer deadlines overflow in gRPC
_AFTER_FORK = "gRPC does not survive a fork: start the child with `spawn`, or fork before you make the first client."

_OPTIONS = [
    # Reverb's own client sets no limits either: a window of frames is larger than gRPC's default of 4 MB.
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A restarted server is found within seconds; gRPC would wait up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A vanished host (no FIN, no RST) is noticed. Reverb's server counts pings that come more often than every five
    # minutes on a silent stream as abuse, so streams that may be silent for long check by `ServerInfo` instead.
    ("grpc.keepalive_time_ms", 300_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Two clients in one process are two connections: one that is blocked does not block the other.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True)
class TLS:
    """Certificates for an encrypted connection, as paths to PEM files.

    Attributes:
        root_certificates: certificates that may have signed the server's; None for those of the system.
        certificate: this client's own certificate chain, for mutual TLS.
        private_key: its key; given together with `certificate`.
        server_name: the name that the server's certificate must carry, if it is not the address's.
    """

    root_certificates: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    private_key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        """Check that certificate and key come together."""
        if (self.certificate is None) != (self.private_key is None):
            raise SpecError("`certificate` and `private_key` must be given together: each is useless alone.")


class Channel:
    """A connection to one server, shared by all that talk to it.

    Thread-safe. Connects on the first call and again by itself after a loss.
    """

    _first_process: ClassVar[int | None] = None

    def __init__(
        self, address: str, *, tls: TLS | bool | None = None, token: str | None = None, use_proxy: bool = False
    ) -> None:
        """Prepare the connection; nothing is sent yet.

        Args:
            address: `host:port`, `unix:path` or `dns:host:port`.
            tls: certificates; True for the system's; None or False for plain text.
            token: sent with every call as `authorization: Bearer ...`; refused where it would travel in plain text.
            use_proxy: whether `http_proxy` and its relatives in the environment count.

        Raises:
            SpecError: the address cannot be one, a PEM file cannot be used, or a token would travel in plain text.
            ClosedError: there was a channel in a parent process before the fork. Both would read from the same
                sockets, and the parent would crash, too.
        """
        if not isinstance(address, str) or not _TARGET.fullmatch(address):
            raise SpecError(f"`address` must be `host:port`, `unix:path` or `dns:host:port`, got {address!r}.")
        if token is not None and not _TOKEN.fullmatch(token):
            raise SpecError("`token` must be visible ASCII characters without spaces. Strip what was read from a file.")
        if token is not None and not tls and not address.startswith("unix:"):
            raise SpecError(
                f"`token` would travel to {address} in plain text. Give `tls` too, or use a `unix:` address."
            )
        self.address = address
        self._metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        options = [*_OPTIONS, ("grpc.enable_http_proxy", int(use_proxy))]
        if tls:
            tls = TLS() if tls is True else tls
            if tls.server_name is not None:
                options.append(("grpc.ssl_target_name_override", tls.server_name))  # type: ignore[arg-type]  # str or int
            self._connect = functools.partial(grpc.secure_channel, address, _credentials(tls), options)
            self._advice = "the certificates; the server may ask for one of the client, too"
        else:
            self._connect = functools.partial(grpc.insecure_channel, address, options)
            self._advice = "whether it expects `tls`"
        self._pid = os.getpid()
        if Channel._first_process not in (None, self._pid):
            raise ClosedError(
                f"process {Channel._first_process} had a client when it forked this child {self._pid}. {_AFTER_FORK}"
            )
        Channel._first_process = self._pid
        self._lock = threading.Lock()
        self._channel = self._connect()
        self._former: grpc.Channel | None = None
        self._closed = False

    def check_usable(self) -> None:
        """Raise if the channel is closed or belongs to a parent process.

        Raises:
            ClosedError: says which, and what to do.
        """
        if self._pid != os.getpid():
            raise ClosedError(
                f"this client of {self.address} was made in process {self._pid} and is used in its forked child "
                f"{os.getpid()}. {_AFTER_FORK}"
            )
        if self._closed:
            raise ClosedError(f"the client of {self.address} is closed. Make a new one.")

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made the channel."""
        return self._pid != os.getpid()

    def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Make a unary call; wait for the server to come up meanwhile.

        A call that is lost with its connection is made again: none of Reverb's does harm when it is made twice.

        Raises:
            ServerUnavailableError: nothing answers at the address within the time.
            ReplayTimeoutError: the server does not answer in time.
            ClosedError: the channel is or was closed, or belongs to a parent process.
            grpc.RpcError: what the server itself refuses.
        """
        deadline = time.monotonic() + timeout_s
        reasons: dict[str, None] = {}
        # In turn: a call that fails at once tells why; a short one that waits keeps gRPC connecting, which before 1.60
        # does nothing in the background.
        waits = False
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            try:
                call = self.future(method, request, min(left, _PAUSE_S) if waits else left, wait_for_ready=waits)
                reply: bytes = call.result()
            except grpc.RpcError as error:
                if self._closed:
                    raise ClosedError(f"the client of {self.address} was closed during a call.") from error
                if error.code() is grpc.StatusCode.CANCELLED and left > 0:
                    continue  # another thread has renewed the connection
                lost = error.code() is grpc.StatusCode.UNAVAILABLE
                if lost:
                    reasons[str(error.details()).rpartition("last error: ")[2]] = None  # one an address of the host
                elif error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise
                if left <= _PAUSE_S or not (lost or waits):
                    raise self._why_late(list(reasons), timeout_s) from error
                if lost and waits:
                    time.sleep(_PAUSE_S)
                waits = not waits
            else:
                return reply

    def _why_late(self, reasons: list[str], timeout_s: float) -> Exception:
        """Tell a server that is not there from one that does not answer: only the first gives reasons."""
        if reasons:
            return ServerUnavailableError(
                f"no Reverb server at {self.address} within {timeout_s:.1f} s ({'; '.join(reasons)}). Start it, or "
                f"check the address and {self._advice}."
            )
        self.renew()
        return ReplayTimeoutError(
            f"the server at {self.address} did not answer within {timeout_s:.1f} s. It may be paused, overloaded or "
            "out of reach; look at its process, or raise `timeout_s`."
        )

    def future(self, method: str, request: bytes, timeout_s: float, *, wait_for_ready: bool = False) -> Any:
        """Start a unary call and return its `grpc.Future`; if there is no server, it fails at once or waits."""
        self.check_usable()
        start: Any = self._channel.unary_unary(method)
        call = start.future(
            request, timeout=_seconds(timeout_s), metadata=self._metadata, wait_for_ready=wait_for_ready
        )
        lifetime.watch_call(call)
        return call

    def stream(self, method: str, requests: Iterator[bytes], *, timeout_s: float | None = None) -> Any:
        """Open a bidirectional stream of bytes and return its gRPC call: iterate for responses, `cancel()` to end."""
        self.check_usable()
        start: Any = self._channel.stream_stream(method)
        call = start(requests, timeout=_seconds(timeout_s), metadata=self._metadata)
        lifetime.watch_call(call)
        return call

    def renew(self) -> None:
        """Make the next calls over a new connection, because nothing comes over this one any more.

        gRPC itself would notice after minutes. Calls under way keep the old connection until the next renewal.
        """
        with self._lock:
            if self._closed or self.is_forked:
                return
            former, self._former, self._channel = self._former, self._channel, self._connect()
        if former is not None:
            former.close()

    def close(self) -> None:
        """Close the connection; calls under way end with an error. Idempotent; does nothing in a forked child."""
        if self.is_forked:
            return
        with self._lock:
            self._closed = True
        for channel in (self._channel, self._former):
            if channel is not None:
                channel.close()

    def __enter__(self) -> Channel:
        """Return the channel itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def describe(error: grpc.RpcError) -> str:
    """Return gRPC's status and text in one line."""
    return f"{error.code().name}: {error.details()}"


def refused(address: str, error: grpc.RpcError) -> ReverbWriterError:
    """Return our error for what the server, or a gateway in front of it, refuses."""
    return ReverbWriterError(f"the server at {address} refused: {describe(error)}.")


def _seconds(timeout_s: float | None) -> float | None:
    return None if timeout_s is None or timeout_s > _FOR_EVER_S else timeout_s


def _credentials(tls: TLS) -> grpc.ChannelCredentials:
    """Read the PEM files; gRPC itself would say only at the first call, and in its log, that it cannot use them."""
    import ssl  # noqa: PLC0415  # not needed for plain text, and it takes time

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if tls.root_certificates is not None:
        with _readable("root_certificates", tls.root_certificates):
            context.load_verify_locations(tls.root_certificates)
    if tls.certificate is not None:
        with _readable("certificate` and `private_key", tls.certificate, tls.private_key):
            context.load_cert_chain(tls.certificate, tls.private_key, password=lambda: "")
    return grpc.ssl_channel_credentials(*map(_read, (tls.root_certificates, tls.private_key, tls.certificate)))


@contextlib.contextmanager
def _readable(name: str, *paths: str | os.PathLike[str] | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # ssl.SSLError is one, too
        files = ", ".join(os.fspath(path) for path in paths if path is not None)
        raise SpecError(f"`{name}`: cannot use the PEM files {files} ({error.strerror or error}).") from error


def _read(path: str | os.PathLike[str] | None) -> bytes | None:
    return None if path is None else pathlib.Path(path).read_bytes()
