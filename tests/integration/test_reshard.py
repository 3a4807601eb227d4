"""A replay on M servers becomes one on N: every item is there once, with its data, its priority and its key."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from reading import fifo, read
from server_process import HostedServer, Kind

import reverb_writer as rw
from reverb_writer.cli.reshard import command
from reverb_writer.files.resharding import Resharding
from reverb_writer.files.saved_replay import open_saved
from reverb_writer.files.tfrecord import CHUNKS, ITEMS, read_records, write_records

StartServer = Callable[..., HostedServer]
Save = Callable[[str], Path]

SOURCE = (
    rw.TableConfig("replay", 1000, rw.Prioritized(0.6)),
    rw.TableConfig("episodes", 1000),
    rw.TableConfig("weights", 1),
)
TARGET = (fifo("replay", 1000), fifo("episodes", 1000), rw.TableConfig("weights", 1))


@pytest.fixture
def start_saving(
    server_kind: Kind, replay_server: StartServer, tmp_path: Path
) -> Iterator[Callable[..., tuple[str, Callable[[], Path]]]]:
    """Starts a server; the tests get its address, and a function that saves its tables and returns where."""
    numbers = itertools.count()
    with contextlib.ExitStack() as servers:

        def start(*tables: rw.TableConfig) -> tuple[str, Callable[[], Path]]:
            if server_kind == "reverb":
                address = replay_server(*tables).address

                def checkpoint() -> Path:
                    with rw.Client(address) as client:
                        return Path(client.checkpoint())

                return address, checkpoint
            server = servers.enter_context(rw.LocalServer(tables))
            folder = tmp_path / f"saved-{next(numbers)}"

            def save() -> Path:
                server.save(folder)
                return folder

            return server.address, save

        yield start


def write(address: str, first: int, num_steps: int) -> None:
    """Write an episode of numbers: windows of three, each with the priority first + 0.5, and the whole of it."""
    targets = {
        "windows": rw.WindowTarget(rw.WindowSpec(3), ("replay",), lambda window: float(window["n"][0]) + 0.5),
        "whole": rw.WindowTarget(rw.WindowSpec.whole_episode(), ("episodes",), 2.0),
    }
    with rw.TrajectoryObserver(address, windows=targets, chunk_length=4) as observer:
        for number in range(first, first + num_steps):
            observer(
                {"n": np.int64(number), "frame": np.full(5, number)}, end_of_episode=number == first + num_steps - 1
            )


def windows(first: int, num_steps: int) -> list[tuple[list[int], float]]:
    return [([n, n + 1, n + 2], n + 0.5) for n in range(first, first + num_steps - 2)]


def found(servers: Sequence[HostedServer], table: str) -> list[list[tuple[list[int], float]]]:
    """Take out all items of each server: a column and the priority; the other column must belong to it."""
    items = []
    for server in servers:
        with rw.Client(server.address, timeout_s=60) as client:
            samples = read(client, table)
        for sample in samples:
            np.testing.assert_array_equal(sample.data[0], np.repeat(sample.data[1][:, None], 5, axis=1))
        items.append([(sample.data[1].tolist(), sample.info.priority) for sample in samples])
    return items


def run(saved: Sequence[Path], servers: Sequence[HostedServer]) -> Result:
    to = itertools.chain.from_iterable(("--to", server.address) for server in servers)
    return CliRunner().invoke(command, [*map(str, saved), *to])


@pytest.mark.parametrize(("num_before", "num_after"), [(2, 3), (3, 1)])
def test_every_item_is_there_once_with_its_data_and_priority(
    start_saving: Callable[..., tuple[str, Callable[[], Path]]],
    replay_server: StartServer,
    num_before: int,
    num_after: int,
) -> None:
    lengths = {0: 12, 100: 40, 200: 3, 300: 25, 400: 8}  # of episodes, by their first number
    before = [start_saving(*SOURCE) for _ in range(num_before)]
    for turn, (first, num_steps) in enumerate(lengths.items()):
        write(before[turn % num_before][0], first, num_steps)
    for version, (address, _) in enumerate(before, 1):
        with rw.Variables(address, "weights") as learner:
            learner.publish([np.array(version)], version=version)
    with rw.Client(before[0][0]) as client:
        key = next(client.sample("replay")).info.key
    after = [replay_server(*TARGET) for _ in range(num_after)]
    result = run([save() for _, save in before], after)
    assert result.exit_code == 0, result.output
    expected = [item for first, num_steps in lengths.items() for item in windows(first, num_steps)]
    num_items = len(expected) + len(lengths)
    assert f"{num_items} of {num_items} items of {num_before} checkpoints" in result.output
    for server in after:
        with rw.Client(server.address) as client:
            client.mutate_priorities("replay", updates={key: 1e6})
        with rw.Variables(server.address, "weights") as actor:
            assert actor.latest() == [num_before]
    items = found(after, "replay")
    assert max(map(len, items)) - min(map(len, items)) <= 1  # equal shares
    changed = [item for item in itertools.chain(*items) if item[1] == 1e6]
    assert len(changed) == 1  # by its key
    kept = [item if item[1] != 1e6 else (item[0], item[0][0] + 0.5) for item in itertools.chain(*items)]
    assert sorted(kept) == sorted(expected)
    episodes = itertools.chain(*found(after, "episodes"))
    assert sorted(episodes) == [(list(range(first, first + n)), 2.0) for first, n in lengths.items()]


def test_items_keep_the_nest_of_their_steps(
    start_saving: Callable[..., tuple[str, Callable[[], Path]]], replay_server: StartServer
) -> None:
    address, save = start_saving(*SOURCE)
    write(address, 0, 5)
    after = replay_server(*TARGET)
    result = run([save()], [after])
    assert result.exit_code == 0, result.output
    with rw.Client(after.address) as client:
        data = next(client.sample("replay")).data
    assert {name: leaf.shape for name, leaf in data.items()} == {"frame": (3, 5), "n": (3,)}


def test_item_that_two_servers_have_is_inserted_once(
    start_saving: Callable[..., tuple[str, Callable[[], Path]]], replay_server: StartServer
) -> None:
    """As when unconfirmed items were sent again: here one checkpoint is given twice."""
    address, save = start_saving(*SOURCE)
    write(address, 0, 20)
    saved = open_saved(save())
    after = [replay_server(*TARGET) for _ in range(2)]
    with rw.Client([server.address for server in after]) as client:
        resharding = Resharding([saved, saved], client, 20)
        assert (resharding.num_items, resharding.num_twice) == (18 + 1, 18 + 1)
        assert len(list(resharding.run())) == 19
        counts = resharding.counts()
    assert {name for tables in counts.values() for name in tables} == {"replay", "episodes"}  # none but the user's
    assert sorted(itertools.chain(*found(after, "replay"))) == windows(0, 20)


def test_servers_without_room_get_nothing(
    start_saving: Callable[..., tuple[str, Callable[[], Path]]], replay_server: StartServer
) -> None:
    address, save = start_saving(*SOURCE)
    write(address, 0, 20)
    saved = save()
    others = TARGET[1:]
    after = [replay_server(fifo("replay", 8), *others) for _ in range(2)]
    result = run([saved], after)
    assert result.exit_code == 1
    assert "table `replay`: 18 items were saved, and the servers have room for 16 (8 at " in result.output
    assert "Raise its `max_size` to 9 or more on each" in result.output
    limiter = rw.SampleToInsertRatio(1.0, 2, 4.0)
    strict = [replay_server(rw.TableConfig("replay", 1000, rate_limiter=limiter), *others) for _ in range(2)]
    result = run([saved], strict)
    assert "lets 6 of 9 items in before some are sampled" in result.output
    missing = [replay_server(*others)]
    result = run([saved], missing)
    assert "table `replay` is not on the server" in result.output
    for server in (*after, *strict, *missing):
        with rw.Client(server.address) as client:
            assert {table.current_size for table in client.server_info().values()} == {0}


def test_little_room_on_one_server_is_made_up_for_by_the_others(
    start_saving: Callable[..., tuple[str, Callable[[], Path]]], replay_server: StartServer
) -> None:
    address, save = start_saving(*SOURCE)
    write(address, 0, 20)
    after = [replay_server(fifo("replay", size), *TARGET[1:]) for size in (1000, 2, 1000)]
    assert run([save()], after).exit_code == 0
    items = found(after, "replay")
    assert [len(one) for one in items] == [8, 2, 8]
    assert sorted(itertools.chain(*items)) == windows(0, 20)


def test_folder_without_a_checkpoint_is_refused(replay_server: StartServer, tmp_path: Path) -> None:
    result = run([tmp_path], [replay_server(*TARGET)])
    assert result.exit_code == 1
    assert "is no checkpoint, and has none in it" in result.output


@pytest.mark.only_server("reverb", "Reverb's writers")
def test_items_of_reverbs_own_writer_keep_their_keys(
    start_saving: Callable[..., tuple[str, Callable[[], Path]]], replay_server: StartServer
) -> None:
    """It draws keys of 64 bits, and makes a chunk for each column."""
    reverb = pytest.importorskip("reverb")
    address, save = start_saving(*SOURCE)
    client = reverb.Client(address)
    with client.trajectory_writer(num_keep_alive_refs=3) as writer:
        for number in range(30):
            writer.append({"frame": np.full(5, number), "n": np.int64(number)})
            if number >= 2:
                trajectory = {name: writer.history[name][-3:] for name in ("frame", "n")}
                writer.create_item("replay", number - 1.5, trajectory)
        writer.end_episode()
    with rw.Client(address) as before:
        keys = collections.Counter(sample.info.key for sample in before.sample("replay", 1500))
    assert len(keys) == 28
    assert any(key >= 1 << 63 for key in keys)
    after = [replay_server(*TARGET) for _ in range(2)]
    assert run([save()], after).exit_code == 0
    with rw.Client([server.address for server in after]) as both:
        for key in keys:
            both.mutate_priorities("replay", updates={key: 7.0})
    items = sorted(itertools.chain(*found(after, "replay")))
    assert items == [([n, n + 1, n + 2], 7.0) for n in range(28)]


@pytest.mark.parametrize("name", [ITEMS, CHUNKS])
def test_damaged_record_is_named_by_its_number(name: str, tmp_path: Path) -> None:
    with rw.LocalServer([rw.TableConfig("t")]) as before, rw.Client(before.address) as client:
        client.insert({"n": np.arange(2)}, {"t": 1.0})
        path = before.save(tmp_path / "saved") / name
    write_records(path, [*read_records(path), b"\xff"])
    with (
        rw.LocalServer([rw.TableConfig("t")]) as after,
        rw.Client(after.address) as client,
        pytest.raises(rw.FormatError, match=f"{name}: record 1 is not a "),
    ):
        collections.deque(Resharding([open_saved(tmp_path / "saved")], client, 20).run(), maxlen=0)
