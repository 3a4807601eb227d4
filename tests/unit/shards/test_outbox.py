"""Which server gets an episode, and when a server is given up. Most tests need no server: nothing is sent."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from reading import fifo
from shard_outboxes import Episode, Episodes, Items, Replay, first

import reverb_writer as rw
from reverb_writer.errors import StructureError
from reverb_writer.replay.connection import ReplayConnection
from reverb_writer.shards import outbox
from reverb_writer.shards.outbox import ShardedOutbox
from reverb_writer.shards.targets import rank_shards
from reverb_writer.writing.outbox import ServerOutbox
from reverb_writer.writing.stream_options import DeliveryOptions


@pytest.fixture(autouse=True)
def _name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "writer_name", lambda: "actor")


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of `time.monotonic`, to be changed."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


# ------------------------------------------------------------------------------------------------ who gets an episode


def test_episode_goes_to_the_first_server_that_has_room_and_stays_there() -> None:
    replay = Replay("p", "q", "r")
    order = rank_shards("actor/1", "pqr")
    episode = replay.episode(3)
    assert replay.pending()[order[0]] == 3
    replay.write(episode, 5)  # beyond the limit of four, because an episode is never split
    assert replay.pending() == {order[0]: 8, order[1]: 0, order[2]: 0}
    for _ in range(8):
        replay.episode(1)
    assert sorted(replay.pending().values()) == [4, 4, 8], "the full server gets no further episode"
    replay.episode(1)  # all are full: one of those with the most room gets it
    assert sum(replay.pending().values()) == 17


def test_items_of_one_call_count_as_unconfirmed_before_they_are_written() -> None:
    replay = Replay("p", "q", max_in_flight_items=3)
    batches: Any = [Items(Episode(), 2) for _ in range(2)]
    replay.outbox.write(batches)
    assert replay.pending() == {"p": 2, "q": 2}


def test_draining_server_gets_no_new_episode() -> None:
    replay = Replay("p", "q", max_in_flight_items=1000)
    drained = first(1, "p", "q")
    other = {"p": "q", "q": "p"}[drained]
    begun = replay.episode(1)
    replay.set_state(drained, "draining")
    for _ in range(20):
        replay.episode(1)
    replay.write(begun, 1)
    assert replay.pending() == {drained: 2, other: 20}
    replay.outbox.check()
    assert replay.counts == {"lost_shards": 0, "unconfirmed_items": 0}


def test_room_is_that_of_the_fullest_server_of_an_open_episode() -> None:
    replay = Replay("p", "q")
    full = first(1, "p", "q")
    replay.source.open = [Episode()]
    assert replay.outbox.room() == 4
    replay.source.open = []
    replay.episode(3)
    assert replay.outbox.room() == 1
    replay.source.open = [Episode()]  # its server is not chosen yet: the emptiest counts
    assert replay.outbox.room() == 4
    replay.set_state(full, "draining")
    replay.episode(2)
    assert replay.outbox.room() == 2
    replay.confirm("p")
    replay.confirm("q")
    assert replay.outbox.room() == 4


def test_draining_server_gives_no_room_to_an_episode_that_has_no_server_yet() -> None:
    replay = Replay("p", "q")
    replay.set_state("p", "draining")
    replay.episode(3)
    assert replay.pending() == {"p": 0, "q": 3}
    replay.source.open = [Episode()]
    assert replay.outbox.room() == 1


def test_room_is_that_of_the_fullest_of_several_open_episodes() -> None:
    replay = Replay("p", "q", max_in_flight_items=5)
    replay.episode(5)  # full, so the other server gets the next episode
    replay.episode(1)
    assert sorted(replay.pending().values()) == [1, 5]
    assert replay.outbox.room() == 0


def test_bytes_of_one_server_fill_only_this_server() -> None:
    replay = Replay("p", "q", max_in_flight_bytes=24)
    full = first(1, "p", "q")
    replay.episode(3)  # 8 bytes an item
    assert replay.to(full).room() == 0
    assert replay.outbox.room() == 0
    replay.source.open = [Episode()]
    assert replay.outbox.room() == 4
    assert (replay.outbox.num_written, replay.outbox.pending_bytes) == (3, 24)


@pytest.mark.parametrize(("is_endless", "names", "num_cuts"), [(True, "pq", 1), (True, "p", 0), (False, "pq", 0)])
def test_stream_without_an_end_is_cut_after_a_thousand_items_so_that_another_server_gets_the_next(
    is_endless: bool, names: str, num_cuts: int
) -> None:
    replay = Replay(*names, is_endless=is_endless, max_in_flight_items=10_000)
    episode = replay.episode(999)
    assert replay.source.cuts == []
    replay.write(episode, 1)
    assert replay.source.cuts == [(episode, "reset")] * num_cuts


# --------------------------------------------------------------------------------------------------- lost servers


def test_server_that_the_target_calls_lost_is_given_up_and_its_items_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    replay = Replay("p", "q")
    lost = first(1, "p", "q")
    (other,) = {"p", "q"} - {lost}
    episode = replay.episode(3)
    ended = Episode(episode.receiver)  # its next items are complete, and not encoded yet
    replay.set_state(lost, "lost")
    replay.outbox.check()
    assert replay.source.cuts == [(episode, "lost_shard")]
    assert replay.counts == {"lost_shards": 1, "unconfirmed_items": 3}
    told = "are given up, and may be stored there nevertheless."
    assert caplog.messages == [f"Shard {lost}:8000 is called lost by the target: 3 unconfirmed items {told}"]
    assert replay.num_refreshed == 1
    replay.write(ended, 2)
    assert replay.pending() == {lost: 0, other: 2}
    replay.outbox.check()
    assert replay.counts["lost_shards"] == 1, "it is given up once"


def test_silent_server_is_given_up_only_if_a_question_stays_unanswered_for_half_of_the_patience(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    replay = Replay("p", "q")
    silent = first(1, "p", "q")
    (other,) = {"p", "q"} - {silent}
    channel: Any = replay.to(silent).shard.channel
    replay.outbox.check()
    assert channel.questions == [], "nothing is due"
    episode = replay.episode(2)
    for later, num_questions in ((4.9, 0), (5.0, 1), (9.9, 1)):
        now[0] = 100 + later
        replay.outbox.check()
        assert len(channel.questions) == num_questions
    channel.answer("a")  # at 109.9: it is not lost, because it answers
    now[0] = 114.8
    replay.outbox.check()
    assert channel.questions == []
    now[0] = 115.0
    replay.outbox.check()
    assert len(channel.questions) == 1
    now[0] = 119.8  # silent for less than ten seconds
    replay.outbox.check()
    assert replay.counts["lost_shards"] == 0
    now[0] = 120.0  # ten seconds without a message, five of them after the question
    replay.outbox.check()
    assert replay.counts == {"lost_shards": 1, "unconfirmed_items": 2}
    assert replay.source.cuts == [(episode, "lost_shard")]
    assert f"Shard {silent}:8000 has neither confirmed nor answered anything for 10.1 s: 2 uncon" in caplog.text
    for _ in range(6):
        replay.episode(1)
    assert replay.pending() == {silent: 0, other: 6}, "a lost server gets no episode, even if the others are full"


def test_process_that_was_paused_itself_gives_no_server_up(now: list[float]) -> None:
    replay = Replay("p", "q")
    replay.episode(2)
    now[0] = 1000.0
    replay.outbox.check()
    assert replay.counts["lost_shards"] == 0
    now[0] = 1004.0
    replay.outbox.check()
    assert replay.counts["lost_shards"] == 0


def test_lost_server_is_used_again_when_it_answers_and_has_the_tables(
    now: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    replay = Replay("p", "q")
    lost = first(1, "p", "q")
    channel: Any = replay.to(lost).shard.channel
    replay.episode(2)
    replay.to(lost).delivery.fault = (StructureError, "table `a` is not on the server")
    replay.outbox.check()
    assert f"Shard {lost}:8000 refuses items (table `a` is not on the server): 2 unconfirmed" in caplog.text
    now[0] += 5
    replay.outbox.check()
    now[0] += 0.1
    channel.answer("b")  # it has come back without the table
    replay.outbox.check()
    assert replay.to(lost).is_lost
    now[0] += 5
    replay.outbox.check()
    now[0] += 0.1
    channel.answer("a", "b")
    replay.outbox.check()
    assert not replay.to(lost).is_lost
    assert f"Shard {lost}:8000 answers again." in caplog.messages


def test_server_that_the_target_called_lost_is_used_again_after_its_next_answer(now: list[float]) -> None:
    replay = Replay("p", "q")
    lost = first(1, "p", "q")
    channel: Any = replay.to(lost).shard.channel
    replay.set_state(lost, "lost")
    for _ in range(2):
        replay.outbox.check()
        now[0] += 5
    assert len(channel.questions) == 1
    channel.answer("a")
    replay.outbox.check()
    assert replay.to(lost).is_lost, "the target still says so"
    assert len(channel.questions) == 1
    replay.set_state(lost, "up")
    replay.outbox.check()
    assert replay.to(lost).is_lost, "it has not answered the newest question"
    now[0] += 1
    channel.answer("a")
    replay.outbox.check()
    assert not replay.to(lost).is_lost


def test_lost_server_has_no_room_and_is_asked_while_nothing_is_in_flight() -> None:
    replay = Replay("p", "q")
    lost = first(1, "p", "q")
    replay.set_state(lost, "lost")
    replay.outbox.check()
    assert replay.outbox.proceed() == 1.0
    replay.episode(4)
    replay.source.open = [Episode()]
    assert replay.outbox.room() == 0


def test_server_that_refuses_items_for_another_reason_is_not_lost() -> None:
    replay = Replay("p", "q")
    name = first(1, "p", "q")
    replay.episode(2)
    replay.to(name).delivery.fault = fault = (rw.errors.ReverbWriterError, "no")
    replay.outbox.check()
    assert replay.outbox.fault == fault
    assert replay.counts["lost_shards"] == 0


def test_last_server_that_is_up_is_never_given_up() -> None:
    replay = Replay("p", "q")
    replay.episode(2)
    for name in "pq":
        replay.set_state(name, "lost")
    replay.outbox.check()
    assert replay.counts["lost_shards"] == 1
    replay.episode(1)
    assert sum(replay.pending().values()) in (1, 3)


def test_restarted_server_that_was_given_up_gets_its_kept_items_again() -> None:
    replay = Replay("p", "q")
    lost = first(1, "p", "q")
    kept = replay.to(lost).delivery.kept
    replay.set_state(lost, "lost")
    replay.outbox.check()
    assert replay.to(lost).delivery.kept is kept


# ------------------------------------------------------------------------------------------------- another target


def test_target_that_changes_is_followed(caplog: pytest.LogCaptureFixture) -> None:
    replay = Replay("p", "q", max_kept_bytes=600)
    left = first(1, "p", "q")
    (stays,) = {"p", "q"} - {left}
    episode = replay.episode(3)
    before = replay.to(stays)
    replay.outbox.check()
    assert [replay.to(name).delivery.kept.max_bytes for name in "pq"] == [300, 300]
    replay.change(stays, "r", "s")
    replay.outbox.check()
    assert [replay.to(name).delivery.kept.max_bytes for name in (stays, "r", "s")] == [200, 200, 200]
    assert replay.to(stays) is before
    assert replay.pending() == {stays: 0, "r": 0, "s": 0}
    assert replay.counts == {"lost_shards": 1, "unconfirmed_items": 3}
    assert replay.source.cuts == [(episode, "lost_shard")]
    assert f"Shard {left}:8000 has left the target: 3 unconfirmed items are given up" in caplog.text


def test_all_servers_are_seen_as_one() -> None:
    replay = Replay("p", "q", "r", max_in_flight_items=2)
    for _ in range(3):
        replay.episode(2)
    assert replay.pending() == {"p": 2, "q": 2, "r": 2}
    replay.episode(1)
    (fullest,) = [name for name, count in replay.pending().items() if count == 3]
    one = replay.outbox
    assert one.delivery is replay.to(fullest).delivery
    assert (one.num_written, one.pending_bytes, one.kept_bytes, one.limit) == (7, 56, 0, 2)
    assert one.address == "p:8000, q:8000, r:8000"
    assert one.fault is None
    assert one.progress_at == max(replay.to(name).delivery.flight.progress_at for name in "pqr") > 0
    assert one.close() == 7
    assert one.num_written == 0


@pytest.mark.parametrize(("patience_s", "pause_s"), [(10.0, 1.0), (2.0, 0.25), (math.inf, 1.0)])
def test_servers_are_checked_again_while_items_are_in_flight(patience_s: float, pause_s: float) -> None:
    replay = Replay("p", "q", patience_s=patience_s)
    assert replay.outbox.proceed() == math.inf
    replay.episode(1)
    assert replay.outbox.proceed() == pause_s


@pytest.mark.parametrize(
    ("replay", "kind"),
    [("localhost:1", ServerOutbox), (["localhost:1", "localhost:2"], ShardedOutbox), ("file:", ShardedOutbox)],
)
def test_only_a_replay_that_has_or_may_get_several_servers_has_the_outbox_of_several(
    replay: Any, kind: type, tmp_path: Path
) -> None:
    if replay == "file:":
        (tmp_path / "shards").write_text("localhost:1\n")
        replay = f"file:{tmp_path / 'shards'}"
    connection, source = ReplayConnection(replay, None), cast("Any", Episodes())
    assert type(connection.outbox(DeliveryOptions(), source, lambda work: work())) is kind
    connection.close()
    with pytest.raises(rw.errors.ClosedError):
        connection.check_usable()


def test_connection_of_a_client_has_its_time_out_and_does_not_close_it() -> None:
    with rw.Client("localhost:1", timeout_s=7.0) as client:
        assert ReplayConnection(client, None).timeout_s == 7.0
        connection = ReplayConnection(client, 3.0)
        assert connection.timeout_s == 3.0
        connection.close()
        connection.check_usable()


def test_time_out_names_the_server_with_the_most_unconfirmed_items() -> None:
    with rw.LocalServer([fifo("a")]) as free, rw.LocalServer([rw.TableConfig.queue("a", 1)]) as full:
        observer = rw.TrajectoryObserver([free.address, full.address], "a", 1)
        for number in range(20):
            observer({"n": np.int64(number)}, end_of_episode=True)
        with pytest.raises(rw.errors.ReplayTimeoutError, match="max_diff 1"):
            observer.flush(timeout_s=2)
        with pytest.raises(rw.errors.ReplayTimeoutError):
            observer.close(timeout_s=0.1)
