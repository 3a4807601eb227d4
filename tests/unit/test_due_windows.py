"""Windows that observers hold are sent when a learner of their process begins to wait."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from reverb_writer.client.same_process import add_sender, send_due


class Holder:
    def __init__(self) -> None:
        self.num_calls = 0
        add_sender(self)

    def send_due(self) -> None:
        self.num_calls += 1


@pytest.fixture
def _fast_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("_fast_switches")
def test_observers_are_made_and_forgotten_while_a_learner_begins_to_wait() -> None:
    holders = [Holder() for _ in range(100)]
    others = threading.Thread(target=lambda: [Holder() for _ in range(5_000)])
    others.start()
    num_waits = 0
    while others.is_alive() or not num_waits:
        send_due()
        num_waits += 1
    others.join()
    assert {holder.num_calls for holder in holders} == {num_waits}
