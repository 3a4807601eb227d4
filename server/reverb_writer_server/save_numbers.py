"""The numbers of saves, which writers read in the reserved table of `reverb_writer.tables.saves`.

If a save gets no number, its checkpoint has the number of the save before, so writers keep more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

from reverb_writer.background import Flag
from reverb_writer.client.whole_items import one_item
from reverb_writer.deadline import Deadline
from reverb_writer.protocol import messages
from reverb_writer.protocol.responses import parse
from reverb_writer.tables import SAVES
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.in_flight import InFlight
from reverb_writer.transport.pipes import ByteStream

_TIMEOUT_S = 10.0


def begin_save(channel: Channel) -> None:
    """Give the next save its number.

    Raises:
        ReverbWriterError: the server does not answer, or refuses it.
    """
    flight = InFlight()
    flight.add(one_item([np.zeros(1, np.uint8)], [True], {SAVES: 1.0}))
    _exchange(channel, messages.INSERT_STREAM, flight.take_message(1), 1, _num_confirmed)


def publish_safe(channel: Channel, number: int) -> None:
    """Make `number` the newest safe save, unless a newer save is safe already.

    Raises:
        ReverbWriterError: the server does not answer, or refuses it.
    """
    saves = channel.server_info(_TIMEOUT_S).saves
    num_samples = 0 if saves is None else min(number, saves.begun) - saves.safe
    if num_samples > 0:
        request = messages.SampleStreamRequest(table=SAVES, num_samples=num_samples)
        _exchange(channel, messages.SAMPLE_STREAM, request.SerializeToString(), num_samples, _num_samples)


def _num_confirmed(answer: Any) -> int:
    return len(parse("InsertStreamResponse", messages.InsertStreamResponse, answer).keys)


def _num_samples(answer: Any) -> int:
    entries = parse("SampleStreamResponse", messages.SampleStreamResponse, answer).entries
    return sum(entry.end_of_sequence for entry in entries)


def _exchange(channel: Channel, method: str, message: bytes, number: int, count: Callable[[Any], int]) -> None:
    """Send a message over a stream of its own, and wait until the answers count up to `number`."""
    deadline, changed = Deadline(_TIMEOUT_S), Flag()
    with contextlib.closing(ByteStream(channel, method, changed.set)) as stream:
        stream.send(message)
        while number > 0:
            changed.clear()
            if stream.has_unread:
                number -= count(stream.read())
            else:
                changed.wait(deadline.left_s("the server did not count a save"))
