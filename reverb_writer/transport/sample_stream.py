"""Samples of one table on one server: requested, reassembled, and requested again after a lost connection.

    num_held -> proceed() -> loop -> server -> messages of a few or many samples -> loop -> read()

One thread owns a stream and never waits in it: `changed` is called after each arrival. Samples arrive in the order in
which the server chose them. Samples in flight were requested and have not arrived. While there are any, more are
requested only when half of all room is free: a request and its message take as long as many small samples.

If sampling removes items (`max_times_sampled`), only ready items are requested: otherwise, when the learner leaves, a
request that waits at the server would remove an item that no one receives. The protocol's `rate_limiter_timeout` is not
used: in Reverb 0.14 its end loses the samples of a response that is not full.

Source: Reverb 0.14 (`reverb_service_impl.cc`, WorkerlessSampleReactor; `sampler.cc`).
"""

from __future__ import annotations

import collections
import logging
import math
import time
from collections.abc import Callable

from reverb_writer.errors import (
    ClosedError,
    FormatError,
    PermissionDeniedError,
    ReplayTimeoutError,
    ReverbWriterError,
    ServerUnavailableError,
    StructureError,
)
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import NO_SAMPLES, SampleReassembler, Samples
from reverb_writer.tables.rate_limits import explain_samples
from reverb_writer.tables.table_info import ServerInfo, TableInfo, check_tables_exist
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.loop import PendingCall
from reverb_writer.transport.pipes import ByteStream

_LOG = logging.getLogger(__package__)

_ANSWER_WITHIN_S = 5.0
_RECONNECT_WITHIN_S = 2.0  # time-out of a question to a lost server
_RETRY_S = 0.1  # between two attempts to connect
_OLD_S = 1.0  # a wait asks again if the answer is older; a newer question may still be unanswered
_RECENT_S = 10.0  # earlier inserts do not show that actors write now
_REQUEST_SHARE = 2  # while samples are in flight, 1 / 2 of all room must be free for a request

# Bounds of the pause between two questions whether a queue has ready items. The pause is a small part of the time since
# items were last ready, and so is the delay of the answer.
_PAUSE_S = (0.002, 0.5)
_PAUSE_SHARE = 0.1


class SampleStream:
    """Samples of one table on one server. For one thread, except for the counters.

    Attributes:
        answer: the server's tables in its last answer; None before the first.
        state_id: the state of the server at the last connection; None before the first.
        loss: error of the last attempt to connect; None while there is a connection.
        unanswered_since: start of the time without an answer and without a sample; None without an open question.
        num_in_flight: samples that were requested and that `read` has not returned.
        num_bytes, num_lost, num_unasked: bytes of all messages; samples lost in flight; samples not requested.
        reconnects, server_restarts: lost connections that were made again; connections to a restarted server.
        is_closed: whether the stream was closed: it gives no more samples.
    """

    def __init__(
        self,
        channel: Channel,
        table: str,
        info: ServerInfo | None,
        *,
        changed: Callable[[], object],
        removes_items: bool,
        max_total: int | None = None,
        single_pass: bool = False,
        may_lack_table: bool = False,
    ) -> None:
        """Prepare the stream; the first `proceed` begins. It does not close the channel.

        `info` has the server's tables, None if it has not answered yet. Any thread calls `changed` when `read` or
        `proceed` has work; it must not wait. `removes_items` is whether sampling removes items. `max_total` limits the
        samples that are requested in all; with a `single_pass`, the number of items in the table also limits them when
        nothing is in flight. A server without the table counts as lost if `may_lack_table`; otherwise this is an error.
        """
        self.answer = info
        self.state_id = None if info is None else info.state_id
        self.loss: ReverbWriterError | None = ServerUnavailableError("no answer yet") if info is None else None
        self.unanswered_since: float | None = None
        self.num_in_flight = self.num_bytes = self.num_lost = self.num_unasked = 0
        self.reconnects = self.server_restarts = 0
        self._channel, self._name, self._changed = channel, table, changed
        self._removes_items = removes_items
        self._num_left = 1 << 62 if max_total is None else max_total  # samples that may still be requested
        self._single_pass, self._may_lack_table = single_pass, may_lack_table
        self._stream: ByteStream | None = None
        self._reassembler = SampleReassembler()
        self._question: PendingCall[ServerInfo] | None = None
        self._earlier = collections.deque([info] if info else [])  # answers of the last seconds, one per second
        self._refusal = ""  # the error instead of the newest answer
        self._is_asked = False  # whether a wait asks for its cause
        self._num_ready = 0  # ready items in the last answer that were not requested
        self._num_in_flight_then = 0  # samples in flight at the time of the question
        self._ask_at = self._found_at = 0.0
        self._open_at = 0.0  # time at which a damaged stream may be opened again
        self._is_ending = self.is_closed = False

    # ----------------------------------------------------------------------------------------------- what it has

    @property
    def table(self) -> TableInfo | None:
        """The table in the server's last answer; None before the first."""
        return None if self.answer is None else self.answer.tables.get(self._name)

    @property
    def has_unread(self) -> bool:
        """Whether an unread message has arrived."""
        return self._stream is not None and self._stream.has_unread

    @property
    def is_done(self) -> bool:
        """Whether nothing is in flight and nothing more will be requested."""
        return self.is_closed or (self._max_request() == 0 and self.num_in_flight == 0)

    # ------------------------------------------------------------------------------------------------ what to do

    def proceed(self, now: float, num_held: int, max_samples: int) -> float:
        """Connect if there is no connection, and request samples up to the room. Never waits.

        The caller still has `num_held` samples; together with the samples in flight there may be `max_samples`. Returns
        the time of the next call, unless `changed` is called earlier. Raises ClosedError, StructureError or
        PermissionDeniedError if the server will give no samples.
        """
        self._read_answer(now)
        if self.is_closed:
            return math.inf
        if self.loss is not None:
            return self._ask_when_due(now)
        if now < self._open_at:
            return self._open_at
        if self._stream is None and not self.is_done:
            self._stream = ByteStream(self._channel, messages.SAMPLE_STREAM, self._changed)
        room = max_samples - self.num_in_flight - num_held
        may_have_more = False
        if self._removes_items:
            num_ready, self._num_ready = self._num_ready, 0  # each answer is used once
            self._request(min(room, num_ready))
            may_have_more = room > max(num_ready, 0) and self._max_request() > 0
        elif room >= max_samples / _REQUEST_SHARE or (room > 0 and self.num_in_flight == 0):
            self._request(room)
        if self._is_asked:
            self._is_asked = False
            self.ask(now)
        return self._ask_when_due(now) if may_have_more else math.inf

    def read(self) -> Samples:
        """Return the samples that the next message completes, maybe none; raises as `proceed`.

        Raises FormatError if a message is damaged or has more samples than requested; the stream is opened again soon.
        """
        stream = self._stream
        if stream is None or not stream.has_unread:
            return NO_SAMPLES
        try:
            message = stream.read()
        except StructureError:
            self._end_stream()
            self._refuse(StructureError(f"table `{self._name}` is not on the server at {self._channel.address}."))
            return NO_SAMPLES
        except (PermissionDeniedError, ClosedError):
            self._end_stream()
            raise
        except ReverbWriterError as error:  # any refusal, because a gateway may refuse for a while
            self.lose(error)
            return NO_SAMPLES
        self.num_bytes += len(message)
        self.unanswered_since = None
        try:
            samples = self._reassembler.feed(message)
            if (num_unasked := len(samples) - self.num_in_flight) > 0:
                self.num_unasked += num_unasked
                raise FormatError(  # noqa: TRY301  # as the errors of `feed`
                    f"table `{self._name}`: the server at {self._channel.address} sent {num_unasked} samples without "
                    "being asked. They are left out, and the stream is closed; look at what answers there."
                )
        except FormatError:
            self._end_stream()
            self._open_at = time.monotonic() + _RETRY_S  # so that endless damage costs little
            raise
        self.num_in_flight -= len(samples)
        return samples

    def ask(self, now: float) -> None:
        """Ask the server for its tables, unless a question is in flight; `answer` gets them."""
        if self._question is None and not self.is_closed:
            self._num_in_flight_then = self.num_in_flight
            if self.unanswered_since is None:
                self.unanswered_since = now
            timeout_s = _ANSWER_WITHIN_S if self.loss is None else _RECONNECT_WITHIN_S
            self._question = self._channel.start_info(timeout_s, lambda _: self._changed())

    def ask_why(self, now: float, since: float) -> None:
        """Make the owner ask for the cause of a wait unless the answer is recent and after `since`; for any thread."""
        if self.answer is None or self.answer.at < max(since, now - _OLD_S):
            self._is_asked = True
            self._changed()

    def explain(self, since: float) -> str:
        """Return the known cause of a wait for samples that began at `since`; for any thread."""
        answer, loss, asked_at = self.answer, self.loss, self.unanswered_since
        server, now = f"The server at {self._channel.address}", time.monotonic()
        if answer is None:
            return f"{server} has not answered yet."
        if loss is not None:
            return self._channel.explain_loss(loss)
        unanswered_s = 0.0 if asked_at is None else now - asked_at
        if answer.at >= since and unanswered_s < _OLD_S:
            return explain_samples(answer, self._name, self._earlier[0])
        if self._refusal:
            return f"{server} does not say what its tables do: {self._refusal}"
        if asked_at is None:
            return f"The time was up before the server at {self._channel.address} could be asked why."
        return f"{server} did not answer within {unanswered_s:.1f} s. Look at its process."

    def lose(self, error: ReverbWriterError) -> None:
        """Note a lost connection; `proceed` connects again."""
        if self.state_id is not None and self.loss is None:
            _LOG.warning("Samples of `%s`: %s Looking for it.", self._name, error)
        self._end_stream()
        self.loss = error
        self._ask_at = time.monotonic() + _RETRY_S

    def stop_requests(self) -> None:
        """Request no more samples; samples in flight can still be read."""
        self._is_ending = True

    def close(self) -> None:
        """End the stream, and count the samples in flight as lost. Idempotent."""
        self.is_closed = self._is_ending = True
        self._end_stream()
        question, self._question = self._question, None
        if question is not None:
            question.cancel()

    # ------------------------------------------------------------------------------------------------- how it is done

    def _max_request(self) -> int:
        """Return how many samples may still be requested."""
        return 0 if self._is_ending else self._num_left

    def _request(self, num_samples: int) -> None:
        """Request samples within the limit. Requests are not joined: their first samples would be late."""
        num_samples = min(num_samples, self._max_request())
        if num_samples <= 0 or self._stream is None:
            return
        self._num_left -= num_samples
        self.num_in_flight += num_samples
        request = messages.SampleStreamRequest(table=self._name, num_samples=num_samples)
        self._stream.send(request.SerializeToString())

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        self.num_lost += self.num_in_flight
        if not self._is_ending:
            self._num_left += self.num_in_flight
        self.num_in_flight = self._num_ready = 0
        self._reassembler = SampleReassembler()

    def _refuse(self, error: StructureError) -> None:
        """Treat a server without the table as lost if it may return; otherwise raise."""
        if not self._may_lack_table:
            raise error
        self.lose(error)

    def _ask_when_due(self, now: float) -> float:
        """Ask if it is time; return the time of the next call."""
        if now >= self._ask_at:
            self.ask(now)
        return self._ask_at if self._question is None else math.inf

    def _read_answer(self, now: float) -> None:
        question = self._question
        if question is None or not question.done():
            return
        self._question = None
        try:
            answer = question.result()
        except (ClosedError, PermissionDeniedError):
            raise
        except ReverbWriterError as error:
            if self.loss is not None or isinstance(error, ServerUnavailableError):
                self.lose(error)
                if isinstance(error, ReplayTimeoutError):
                    self._channel.examine()
            else:  # the stream notices if the server is gone
                self._refusal = "" if isinstance(error, ReplayTimeoutError) else str(error)
                self._ask_at = now + _RETRY_S
        else:
            self._note(answer, now)

    def _note(self, info: ServerInfo, now: float) -> None:
        """Take the server's answer."""
        self.unanswered_since, self.answer, self._refusal = None, info, ""
        if self.loss is not None:
            self._earlier = collections.deque([info])
        elif info.at - self._earlier[-1].at >= _OLD_S:
            self._earlier.append(info)
            while info.at - self._earlier[0].at > _RECENT_S:
                self._earlier.popleft()
        if self.loss is not None:
            try:
                check_tables_exist([self._name], info, self._channel.address)
            except StructureError as error:
                self._refuse(error)
                return
            if self.state_id is not None:
                self.reconnects += 1
                self.server_restarts += info.state_id != self.state_id
            self.state_id = info.state_id
            self.loss = None
            self._ask_at = self._found_at = now
        if not self._removes_items or self.table is None:
            return
        if self._single_pass and self._num_in_flight_then == 0:
            # Samples may have been lost, or other learners may have sampled them.
            self._num_left = min(self._num_left, self.table.current_size)
        self._num_ready = self.table.num_ready() - self._num_in_flight_then
        if self._num_ready > 0:
            self._found_at = self._ask_at = now
        else:
            shortest_s, longest_s = _PAUSE_S
            self._ask_at = now + min(max(shortest_s, _PAUSE_SHARE * (now - self._found_at)), longest_s)
