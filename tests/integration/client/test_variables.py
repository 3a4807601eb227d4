"""Weights for the actors: what the learner publishes comes as it was, a poll does not wait, and a run has an end."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import traceback
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from call_forwarder import CallForwarder
from numbered import write_numbers
from reading import Serve
from server_process import StartServer
from threads import soon
from waiting import eventually

import reverb_writer as rw
from reverb_writer import background
from reverb_writer.replay import variables
from reverb_writer.shards.targets import rank_shards

WEIGHTS = rw.TableConfig.variables("weights")


def test_variables_come_as_they_were_published(serve: Serve) -> None:
    client = serve(WEIGHTS)
    nest = {"layers": [(np.ones((2, 3), np.float32), np.zeros(3))], "step": 7}
    with rw.Variables(client, "weights") as learner, rw.Variables(client, "weights") as actor:
        with pytest.raises(rw.errors.ReplayTimeoutError):
            actor.latest(timeout_s=0.2)
        learner.publish(nest)
        found = actor.latest()
        assert isinstance(found["layers"], list)
        np.testing.assert_array_equal(found["layers"][0][0], np.ones((2, 3)))
        assert found["step"] == 7
        learner.publish({"step": np.float32(8)})
        assert actor.latest() == {"step": 8}
        with ThreadPoolExecutor(8) as threads:  # each publishes under a number of its own
            versions = sorted(threads.map(lambda number: learner.publish([number]), range(40)))
    assert versions == [*range(versions[0], versions[0] + 40)]


def test_server_that_hangs_or_is_gone_has_nothing_new_and_is_named_in_time(
    lone_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(background, "LOG_EVERY_S", 0.2)
    server = lone_server(WEIGHTS)
    with (
        rw.Variables(server.address, "weights") as learner,
        rw.Variables(server.address, "weights", interval_s=0.0, timeout_s=float("inf")) as actor,
    ):
        learner.publish([np.arange(3)])
        server.process.pause()
        try:
            assert [actor.poll("old") for _ in range(1000)] == ["old"] * 1000  # it does not wait
        finally:
            server.process.resume()
        eventually(lambda: actor.poll() is not None)
        server.process.kill()
        assert [actor.poll("old") for _ in range(200)] == ["old"] * 200
        with pytest.raises(rw.errors.ServerUnavailableError, match=r"within 1.5 s"):
            actor.latest(timeout_s=1.5)
    logged = [record.getMessage() for record in caplog.records]
    assert sum(f"table `weights`: waiting for the server at {server.address} (" in line for line in logged) > 1
    assert not any("nothing was published" in line for line in logged)


def test_each_version_goes_to_the_first_server_in_the_order_of_the_tables_name(replay_server: StartServer) -> None:
    addresses = [replay_server(WEIGHTS).address for _ in range(3)]
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
def test_weights_come_though_servers_and_learner_have_begun_anew(lone_server: StartServer, num_servers: int) -> None:
    servers = [lone_server(WEIGHTS) for _ in range(num_servers)]
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
    servers = {server.address: server for server in [lone_server(WEIGHTS) for _ in range(2)]}
    addresses = list(servers)
    first, second = (servers[address] for address in rank_shards("weights", addresses))
    with rw.Variables(addresses, "weights") as learner, rw.Variables(addresses, "weights", interval_s=0.001) as actor:
        learner.publish([1])
        eventually(lambda: actor.poll() == [1])
        first.process.kill()
        learner.publish([2])
        learner.publish([3])
        eventually(lambda: actor.poll() == [3])
        first.process.restart()  # without weights
        with rw.Variables(addresses, "weights") as late:
            assert late.latest() == [3]
        second.process.kill()
        learner.publish([4])  # the first server has it
        eventually(lambda: actor.poll() == [4])
        second.process.restart()
        learner.publish([5])
        eventually(lambda: actor.poll() == [5])
        assert actor.latest() == [5]
    said = [record.getMessage() for record in caplog.records if "publications now go to" in record.getMessage()]
    assert said == [f"table `weights`: publications now go to {one.address}." for one in (second, first)]


def test_weights_that_an_old_checkpoint_brings_back_are_not_taken(replay_server: StartServer) -> None:
    """A reader keeps the version of the largest number, whatever a server that comes back has."""
    servers = [replay_server(WEIGHTS) for _ in range(2)]
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


@pytest.mark.parametrize("num_servers", [1, 2])
def test_weights_that_no_server_has_yet_are_waited_for_as_is_logged(
    replay_server: StartServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, num_servers: int
) -> None:
    monkeypatch.setattr(background, "LOG_EVERY_S", 0.2)
    addresses = [replay_server(WEIGHTS).address for _ in range(num_servers)]
    message = r"table `weights` is empty at .* Nothing was published yet: start the learner"
    with rw.Variables(addresses, "weights") as learner, rw.Variables(addresses, "weights") as actor:
        with pytest.raises(rw.errors.ReplayTimeoutError, match=message) as caught:
            actor.latest(timeout_s=1.5)
        assert "actors" not in str(caught.value)
        assert "".join(traceback.format_exception(caught.value)).count("Traceback") == 1
        logged = [record.getMessage() for record in caplog.records]
        waits = [line for line in logged if "nothing was published yet, waiting for it at" in line]
        assert len(waits) > 1
        assert all(address in waits[0] for address in addresses)
        with soon(lambda: learner.publish([np.arange(3)])):
            assert actor.latest()[0].tolist() == [0, 1, 2]


def test_a_pause_that_takes_longer_than_it_should_leaves_the_error_right(
    replay_server: StartServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a busy machine: the time is up when the pause between two questions ends."""
    with rw.Variables(replay_server(WEIGHTS).address, "weights") as actor:
        late = types.SimpleNamespace(sleep=lambda _: time.sleep(5.1), monotonic=time.monotonic, time_ns=time.time_ns)
        monkeypatch.setattr(variables, "time", late)
        with pytest.raises(rw.errors.ReplayTimeoutError, match="table `weights` is empty at"):
            actor.latest(timeout_s=5.0)


def test_weights_after_a_time_out_have_another_number(replay_server: StartServer) -> None:
    """The servers have both: readers take the later ones, although they know the others."""
    servers = [replay_server(WEIGHTS) for _ in range(2)]
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


class Module:
    """What has a state, as modules of PyTorch have."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_state_of_a_module_is_published_and_loaded(serve: Serve) -> None:
    client = serve(WEIGHTS)
    there, here = Module({"layer.weight": np.ones((2, 3), np.float32), "steps": 7}), Module({})
    with rw.Variables(client, "weights") as learner, rw.Variables(client, "weights", interval_s=0.001) as actor:
        learner.publish(there)
        assert actor.load_into(here)
        np.testing.assert_array_equal(here.state["layer.weight"], np.ones((2, 3)))
        assert here.state["steps"] == 7
        assert not actor.load_into(here)
        learner.publish(Module({"steps": 8}))
        eventually(lambda: actor.load_into(here))
        assert here.state == {"steps": 8}


def test_module_gets_a_version_that_another_call_has_returned(serve: Serve) -> None:
    client, here = serve(WEIGHTS), Module({})
    with rw.Variables(client, "weights") as learner, rw.Variables(client, "weights", interval_s=0.001) as actor:
        learner.publish({"steps": 1})
        assert actor.latest() == {"steps": 1}
        assert actor.load_into(here)
        assert here.state == {"steps": 1}
        learner.publish({"steps": 2})
        eventually(lambda: actor.poll() is not None)
        assert actor.load_into(here)
        assert here.state == {"steps": 2}
        learner.publish({"steps": 3})
        assert actor.wait() == {"steps": 3}
        assert actor.load_into(here)
        assert here.state == {"steps": 3}
        assert not actor.load_into(here)


def test_weights_of_a_pytorch_module_are_loaded_as_tensors(serve: Serve) -> None:
    torch = pytest.importorskip("torch")

    def network(dtype: Any) -> Any:
        return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).to(dtype)

    client = serve(WEIGHTS)
    for dtype in (torch.float32, torch.bfloat16):
        there, here = network(dtype), network(dtype)
        with rw.Variables(client, "weights") as learner, rw.Variables(client, "weights") as actor:
            learner.publish(there)
            assert actor.load_into(here)
        for name, tensor in there.state_dict().items():
            assert torch.equal(here.state_dict()[name], tensor)
            assert here.state_dict()[name].dtype == tensor.dtype


def test_actors_see_that_the_run_has_ended_and_keep_its_weights(replay_server: StartServer) -> None:
    addresses = [replay_server(WEIGHTS).address for _ in range(2)]
    with contextlib.ExitStack() as stack:
        learner, actor, late = (
            stack.enter_context(rw.Variables(addresses, "weights", interval_s=0.001)) for _ in range(3)
        )
        version = learner.publish([np.arange(3)])
        assert actor.latest()[0].tolist() == [0, 1, 2]
        assert not actor.finished
        learner.finish()
        assert learner.finished
        eventually(lambda: actor.finished)
        assert actor.poll()[0].tolist() == [0, 1, 2]
        assert actor.version == learner.version == version + 1
        assert actor.wait() is None
        assert late.latest()[0].tolist() == [0, 1, 2]
        assert late.finished
        learner.publish([np.arange(4)])  # another run
        eventually(lambda: not actor.finished)
        assert actor.poll()[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "ask", [rw.Variables.latest, rw.Variables.wait, functools.partial(rw.Variables.wait, newer_than=0)]
)
def test_earlier_run_on_another_server_is_not_taken(
    replay_server: StartServer, lone_server: StartServer, ask: Callable[..., Any]
) -> None:
    earlier, newer = replay_server(WEIGHTS).address, lone_server(WEIGHTS)
    with rw.Variables(earlier, "weights") as learner:
        learner.publish([1])
        learner.finish()
    with contextlib.ExitStack() as stack:
        learner = stack.enter_context(rw.Variables(newer.address, "weights"))
        actor = stack.enter_context(rw.Variables([earlier, newer.address], "weights"))
        newest = learner.publish([5])
        assert actor.latest() == [5]
        newer.process.kill()
        with pytest.raises((rw.errors.ReplayTimeoutError, rw.errors.ServerUnavailableError)):
            ask(actor, timeout_s=3)
        assert actor.version == newest
        assert not actor.finished


@pytest.mark.parametrize("blocks_in", ["step", "flush", "close"])
def test_actor_that_a_rate_limiter_blocks_ends_with_the_run(
    replay_server: StartServer, caplog: pytest.LogCaptureFixture, blocks_in: str
) -> None:
    caplog.set_level(logging.INFO, "reverb_writer")
    address = replay_server(rw.TableConfig.queue("queue", 2), WEIGHTS).address
    with rw.Variables(address, "weights") as learner, rw.Variables(address, "weights") as weights:

        def act(observer: rw.TrajectoryObserver) -> None:
            write_numbers(observer, range(1_000_000 if blocks_in == "step" else 5))
            if blocks_in == "flush":
                observer.flush()

        options: dict[str, Any] = {"timeout_s": 600, "max_in_flight_items": 10, "until": lambda: weights.finished}
        ends = pytest.raises(rw.errors.FinishedError, match=r"the run has ended .`until` is true.: [0-9]+ items")
        with (
            soon(learner.finish),
            rw.TrajectoryObserver(address, "queue", 1, **options) as observer,
            contextlib.nullcontext() if blocks_in == "close" else ends,
        ):
            act(observer)
    assert observer.stats().acknowledged_items <= 2
    assert observer.stats().dropped_items >= 3
    assert not [
        record for record in caplog.records if record.levelno >= logging.ERROR or "undelivered" in record.message
    ]


def test_error_of_until_is_raised_by_the_call_that_waits(replay_server: StartServer) -> None:
    def until() -> bool:
        raise ZeroDivisionError

    address = replay_server(rw.TableConfig.queue("queue", 1)).address
    with contextlib.suppress(ZeroDivisionError), rw.TrajectoryObserver(address, "queue", 1, until=until) as observer:
        write_numbers(observer, range(2))
        with pytest.raises(ZeroDivisionError):
            observer.flush()
