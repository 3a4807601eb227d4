"""A delivery in each of its waits, with a server, a clock and a chance that the test plays."""

from __future__ import annotations

import collections
import functools
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.protocol.messages import InsertStreamRequest, InsertStreamResponse, PrioritizedItem
from reverb_writer.tables.table_info import ServerInfo
from reverb_writer.transport import delivery as deliveries
from reverb_writer.transport import in_flight
from reverb_writer.transport.delivery import Delivery
from reverb_writer.transport.in_flight import InsertRequest

GONE = rw.errors.ServerUnavailableError("gone.")
LATE = rw.errors.ReplayTimeoutError("late.")
REFUSED = rw.errors.PermissionDeniedError("refused.")
NO_TABLE = rw.errors.StructureError("no such table.")
CLOSED = rw.errors.ClosedError("closed.")


class Stream:
    """A stream whose other end is the test."""

    def __init__(self, deliver: Callable[[Any], object]) -> None:
        self.deliver, self.sent, self.is_closed = deliver, list[list[int]](), False

    def send(self, message: bytes) -> None:
        self.sent.append([item.key for item in InsertStreamRequest.FromString(message).items])

    def close(self) -> None:
        self.is_closed = True

    def confirm(self, *keys: int) -> None:
        self.deliver(InsertStreamResponse(keys=keys).SerializeToString())


class World:
    """A delivery, and all that is around it."""

    address, last_response_at = "HOST:1", 0.0

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.num_examined = 100.0, 0
        self.questions: list[Callable[[Any], object]] = []
        self.streams: list[Stream] = []
        self.inbox: collections.deque[Callable[[], None]] = collections.deque()
        self.counts: collections.Counter[str] = collections.Counter()
        for module in (deliveries, in_flight):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))
        patch.setattr(deliveries, "random", SimpleNamespace(uniform=lambda _, longest: longest))
        patch.setattr(deliveries, "open_pipe", self._open)
        channel: Any = self
        self.delivery = Delivery(channel, self.inbox.append, self.counts)

    def _open(self, _: Any, method: str, deliver: Callable[[Any], object]) -> Stream:
        assert method.endswith("InsertStream")
        self.streams.append(Stream(deliver))
        return self.streams[-1]

    def start_info(self, _: float, deliver: Callable[[Any], object]) -> None:
        self.questions.append(deliver)

    def examine(self) -> None:
        self.num_examined += 1

    def add(self, key: int) -> None:
        item = PrioritizedItem(key=key, table="replay")
        row = np.frombuffer(InsertStreamRequest(items=[item]).SerializeToString(), np.uint8)[None]
        self.delivery.flight.add(InsertRequest(frozenset(["replay"]), key, [row], {}))

    def ask(self) -> None:
        """Have a question open."""
        self.add(10)
        self.proceed()

    def lose(self) -> None:
        """Have a pause after a loss."""
        self.connect().deliver(GONE)
        self.proceed()

    def proceed(self) -> float:
        while self.inbox:
            self.inbox.popleft()()
        return self.delivery.proceed()

    def answer(self, answer: Any = None) -> float:
        """Answer the newest question, by default with the server's tables; then proceed."""
        tables: dict[str, Any] = {"replay": None}
        self.questions[-1](ServerInfo(1, tables, self.now) if answer is None else answer)
        return self.proceed()

    def connect(self) -> Stream:
        """Have an item, numbered by the streams so far, on its way over a stream."""
        self.add(10 + len(self.streams))
        self.proceed()
        self.answer()
        return self.streams[-1]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_items_go_over_one_stream_after_one_question(world: World) -> None:
    assert (world.proceed(), len(world.questions)) == (math.inf, 0), "nothing is to be sent"
    world.add(10)
    world.add(11)
    assert (world.proceed(), world.proceed(), len(world.questions)) == (math.inf, math.inf, 1)
    assert world.answer() == 10.0, "of silence until the connection is examined"
    world.add(12)
    world.proceed()
    (stream,) = world.streams
    assert stream.sent == [[10, 11], [12]]
    stream.confirm(10)
    stream.confirm(11, 12)
    assert (world.proceed(), world.delivery.flight.pending) == (math.inf, 0)
    assert world.counts == {"acknowledged_items": 3}


@pytest.mark.parametrize("before", ["first", "next"])
def test_connection_that_is_silent_without_a_stream_is_examined(world: World, before: str) -> None:
    if before == "next":
        world.lose()
        world.now += 0.05
    else:
        world.add(10)
    world.proceed()
    world.answer(LATE)
    assert (world.num_examined, world.delivery.loss) == (1, LATE)


def test_connection_that_is_silent_with_a_stream_is_examined_each_second_from_the_tenth_on(world: World) -> None:
    stream = world.connect()
    world.now += 4.0
    assert (world.proceed(), world.num_examined) == (6.0, 0)
    world.now += 6.0
    assert (world.proceed(), world.proceed(), world.num_examined) == (1.0, 1.0, 2)
    world.last_response_at = world.now  # of another call over the connection
    assert (world.proceed(), world.num_examined) == (10.0, 2)
    world.now += 20.0
    stream.confirm(10)
    assert (world.proceed(), world.num_examined) == (math.inf, 2), "no confirmation is due"


def test_pause_doubles_with_each_failure_until_a_confirmation_and_the_first_failure_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.connect().deliver(GONE)
    pauses = [world.proceed()]
    for error in (GONE, LATE, GONE, GONE, GONE, GONE):
        world.now += pauses[-1]
        world.proceed()
        pauses.append(world.answer(error))
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0])
    assert caplog.messages == ["HOST:1: insert stream lost: gone. The client connects again."]
    world.now += 2.0
    world.proceed()
    world.answer()
    assert (world.streams[-1].sent, world.delivery.loss, world.counts["resent_items"]) == ([[10]], None, 1)
    world.streams[-1].confirm(10)
    world.add(11)
    world.proceed()
    world.streams[-1].deliver(GONE)
    assert world.proceed() == pytest.approx(0.05)
    assert len(caplog.messages) == 2


def test_messages_of_a_stream_after_its_end_are_ignored(world: World) -> None:
    old = world.connect()
    old.deliver(GONE)
    old.confirm(10)
    world.proceed()
    assert (world.delivery.flight.pending, old.is_closed) == (1, True)


@pytest.mark.parametrize("error", [REFUSED, NO_TABLE])
def test_refusal_is_told_until_the_next_connection(world: World, error: Exception) -> None:
    world.add(10)
    world.proceed()
    world.now += world.answer(error)
    assert world.delivery.fault == (type(error), str(error))
    assert world.delivery.lacks_table == (error is NO_TABLE)
    world.proceed()
    world.answer()
    assert world.streams[-1].sent == [[10]]
    assert not world.delivery.fault


def test_refusal_of_an_idle_stream_or_of_its_table_is_a_loss(world: World) -> None:
    stream = world.connect()
    stream.confirm(10)
    stream.deliver(REFUSED)
    world.now += world.proceed()
    assert (world.delivery.fault, world.proceed()) == (None, math.inf)
    world.connect().deliver(NO_TABLE)
    world.proceed()
    assert (world.delivery.fault, world.counts["reconnects"]) == (None, 2)


def test_damaged_confirmation_is_a_refusal(world: World) -> None:
    stream = world.connect()
    stream.deliver(b"\xff")
    world.proceed()
    assert world.delivery.fault is not None
    assert (world.delivery.fault[0], stream.is_closed) == (rw.errors.FormatError, True)


def test_restarted_server_gets_unconfirmed_items_again(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    world.connect().deliver(GONE)
    world.now += world.proceed()
    world.proceed()
    tables: dict[str, Any] = {"replay": None}
    world.answer(ServerInfo(2, tables, world.now))
    assert (world.streams[-1].sent, world.counts["server_restarts"]) == ([[10]], 1)
    assert "1 unconfirmed and 0 confirmed items are sent again" in caplog.messages[-1]


def test_closed_channel_ends_the_delivery(world: World) -> None:
    world.connect().deliver(CLOSED)
    assert (world.proceed(), world.delivery.fault) == (math.inf, (rw.errors.ClosedError, "closed."))
    world.now += 100.0
    assert (world.proceed(), len(world.questions)) == (math.inf, 1)


STATES: dict[str, Callable[[World], object]] = {
    "idle": lambda world: world.add(10),
    "asking": World.ask,
    "connected": World.connect,
    "pausing": World.lose,
}


@pytest.mark.parametrize("state", STATES)
def test_close_in_each_state_gives_items_up_and_late_answers_do_nothing(world: World, state: str) -> None:
    STATES[state](world)
    assert (world.delivery.close(), world.delivery.close()) == (1, 0)
    late: list[Callable[[], object]] = [functools.partial(stream.confirm, 10) for stream in world.streams]
    late += [functools.partial(question, GONE) for question in world.questions]
    num_questions = len(world.questions)
    for call in late:
        call()
    world.now += 100.0
    assert (world.proceed(), len(world.questions)) == (math.inf, num_questions)
    assert all(stream.is_closed for stream in world.streams)
    assert not world.counts["acknowledged_items"]
