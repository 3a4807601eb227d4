"""Weights on a server of this process: their numbers, and the end of a run."""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from threads import soon

import reverb_writer as rw

WEIGHTS = {"w": np.arange(3.0)}


@pytest.fixture
def server() -> Iterator[rw.LocalServer]:
    with rw.LocalServer([rw.TableConfig.variables("weights"), rw.TableConfig("replay")]) as server:
        yield server


def test_newest_version_is_the_one_that_is_read(server: rw.LocalServer) -> None:
    wrong: Any
    for wrong in (-1, float("nan"), "often"):
        with pytest.raises(rw.errors.SpecError, match="`interval_s` must be"):
            rw.Variables(server, "weights", interval_s=wrong)
    with rw.Variables(server, "weights", timeout_s=60) as learner, rw.Variables(server, "weights") as actor:
        assert (learner.version, actor.version) == (0, 0)
        first = learner.publish(WEIGHTS)
        assert learner.version == first
        second = learner.publish({"w": np.ones(3)})
        assert actor.latest()["w"].tolist() == [1, 1, 1]
        assert (actor.version, actor.finished, actor.poll("same")) == (second, False, "same")
        with pytest.raises(rw.errors.ReplayTimeoutError, match="has no newer version"):
            actor.wait(timeout_s=0.1)
        assert actor.wait(newer_than=first)["w"].tolist() == [1, 1, 1]
        with pytest.raises(rw.errors.SpecError, match="`newer_than` must be an integer"):
            actor.wait(newer_than=wrong)
        with soon(lambda: learner.publish(WEIGHTS)):
            assert actor.wait()["w"].tolist() == [0, 1, 2]


def test_versions_begin_with_the_time_and_grow_by_one(server: rw.LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with rw.Variables(server, "weights", timeout_s=60) as learner:
        first = learner.publish(WEIGHTS)
        assert first > 1_700_000_000_000
        assert [learner.publish(WEIGHTS) for _ in range(3)] == [first + 1, first + 2, first + 3]
        with rw.Variables(server, "weights") as other:
            other.latest()
            monkeypatch.setattr("time.time_ns", lambda: 10**18)  # its clock is behind
            assert other.publish(WEIGHTS) == first + 4


def test_learner_whose_clock_is_behind_publishes_weights_that_actors_take(
    server: rw.LocalServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rw.Variables(server, "weights") as learner, rw.Variables(server, "weights") as actor:
        first = learner.publish([np.arange(3)])
        assert actor.wait()[0].tolist() == [0, 1, 2]
        monkeypatch.setattr("time.time_ns", lambda: 1_000_000_000)  # on another machine, 1 s after 1970
        with rw.Variables(server, "weights") as later:
            assert [later.publish([np.arange(3, 6)]), later.publish([np.arange(3)])] == [first + 1, first + 2]
        assert actor.wait(timeout_s=10.0)[0].tolist() == [0, 1, 2]
        assert actor.version == first + 2
        with rw.Variables(server, "weights") as last:
            last.finish()
        assert actor.wait(timeout_s=10.0) is None


def test_variables_may_be_sent_to_another_process(server: rw.LocalServer) -> None:
    with rw.Variables(server, "weights", timeout_s=60) as learner:
        learner.publish(WEIGHTS)
        with pickle.loads(pickle.dumps(learner)) as actor:  # noqa: S301  # it is ours
            assert (actor.version, actor.latest()["w"].tolist()) == (0, [0, 1, 2])
        with pytest.raises(rw.errors.ClosedError):  # its own client was closed
            actor.latest()
    with rw.Client(server, timeout_s=7) as client:
        given = pickle.loads(pickle.dumps(rw.Variables(client, "weights")))  # noqa: S301
        client.reset("weights")
        with pytest.raises(rw.errors.ReplayTimeoutError, match=r"is empty at .* after 0\.1 s"):
            given.latest(timeout_s=0.1)


def test_module_in_a_nest_is_refused_with_what_to_publish(server: rw.LocalServer) -> None:
    class Module:
        def state_dict(self) -> dict[str, Any]:
            return WEIGHTS

    with rw.Variables(server, "weights", timeout_s=60) as learner:
        with pytest.raises(rw.errors.StructureError, match=r"a nest with a Module, .* `state_dict\(\)`"):
            learner.publish({"actor": Module(), "critic": Module()})
        assert learner.version == 0


_LEARNER = """
import sys
import reverb_writer as rw
address, *priorities = sys.argv[1:]
with rw.Client(address) as client, rw.Variables(client, "weights") as weights:
    for priority in priorities:
        client.mutate_priorities("replay", {1: float(priority)})  # the server ignores keys that it does not have
    if not priorities:
        client.reset("replay")
    weights.publish([0.0])
"""


def test_largest_priority_of_a_learner_in_another_process_travels_with_its_weights() -> None:
    tables = [
        rw.TableConfig.variables("weights"),
        rw.TableConfig("replay", 10, sampler="lifo"),
        rw.TableConfig("other"),
    ]
    with rw.LocalServer(tables) as server, rw.Variables(server.address, "weights") as weights:

        def learner(*priorities: str) -> None:
            subprocess.run([sys.executable, "-c", _LEARNER, server.address, *priorities], check=True, timeout=60)
            weights.wait(timeout_s=10.0)

        def priority_of_a_new_item(table: str = "replay") -> float:
            with rw.TrajectoryObserver(server.address, table, 1, priority="max") as actor:
                actor({"x": np.zeros(2)})
            with rw.Client(server.address) as client:
                (sample,) = client.sample(table, 1)
            return sample.info.priority

        assert priority_of_a_new_item() == 1.0
        learner("7.5", "50", "2")
        assert priority_of_a_new_item() == 50.0
        assert priority_of_a_new_item("other") == 1.0
        learner("3")  # a learner that starts again
        assert priority_of_a_new_item() == 3.0
        learner()  # it empties the table
        assert priority_of_a_new_item() == 1.0


@pytest.mark.parametrize("blob", [b"PK\x00\x00", "text\x00", b"\x00\x00", b""])
def test_bytes_and_strings_arrive_whole(server: rw.LocalServer, blob: bytes | str) -> None:
    with rw.Variables(server, "weights") as learner, rw.Variables(server, "weights") as actor:
        expected = blob if isinstance(blob, bytes) else blob.encode()
        learner.publish(blob)
        assert actor.latest() == expected
        learner.publish({"files": [blob, "b"], "step": 3})
        assert actor.latest() == {"files": [expected, b"b"], "step": 3}


@pytest.mark.parametrize(
    ("nest", "place"),
    [
        ({"groups": [{"lr": 0.1, "foreach": None}]}, "a version, leaf `groups/0/foreach`: NoneType, expected"),
        ({"w": np.zeros(2), "f": {"g": object()}}, "a version, leaf `f/g`: object, expected an array, a number"),
        (None, "a version: NoneType, expected an array"),
    ],
)
def test_leaf_that_is_no_array_is_named_by_its_path(server: rw.LocalServer, nest: object, place: str) -> None:
    with rw.Variables(server, "weights") as learner:
        with pytest.raises(rw.errors.StructureError, match=place):
            learner.publish(nest)
        assert learner.poll("nothing") == "nothing"


@pytest.mark.parametrize("published", [False, True])
def test_end_of_a_run_keeps_its_last_weights(server: rw.LocalServer, published: bool) -> None:
    with rw.Variables(server, "weights", timeout_s=60) as learner, rw.Variables(server, "weights") as actor:
        version = learner.publish(WEIGHTS) if published else 0
        learner.finish()
        assert actor.wait() is None
        assert actor.poll("no newer ones") == "no newer ones"
        assert actor.finished
        if published:
            assert (actor.version, actor.latest()["w"].tolist()) == (version + 1, [0, 1, 2])
        else:
            with pytest.raises(rw.errors.FinishedError, match="nothing was published in it"):
                actor.latest()
        learner.publish({"w": np.ones(3)})  # begins a new run
        assert actor.wait()["w"].tolist() == [1, 1, 1]
        assert not actor.finished


@pytest.mark.parametrize("data", [{"x": np.zeros(2)}, [np.array([b"", b"x"], object)]])
def test_items_that_are_no_weights_are_refused(server: rw.LocalServer, data: object) -> None:
    with rw.Client(server) as client, rw.Variables(server, "weights", timeout_s=60) as actor:
        client.insert(data, {"weights": 1.0})
        with pytest.raises(rw.errors.FormatError, match="`weights`: "):
            actor.latest()


def test_table_that_holds_more_than_one_version_is_refused(server: rw.LocalServer) -> None:
    with pytest.raises(rw.errors.StructureError, match="expected 1 and 0 because it holds one version"):
        rw.Variables(server, "replay")
    with (
        rw.LocalServer([rw.TableConfig("once", 1, max_times_sampled=1)]) as other,
        pytest.raises(rw.errors.StructureError, match="max_size 1, max_times_sampled 1"),
    ):
        rw.Variables(other, "once")


def test_step_that_waits_ends_with_the_run() -> None:
    ended = threading.Event()

    def act(server: rw.LocalServer, timeout_s: float) -> None:
        with rw.TrajectoryObserver(
            server, "queue", 1, max_in_flight_items=1, until=ended.is_set, timeout_s=timeout_s
        ) as observer:
            for number in range(9):
                observer({"n": np.int64(number)})

    with rw.LocalServer([rw.TableConfig.queue("queue", 1)]) as server:
        threading.Timer(0.5, ended.set).start()  # while a step waits, unless the machine is slow
        with pytest.raises(rw.errors.FinishedError):
            act(server, 20.0)
