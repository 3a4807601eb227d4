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
pytestmark = pytest.mark.timeout(300)

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
