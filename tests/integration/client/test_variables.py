"""Weights for the actors: what the learner publishes comes as it was, and a poll does not wait."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from call_forwarder import CallForwarder
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw
from reverb_writer.client import server_set
from reverb_writer.client.targets import rank_shards


def test_variables_come_as_they_were_published(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("weights", 1), rw.TableConfig("replay"))
    nest = {"layers": [(np.ones((2, 3), np.float32), np.zeros(3))], "step": 7}
    with rw.Variables(server.address, "weights") as learner, rw.Variables(server.address, "weights") as actor:
        with pytest.raises(rw.errors.ReplayTimeoutError):
            actor.latest(timeout_s=0.2)
        learner.publish(nest)
        found = actor.latest()
        assert isinstance(found["layers"], list)
        np.testing.assert_array_equal(found["layers"][0][0], np.ones((2, 3)))
        assert found["step"] == 7
        learner.publish({"step": np.float32(8)})
        assert actor.latest() == {"step": 8}
    with pytest.raises(rw.errors.StructureError, match=r"expected 1"):
        rw.Variables(server.address, "replay")


def test_latest_logs_that_it_waits(
    replay_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_set, "LOG_EVERY_S", 0.2)
    server = replay_server(rw.TableConfig("weights", 1))
    with rw.Variables(server.address, "weights") as actor, pytest.raises(rw.errors.ReplayTimeoutError):
        actor.latest(timeout_s=1.5)
    logged = [record.getMessage() for record in caplog.records]
    assert sum(f"nothing was published yet, waiting for it at {server.address} for" in line for line in logged) > 1


def test_latest_logs_that_no_server_answers(
    lone_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server_set, "LOG_EVERY_S", 0.2)
    server = lone_server(rw.TableConfig("weights", 1))
    with rw.Variables(server.address, "weights") as actor:
        server.process.kill()
        with pytest.raises(rw.errors.ServerUnavailableError):
            actor.latest(timeout_s=1.5)
    logged = [record.getMessage() for record in caplog.records]
    assert sum(f"table `weights`: waiting for the server at {server.address} for" in line for line in logged) > 1
    assert not any("nothing was published" in line for line in logged)


def test_poll_gives_each_version_once(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("weights", 1))
    with (
        rw.Variables(server.address, "weights") as learner,
        rw.Variables(server.address, "weights", interval_s=0.001) as actor,
    ):
        found = []

        def polled() -> bool:
            found.extend(actor.poll([]))
            return bool(found)

        assert not any(actor.poll() for _ in range(100))
        learner.publish([np.arange(3)])
        eventually(polled)
        actor.latest()
        assert not any(actor.poll() for _ in range(100))
        learner.publish([np.arange(4)])
        found.clear()
        eventually(polled)
        assert [array.tolist() for array in found] == [[0, 1, 2, 3]]


def test_poll_of_a_server_that_is_gone_finds_nothing_new(lone_server: StartServer) -> None:
    server = lone_server(rw.TableConfig("weights", 1))
    with rw.Variables(server.address, "weights", interval_s=0.001) as actor:
        server.process.kill()
        assert [actor.poll("old") for _ in range(200)] == ["old"] * 200


def test_latest_waits_for_its_own_time_out_only(lone_server: StartServer) -> None:
    server = lone_server(rw.TableConfig("weights", 1))
    with rw.Variables(server.address, "weights", timeout_s=float("inf")) as actor:
        server.process.kill()
        with pytest.raises(rw.errors.ServerUnavailableError, match=r"within 0.3 s"):
            actor.latest(timeout_s=0.3)


def test_each_version_goes_to_the_first_server_in_the_order_of_the_tables_name(replay_server: StartServer) -> None:
    addresses = [replay_server(rw.TableConfig("weights", 1)).address for _ in range(3)]
    with rw.Variables(addresses, "weights") as learner:
        first = learner.publish([np.arange(3)])
        assert learner.publish([np.arange(4)]) == first + 1
        assert learner.latest()[0].tolist() == [0, 1, 2, 3]
    with contextlib.ExitStack() as stack:
        clients = {address: stack.enter_context(rw.Client(address)) for address in addresses}
        inserts = {name: one.server_info()["weights"].rate_limiter.num_inserts for name, one in clients.items()}
    (chosen, *others) = rank_shards("weights", addresses)
    assert inserts == {chosen: 2, **dict.fromkeys(others, 0)}


@pytest.mark.parametrize("num_servers", [1, 2])
def test_weights_are_taken_from_servers_and_a_learner_that_have_all_started_again_empty(
    lone_server: StartServer, num_servers: int
) -> None:
    servers = [lone_server(rw.TableConfig("weights", 1)) for _ in range(num_servers)]
    addresses = [server.address for server in servers]
    with rw.Variables(addresses, "weights", interval_s=0.001) as actor:
        with rw.Variables(addresses, "weights") as learner:
            for number in range(3):
                learner.publish([number])
        eventually(lambda: actor.poll() == [2])
        for server in servers:
            server.process.kill()
            server.process.restart()
        with rw.Variables(addresses, "weights") as learner:
            learner.publish([7])
        eventually(lambda: actor.poll() == [7])
        assert actor.version == learner.version


def test_weights_are_read_from_whichever_server_has_the_newest(
    lone_server: StartServer, caplog: pytest.LogCaptureFixture
) -> None:
    servers = {server.address: server for server in [lone_server(rw.TableConfig("weights", 1)) for _ in range(2)]}
    addresses = list(servers)
    first, second = (servers[address] for address in rank_shards("weights", addresses))
    with rw.Variables(addresses, "weights") as learner, rw.Variables(addresses, "weights", interval_s=0.001) as actor:

        def polled(version: int) -> bool:
            """Return whether polling comes to a publication, and to none but newer ones on the way."""
            versions = [0]

            def is_there() -> bool:
                if (nest := actor.poll()) is not None:
                    versions.append(int(nest[0]))
                return versions[-1] == version

            eventually(is_there)
            return versions == sorted(set(versions))

        learner.publish([1])
        assert polled(1)
        first.process.kill()
        learner.publish([2])
        learner.publish([3])
        assert polled(3)
        first.process.restart()  # without weights
        with rw.Variables(addresses, "weights") as late:
            assert late.latest() == [3]
        second.process.kill()
        learner.publish([4])  # the first server has it
        assert polled(4)
        second.process.restart()
        learner.publish([5])
        assert polled(5)
        assert actor.latest() == [5]
    said = [record.getMessage() for record in caplog.records if "publications now go to" in record.getMessage()]
    assert said == [f"table `weights`: publications now go to {one.address}." for one in (second, first)]


def test_weights_that_an_old_checkpoint_brings_back_are_not_taken(replay_server: StartServer) -> None:
    """A reader keeps the version of the largest number, whatever a server that comes back has."""
    servers = [replay_server(rw.TableConfig("weights", 1)) for _ in range(2)]
    addresses = [server.address for server in servers]
    with rw.Variables(addresses, "weights") as learner, rw.Variables(addresses, "weights", interval_s=0.001) as actor:
        newest = learner.publish([10])
        eventually(lambda: actor.poll() == [10] or actor.version == newest)
        for address in addresses:
            with rw.Variables(address, "weights") as old:
                old._last_number = newest - 3
                assert old.publish([9]) == newest - 2
            assert not any(actor.poll() for _ in range(300))
        newest = learner.publish([11])
        eventually(lambda: actor.poll() is not None or actor.version == newest)


def test_weights_that_no_server_has_yet_are_waited_for(replay_server: StartServer) -> None:
    addresses = [replay_server(rw.TableConfig("weights", 1)).address for _ in range(2)]
    with rw.Variables(addresses, "weights") as learner, rw.Variables(addresses, "weights") as actor:
        with pytest.raises(
            rw.errors.ReplayTimeoutError, match=r"table `weights` is empty at .* Nothing was published yet"
        ):
            actor.latest(timeout_s=0.3)
        timer = threading.Timer(0.2, learner.publish, [[np.arange(3)]])
        timer.start()
        assert actor.latest()[0].tolist() == [0, 1, 2]
        timer.join()


@pytest.mark.parametrize("interval_s", [-1, float("nan"), "often"])
def test_interval_that_is_none_is_refused(interval_s: object) -> None:
    with pytest.raises(rw.errors.SpecError, match="`interval_s` must be"):
        rw.Variables("localhost:1", "weights", interval_s=interval_s)  # type: ignore[arg-type]  # what is tested


def test_poll_does_not_wait_for_a_server_that_hangs_with_news(lone_server: StartServer) -> None:
    server = lone_server(rw.TableConfig("weights", 1))
    with (
        rw.Variables(server.address, "weights") as learner,
        rw.Variables(server.address, "weights", interval_s=0.0) as actor,
    ):
        learner.publish([np.arange(3)])
        server.process.pause()
        try:
            assert [actor.poll("old") for _ in range(1000)] == ["old"] * 1000
        finally:
            server.process.resume()
        eventually(lambda: actor.poll() is not None)


def test_weights_after_a_time_out_have_another_number(replay_server: StartServer) -> None:
    """The servers have both: readers take the later ones, although they know the others."""
    servers = [replay_server(rw.TableConfig("weights", 1)) for _ in range(2)]
    with contextlib.ExitStack() as stack:
        forwarders = [stack.enter_context(CallForwarder(server.port)) for server in servers]
        learner = stack.enter_context(rw.Variables([one.address for one in forwarders], "weights", timeout_s=4))
        actor = stack.enter_context(rw.Variables([one.address for one in servers], "weights", interval_s=0.001))
        for forwarder in forwarders:
            forwarder.lose = {"InsertStream": grpc.StatusCode.DEADLINE_EXCEEDED}.get
        with pytest.raises((rw.errors.ReplayTimeoutError, rw.errors.ServerUnavailableError)):
            learner.publish([1])
        eventually(lambda: actor.poll() == [1])
        for forwarder in forwarders:
            forwarder.lose = lambda _: None
        learner.publish([2])
        eventually(lambda: actor.poll() == [2])


def test_each_of_many_threads_publishes_under_a_number_of_its_own(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("weights", 1))
    with rw.Variables(server.address, "weights") as learner, ThreadPoolExecutor(8) as threads:
        versions = sorted(threads.map(lambda number: learner.publish([number]), range(40)))
    assert versions == [*range(versions[0], versions[0] + 40)]


class Module:
    """What has a state, as modules of PyTorch have."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_state_of_a_module_is_published_and_loaded(replay_server: StartServer) -> None:
    address = replay_server(rw.TableConfig.variables("weights")).address
    there, here = Module({"layer.weight": np.ones((2, 3), np.float32), "steps": 7}), Module({})
    with rw.Variables(address, "weights") as learner, rw.Variables(address, "weights", interval_s=0.001) as actor:
        learner.publish(there)
        assert actor.load_into(here)
        np.testing.assert_array_equal(here.state["layer.weight"], np.ones((2, 3)))
        assert here.state["steps"] == 7
        assert not actor.load_into(here)
        learner.publish(Module({"steps": 8}))
        eventually(lambda: actor.load_into(here))
        assert here.state == {"steps": 8}


def test_weights_of_a_pytorch_module_are_loaded_as_tensors(replay_server: StartServer) -> None:
    torch = pytest.importorskip("torch")

    def network(dtype: Any) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(dtype)

    address = replay_server(rw.TableConfig.variables("weights")).address
    for dtype in (torch.float32, torch.bfloat16):
        there, here = network(dtype), network(dtype)
        with rw.Variables(address, "weights") as learner, rw.Variables(address, "weights") as actor:
            learner.publish(there)
            assert actor.load_into(here)
        for name, tensor in there.state_dict().items():
            assert torch.equal(here.state_dict()[name], tensor)
            assert here.state_dict()[name].dtype == tensor.dtype
