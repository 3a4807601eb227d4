"""The channel to one Reverb server: address, TLS, token, time-outs, calls, and the test for a dead connection.

gRPC needs minutes to notice a dead connection. A late call is no proof of one: a paused or busy server answers over no
connection. So a connection is given up, and its calls end, only after these observations:

    no response -> a probe is not answered -> a probe over a new connection is, one over the old connection is not
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import re
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc.aio

from reverb_writer.background import Flag
from reverb_writer.errors import ClosedError, ReplayTimeoutError, ReverbWriterError, ServerUnavailableError, SpecError
from reverb_writer.protocol.messages import SERVER_INFO
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.tables.table_messages import read_server_info
from reverb_writer.transport import endpoints, loop, process_hooks
from reverb_writer.transport.grpc_errors import NO_ANSWER, is_refusal, is_silent, translate_error
from reverb_writer.transport.loop import PendingCall
from reverb_writer.transport.wire import OPTIONS, PERMANENT, TLS, Wire, WireClosedError, credentials_of

_TOKEN = re.compile(r"[!-~]+")
_PAUSE_S = 0.1
_ANSWER_WITHIN_S, _AGAIN_WITHIN_S = 2.0, 3.0
_CLOSE_S = 1.0  # time that `close` waits for the end of the connection
_num_given_up: collections.Counter[str] = collections.Counter()  # connections, by address: gRPC may still hold them
_NOT_BEFORE_S = 10.0  # least time between the starts of two examinations, unless the connection proves alive


class Losable(Protocol):
    """A stream to a server of this process."""

    def lose(self, fault: str) -> None:
        """End the stream as after a loss of its connection; for the loop's thread only."""


class Channel:
    """A connection to one server, shared by all its users.

    Thread-safe. It connects at the first call, and again by itself after a loss. Channels of one process with the same
    address and options share a connection.

    Attributes:
        address: the server's address; `redirect` changes it.
        last_response_at: `time.monotonic()` of the last response; at first, of the channel's creation.
        local_pipes: streams to a server of this process.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TLS | bool | None = None,
        token: str | None = None,
        use_proxy: bool = False,
        permanent: bool = False,
    ) -> None:
        """Prepare the connection; nothing is sent yet. `Client` documents the arguments.

        A `permanent` connection survives any silence; others end if a ping is not answered, or after half an hour
        without a call. Raises ClosedError if a parent process used gRPC before the fork.
        """
        if token is not None and not _TOKEN.fullmatch(token):
            raise SpecError("`token` must be visible ASCII characters without spaces. Strip what was read from a file.")
        if token is not None and not tls and not address.startswith("unix:"):
            raise SpecError(
                f"`token` would travel to {address} in plain text. Give `tls` too, or use a `unix:` address."
            )
        process_hooks.claim()
        self.address = address
        self.last_response_at = time.monotonic()
        self._metadata = None if token is None else (("authorization", f"Bearer {token}"),)
        self._options = {**OPTIONS, **(PERMANENT if permanent else {}), "grpc.enable_http_proxy": int(use_proxy)}
        self._dial: Callable[..., grpc.aio.Channel] = grpc.aio.insecure_channel
        self._advice = "whether it expects `tls`"
        if tls:
            tls = TLS() if tls is True else tls
            if tls.server_name is not None:
                self._options["grpc.ssl_target_name_override"] = tls.server_name
            self._dial = functools.partial(grpc.aio.secure_channel, credentials=credentials_of(tls))
            self._advice = "the certificates; the server may ask for one of the client"
        self._is_direct = not tls and not use_proxy
        self.local_pipes: set[Losable] = set()
        self._closed = False
        # Only the loop's thread uses the rest.
        self._wire: Wire | None = None
        self._next_examination_at = 0.0

    def check_usable(self) -> None:
        """Raise ClosedError if the channel is closed or belongs to a parent process."""
        process_hooks.claim()
        if self._closed:
            raise ClosedError(f"the client of {self.address} is closed. Make a new one.")

    @property
    def endpoint(self) -> endpoints.Endpoint | None:
        """The server of the address if it is in this process and the channel uses neither TLS nor a proxy."""
        return endpoints.BY_ADDRESS.get(self.address) if self._is_direct else None

    def loss(self, reason: str) -> ReverbWriterError:
        """Return the error of a stream whose connection is lost or closed."""
        try:
            self.check_usable()
        except ClosedError as error:
            return error
        return ServerUnavailableError(f"there is no connection to the server at {self.address} ({reason}).")

    def is_silent(self, error: Exception) -> bool:
        """Whether the server exists but does not answer, judged by the error of the last attempt to connect."""
        return isinstance(error, ReplayTimeoutError) or is_silent([self._words(error)], self.address)

    def explain_loss(self, error: Exception) -> str:
        """Return cause and advice while there is no connection; `error` is of the last attempt to connect.

        Only a refusal advises a start, because a paused server would lose its tables.
        """
        heard = f"last heard of {time.monotonic() - self.last_response_at:.1f} s ago ({str(error).rstrip('.')})"
        if self.is_silent(error):
            return (
                f"The server at {self.address} does not answer, {heard}. It may be starting or paused: look at its "
                "process."
            )
        if is_refusal(self._words(error)):
            return f"The server at {self.address} is gone, {heard}. Start it again."
        return f"There is no connection to the server at {self.address}, {heard}. It is tried again and again."

    def _words(self, error: Exception) -> str:
        return str(error).replace(self.address, "")  # an address may have `dns` or `timeout` in it

    def redirect(self, address: str) -> None:
        """Use the server's new address: streams end as after a loss of the connection, calls are repeated."""
        self.check_usable()
        self.address = address
        if loop.has_begun() or self.local_pipes:
            loop.submit(self._give_up, f"the server has moved to {address}")

    def close(self) -> None:
        """Close the connection; open calls end with an error. Idempotent; does nothing in a forked child."""
        if not process_hooks.is_forked():
            self._closed = True
            if loop.has_begun() or self.local_pipes:
                done = Flag()  # no `PendingCall`, whose task an interrupted main thread would drop
                with contextlib.suppress(ClosedError):  # the interpreter ends
                    loop.submit(lambda: loop.spawn(self._close(done)))
                    if not loop.is_here():
                        done.wait(_CLOSE_S)

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------- calls

    def call(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """Make a unary call; wait for a server that is not up yet.

        A call is repeated if its connection is lost; among Reverb's calls, repetition harms only a checkpoint. Raises
        ServerUnavailableError if nothing answers at the address within the time, else an error of `translate_error`.
        """
        self.check_usable()
        started, texts = time.monotonic(), dict[str, None]()
        try:
            return PendingCall(lambda: self._call(method, request, timeout_s, texts), self.address, timeout_s).result()
        except (ReplayTimeoutError, ServerUnavailableError) as error:
            if self.last_response_at < started:
                self.examine()
            raise self._explain([*texts], timeout_s) from error.__cause__

    def start(self, method: str, request: bytes, timeout_s: float) -> PendingCall[bytes]:
        """Start a unary call that is not repeated; without a server it fails at once."""
        self.check_usable()
        return PendingCall(lambda: self._ask(method, request, timeout_s), self.address, timeout_s)

    def server_info(self, timeout_s: float) -> ServerInfo:
        """Return the server's tables, by `call`; raise FormatError if the answer cannot be read."""
        return read_server_info(self.call(SERVER_INFO, b"", timeout_s), time.monotonic())

    def start_info(
        self, timeout_s: float, deliver: Callable[[ServerInfo | ReverbWriterError], object] = lambda _: None
    ) -> PendingCall[ServerInfo]:
        """Ask the server for its tables once; without a server it fails at once. Never waits.

        The loop's thread calls `deliver` with the answer or the error; it must not wait.
        """

        async def ask() -> ServerInfo:
            return read_server_info(await self._ask(SERVER_INFO, b"", timeout_s), time.monotonic())

        self.check_usable()
        return PendingCall(ask, self.address, timeout_s, deliver)

    def examine(self) -> None:
        """Test in the background whether the connection is dead, and end its calls if so; never waits."""
        self.check_usable()
        loop.submit(self._begin_examination)

    # ------------------------------------------------------------------------------------ the loop's thread

    def open(self, method: str) -> tuple[Wire, Any]:
        """Open a bidirectional stream of bytes; return its wire and gRPC's call. For the loop's thread only."""
        wire = self._connect()
        return wire, wire.open(method)

    def _connect(self) -> Wire:
        """Return the present wire, or a new one."""
        self.check_usable()
        if self._wire is None:
            # With the same options, the new channel would share the connection that was given up.
            self._wire = self._make_wire({"reverb_writer.num_given_up": _num_given_up[self.address]})
        return self._wire

    def _make_wire(self, options: dict[str, Any]) -> Wire:
        return Wire(self._dial, self.address, {**self._options, **options}, self._metadata)

    def _give_up(self, fault: str) -> Wire | None:
        """End all calls over the connection, and return it; the next call makes a new one."""
        wire, self._wire = self._wire, None
        if wire is not None:
            _num_given_up[self.address] += 1
            wire.close(fault)
        for pipe in [*self.local_pipes]:
            pipe.lose(fault)
        return wire

    async def _close(self, done: Flag) -> None:
        wire = self._give_up("the client was closed")
        if wire is not None and wire.closing is not None:
            await asyncio.wait([wire.closing])
        done.set()

    async def _ask(self, method: str, request: bytes, timeout_s: float) -> bytes:
        self.check_usable()
        endpoint = self.endpoint
        try:
            if endpoint is None:
                reply = await self._connect().ask(method, request, timeout_s)
            else:
                reply = endpoint.call(method, request)
        except grpc.RpcError as error:
            if error.code() not in NO_ANSWER:
                self.last_response_at = time.monotonic()
            raise translate_error(error, self.address) from error
        except WireClosedError as error:
            if self._closed or loop.is_ending():
                raise ClosedError(f"the client of {self.address} was closed during a call.") from error
            raise
        self.last_response_at = time.monotonic()
        return reply

    async def _call(self, method: str, request: bytes, timeout_s: float, texts: dict[str, None]) -> bytes:
        """Repeat the call while it fails without a connection, and note gRPC's texts; gRPC connects again meanwhile."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = max(deadline - time.monotonic(), 0.0)
            try:
                return await self._ask(method, request, left_s)
            except WireClosedError:
                if left_s <= 0:
                    raise
                await asyncio.sleep(0.0)
            except (ReplayTimeoutError, ServerUnavailableError) as error:
                cause = error.__cause__
                if not isinstance(cause, grpc.RpcError) or cause.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                last = str(cause.details()).rpartition("last error: ")[2]  # for one address of the host
                last = last.removeprefix("UNKNOWN: ")  # a second code
                texts[urllib.parse.unquote(last)] = None  # [::1] may be quoted
                if left_s <= _PAUSE_S:
                    raise
                await asyncio.sleep(_PAUSE_S)

    def _explain(self, reasons: Sequence[str], timeout_s: float) -> ReverbWriterError:
        """Return the error of a call without an answer: the server does not exist, or does not answer."""
        if not reasons or is_silent(reasons, self.address):
            return ReplayTimeoutError(
                f"the server at {self.address} did not answer within {timeout_s:.1f} s. It may be paused, overloaded "
                f"or out of reach: look at its process, check {self._advice}, or raise `timeout_s`."
            )
        return ServerUnavailableError(
            f"no Reverb server at {self.address} within {timeout_s:.1f} s ({'; '.join(reasons)}). Start it, or "
            f"check the address and {self._advice}."
        )

    def _begin_examination(self) -> None:
        now = time.monotonic()
        if self._wire is not None and now >= self._next_examination_at:
            self._next_examination_at = now + _NOT_BEFORE_S
            loop.spawn(self._examine(self._wire, now))

    async def _examine(self, wire: Wire, since: float) -> None:
        """Give up the wire if it is dead; see the module."""
        if await wire.answers(_ANSWER_WITHIN_S) or self.last_response_at >= since:
            self._next_examination_at = 0.0
            return
        other = self._make_wire({"grpc.use_local_subchannel_pool": 1})
        again = loop.spawn(wire.answers(_AGAIN_WITHIN_S))
        # The old connection gets more time than the new one, so a reply near the deadline is no proof against it.
        is_there = await other.answers(_AGAIN_WITHIN_S * 2 / 3)
        other.close("the question is answered")
        if not await again and is_there and self.last_response_at < since and wire is self._wire:
            silence_s = time.monotonic() - since
            self._give_up(
                f"nothing came over the connection for {silence_s:.0f} s, while the server answers over others"
            )

    def __del__(self) -> None:
        """Close the wire."""
        if not getattr(self, "_closed", True) and not process_hooks.is_forked():
            self._closed = True
            if self._wire is not None:
                with contextlib.suppress(ClosedError):
                    loop.submit(self._wire.close, "the client was forgotten")
