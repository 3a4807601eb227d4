"""The streams of a local server, and what gRPC's handlers do with them. Without a network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from store_messages import Inserter, store_of

from reverb_writer.background import in_background
from reverb_writer.local.endpoint import InsertStream, LocalEndpoint, SampleStream
from reverb_writer.local.grpc_service import Service
from reverb_writer.protocol import messages
from reverb_writer.tables import TableConfig


class ClientThatGoes:
    """The context of a call whose client goes as soon as the server wants to hear of it."""

    def add_callback(self, end: Callable[[], None]) -> bool:
        end()
        return True


@pytest.fixture
def endpoint() -> LocalEndpoint:
    return LocalEndpoint(store_of(TableConfig("replay")))


def test_samples_of_a_request_are_missing_until_they_are_delivered(endpoint: LocalEndpoint) -> None:
    """A handler of gRPC that finds none missing, and none delivered, waits for the next request."""
    answers, early = [], []

    def deliver(answer: Any) -> None:
        is_asked = in_background(lambda: stream.is_asked)  # of the handler's thread
        early.append(is_asked.wait(0.2) and not is_asked.result())
        answers.append(answer)

    stream = SampleStream(endpoint, deliver)
    stream.open()
    stream.feed(messages.SampleStreamRequest(table="replay", num_samples=1).SerializeToString())
    assert stream.is_asked
    Inserter(endpoint.store).insert([1])
    assert (len(answers), early) == (1, [False])
    assert not stream.is_asked


@pytest.mark.parametrize("method", ["_insert", "_sample"])
def test_a_stream_whose_client_goes_while_it_is_opened_is_forgotten(endpoint: LocalEndpoint, method: str) -> None:
    assert not [*getattr(Service(endpoint), method)(iter([]), ClientThatGoes())]
    assert not endpoint.streams


def test_a_stream_that_has_ended_keeps_no_messages(endpoint: LocalEndpoint) -> None:
    """The writer may go on sending until it hears of the refusal."""
    answers: list[Any] = []
    stream = InsertStream(endpoint, answers.append)
    stream.open()
    for _ in range(3):
        stream.feed(b"\x01")
    assert len(answers) == 1
    assert not stream._messages
