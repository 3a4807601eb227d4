"""The memory that is estimated, and the memory that is taken: random windows, columns and episodes in a full table."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from service_process import service
from waiting import eventually

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS_BYTES = 36 << 20  # that the server takes for a stream, whatever is in its tables
TIMES_FILLED = 2


@pytest.mark.parametrize("seed", range(4))
def test_full_table_takes_about_what_was_estimated(tmp_path: Path, seed: int) -> None:
    from reverb_writer_server.config.schema import load

    chance = random.Random(seed)  # noqa: S311  # no secrets
    length = chance.randint(1, 24)
    stride = chance.randint(1, length)
    num_columns, column_bytes = chance.choice([(8, 64), (2, 2000), (5, 100)])
    episode = length + chance.randint(0, 100)
    per_item = 5000 + stride * num_columns * column_bytes
    max_size = 100_000_000 // per_item
    text = f"""
        [tables.replay]
        max_size = {max_size}
        sequence_length = {length}
        stride_length = {stride}
        episode_length = {episode}
        signature = {{{", ".join(f'c{number} = "uint8[{column_bytes}]"' for number in range(num_columns))}}}
    """
    noise = np.random.default_rng(seed).integers(0, 256, (1024, num_columns, column_bytes), np.uint8)
    with service(tmp_path, text) as server:
        reverb = psutil.Process(server.child())
        before = reverb.memory_info().rss
        windows = (episode - length) // stride + 1
        with rw.TrajectoryObserver(
            server.address, "replay", sequence_length=length, stride_length=stride, timeout_s=60
        ) as observer:
            for _ in range(TIMES_FILLED * max_size // windows + 1):
                for number in range(episode):
                    observer({f"c{column}": noise[number % 1024, column] for column in range(num_columns)})
                observer.reset()
        with rw.Client(server.address) as client:
            eventually(lambda: client.server_info()["replay"].current_size == max_size, "the table is full")
        taken = reverb.memory_info().rss - before
    (table,) = load(tmp_path / "server.toml", {}).tables
    said = table.estimate().total_bytes
    assert said is not None
    assert 0.8 * taken <= said + STREAMS_BYTES <= 1.8 * taken


def test_crossing_the_limit_writes_a_checkpoint_and_fires_the_alert_and_refuses_nobody(tmp_path: Path) -> None:
    limit = 700 << 20
    text = f"""
        [memory]
        alert_bytes = {limit}
        [checkpoints]
        directory = "{tmp_path / "checkpoints"}"
        every_s = 0
        [tables.q]
        rate_limiter = "queue"
        max_size = 100000
    """
    with service(tmp_path, text) as server:
        assert "\nreverb_memory_alert 0.0\n" in server.get("/metrics")[1]
        with rw.Client(server.address, timeout_s=60) as writer:
            held = _fill_until(writer, lambda: "\nreverb_memory_alert 1.0\n" in server.get("/metrics")[1])
        eventually(lambda: server.status()["checkpoints"]["kept"] == 1, "a checkpoint is written")
        assert "ERROR   the server takes" in server.log()
        assert "more than memory.alert_bytes = 700.0 MiB; a checkpoint is written." in server.log()
        assert server.get("/readyz") == (200, "serving\n")
        with rw.Client(server.address, timeout_s=60) as late:  # who comes above the limit is served, too
            late.insert(np.zeros(3), {"q": 1.0})
            assert len(list(late.sample("q", held + 1))) == held + 1
            late.insert(np.zeros(3), {"q": 1.0})
            late.reset("q")
            assert late.server_info()["q"].current_size == 0
        assert server.status()["checkpoints"]["kept"] == 1  # one for a crossing, however long it lasts
        assert server.status()["job_failures"] == {}
        assert server.end() == 0


@pytest.mark.parametrize(
    ("now_bytes", "crosses"),
    [
        ([90, 100, 101, 102], [False, False, True, False]),
        ([101, 86, 101], [True, False, False]),  # it swings about the limit: once
        ([101, 85, 101, 85, 86], [True, False, True, False, False]),
        ([101, 0, 300], [True, False, True]),
    ],
)
def test_limit_is_crossed_again_when_memory_has_fallen_to_85_percent_of_it(
    now_bytes: list[int], crosses: list[bool]
) -> None:
    from reverb_writer_server.service import is_high

    states = [False]
    for now in now_bytes:
        states.append(is_high(now, 100, was_high=states[-1]))
    assert [now and not before for before, now in itertools.pairwise(states)] == crosses


def _fill_until(writer: rw.Client, is_enough: Callable[[], bool]) -> int:
    """Insert items of 4 MB; return how many."""
    noise = np.random.default_rng(0).random((1, 500_000))
    count = 0
    while not is_enough():
        writer.insert(noise, {"q": 1.0})
        count += 1
    return count
