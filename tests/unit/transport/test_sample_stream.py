"""A sample stream asks its server what it has."""

from __future__ import annotations

import math

from waiting import eventually

import reverb_writer as rw
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.sample_stream import SampleStream


def test_question_is_open_until_its_answer_is_read() -> None:
    with rw.LocalServer([rw.TableConfig("replay")]) as server, Channel(server.address) as channel:
        stream = SampleStream(channel, "replay", None, changed=lambda: None, removes_items=False)
        assert stream.proceed(5.0, 0, 8) == math.inf, "the answer causes the next call"
        assert stream.unanswered_since == 5.0

        def is_answered() -> bool:
            stream.proceed(6.0, 0, 8)
            return stream.unanswered_since is None

        eventually(is_answered)
        assert (stream.loss, stream.table is None) == (None, False)
        stream.close()
