"""A service counts its saves, so writers release items that a checkpoint has, and send the others again."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from kills import Local, Service, kill_at_random, numbers_in
from service_process import ServiceProcess, configuration, flip, kept, run_command, service, sizes
from waiting import eventually

import reverb_writer as rw
from reverb_writer.tables import SAVES

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = pytest.mark.timeout(900)


def write(observer: rw.TrajectoryObserver, *numbers: int) -> None:
    for number in numbers:
        observer({"number": number}, end_of_episode=True)
    observer.flush()


def save(server: ServiceProcess, observer: rw.TrajectoryObserver, folder: Path) -> None:
    """Wait until a checkpoint has all items of the observer; `every_s` is 1."""
    eventually(lambda: observer.stats().kept_bytes == 0, f"a checkpoint has all items; {kept(folder)}\n{server.log()}")


def test_items_since_the_last_checkpoint_come_back_and_are_released_by_the_next_one(tmp_path: Path) -> None:
    with service(tmp_path, configuration(tmp_path, every_s=1)) as server:
        with rw.TrajectoryObserver(server.address, "replay", 1, timeout_s=100) as observer:
            write(observer, *range(10))
            save(server, observer, tmp_path)
            write(observer, 10, 11)
            server.end(signal.SIGKILL)
            server.restart()
            write(observer, 12)
            save(server, observer, tmp_path)
            stats = observer.stats()
            assert sizes(server.address) == {"replay": 13}  # the reserved table is not among them
            with rw.Client(server.address) as client:
                assert SAVES not in client.server_info()
        assert server.end() == 0
    assert numbers_in(tmp_path / "checkpoints") == Counter(range(13))
    assert stats.uncovered_items == 0
    assert stats.recovered_items <= 12
    shown = run_command("checkpoints", "inspect", str(tmp_path / "checkpoints/kept" / kept(tmp_path)[-1]))
    assert (shown.returncode, SAVES in shown.stdout) == (0, False)


@pytest.mark.slow
@pytest.mark.parametrize("safe_after", [1, 2])
def test_damaged_checkpoint_loses_nothing_if_two_must_have_an_item_and_is_counted_else(
    tmp_path: Path, safe_after: int
) -> None:
    text = configuration(tmp_path, every_s=1, keep=4).replace("keep = 4", f"keep = 4\nsafe_after = {safe_after}")
    with service(tmp_path, text) as server:
        with rw.TrajectoryObserver(server.address, "replay", 1, timeout_s=100) as observer:
            write(observer, 1, 2)
            save(server, observer, tmp_path)
            before = kept(tmp_path)[-1]
            write(observer, 3, 4, 5)
            eventually(lambda: kept(tmp_path)[-1] > before, "the next checkpoint")
            if safe_after == 1:
                save(server, observer, tmp_path)
            server.end(signal.SIGKILL)
            for name in [name for name in kept(tmp_path) if name > before][-2 + safe_after // 2 :]:
                flip(tmp_path / "checkpoints/kept" / name / "items.tfrecord")
            server.restart()
            write(observer, 6)
            there, uncovered = sizes(server.address)["replay"], observer.stats().uncovered_items
        assert server.end() == 0
    assert there + uncovered >= 6
    if safe_after == 2:
        assert (there, uncovered) == (6, 0)


def test_restored_tables_of_another_configuration_keep_the_number_of_saves(tmp_path: Path) -> None:
    text = configuration(tmp_path, every_s=1)
    with service(tmp_path, text) as server:
        with rw.TrajectoryObserver(server.address, "replay", 1, timeout_s=100) as observer:
            write(observer, *range(10))
            save(server, observer, tmp_path)
            server.end(signal.SIGKILL)
            other = text.replace(" every_s", ' on_mismatch = "config"\n every_s')
            (tmp_path / "server.toml").write_text(f"{other}\n[tables.other]\n")
            server.restart()
            write(observer, 10)
            assert sizes(server.address) == {"replay": 11, "other": 0}
            assert observer.stats().uncovered_items == 0
        assert server.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_kills"), [(Service, 8), (Local, 50)])
def test_kills_at_random_lose_no_confirmed_item_that_is_not_counted(
    kind: type[Service | Local], num_kills: int, tmp_path: Path
) -> None:
    print(kill_at_random(kind, tmp_path, num_kills, random.randrange(1 << 30)))  # noqa: S311  # no secrets
