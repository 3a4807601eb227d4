"""A local server's life: address, port, close, save and restore, the command, the fixture, clients of its process."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import pickle
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from interrupting import interrupted
from numbered import write_numbers
from ports import free_port
from threads import at_once
from waiting import eventually

import reverb_writer as rw
from reverb_writer.files.tfrecord import FILES
from reverb_writer.protocol import messages
from reverb_writer.protocol.signatures import ArraySpec
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.loop import THREAD_NAME
from reverb_writer.transport.pipes import ByteStream

TABLES = [
    rw.TableConfig("replay", 100, rw.Prioritized(0.5), rate_limiter=rw.SampleToInsertRatio(2.0, 2, (-100.0, 500.0))),
    rw.TableConfig("heap", 10, "max_heap", "lifo", signature={"a": ArraySpec((None, 2), np.dtype("float32"))}),
    rw.TableConfig.queue("queue", 5),
]


def write(address: str, num_steps: int, table: str = "replay") -> None:
    with rw.TrajectoryObserver(address, table, 3, priority=lambda steps: float(steps["a"][0, 0] + 1)) as observer:
        for number in range(num_steps):
            observer({"a": np.full(2, number, np.float32)}, end_of_episode=number == num_steps - 1)


def test_it_listens_on_loopback_only_and_frees_its_port(capfd: pytest.CaptureFixture[str]) -> None:
    server = rw.LocalServer([rw.TableConfig("replay")])
    assert server.address == f"127.0.0.1:{server.port}"
    with pytest.raises(rw.errors.ServerUnavailableError, match="the port is taken"):
        rw.LocalServer([rw.TableConfig("replay")], server.port)
    assert capfd.readouterr().err == ""  # nothing of gRPC's beside the error
    server.close()
    server.close()
    assert server.wait(0)
    with socket.create_server(("127.0.0.1", server.port)):
        pass


def test_a_server_that_is_sent_to_another_process_is_refused_with_its_address() -> None:
    with (
        rw.LocalServer([rw.TableConfig("replay")]) as server,
        pytest.raises(rw.errors.ClosedError, match=f"cannot be sent to another process.* '{server.address}'"),
    ):
        pickle.dumps(server)


@pytest.mark.parametrize("scheme", ["", "dns:"], ids=["in this process", "over gRPC"])
def test_close_ends_streams_that_wait(scheme: str) -> None:
    server = rw.LocalServer([rw.TableConfig("replay")])
    with Channel(scheme + server.address) as channel:
        request = messages.SampleStreamRequest(table="replay", num_samples=1).SerializeToString()
        streams = [ByteStream(channel, messages.SAMPLE_STREAM) for _ in range(20)]
        for stream in streams:
            stream.send(request)
        with rw.Client(server.address) as client:
            assert client.server_info()["replay"].current_size == 0
        server.close()
        for stream in streams:
            with pytest.raises(rw.errors.ServerUnavailableError):  # and no ReplayTimeoutError
                stream.read()


def test_clients_of_other_processes_get_no_lines_of_grpc_when_it_closes() -> None:
    """A stream that gRPC cancels makes gRPC print lines of its own in the client's process."""
    client = """
    import contextlib
    import sys
    import numpy as np
    import reverb_writer as rw

    observer = rw.TrajectoryObserver(sys.argv[1], "replay", 1)
    observer({"n": np.int64(0)})
    observer.flush()
    dataset = rw.ReplayDataset(sys.argv[1], "replay", 4, timeout_s=2.0)
    next(dataset)
    print("ready", flush=True)
    with contextlib.suppress(rw.errors.ServerUnavailableError):
        while True:
            next(dataset)
    """
    for _ in range(3):  # gRPC printed its line at four of five ends
        with rw.LocalServer([rw.TableConfig("replay")]) as server:
            command = [sys.executable, "-c", textwrap.dedent(client), server.address]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        _, log = process.communicate(timeout=100)
        assert process.returncode == 0, log
        assert "(UNAVAILABLE: the server was closed)" in log
        assert "chttp2" not in log


@pytest.mark.parametrize("scheme", ["", "dns:"], ids=["in this process", "over gRPC"])
def test_a_learner_that_goes_takes_nothing(scheme: str) -> None:
    with rw.LocalServer([rw.TableConfig.queue("queue", 5)]) as server, Channel(scheme + server.address) as channel:
        request = messages.SampleStreamRequest(table="queue", num_samples=3).SerializeToString()
        stream = ByteStream(channel, messages.SAMPLE_STREAM)
        stream.send(request)
        requests = server._store.tables["queue"]._requests
        eventually(lambda: len(requests) == 1)
        stream.close()
        eventually(lambda: not requests)
        with rw.Client(server.address) as client:
            client.insert([np.arange(3)], {"queue": 1.0})
            assert len(list(client.sample("queue", 1))) == 1


def test_samples_that_a_caller_leaves_are_told_as_lost(
    server: rw.LocalServer, caplog: pytest.LogCaptureFixture
) -> None:
    with rw.Client(server) as client:
        for number in range(5):
            client.insert([np.array([number])], {"queue": 1.0})
        samples = client.sample("queue", 5)
        assert next(samples).data[0].tolist() == [0]
        samples.close()  # type: ignore[attr-defined]  # it is a generator
        assert "Up to 4 samples were taken out of `queue` and are lost." in caplog.messages


def test_a_server_that_nobody_closes_does_not_keep_the_interpreter_and_is_closed_when_it_is_collected() -> None:
    program = """
        import threading
        import reverb_writer as rw
        server = rw.LocalServer([rw.TableConfig("replay")])
        client = rw.Client(server.address)
        threading.Thread(target=lambda: next(client.sample("replay", 1, timeout_s=1000)), daemon=True).start()
        client.server_info()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=100)
    address = rw.LocalServer([rw.TableConfig("replay")]).address
    gc.collect()
    with (
        rw.Client(address, timeout_s=0.5) as client,
        pytest.raises((rw.errors.ServerUnavailableError, rw.errors.ReplayTimeoutError)),
    ):
        client.server_info()


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Path, rw.LocalServer]]:
    with rw.LocalServer(TABLES) as server:
        write(server.address, 40)
        write(server.address, 5, "heap")
        with rw.Client(server.address) as client:
            list(client.sample("replay", 30))
            keys = [sample.info.key for sample in client.sample("replay", 5)]
            client.mutate_priorities("replay", updates={keys[0]: 77.0}, deletes=[key for key in keys if key != keys[0]])
        server.save(tmp_path)
        yield tmp_path, server


def test_what_is_saved_comes_back(saved: tuple[Path, rw.LocalServer]) -> None:
    folder, server = saved
    with (
        rw.LocalServer.restore(folder) as again,
        rw.Client(server.address) as first,
        rw.Client(again.address) as second,
    ):
        before, after = (
            {name: vars(table) | {"worker_time_ms": 0} for name, table in client.server_info().items()}
            for client in (first, second)
        )
        assert before == after
        old, new = (
            {
                one.info.key: (one.data["a"].tolist(), one.info.priority, pytest.approx(one.info.probability))
                for one in client.sample("replay", 60)
            }
            for client in (first, second)
        )
        assert old.keys() & new.keys()
        assert [old[key] for key in old if key in new] == [new[key] for key in old if key in new]
        write(again.address, 10)
        again.save(folder)
    assert len(list((folder / "kept").iterdir())) == 1
    with rw.LocalServer.restore(folder) as third, rw.Client(third.address) as client:
        assert client.server_info()["replay"].current_size == after["replay"]["current_size"] + 8


def test_saves_into_one_folder_at_once_take_turns(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(rw.LocalServer([rw.TableConfig("replay")])) for _ in range(2)]
        for server in servers:
            write(server.address, 50)
        both = threading.Barrier(len(servers), timeout=60)

        def save(server: rw.LocalServer) -> None:
            both.wait()
            for _ in range(20):
                server.save(tmp_path)

        at_once(*(functools.partial(save, server) for server in servers))
    assert len(list((tmp_path / "kept").iterdir())) == 1
    with rw.LocalServer.restore(tmp_path) as server, rw.Client(server.address) as client:
        assert client.server_info()["replay"].current_size == 48


def test_an_interrupted_constructor_leaves_no_thread_and_no_port() -> None:
    port = free_port()
    before = set(threading.enumerate())
    made: list[rw.LocalServer] = []
    moment, has_ended = 0, False
    while not has_ended:
        moment += 1
        has_ended = interrupted(lambda: made.append(rw.LocalServer([rw.TableConfig("replay")], port)), moment)
        made.clear()
        eventually(lambda: not [one for one in threading.enumerate() if is_of_server(one, before)])
    assert moment > 5


def is_of_server(thread: threading.Thread, before: set[threading.Thread]) -> bool:
    return thread not in before and thread.name != THREAD_NAME


@pytest.mark.parametrize("name", FILES[:-1])
@pytest.mark.parametrize("how", ["gone", "cut", "changed"])
def test_what_is_damaged_is_not_restored(saved: tuple[Path, rw.LocalServer], name: str, how: str) -> None:
    (path,) = saved[0].glob(f"kept/*/{name}")
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(rw.errors.FormatError, match=path.name if how == "changed" else str(path.parent)):
        rw.LocalServer.restore(saved[0])


def test_the_command_serves_until_it_is_told_to_end() -> None:
    port = free_port()
    command = [sys.executable, "-m", "reverb_writer.cli", "local", "--table", "a", "--table", "b", "--port", str(port)]
    command += ["--sampler", "prioritized", "--sampler-exponent", "0.6"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert f"serving a, b at 127.0.0.1:{port}" in process.stdout.readline()
        with rw.Client(f"127.0.0.1:{port}") as client:
            info = client.server_info()
            assert {name: (one.sampler, one.sampler_exponent) for name, one in info.items()} == dict.fromkeys(
                ("a", "b"), ("prioritized", 0.6)
            )
        process.terminate()
        assert process.wait(60) == 0


def test_the_command_makes_queues() -> None:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "reverb_writer.cli",
        "local",
        "--queue",
        "q",
        "--max-size",
        "2",
        "--port",
        str(port),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert f"serving q at 127.0.0.1:{port}" in process.stdout.readline()
        with rw.Client(f"127.0.0.1:{port}") as client:
            for number in range(2):
                client.insert(np.array([number]), {"q": 1.0})
            with pytest.raises(rw.errors.ReplayTimeoutError, match="blocks inserts"):
                client.insert(np.array([2]), {"q": 1.0}, timeout_s=0.5)
            assert [int(np.squeeze(sample.data)) for sample in client.sample("q", 2)] == [0, 1]
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("asked", [[], ["--reverb-writer-server"], ["-o", "reverb_writer_server=true"]], ids=str)
def test_the_fixture_is_there_if_asked_for(tmp_path: Path, asked: list[str]) -> None:
    (tmp_path / "test_mine.py").write_text(
        textwrap.dedent("""
            import numpy as np
            import reverb_writer as rw

            def test_mine(replay_server):
                server = replay_server()
                with rw.Client(server.address) as client:
                    client.insert([np.arange(3)], {"replay": 1.0})
                    assert len(list(client.sample("replay", 2))) == 2
        """)
    )
    arguments = ["-q", "-p", "no:cacheprovider", "-p", "reverb_writer.testing", *asked, str(tmp_path)]
    # As if only this plugin were installed, so options of others are unknown.
    environment = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", "/dev/null", *arguments],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=100, env={**os.environ, **environment},
    )  # fmt: skip
    assert ("1 passed" if asked else "fixture 'replay_server' not found") in run.stdout, run.stdout + run.stderr


# In the process of its clients: no socket, and all that waits, ends or is interrupted as elsewhere.


@pytest.fixture
def server() -> Iterator[rw.LocalServer]:
    tables = [rw.TableConfig("replay"), rw.TableConfig.queue("queue", 5)]
    tables.append(rw.TableConfig("ratio", rate_limiter=rw.SampleToInsertRatio(2.0, 4, 8.0)))
    with rw.LocalServer(tables) as running:
        yield running


def test_writing_reading_and_priorities_open_no_connection(server: rw.LocalServer) -> None:
    with (
        rw.Client(server.address) as client,
        rw.TrajectoryObserver(client, "replay", 1) as observer,
        rw.ReplayDataset(client, "replay", 8) as dataset,
    ):
        write_numbers(observer, range(100))
        observer.flush()
        dataset.update_priorities(next(dataset), np.full(8, 3.0))
        dataset.flush_priorities()
        assert len(list(client.sample("replay", 1))) == 1
        (shard,) = client.shards
        assert shard.channel._wire is None
        assert client.server_info()["replay"].current_size == 100


def test_a_server_that_starts_again_at_its_port_gets_all_items_that_no_save_has() -> None:
    first = rw.LocalServer([rw.TableConfig.queue("replay", 5)])
    with rw.TrajectoryObserver(first.address, "replay", 1, timeout_s=60) as observer:
        write_numbers(observer, range(20))
        eventually(lambda: observer.stats().acknowledged_items == 5)
        first.close()
        with rw.LocalServer([rw.TableConfig("replay")], first.port) as second, rw.Client(second) as client:
            observer.flush()
            assert client.server_info()["replay"].current_size == 20
            assert observer.stats().reconnects == 1


def test_a_channel_that_is_closed_or_sent_elsewhere_ends_its_streams(server: rw.LocalServer) -> None:
    request = messages.SampleStreamRequest(table="replay", num_samples=1).SerializeToString()
    with Channel(server.address) as channel:
        streams = [ByteStream(channel, messages.SAMPLE_STREAM) for _ in range(2)]
        streams[0].send(request)
        channel.redirect("127.0.0.1:1")
        with pytest.raises(rw.errors.ServerUnavailableError, match="has moved"):
            streams[0].read()
        channel.redirect(server.address)
        stream = ByteStream(channel, messages.SAMPLE_STREAM)
        stream.send(request)
    with pytest.raises(rw.errors.ClosedError):
        stream.read()
    eventually(lambda: not server._store.tables["replay"]._requests)


def test_a_reader_that_does_not_read_bounds_what_is_drawn_for_it(server: rw.LocalServer) -> None:
    with Channel(server.address) as channel, rw.Client(server.address) as client:
        client.insert([np.random.default_rng(0).random(100_000)], {"replay": 1.0})  # 800 kB
        stream = ByteStream(channel, messages.SAMPLE_STREAM)
        num_samples = 100
        stream.send(messages.SampleStreamRequest(table="replay", num_samples=num_samples).SerializeToString())
        eventually(lambda: client.server_info()["replay"].rate_limiter.num_samples > 15)
        assert client.server_info()["replay"].rate_limiter.num_samples < 40
        come = 0
        while come < num_samples:
            message = stream.read()
            assert not isinstance(message, bytes)
            come += len(message.samples)
        assert come == num_samples
        stream.close()
