"""Where the shards of a cluster on Ray are, as the files beside their checkpoints say; and who may write there."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from threads import at_once
from waiting import eventually

import reverb_writer as rw
from reverb_writer.ray import ReplayCluster
from reverb_writer.ray.actor_target import ActorTarget
from reverb_writer.ray.addresses import newest_claim, numbers_in, path_of
from reverb_writer.ray.shard_report import ClusterSpec
from reverb_writer.shards.targets import Shard

NAME = "replay:experiment:shard-0-of-1"


def write(folder: Path, number: int, phase: str, address: str = "10.0.0.1:8000") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path_of(folder, number).write_text(json.dumps({"address": address, "phase": phase}))


def shard(tmp_path: Path) -> tuple[ActorTarget, Path]:
    """Return the target of a cluster of one shard, and that shard's folder."""
    spec = ClusterSpec("experiment", (), 1, "python", str(tmp_path))
    folder = spec.shard_folder(0)
    assert folder is not None
    return ActorTarget(spec), folder


def test_highest_number_counts_and_no_clock(tmp_path: Path) -> None:
    target, folder = shard(tmp_path)
    write(folder, 9, "serving")
    os.utime(path_of(folder, 9), (2e9, 2e9))  # its node's clock was years ahead
    before = target.look_up(60)
    assert before.shards == (Shard(NAME, "10.0.0.1:8000"),)
    write(folder, 10, "restoring", "10.0.0.2:8001")
    os.utime(path_of(folder, 10), (1e9, 1e9))
    assert target.look_up(60).shards == (Shard(NAME, "10.0.0.2:8001", "lost"),)
    write(folder, 10, "serving", "10.0.0.2:8001")
    after = pickle.loads(pickle.dumps(target)).look_up(60)  # noqa: S301  # its own
    assert after.shards == (Shard(NAME, "10.0.0.2:8001"),)


def test_file_that_is_just_created_says_nothing_and_the_address_before_it_stays(tmp_path: Path) -> None:
    target, folder = shard(tmp_path)
    write(folder, 1, "serving")
    target.look_up(60)
    path_of(folder, 2).touch()
    (folder / ".2.partial").touch()
    assert target.look_up(60).shards == (Shard(NAME, "10.0.0.1:8000", "lost"),)


def test_folder_that_does_not_answer_does_not_hang_a_look_up(tmp_path: Path) -> None:
    target, folder = shard(tmp_path)
    write(folder, 1, "serving")
    before = target.look_up(60)
    os.mkfifo(path_of(folder, 2))  # as on a server of NFS that is away: a read waits for ever
    assert target.look_up(0.1) == before
    num_threads = threading.active_count()
    assert target.look_up(0.1) == before
    assert threading.active_count() <= num_threads  # one thread waits for the folder, however often it is looked up
    path_of(folder, 2).write_text("")  # now it has come back


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "-x"])
def test_name_that_is_no_folder_of_its_own_is_refused(name: str) -> None:
    with pytest.raises(rw.errors.SpecError, match="`name` must be"):
        ReplayCluster.start(name, [rw.TableConfig("replay")], checkpoints="/shared")


class TestClaim:
    """Of several servers on one folder, one begins, and the others know."""

    @pytest.fixture
    def claim(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        module = pytest.importorskip("reverb_writer_server.turn", reason="the server is not installed")
        monkeypatch.setattr(module, "_BEAT_S", 0.01)
        monkeypatch.setattr(module, "_POLL_S", 0.01)
        return module

    def test_no_two_have_one_number(self, claim: Any, tmp_path: Path) -> None:
        folder = tmp_path / "shard" / "checkpoints"
        made = at_once(*[lambda: claim.FolderClaim(folder, lambda: ("a:1", "starting"))] * 8)
        assert sorted(one.number for one in made) == [*range(1, 9)]
        for one in made:
            one.close()
        with contextlib.closing(claim.FolderClaim(folder, lambda: ("a:1", "starting"))) as last:
            assert last.number == 9

    def test_server_of_another_machine_is_waited_for_until_it_tells_its_end(self, claim: Any, tmp_path: Path) -> None:
        folder = tmp_path / "shard" / "checkpoints"
        old = claim.FolderClaim(folder, lambda: ("a:1", "serving"), machine="a")
        new = claim.FolderClaim(folder, lambda: ("b:1", "starting"), machine="b")
        waited: list[str] = []

        def tell(what: str) -> None:
            waited.append(what)
            if old.newer == 2:
                old.close()

        new.wait(tell)
        assert waited[0] == "waits for the end of the previous server (a:1, serving)"
        with pytest.raises(claim.ClaimError, match="server 2 has taken over from this one, number 1"):
            old.wait(waited.append)
        new.close()
        assert numbers_in(tmp_path / "shard") == [2]

    def test_claim_that_cannot_be_read_is_waited_for(self, claim: Any, tmp_path: Path) -> None:
        folder = tmp_path / "shard" / "checkpoints"
        unreadable = path_of(tmp_path / "shard", 1)
        unreadable.mkdir(parents=True)
        waited: list[str] = []

        def tell(what: str) -> None:
            waited.append(what)
            unreadable.rmdir()
            write(tmp_path / "shard", 1, "ended")

        with contextlib.closing(claim.FolderClaim(folder, lambda: ("b:1", "starting"))) as new:
            new.wait(tell)
        (text,) = waited
        assert (
            text == f"waits until it can read the claims of other servers ([Errno 21] Is a directory: '{unreadable}')"
        )
        assert numbers_in(tmp_path / "shard") == [2]

    def test_silent_server_of_another_machine_is_waited_for_as_long_as_it_may_serve(
        self, claim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert claim.DOUBT_S < claim.LEASE_S
        monkeypatch.setattr(claim, "LEASE_S", 0.1)
        folder = tmp_path / "shard" / "checkpoints"
        write(tmp_path / "shard", 1, "serving")  # its machine has lost its power
        waited: list[str] = []
        with contextlib.closing(claim.FolderClaim(folder, lambda: ("b:1", "starting"))) as new:
            new.wait(waited.append)
        assert waited
        found = newest_claim(tmp_path / "shard")
        assert found is not None
        assert (found.number, found.address, found.phase) == (2, "b:1", "ended")
        assert numbers_in(tmp_path / "shard") == [2]

    def test_lock_of_a_silent_server_of_another_machine_is_waited_for(
        self, claim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As of a lost machine, whose locks NFS keeps for a while."""
        monkeypatch.setattr(claim, "LEASE_S", 0.05)
        folder = tmp_path / "shard" / "checkpoints"
        folder.mkdir(parents=True)
        write(tmp_path / "shard", 1, "serving")
        waited: list[str] = []
        with contextlib.ExitStack() as lock:
            file = lock.enter_context((folder / "OWNER.json").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)

            def tell(what: str) -> None:
                waited.append(what)
                if len(waited) == 30:  # 0.01 s each, at least
                    lock.close()

            with contextlib.closing(claim.FolderClaim(folder, lambda: ("b:1", "starting"))) as new:
                new.wait(tell)
            assert file.closed

    def test_full_disk_does_not_make_a_server_silent(self, claim: Any, tmp_path: Path) -> None:
        folder = tmp_path / "shard"
        folder.mkdir()
        (folder / f".1.a.{os.getpid()}").symlink_to("/dev/full")
        told = [("", "restoring")]
        with contextlib.closing(claim.FolderClaim(folder / "checkpoints", lambda: told[-1], machine="a")):
            eventually(lambda: (one := newest_claim(folder)) and one.beat > 3, "it goes on to write")
            told.append(("a:1", "serving"))
            found = eventually(lambda: (one := newest_claim(folder)) and one.address and one, "it tells its address")
            assert (found.address, found.phase) == told[-1]
        last = newest_claim(folder)
        assert last is not None
        assert (last.address, last.phase) == ("a:1", "ended")

    def test_server_that_cannot_look_is_in_doubt(
        self, claim: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(claim, "DOUBT_S", 0.1)
        folder = tmp_path / "shard" / "checkpoints"
        with contextlib.closing(claim.FolderClaim(folder, lambda: ("a:1", "serving"))) as one:
            (tmp_path / "shard").rename(tmp_path / "away")
            eventually(one.in_doubt, "it is in doubt")
            assert caplog.text.count("cannot be written or read") == 1
            (tmp_path / "away").rename(tmp_path / "shard")
            eventually(lambda: not one.in_doubt(), "it is sure again")
