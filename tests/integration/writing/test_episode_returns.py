"""Returns of episodes, from actors to whoever draws the curve."""

from __future__ import annotations

import numpy as np
import pytest
from reading import Serve
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw

RETURNS = rw.TableConfig.returns("returns", max_size=5)


def play(returns: rw.EpisodeReturns, rewards: list[list[float]]) -> None:
    """Add the steps of episodes, each with these rewards."""
    for episode in rewards:
        for number, reward in enumerate(episode, 1):
            returns.add(reward, number == len(episode))


def test_each_ended_episode_of_all_actors_is_read_once(serve: Serve) -> None:
    client = serve(RETURNS)
    with rw.EpisodeReturns(client) as reader:
        assert [one.tolist() for one in reader.read()] == [[], []]
        assert reader.as_scalars() == {"episodes": 0.0, "episode_steps": 0.0}
        with rw.EpisodeReturns(client.address) as first, rw.EpisodeReturns(client.address) as second:
            play(first, [[1.0, 2.5], [4.0]])
            second.add(100.0, is_over=False)  # it does not end
        returns, lengths = reader.read()
        assert (returns.tolist(), lengths.tolist()) == ([3.5, 4.0], [2, 1])
        with rw.EpisodeReturns(client.address) as first:
            play(first, [[-1.0, 0.0, 0.0]])
        assert reader.as_scalars("actor/") == {
            "actor/episodes": 3.0,
            "actor/episode_steps": 6.0,
            "actor/mean_return": 6.5 / 3,
            "actor/mean_length": 2.0,
        }
        assert reader.read()[0].tolist() == []


def test_episodes_of_a_vector_end_one_by_one(serve: Serve) -> None:
    client = serve(RETURNS)
    with rw.EpisodeReturns(client, num_last=2) as returns:
        returns.add(np.array([1.0, 10.0], np.float32), np.array([False, False]))
        returns.add([2.0, 20.0], [False, True])
        returns.add([3.0, 30.0], [True, False])
        returns.add([4.0, 40.0], [False, True])
        eventually(lambda: client.server_info()["returns"].current_size == 3, "they are written")
        numbers = returns.as_scalars()
        assert (numbers["mean_return"], numbers["mean_length"]) == ((6.0 + 70.0) / 2, (3 + 2) / 2)  # the last two
        for reward, is_over in (
            (1.0, True),
            ([1.0, 2.0], [True]),
            ([1.0], [False]),
            (np.ones((2, 1)), np.ones((2, 1))),
        ):
            with pytest.raises(rw.errors.StructureError, match="expected a number and a flag"):
                returns.add(reward, is_over)


def test_actors_never_wait_for_a_reader_and_the_newest_episodes_stay(serve: Serve) -> None:
    client = serve(RETURNS)
    with rw.EpisodeReturns(client) as returns:
        play(returns, [[float(number)] for number in range(100)])
    with rw.EpisodeReturns(client) as reader:
        assert reader.read()[0].tolist() == [95.0, 96.0, 97.0, 98.0, 99.0]


def test_episodes_on_several_servers_are_read_from_all(replay_server: StartServer) -> None:
    servers = [replay_server(RETURNS) for _ in range(2)]
    for number, server in enumerate(servers):
        with rw.EpisodeReturns(server.address) as actor:
            play(actor, [[float(number)]])
    with rw.EpisodeReturns([server.address for server in servers]) as reader:
        assert sorted(reader.read()[0]) == [0.0, 1.0]


@pytest.mark.parametrize(
    "table", [rw.TableConfig("returns"), rw.TableConfig.queue("returns", 5)], ids=["plain", "queue"]
)
def test_table_of_other_rules_is_refused(serve: Serve, table: rw.TableConfig) -> None:
    client = serve(table)
    with pytest.raises(rw.errors.StructureError, match=r"Make it by `TableConfig.returns\('returns'\)`"):
        rw.EpisodeReturns(client)


def test_items_of_others_are_refused(serve: Serve) -> None:
    client = serve(RETURNS)
    client.insert([np.zeros(3)], {"returns": 1.0})
    with rw.EpisodeReturns(client) as reader, pytest.raises(rw.errors.FormatError, match="a table of its own"):
        reader.read()
