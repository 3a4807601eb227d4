"""A learner ends a run: actors that look, that wait for weights, and that a rate limiter blocks end by themselves."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from server_process import StartServer
from waiting import eventually

import reverb_writer as rw

WEIGHTS = rw.TableConfig.variables("weights")


def write(observer: rw.TrajectoryObserver, number: int) -> None:
    observer({"n": np.int64(number)}, end_of_episode=False)


@contextlib.contextmanager
def soon(work: Callable[[], object]) -> Iterator[None]:
    """Have another thread do something while the block waits for it; it has come back when the block has ended."""
    timer = threading.Timer(0.1, work)
    timer.start()
    try:
        yield
    finally:
        timer.join()


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


def test_wait_returns_a_newer_version_or_the_end(replay_server: StartServer) -> None:
    address = replay_server(WEIGHTS).address
    with rw.Variables(address, "weights") as learner, rw.Variables(address, "weights") as actor:
        with pytest.raises(rw.errors.SpecError, match="`newer_than` must be an integer"):
            actor.wait(newer_than="newest")  # type: ignore[arg-type]  # what is tested
        first = learner.publish([1])
        assert actor.wait() == [1]
        assert actor.wait(newer_than=first - 1) == [1]
        with pytest.raises(rw.errors.ReplayTimeoutError):
            actor.wait(timeout_s=0.2)
        with soon(lambda: learner.publish([2])):
            assert actor.wait(newer_than=first) == [2]
        with soon(learner.finish):
            assert actor.wait() is None


@pytest.mark.parametrize("blocks_in", ["step", "flush", "close"])
def test_actor_that_a_rate_limiter_blocks_ends_with_the_run(
    replay_server: StartServer, caplog: pytest.LogCaptureFixture, blocks_in: str
) -> None:
    address = replay_server(rw.TableConfig.queue("queue", 2), WEIGHTS).address
    with rw.Variables(address, "weights") as learner, rw.Variables(address, "weights") as weights:

        def act(observer: rw.TrajectoryObserver) -> None:
            for number in range(1_000_000 if blocks_in == "step" else 5):
                write(observer, number)
            if blocks_in == "flush":
                observer.flush()

        options: dict[str, Any] = {"timeout_s": 600, "max_in_flight_items": 10, "until": lambda: weights.finished}
        with (
            soon(learner.finish),
            pytest.raises(rw.errors.FinishedError, match=r"the run has ended .`until` is true.: [0-9]+ items"),
            rw.TrajectoryObserver(address, "queue", 1, **options) as observer,
        ):
            act(observer)
    assert observer.stats().acknowledged_items <= 2
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_until_must_be_a_function() -> None:
    with pytest.raises(
        rw.errors.SpecError, match=r"`until` must be a function without arguments, got False. Put `lambda:`"
    ):
        rw.TrajectoryObserver("localhost:1", "queue", 1, until=False)  # type: ignore[arg-type]  # what is tested


def test_error_of_until_is_raised_by_the_call_that_waits(replay_server: StartServer) -> None:
    def until() -> bool:
        raise ZeroDivisionError

    address = replay_server(rw.TableConfig.queue("queue", 1)).address
    with contextlib.suppress(ZeroDivisionError), rw.TrajectoryObserver(address, "queue", 1, until=until) as observer:
        write(observer, 0)
        write(observer, 1)
        with pytest.raises(ZeroDivisionError):
            observer.flush()
