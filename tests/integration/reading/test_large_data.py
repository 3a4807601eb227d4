"""What does not fit in one message: samples that the server splits, and weights of 100 MB."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from server_process import StartServer

import reverb_writer as rw

WEIGHTS_BYTES = int(os.environ.get("REVERB_WRITER_WEIGHTS_BYTES", str(100 << 20)))  # `make fuzz` takes 1 GB


@pytest.mark.parametrize("collate", ["list", "pad"])
def test_samples_that_are_split_over_messages_come_whole(replay_server: StartServer, collate: Any) -> None:
    server = replay_server(rw.TableConfig("queue", 10, sampler="fifo", max_times_sampled=1))
    noise = np.random.default_rng(0)
    episodes = [noise.integers(256, size=(length, 300, 300), dtype=np.uint8) for length in (90, 3, 70)]
    with rw.EpisodeObserver(server.address, "queue", 100, chunk_length=7) as observer:
        for episode in episodes:
            for t, frame in enumerate(episode):
                observer({"frame": frame}, end_of_episode=t == len(episode) - 1)
    with rw.ReplayDataset(server.address, "queue", 3, collate=collate, max_cache_bytes=1 << 20) as dataset:
        data, info = next(dataset)
    assert info.lengths.tolist() == [90, 3, 70]
    for number, episode in enumerate(episodes):
        frames = data[number]["frame"] if collate == "list" else data["frame"][number, : len(episode)]
        np.testing.assert_array_equal(frames, episode)


@pytest.mark.timeout(600)
def test_large_weights_come_as_they_were_published(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig("weights", 1))
    rng = np.random.default_rng(0)
    part = rng.standard_normal(WEIGHTS_BYTES // 4 // 5, np.float32)
    with (
        rw.Variables(server.address, "weights", timeout_s=120) as learner,
        rw.Variables(server.address, "weights", timeout_s=120) as actor,
    ):
        learner.publish({f"layer{i}": part for i in range(5)})
        found = actor.latest()
        assert all(np.array_equal(found[f"layer{i}"], part) for i in range(5))
        with pytest.raises(rw.errors.StructureError, match="Publish it in parts"):
            learner.publish(np.broadcast_to(np.float64(0), (1 << 27) + 1))
