"""How processes end and fork: nothing hangs, nothing is left behind, and what was not delivered is told.

Each test runs a program of its own, for a fork or an exit of the tests' process would be more than a test.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import pytest
from kinds import by_socket, client_by_socket
from reading import column_at, fifo
from server_process import HostedServer, StartServer

import reverb_writer as rw

pytestmark = by_socket

END_WITHIN_S = 120.0  # far more than any of them takes, on a busy machine, too

WRITE = """
import gc, multiprocessing, os, sys, threading, time
import numpy as np
import reverb_writer as rw

address = sys.argv[1]

def write(observer, steps):
    for number in steps:
        observer({"n": np.int64(number)}, end_of_episode=False)

def told():
    print("ready", flush=True)
    sys.stdin.readline()

def refusal(call):
    try:
        call()
    except rw.errors.ClosedError as error:
        return str(error)
    raise AssertionError("not refused")

def check_forked(*calls):
    for call in calls:
        told = refusal(call)
        assert "forked" in told, told
        assert "start the child with `spawn`" in told, told
"""


@contextlib.contextmanager
def program(server: HostedServer, text: str | pathlib.Path) -> Iterator[subprocess.Popen[str]]:
    """Run a program that may `write`, and that waits for `go` where it has been `told`; or a file."""
    source = ["-c", WRITE + text] if isinstance(text, str) else [str(text)]
    command = [sys.executable, *source, server.address]
    pipe = subprocess.PIPE
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True, cwd=folder
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children, too
            process.communicate()


def ready(process: subprocess.Popen[str]) -> None:
    """Wait until the program is `told`."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    """Let the program go on to its end; return what it logged."""
    out, log = process.communicate("go\n", timeout=END_WITHIN_S)
    assert process.returncode == status, out + log
    return log


def run(server: HostedServer, text: str | pathlib.Path) -> None:
    with program(server, text) as process:
        ended(process)


def delivered(server: HostedServer) -> list[int]:
    return sorted(number for (number,) in column_at(server.address))


# The end of a program that has not closed its observer.


def opened(acknowledged: int) -> str:
    """Return a program that writes 100 items, of which so many are acknowledged, and 20 more when it is `told`."""
    return f"""
observer = rw.TrajectoryObserver(address, "replay", 1, max_delay_s=0.05)
write(observer, range(100))
while observer.stats().acknowledged_items < {acknowledged}:
    time.sleep(0.01)
told()
write(observer, range(100, 120))
"""


ENDINGS = {
    "exit": "",
    "error": "sys.exit(0)",
    "deleted": "del observer",
    "garbage": "agent = [observer]; agent.append(agent); del agent, observer; gc.collect(); time.sleep(0.5)",
    "blocked thread": "threading.Thread(target=observer.flush, daemon=True).start(); time.sleep(0.5)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_program_that_ends_without_a_close_delivers(replay_server: StartServer, ending: str) -> None:
    server = replay_server(fifo("replay"))
    with program(server, opened(100) + ENDINGS[ending]) as process:
        ready(process)
        assert "undelivered" not in ended(process)
    assert delivered(server) == [*range(120)]


REFUSED = """
import _thread, atexit

def refuse():  # as CPython 3.12 does while the interpreter ends
    def start(*_, **__):
        raise RuntimeError("can't create new thread at interpreter shutdown")
    threading.Thread.start = _thread.start_new_thread = start

def at_exit(work):
    atexit.register(work)
    atexit.register(refuse)

def after_main(work):
    def run():
        threading.main_thread().join()
        refuse()
        work()
    threading.Thread(target=run).start()

first = rw.TrajectoryObserver(address, "replay", 1, max_delay_s=1000)
later = rw.TrajectoryObserver(address, "replay", 1, max_delay_s=1000)
write(first, range(50))
"""
LAST_STEPS = {
    "at exit": "at_exit(lambda: write(later, range(50, 60)))",
    "after the main thread": "after_main(lambda: write(later, range(50, 60)))",
    "at exit, and close": "at_exit(lambda: (write(later, range(50, 60)), later.close()))",
    "after the main thread, and close": "after_main(lambda: (write(later, range(50, 60)), later.close()))",
}


@pytest.mark.parametrize("steps", LAST_STEPS)
def test_first_step_while_the_interpreter_ends_and_starts_no_thread_is_delivered(
    replay_server: StartServer, steps: str
) -> None:
    server = replay_server(fifo("replay"))
    with program(server, REFUSED + LAST_STEPS[steps]) as process:
        assert "Error" not in ended(process)
    assert delivered(server) == [*range(60)]


def test_call_that_needs_a_thread_while_the_interpreter_ends_is_refused_at_once(replay_server: StartServer) -> None:
    text = """
@at_exit
def work():
    write(later, range(50, 60))
    for call in (later.flush, lambda: next(rw.ReplayDataset(address, "replay", 1))):
        assert "the interpreter ends" in refusal(call)
"""
    with program(replay_server(fifo("replay")), REFUSED + text) as process:
        assert "Error" not in ended(process)


def test_first_client_while_the_interpreter_ends_is_refused_at_once(replay_server: StartServer) -> None:
    text = """
@at_exit
def work():
    assert "the interpreter ends" in refusal(lambda: rw.TrajectoryObserver(address, "replay", 1))
"""
    with program(replay_server(fifo("replay")), REFUSED.partition("first =")[0] + text) as process:
        assert "Error" not in ended(process)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_that_ends_without_a_close_delivers_and_gets_no_observer(replay_server: StartServer, method: str) -> None:
    """Also a forked one of CPython 3.10 and 3.11, which does not call what is registered with `atexit`."""
    server = replay_server(fifo("replay"))
    text = """
def act(address):
    global observer, episodes
    observer = rw.TrajectoryObserver(address, "replay", 1, max_delay_s=1000)
    episodes = rw.EpisodeObserver(address, "replay", 3, max_delay_s=1000)
    write(observer, range(50))
    episodes({"n": np.int64(50)}, end_of_episode=True)

if __name__ == "__main__":
    child = multiprocessing.get_context(METHOD).Process(target=act, args=[address])
    child.start()
    child.join(20)
    assert child.exitcode == 0, child.exitcode
    observer = rw.TrajectoryObserver(address, "replay", 1)
    write(observer, range(51, 53))
    for made in (observer, rw.EpisodeObserver(address, "replay", 3)):
        told = refusal(multiprocessing.get_context("spawn").Process(target=act, args=[made]).start)
        assert "cannot be sent to another process" in told, told
        assert "`spawn`" in told, told
    write(observer, range(53, 55))
    observer.close()
"""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "program.py"  # a spawned child imports it
        path.write_text(WRITE + text.replace("METHOD", repr(method)))
        run(server, path)
    assert delivered(server) == [*range(55)]


@client_by_socket
@pytest.mark.parametrize(
    ("fault", "ending"), [("killed", "exit"), *itertools.product(("paused", "blocked by a rate limiter"), ENDINGS)]
)
def test_program_ends_although_its_server_does_not_answer(lone_server: StartServer, fault: str, ending: str) -> None:
    blocks = fault == "blocked by a rate limiter"
    server = lone_server(rw.TableConfig.queue("replay", 10) if blocks else fifo("replay"))
    with program(server, opened(10 if blocks else 100) + ENDINGS[ending]) as process:
        ready(process)
        if fault == "killed":
            server.process.kill()
        elif fault == "paused":
            server.process.pause()
        log = ended(process)
        assert f"the observer has ended with {110 if blocks else 20} undelivered items" in log
        assert "`close(timeout_s=...)` waits longer for them" in log


@client_by_socket
@pytest.mark.parametrize("ending", ["", "sys.exit(3)", "raise ValueError", "del samples", "client.close()"])
def test_program_ends_with_an_open_iterator_of_samples(replay_server: StartServer, ending: str) -> None:
    server = replay_server(rw.TableConfig("replay"))
    text = """
client = rw.Client(address)
client.insert(np.zeros((1, 1)), {"replay": 1.0})
samples = client.sample("replay", 100_000)
next(samples)

def delete():  # when the interpreter finalizes, as a module's variables are deleted: no thread runs any more
    samples.close()

class AtTheVeryEnd:
    def __del__(self, delete=delete):
        delete()

sys.at_the_very_end = AtTheVeryEnd()
"""
    with contextlib.ExitStack() as programs:
        for process in [programs.enter_context(program(server, text + ending)) for _ in range(2)]:
            _, log = process.communicate("go\n", timeout=END_WITHIN_S)
            assert "gRPC" not in log
            assert "Fatal" not in log


@client_by_socket
def test_interrupt_ends_a_step_that_waits(replay_server: StartServer) -> None:
    server = replay_server(rw.TableConfig.queue("replay", 10))
    text = """
observer = rw.TrajectoryObserver(address, "replay", 1, max_in_flight_items=20, max_delay_s=0.05)
threading.Thread(target=told).start()
write(observer, range(10_000_000))
"""
    with program(server, text) as process:
        ready(process)
        time.sleep(1)  # it blocks long before
        process.send_signal(signal.SIGINT)
        _, log = process.communicate("go\n", timeout=END_WITHIN_S)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in log


@client_by_socket
@pytest.mark.parametrize("with_client", [False, True], ids=["server", "server and client"])
def test_forked_child_beside_a_local_server_is_refused_at_once(replay_server: StartServer, with_client: bool) -> None:
    text = f"""
local = rw.LocalServer([rw.TableConfig("replay")])
made_before = []
if {with_client}:
    client = rw.Client(local.address)
    earlier = rw.TrajectoryObserver(client, "replay", 1)
    write(earlier, range(3))
    made_before = [client.server_info, lambda: write(earlier, range(1))]
child = os.fork()
if not child:
    check_forked(
        lambda: rw.Client(local.address),
        lambda: rw.Client(address),
        lambda: rw.Client([address, local.address]),
        lambda: rw.TrajectoryObserver(local.address, "replay", 1),
        lambda: rw.ReplayDataset(local.address, "replay", 1),
        lambda: rw.Variables(local.address, "replay"),
        lambda: rw.LocalServer([rw.TableConfig("replay")]),
        *made_before,
    )
    local.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
with rw.TrajectoryObserver(local.address, "replay", 1) as observer:
    write(observer, range(3))
if {with_client}:
    write(earlier, range(3))
    earlier.flush()
assert len(list(rw.Client(local.address).sample("replay", 2))) == 2
"""
    run(replay_server(fifo("replay")), text)


CHILD_ENDINGS = {
    "exit": "",
    "close": "for one in everything: one.close()",
    "error": """
try:
    with contextlib.ExitStack() as stack:
        for one in everything:
            stack.enter_context(one)
        raise ValueError
except ValueError:
    pass
""",
    "garbage": "everything.clear(); del observer, vector, episodes, idle, other, dataset, samples, one; gc.collect()",
}


@client_by_socket
@pytest.mark.parametrize("ending", CHILD_ENDINGS)
def test_forked_child_is_refused_by_name_and_leaves_its_parents_streams_alone(
    replay_server: StartServer, ending: str
) -> None:
    server = replay_server(fifo("replay"), rw.TableConfig.queue("queue", 10), rw.TableConfig("read"))
    text = f"""
import contextlib, logging
logging.basicConfig(level=logging.INFO)
client = rw.Client(address)
for _ in range(3):
    client.insert(np.zeros((1, 1)), {{"read": 1.0}})
everything = [
    observer := rw.TrajectoryObserver(client, "queue", 1, max_delay_s=0.002),
    vector := rw.TrajectoryObserver(address, "replay", 2, num_envs=2, max_delay_s=1000),
    episodes := rw.EpisodeObserver(address, "replay", 50, max_delay_s=1000),
    idle := rw.TrajectoryObserver(client, "replay", 1),
    other := rw.TrajectoryObserver(client, "replay", 2),  # another thread is in the middle of an episode
    dataset := rw.ReplayDataset(address, "read", 2),
    client,
]
step, steps = {{"n": np.int64(0)}}, {{"n": np.arange(3)}}
episode = rw.Episode(observations=[0, 1], actions=[0], rewards=[1.0], len_lookback_buffer=0)
write(observer, range(30))  # 10 are acknowledged, 20 wait
for number in range(3):
    vector({{"n": np.arange(2)}}, end_of_episode=[number == 0] * 2)  # a step each that is in no window
    episodes({{"n": np.int64(number)}}, end_of_episode=False)
thread = threading.Thread(target=lambda: other(step, end_of_episode=False))
thread.start()
thread.join()
while observer.stats().acknowledged_items < 10:
    time.sleep(0.01)
next(dataset)
samples = client.sample("read", 3)  # they came in one message, and are decoded
next(samples)
child = os.fork()
if not child:
    log = os.open("child.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 2)
    check_forked(
        lambda: write(observer, range(1)),
        lambda: next(samples),
        lambda: other(step, end_of_episode=False),
        lambda: other.extend(steps),
        lambda: other.write_episode(episode),
        lambda: write(idle, range(1)),
        lambda: observer.extend(steps),
        lambda: vector({{"n": np.arange(2)}}, end_of_episode=[True, True]),
        lambda: episodes(step, end_of_episode=True),
        lambda: episodes.update_priority(2.0),
        observer.flush,
        observer.reset,
        vector.reset,
        observer.open,
        idle.open,
        client.server_info,
        lambda: client.insert(np.zeros((1, 1)), {{"read": 1.0}}),
        lambda: next(client.sample("read")),
        lambda: rw.TrajectoryObserver(client, "replay", 1),
        lambda: rw.Client(address),
    )
    for one in everything[:6]:
        one.stats()
    exec({CHILD_ENDINGS[ending]!r})
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
with open("child.log") as log:
    assert log.read() == ""
assert [len(list(client.sample("queue", 10))) for _ in range(3)] == [10, 10, 10]
observer.flush()
next(dataset)
write(idle, range(3))
vector({{"n": np.arange(2)}}, end_of_episode=[True, True])
for one in everything[:5]:
    one.reset(discard=True)
    one.flush()
    stats = one.stats()
    assert (stats.reconnects, stats.dropped_items) == (0, 0), stats
    assert stats.items == stats.acknowledged_items
assert dataset.stats().reconnects == dataset.stats().lost_samples == 0
"""
    run(server, text)


@client_by_socket
def test_forked_children_end_at_their_exit_while_another_thread_writes_and_learns(replay_server: StartServer) -> None:
    text = """
client = rw.Client(address)
client.insert(np.zeros((1, 1)), {"read": 1.0})
observer = rw.TrajectoryObserver(client, "replay", 8, max_delay_s=0.002)
vector = rw.TrajectoryObserver(address, "replay", 2, num_envs=2, max_delay_s=0.002)
dataset = rw.ReplayDataset(client, "read", 1)
batch = next(dataset)
stop = threading.Event()

def act():
    while not stop.is_set():
        write(observer, range(100))
        vector({"n": np.arange(2)}, end_of_episode=[False, False])
        dataset.update_priorities(np.repeat(batch.info.keys, 10_000), np.ones(10_000))
        next(dataset)

actor = threading.Thread(target=act)
actor.start()
try:
    for number in range(40):
        child = os.fork()
        if not child:
            if number % 2:
                check_forked(
                    lambda: next(dataset),
                    lambda: dataset.update_priorities(batch.info.keys, [1.0]),
                    lambda: dataset.flush_priorities(1.0),
                )
                for one in (observer, vector, dataset):
                    one.stats()
                    with one:
                        pass
                client.close()
            sys.exit(0)  # all that runs at the exit of an interpreter runs
        until = time.monotonic() + 20
        while not (status := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > until:
                os.kill(child, 9)
                raise AssertionError(f"child {number} has not ended")
            time.sleep(0.01)
        assert status[1] == 0, status
finally:
    stop.set()
    actor.join()
"""
    run(replay_server(rw.TableConfig("replay", 10), rw.TableConfig("read", 10)), text)


@client_by_socket
def test_children_forked_before_the_first_client_have_their_own(replay_server: StartServer) -> None:
    server = replay_server(fifo("replay"))
    text = """
children = []
for first in (0, 10, 20):
    children.append(os.fork())
    if not children[-1]:
        with rw.TrajectoryObserver(address, "replay", 1) as observer:
            write(observer, range(first, first + 10))
        sys.exit(0)
with rw.TrajectoryObserver(address, "replay", 1) as observer:
    write(observer, range(30, 40))
for child in children:
    assert os.waitpid(child, 0)[1] == 0
"""
    run(server, text)
    assert delivered(server) == [*range(40)]


@client_by_socket
def test_calls_of_the_main_thread_leave_no_thread_behind(replay_server: StartServer) -> None:
    server = replay_server(fifo("replay"))
    text = """
foreign = []

class Foreign(threading._DummyThread):  # what `threading` remembers of a thread that it has not started
    def __init__(self):
        super().__init__()
        foreign.append(self)

threading._DummyThread = Foreign
with rw.TrajectoryObserver(address, "replay", 1) as observer, rw.Client(address) as client:
    write(observer, range(3))
    observer.flush()
    client.insert({"n": np.zeros(1, np.int64)}, {"replay": 1.0})
    assert len(list(client.sample("replay", 2))) == 2
    dataset = rw.ReplayDataset(client, "replay", 2)
    next(dataset)
    dataset.close()
assert not foreign
end = time.monotonic() + 20
lasting = ("MainThread", "reverb-writer-loop", "poll_wrapper")
while others := [one for one in threading.enumerate() if not any(name in one.name for name in lasting)]:
    assert time.monotonic() < end, others
    time.sleep(0.05)
"""
    run(server, text)
