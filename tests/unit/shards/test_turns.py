"""Servers in turn, and the target that names them: who gives the next batch, without a server."""

from __future__ import annotations

from collections.abc import Sequence

from shard_feeds import BATCH_SIZE, MAX_SAMPLES, NOTHING, NOW, Shards, numbers_of, table_info

from reverb_writer.shards.turns import InTurn

FIFO, QUEUE = table_info("fifo"), table_info("fifo", max_times_sampled=1)


class Turns(Shards):
    """Two servers that are read in turn."""

    def __init__(self, table: object = FIFO, num_servers: int = 2, *, may_grow: bool = True) -> None:
        self.rule = InTurn(BATCH_SIZE)
        super().__init__(self.rule, table, *[9] * num_servers, may_grow=may_grow)  # type: ignore[arg-type]  # a table
        self.proceed()

    def batch(self, num_samples: int = BATCH_SIZE, now: float = NOW, *, rest: bool = False) -> tuple[list[int], str]:
        """Take samples and end their batch; return their keys and their server."""
        found = self.rule.take(self.feeds.present, self.feeds._leaving, num_samples, now, rest=rest)
        return numbers_of(found), self.feeds.end_batch()

    def tell(self, *names: str) -> None:
        """Have the target name these servers."""
        known = {shard.name: shard for shard in self.connections.shards}
        self.connections.shards = tuple([known.get(name) or self.shard(name) for name in names])
        self.proceed()


def test_each_server_gives_a_batch_in_its_turn() -> None:
    turns = Turns()
    turns.receive("a", range(8), 9)
    turns.receive("b", range(10, 18), 9)
    found = [turns.batch() for _ in range(4)]
    assert found == [([0, 1, 2, 3], "a:1"), ([10, 11, 12, 13], "b:1"), ([4, 5, 6, 7], "a:1"), ([14, 15, 16, 17], "b:1")]
    assert turns.batch() == (NOTHING, "")
    assert (turns.remembered[3], turns.remembered[13]) == ("a", "b")


def test_server_whose_turn_it_is_is_waited_for_a_moment_and_then_left_out_until_it_has_a_batch() -> None:
    turns = Turns()
    turns.receive("b", range(10, 18), 9)
    assert turns.batch() == (NOTHING, "")
    assert turns.proceed() == NOW + 0.1  # the end of the patience
    assert turns.batch(now=NOW + 0.09) == (NOTHING, "")
    assert turns.batch(now=NOW + 0.11) == ([10, 11, 12, 13], "b:1")
    assert turns.stats().left_out_servers == 1
    assert turns.batch(now=NOW + 0.12) == ([14, 15, 16, 17], "b:1")  # it is no longer waited for
    turns.receive("a", range(4), 9)
    assert turns.batch() == ([0, 1, 2, 3], "a:1")
    assert turns.stats().left_out_servers == 0


def test_a_batch_stays_with_its_server_and_ends_when_the_server_is_lost_and_there_are_others() -> None:
    turns = Turns()
    turns.receive("a", range(4), 9)
    first = turns.rule.take(turns.feeds.present, [], 3, NOW, rest=False)
    turns.receive("b", range(10, 14), 9)
    second = turns.rule.take(turns.feeds.present, [], 1, NOW, rest=False)
    assert (numbers_of(first), numbers_of(second)) == ([0, 1, 2], [3])
    assert not turns.feeds.is_starved
    turns.lose("a")
    assert turns.feeds.is_starved
    assert turns.feeds.end_batch() == "a:1"
    assert turns.batch() == ([10, 11, 12, 13], "b:1")


def test_a_server_whose_samples_are_all_left_out_keeps_no_other_from_giving_the_batch() -> None:
    """Such as foreign or damaged samples: the batch is still empty when the server is lost, or has left."""
    for has_left in (False, True):
        turns = Turns()
        turns.receive("a", range(4), 9)
        assert numbers_of(turns.rule.take(turns.feeds.present, [], 4, NOW, rest=False)) == [0, 1, 2, 3]
        if has_left:
            turns.tell("b")
        else:
            turns.lose("a")
        turns.receive("b", range(10, 14), 9)
        assert turns.batch() == ([10, 11, 12, 13], "b:1")


def test_part_of_a_batch_is_given_on_request() -> None:
    turns = Turns()
    turns.receive("b", [10], 9)
    assert turns.batch(rest=True) == ([10], "b:1")


def test_only_server_shares_its_room_with_the_caller() -> None:
    def rooms(turns: Shards, names: Sequence[str]) -> list[tuple[int, int] | None]:
        turns.proceed(num_held=3)
        return [turns.streams[name].room for name in names]

    turns = Turns()
    turns.receive("a", [0, 1], 9)
    turns.of("b").max_samples = 5
    assert rooms(turns, "ab") == [(2, MAX_SAMPLES), (0, 5)]  # each has room of its own
    turns.tell("b")
    assert rooms(turns, "b") == [(3, MAX_SAMPLES)]


def test_samples_of_a_server_of_a_queue_that_leaves_are_still_given() -> None:
    for table, rest, dropped in ((QUEUE, [0, 1], 0), (FIFO, NOTHING, 2)):
        turns = Turns(table)
        turns.receive("a", [0, 1], 9)
        turns.tell("b", "c")
        assert turns.streams["a"].is_closed
        assert (turns.streams["c"].state_id, turns.streams["c"].is_closed) == (None, False)  # it is asked first
        assert turns.feeds.num_waiting == len(rest)
        assert turns.batch()[0] == rest
        stats = turns.stats()
        assert (stats.received_samples, stats.dropped_samples) == (2, dropped)


def test_no_new_server_is_read_in_a_single_pass_or_after_the_end() -> None:
    one_pass, ended = Turns(may_grow=False), Turns()
    ended.feeds.stop_requests()
    for turns in (one_pass, ended):
        turns.tell("b", "c")
        assert [one.shard.name for one in turns.feeds.present] == ["b"]


def test_all_that_has_arrived_is_given_after_the_end() -> None:
    turns = Turns()
    turns.receive("a", [0], 9)
    turns.receive("b", [10, 11], 9)
    turns.feeds.close()
    assert [turns.batch(rest=True)[0] for _ in range(3)] == [[0], [10, 11], NOTHING]
    assert turns.feeds.is_done
