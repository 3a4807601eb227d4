"""The memory that is estimated, and the memory that is taken: random windows, columns and episodes in a full table."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import psutil
import pytest
from service_process import eventually, service

import reverb_writer as rw

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

STREAMS_BYTES = 36 << 20  # that the server takes for a stream, whatever is in its tables
TIMES_FILLED = 2


@pytest.mark.parametrize("seed", range(4))
def test_full_table_takes_about_what_was_estimated(tmp_path: Path, seed: int) -> None:
    from reverb_writer_server.config.schema import load
    from reverb_writer_server.observability.memory import estimate

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
    said = estimate(table).total_bytes
    assert said is not None
    assert 0.8 * taken <= said + STREAMS_BYTES <= 1.8 * taken


def test_inserts_are_refused_with_the_reason_above_the_limit_and_accepted_below_it(tmp_path: Path) -> None:
    limit = 700 << 20
    text = f'[memory]\nmax_total_bytes = {limit}\n[tables.q]\nrate_limiter = "queue"\nmax_size = 100000'
    # Other options than the writer's, so that the two do not share a connection: learners are other processes.
    with service(tmp_path, text) as server, rw.Client(server.address, timeout_s=60, use_proxy=True) as learner:
        assert learner.server_info()["q"].current_size == 0  # it is connected
        with pytest.raises(rw.ReverbWriterError, match=r"RESOURCE_EXHAUSTED: inserts are refused: the Reverb process"):
            _fill(server.address)
        eventually(lambda: server.get("/readyz")[1].startswith("serving, inserts are refused: "), "it is told")
        with (
            rw.Client(server.address, timeout_s=60) as late,
            pytest.raises(rw.ReverbWriterError, match="Lower max_size"),
        ):
            late.insert(np.zeros(3), {"q": 1.0})
        assert psutil.Process(server.child()).memory_info().rss > 0.9 * limit  # and not long before the limit
        assert "\nreverb_inserts_refused 1.0\n" in server.get("/metrics")[1]
        assert "ERROR   inserts are refused: the Reverb process takes" in server.log()
        held = learner.server_info()["q"].current_size  # over the connection that it had
        assert held > 10
        assert len(list(learner.sample("q", held))) == held
        eventually(lambda: "inserts are accepted again" in server.log(), "memory is below the limit")
        with rw.Client(server.address, timeout_s=60) as late:
            late.insert(np.zeros(3), {"q": 1.0})
        assert server.get("/readyz") == (200, "serving\n")
        assert server.end() == 0


def _fill(address: str) -> None:
    noise = np.random.default_rng(0).random((1, 500_000))  # 4 MB
    with rw.Client(address, timeout_s=60) as writer:
        while True:
            writer.insert(noise, {"q": 1.0})
