"""Fetch samples of one table from one server: bounded, up to a limit, over one stream after another.

    room -> ask() -> server -> read() -> accept() -> num_held() of the caller -> fill() -> room

How much room there is follows from what is in flight and what the caller holds at that moment, not from a record of
changes: an interrupt of the main thread between a change and its record would lose room for good. While samples are in
flight, more are asked for only when half of all room is free: a request and its message take as long as many small
samples.

If sampling removes items (`max_times_sampled`), only items that are ready are asked for: a request that waits at the
server when the learner leaves removes an item that no one receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from reverb_writer.deadline import Deadline
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.sample_stream import SampleStream
from reverb_writer.transport.server_info import try_server_info

_INFO_TIMEOUT_S = 5.0
_PAUSE_S = (0.002, 0.05)  # between two questions whether items are ready: at first, and at most
_REQUEST_SHARE = 2  # this part of all room must be free for a request, while samples are in flight


class SampleFetcher:
    """Samples of one table on one server.

    `ask`, `read`, `accept` and `end` are for one thread; everything else is thread-safe.

    Attributes:
        removes_items: whether sampling removes items from the table.
        max_samples: how many samples may be in flight or held by the caller; if it grows, a later `fill` asks for more.
        num_unasked: samples that came although they were not requested; they were left out.
    """

    def __init__(
        self,
        channel: Channel,
        table: str,
        *,
        removes_items: bool,
        max_samples: int,
        num_held: Callable[[], int],
        limit: int | None,
        pause: Callable[[float | None], object],
        deadline: Deadline | None = None,
        single_pass: bool = False,
    ) -> None:
        """Set what to fetch; the first `ask` opens the stream.

        Args:
            channel: the connection; not closed by this.
            table: its name.
            removes_items: whether sampling removes items from the table.
            max_samples: how many samples may be in flight or held by the caller, >= 1.
            num_held: called by `ask`, `accept` and `fill`. It returns how many samples the caller holds, of those that
                it has accepted. It must not wait.
            limit: how many samples to ask for in all; None for no end.
            pause: called by `ask` if nothing is ready. It waits for so many seconds, or for any time if it gets None.
                It may return early, and does after `fill`, `stop_asking` or `stop` in another thread.
            deadline: of streams and questions; None for streams without end.
            single_pass: whether the items that are in the table when nothing is in flight are a further limit.
        """
        self.removes_items = removes_items
        self._channel, self._table, self._pause, self._deadline = channel, table, pause, deadline
        self._single_pass = single_pass
        self.max_samples, self._num_held = max_samples, num_held
        self.num_unasked = 0
        self._lock = threading.Lock()  # guards all below; never held while waiting for the server
        self._remaining = limit
        self._num_expected = 0  # samples asked for that the caller has not accepted
        self._stream: SampleStream | None = None
        self._question: Any = None  # the latest call for the table's state, for `stop` to cancel
        self._past_bytes = 0  # of streams that have ended
        self._is_ending = self._is_stopped = False

    @property
    def num_in_flight(self) -> int:
        """Samples that were asked for and have not arrived."""
        stream = self._stream
        return stream.num_in_flight if stream else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all messages so far."""
        with self._lock:
            return self._past_bytes + (self._stream.num_bytes if self._stream else 0)

    @property
    def is_done(self) -> bool:
        """Whether nothing is in flight and nothing more will be asked for."""
        return self._is_stopped or (self._remaining == 0 and not self.num_in_flight)

    def ask(self) -> bool:
        """Ask for as many samples as there is room for. Opens the stream if there is none.

        If sampling removes items, this waits until one is in flight.

        Returns:
            Whether to `read`: False if nothing is in flight and nothing more will be asked for.

        Raises:
            ReplayTimeoutError: the deadline has passed.
            ServerUnavailableError: there is no connection.
            ClosedError: the channel is closed, or belongs to a parent process.
        """
        if self._stream is None:
            self._open()
        if not self.removes_items:
            self.fill()
            return not self._is_stopped
        pause_s, longest_s = _PAUSE_S
        while self._remaining != 0 and not self._is_stopped:
            if self._room() > 0:
                self._request_ready()
            if self.num_in_flight:
                break
            self._pause(pause_s if self._room() > 0 else None)
            pause_s = min(2 * pause_s, longest_s)
        return self.num_in_flight > 0

    def read(self) -> list[Any]:
        """Wait for the next message and return its samples, see `SampleStream.read`; `accept` is to be called."""
        assert self._stream is not None  # noqa: S101  # `ask` has opened it
        return self._stream.read()

    def accept(self, num_samples: int) -> None:
        """Note that `num_held` counts so many samples that `read` has returned, or that they were used."""
        with self._lock:
            self._num_expected -= num_samples
        self.fill()

    def fill(self) -> None:
        """Ask for as many samples as there is room for, if sampling does not remove items.

        While samples are in flight, and less than half of all room is free, it waits for a later call.
        """
        if not self.removes_items:
            with self._lock:
                room = self._room()
                is_enough = room >= self.max_samples / _REQUEST_SHARE or not self.num_in_flight
                self._request(room if is_enough else 0)

    def end(self) -> int:
        """Close the stream, and return how many samples were in flight; `ask` asks for as many again."""
        with self._lock:
            stream, self._stream = self._stream, None
            if stream is None:
                return 0
            stream.cancel()
            num_lost = stream.num_in_flight
            self._past_bytes += stream.num_bytes
            self.num_unasked += stream.num_unasked
            self._num_expected -= num_lost
            if self._remaining is not None and not self._is_ending:
                self._remaining += num_lost
        return num_lost

    def stop_asking(self) -> None:
        """Ask for no more samples; those in flight can still be read."""
        with self._lock:
            self._is_ending, self._remaining = True, 0

    def stop(self) -> None:
        """End a call to `ask` or `read` in another thread, and all later ones. Idempotent."""
        self.stop_asking()
        with self._lock:
            self._is_stopped = True
            stream, question = self._stream, self._question
        if stream is not None:
            stream.cancel()
        if question is not None:
            question.cancel()

    def _open(self) -> None:
        left_s = None if self._deadline is None else self._deadline.left_s()
        stream = SampleStream(self._channel, self._table, deadline_s=left_s)
        with self._lock:
            self._stream = stream
        if self._is_stopped:
            stream.cancel()

    def _request_ready(self) -> None:
        """Ask for samples of the items that are ready now."""
        timeout_s = _INFO_TIMEOUT_S if self._deadline is None else self._deadline.left_s()
        info = try_server_info(self._channel, timeout_s, begun=self._remember_question)
        table = info.tables.get(self._table) if info else None
        if table:
            with self._lock:
                if self._single_pass and not self.num_in_flight and self._remaining:
                    # Some may have been lost, or others may have sampled them.
                    self._remaining = min(self._remaining, table.current_size)
                self._request(min(self._room(), table.num_ready() - self.num_in_flight))

    def _remember_question(self, call: Any) -> None:
        self._question = call
        if self._is_stopped:
            call.cancel()

    def _request(self, num_samples: int) -> None:
        """Ask for samples, but for no more than the limit allows."""
        if self._remaining is not None:
            num_samples = min(num_samples, self._remaining)
        stream = self._stream
        if stream is None:
            return
        if num_samples > 0:
            remaining = None if self._remaining is None else self._remaining - num_samples
            asked, expected = stream.num_asked + num_samples, self._num_expected + num_samples
            # One statement without a call: an interrupt comes before it or after it.
            stream.num_asked, self._num_expected, self._remaining = asked, expected, remaining
        stream.send()  # also what an interrupted call has not sent

    def _room(self) -> int:
        return self.max_samples - self._num_expected - self._num_held()
