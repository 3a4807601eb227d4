"""The channel to one Reverb server: address, TLS, token, time-outs. The only module that makes gRPC channels."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc

from reverb_writer.arguments import check_address
from reverb_writer.background import SHORT_S, Flag, uninterrupted
from reverb_writer.closing import ClosedAtExit
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ServerUnavailableError, SpecError
from reverb_writer.protocol.messages import SERVER_INFO
from reverb_writer.transport.connection import OPTIONS, Call, Connection, Reply
from reverb_writer.transport.grpc_errors import NO_ANSWER, is_listening, is_refusal, is_silence, translate_error

_TOKEN = re.compile(r"[!-~]+")
_PAUSE_S = 0.1
_NEVER_MS = 2**31 - 1
_RECENT_S, _MAX_CONNECT_ERRORS = 10.0, 200  # at the pace of `_PAUSE_S`
_AFTER_FORK = "gRPC does not survive a fork: start the child with `spawn`, or fork before you make the first client."


@dataclass(frozen=True)
class TLS:
    """Certificates for an encrypted connection, as paths to PEM files.

    Attributes:
        root_certificates: certificates that may have signed the server's; None for those of the system.
        certificate: this client's own certificate chain, for mutual TLS.
        private_key: its key; given together with `certificate`.
        server_name: the name that the server's certificate must carry, if it is not the address's.

    Raises:
        SpecError: one of `certificate` and `private_key` is given without the other.
    """

    root_certificates: str | os.PathLike[str] | None = None
    certificate: str | os.PathLike[str] | None = None
    private_key: str | os.PathLike[str] | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise SpecError("`certificate` and `private_key` must be given together: each is useless alone.")


class Channel(ClosedAtExit):
    """A connection to one server, shared by all that talk to it.

    Thread-safe. Connects on the first call and again by itself after a loss.
    """

    _first_process: ClassVar[int | None] = None

    def __init__(
        self,
        address: str,
        *,
        tls: TLS | bool | None = None,
        token: str | None = None,
        use_proxy: bool = False,
        permanent: bool = False,
    ) -> None:
        """Prepare the connection; nothing is sent yet.

        Args:
            address: `host:port`, `unix:path` or `dns:host:port`.
            tls: certificates; True for the system's; None or False for plain text.
            token: sent with every call as `authorization: Bearer ...`; an error if it would travel in plain text.
            use_proxy: whether `http_proxy` and the like in the environment are used.
            permanent: whether the connection is kept however long it or the server is silent: by default gRPC's pings
                end it, or half an hour without a call.

        Raises:
            SpecError: the address cannot be one, a PEM file cannot be used, or a token would travel in plain text.
            ClosedError: there was a channel in a parent process before the fork. Both would read from the same
                sockets, and the parent would crash, too.
        """
        check_address(address)
        if token is not None and not _TOKEN.fullmatch(token):
            raise SpecError("`token` must be visible ASCII characters without spaces. Strip what was read from a file.")
        if token is not None and not tls and not address.startswith("unix:"):
            raise SpecError(
                f"`token` would travel to {address} in plain text. Give `tls` too, or use a `unix:` address."
            )
        self.address = address
        self._metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        options = [*OPTIONS, ("grpc.enable_http_proxy", int(use_proxy))]
        if permanent:
            never = [(f"grpc.{name}_ms", _NEVER_MS) for name in ("keepalive_time", "client_idle_timeout")]
            options = [*never, *(one for one in options if "keepalive" not in one[0])]
        self._same = functools.partial(Channel, tls=tls, token=token, use_proxy=use_proxy)
        if tls:
            tls = TLS() if tls is True else tls
            if tls.server_name is not None:
                options.append(("grpc.ssl_target_name_override", tls.server_name))
            self._dial = functools.partial(grpc.secure_channel, credentials=_credentials(tls), options=options)
            self._advice = "the certificates; the server may ask for one of the client, too"
        else:
            self._dial = functools.partial(grpc.insecure_channel, options=options)
            self._advice = "whether it expects `tls`"
        self._pid = os.getpid()
        if Channel._first_process not in (None, self._pid):
            raise ClosedError(
                f"process {Channel._first_process} had a client when it forked this child {self._pid}. {_AFTER_FORK}"
            )
        Channel._first_process = self._pid
        self._lock = threading.Lock()
        self._connection = self._connect()
        self._connect_errors: list[tuple[str, float]] = []
        self._own_channels: set[Channel] = set()  # of calls under way that have one
        self._closed = False

    def redirect(self, address: str) -> None:
        """Connect to the server at its new address; streams end as if the connection were lost, calls are made again.

        Raises:
            SpecError: the address cannot be one.
        """
        check_address(address)
        with self._lock:
            self.address = address
            former = self._connection
        former.give_up(f"the server has moved to {address}")

    def _connect(self) -> Connection:
        return Connection(self.address, functools.partial(self._dial, self.address), self._metadata)

    def check_usable(self) -> None:
        """Raise if the channel is closed or belongs to a parent process."""
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

        A call that is lost with its connection is made again. Of Reverb's, only a checkpoint does harm when it is made
        twice: see `call_once`.

        Raises:
            ServerUnavailableError: nothing answers at the address within the time.
            ReplayTimeoutError: the server does not answer in time.
            ClosedError: the channel is or was closed, or belongs to a parent process.
            ReverbWriterError: the server refuses; StructureError if it has no such table.
        """
        abandoned = Flag()  # by an interrupt: no further attempts
        try:
            return uninterrupted(lambda: self._call(method, request, timeout_s, abandoned), timeout_s + SHORT_S)
        finally:
            abandoned.set()

    def call_once(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Make a `call` over a connection of its own when the server answers, and never make it again."""
        self.check_usable()
        deadline = time.monotonic() + timeout_s
        with self._same(self.address) as own:
            self._own_channels.add(own)
            try:
                own.call(SERVER_INFO, b"", timeout_s)
                return own.future(method, request, max(deadline - time.monotonic(), 0.0)).result()
            except ReplayTimeoutError as error:
                if self._closed:
                    raise ClosedError(f"the client of {self.address} was closed during a call.") from error
                raise
            finally:
                self._own_channels.discard(own)

    def _call(self, method: str, request: bytes, timeout_s: float, abandoned: Flag) -> bytes:
        started = time.monotonic()
        deadline = started + timeout_s
        reasons: dict[str, None] = {}
        # Two kinds of attempts take turns: one that fails at once tells why; a short one that waits keeps gRPC
        # connecting, which before 1.60 does nothing in the background.
        waits = False
        while True:
            left = max(deadline - time.monotonic(), 0.0)
            error = None
            try:
                return self._reply(method, request, min(left, _PAUSE_S) if waits else left, wait_for_ready=waits)
            except grpc.FutureCancelledError:  # the connection was given up
                if left > 0 and not abandoned.is_set():
                    continue
            except grpc.RpcError as met:
                error = met
                if error.code() not in NO_ANSWER:
                    raise translate_error(error, self.address) from error
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    reason = str(error.details()).rpartition("last error: ")[2]  # one an address of the host
                    reasons[reason] = None
                    self._connect_errors = [*self._connect_errors[-_MAX_CONNECT_ERRORS:], (reason, time.monotonic())]
            lost = error is not None and error.code() is grpc.StatusCode.UNAVAILABLE
            if left <= _PAUSE_S or not (lost or waits) or abandoned.is_set():
                if self._connection.last_response_at < started:
                    self._connection.examine()
                raise self._no_answer_error(list(reasons), timeout_s) from error
            if lost and waits:
                abandoned.wait(_PAUSE_S)
            waits = not waits

    def _reply(self, method: str, request: bytes, timeout_s: float, *, wait_for_ready: bool) -> bytes:
        """Make one attempt; raises gRPC's errors as they are."""
        call = self._start(lambda connection: connection.ask(method, request, timeout_s, wait_for_ready=wait_for_ready))
        try:
            reply: bytes = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if self._closed:
                raise ClosedError(f"the client of {self.address} was closed during a call.") from error
            raise
        return reply

    def recent_connect_errors(self) -> list[str]:
        """Return the errors of attempts to connect in the last seconds, in gRPC's words."""
        now = time.monotonic()
        return list(dict.fromkeys(reason for reason, at in self._connect_errors if now - at < _RECENT_S))

    def _no_answer_error(self, reasons: list[str], timeout_s: float) -> Exception:
        """Return the error of a call without an answer: a server that is not there, or one that does not answer."""
        is_silent = not reasons or any(map(is_silence, reasons))
        if is_silent or (all(map(is_refusal, reasons)) and is_listening(self.address)):
            return ReplayTimeoutError(
                f"the server at {self.address} did not answer within {timeout_s:.1f} s. It may be paused, overloaded "
                f"or out of reach: look at its process, check {self._advice}, or raise `timeout_s`."
            )
        return ServerUnavailableError(
            f"no Reverb server at {self.address} within {timeout_s:.1f} s ({'; '.join(reasons)}). Start it, or "
            f"check the address and {self._advice}."
        )

    def future(self, method: str, request: bytes, timeout_s: float) -> Reply:
        """Start a unary call and return its reply, to come; if there is no server, it fails at once."""

        def ask() -> Reply:
            future = self._start(lambda connection: connection.ask(method, request, timeout_s))
            return Reply(future, self.address, timeout_s)

        return uninterrupted(ask)

    def stream(self, method: str, requests: Iterator[bytes], *, timeout_s: float | None = None) -> Call:
        """Open a bidirectional stream of bytes: iterate for responses, `cancel()` to end."""
        call: Call = uninterrupted(
            lambda: self._start(lambda connection: connection.stream(method, requests, timeout_s))
        )
        return call

    def _start(self, start: Callable[[Connection], Any]) -> Any:
        """Start a call over the connection, or over a new one in place of one that was given up."""
        while True:
            self.check_usable()
            with self._lock:
                former = self._connection
                if former.fault is not None and not self._closed:
                    self._connection = self._connect()
                connection = self._connection
            if former is not connection:
                former.close()
            try:
                return start(connection)
            except ClosedError:
                if connection.fault is None:
                    raise

    def close(self) -> None:
        """Close the connection; calls under way end with an error. Idempotent; does nothing in a forked child."""
        if self.is_forked:
            return
        with self._lock:
            self._closed = True
        for own in list(self._own_channels):
            own.close()
        uninterrupted(self._connection.close)


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
