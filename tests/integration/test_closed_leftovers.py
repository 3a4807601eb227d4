"""What closed observers and clients leave in this process: no thread and no socket."""

from __future__ import annotations

import contextlib
import pathlib
import threading

import numpy as np
import pytest
from reading import fifo
from server_process import StartServer
from threads import our_threads
from waiting import eventually

import reverb_writer as rw


def num_sockets() -> int:
    """Return how many sockets are open; gRPC keeps other files for up to a minute after its last channel."""
    count = 0
    for path in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            count += path.readlink().name.startswith("socket:")
    return count


def test_closed_observers_leave_no_thread_and_no_file(replay_server: StartServer) -> None:
    server = replay_server(fifo("replay"))

    def cycle() -> None:
        with rw.TrajectoryObserver(server.address, "replay", 1) as observer, rw.Client(server.address) as client:
            observer({"n": np.int64(0)}, end_of_episode=True)
            observer.flush()
            client.insert(np.zeros((1, 1)), {"replay": 1.0})
            assert len(list(client.sample("replay", 2))) == 2

    cycle()
    eventually(lambda: not our_threads())
    sockets, threads = num_sockets(), threading.active_count()
    for _ in range(30):
        cycle()
    eventually(lambda: not our_threads())
    eventually(lambda: threading.active_count() <= threads)
    eventually(lambda: num_sockets() <= sockets)


def test_observers_that_are_closed_without_a_server_leave_nothing_either(lone_server: StartServer) -> None:
    server = lone_server(fifo("replay"))
    with rw.Client(server.address) as client:
        client.server_info()  # the process's loop lasts
    sockets = num_sockets()
    observers = [rw.TrajectoryObserver(server.address, "replay", 1, max_delay_s=0.05) for _ in range(5)]
    for observer in observers:
        observer({"n": np.int64(0)}, end_of_episode=True)
        observer.flush()
    server.process.kill()
    for observer in observers:
        observer({"n": np.int64(1)}, end_of_episode=True)
        with pytest.raises(rw.errors.ServerUnavailableError):
            observer.close(timeout_s=0.5)
    eventually(lambda: not our_threads())
    eventually(lambda: num_sockets() <= sockets)
