"""The folder of checkpoints: whose it is, which are kept, which are complete. No server takes part."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
from reverb_writer_server.checkpoints.contents import Checkpoint, differences
from reverb_writer_server.checkpoints.folder import CheckpointFolder, checkpoints_in, first_restorable
from reverb_writer_server.checkpoints.owner import CheckpointError

from reverb_writer.errors import FormatError
from reverb_writer.files.tfrecord import DONE, FILES, read_records
from reverb_writer.protocol.messages import PriorityTableCheckpoint
from reverb_writer.tables import MinSize, Prioritized, SampleToInsertRatio, TableConfig
from reverb_writer.tables.table_messages import write_table


def written(incoming: Path, name: str, *, at: float, done: bool = True, what: bytes = b"") -> Path:
    """Do as Reverb does: a folder of that name, with its files, and DONE at the end. It has no tables."""
    path = incoming / name
    path.mkdir()
    for file in FILES:
        if file != DONE or done:
            content = zlib.compress(b"" if file == "tables.tfrecord" else what)
            (path / file).write_bytes(b"" if file == DONE else content)
            os.utime(path / file, (at, at))
    return path


def adopted(folder: CheckpointFolder) -> list[str]:
    return [one.name for one in folder.adopt_finished().kept.values()]


def kept(folder: CheckpointFolder, name: str, *, at: float) -> str:
    """Write a checkpoint that is kept, and return its name."""
    written(folder.incoming, name, at=at)
    (one,) = adopted(folder)
    return one


def names(directory: Path) -> list[str]:
    return [one.name for one in checkpoints_in(directory)]


def test_newest_checkpoints_are_kept_under_a_number_and_their_time_without_a_copy(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        for number, second in enumerate((9, 5, 1), 1):  # a clock that is set back changes no order
            path = written(folder.incoming, f"2026-01-01T00:00:0{second}+00:00", at=second, what=b"of %d" % number)
            inode = (path / "chunks.tfrecord").stat().st_ino
            assert adopted(folder) == [f"0000000{number}-19700101T00000{second}.000000Z"]
            assert adopted(folder) == []
        assert names(folder.directory) == ["00000003-19700101T000001.000000Z", "00000002-19700101T000005.000000Z"]
        latest = folder.latest()
        assert latest is not None
        assert zlib.decompress((latest.path / "items.tfrecord").read_bytes()) == b"of 3"
        assert (latest.path / "chunks.tfrecord").stat().st_ino == inode
        assert list(folder.incoming.iterdir()) == []  # so that Reverb never finds an older one of a later name


def test_names_of_earlier_versions_are_older_than_all_with_a_number_even_in_the_future(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        for name in ("20990101T000000.000000Z", "20260101T000000.000000Z"):
            written(tmp_path / "own" / "kept", name, at=1)
        assert names(folder.directory) == ["20990101T000000.000000Z", "20260101T000000.000000Z"]
        written(folder.incoming, "2026-01-02T00:00:00+00:00", at=2)
        assert adopted(folder) == ["00000001-19700101T000002.000000Z"]
        assert names(folder.directory) == ["00000001-19700101T000002.000000Z", "20990101T000000.000000Z"]


def test_number_of_a_checkpoint_that_was_removed_is_not_used_again(tmp_path: Path) -> None:
    for number in (1, 2):
        with CheckpointFolder(tmp_path / "own", keep=2) as folder:
            name = kept(folder, "a", at=1)
            assert name.startswith(f"0000000{number}-")
            shutil.rmtree(folder.directory / "kept" / name)
            assert folder.latest() is None


def test_unfinished_checkpoint_is_not_kept(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        written(folder.incoming, "a", at=1, done=False)
        assert adopted(folder) == []
        assert folder.latest() is None


@pytest.mark.parametrize("content", [b"", zlib.compress(bytes(1000))[:-4], b"no zlib stream at all"])
def test_finished_checkpoint_that_is_damaged_is_refused_and_deleted(tmp_path: Path, content: bytes) -> None:
    with CheckpointFolder(tmp_path / "own", keep=1) as folder:
        before = kept(folder, "a", at=1)
        path = written(folder.incoming, "b", at=2)
        (path / "chunks.tfrecord").write_bytes(content)  # a full disk: Reverb does not look when it closes a file
        found = folder.adopt_finished()
        assert not found.kept
        assert "chunks.tfrecord" in found.refused["b"]
        assert names(folder.directory) == [before]
        assert not path.exists()


def test_next_start_keeps_what_was_finished_and_clears_what_was_not(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        written(folder.incoming, "finished", at=1)
        written(folder.incoming, "unfinished", at=2, done=False)
        written(folder.incoming, ".converted", at=3)  # what earlier versions left when they were killed
        folder.fitted.mkdir()
        assert folder.owner.mark.starts == 1
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        assert names(folder.directory) == ["00000001-19700101T000001.000000Z"]
        assert [path.name for path in (folder.directory / "kept").iterdir()] == names(folder.directory)
        assert list(folder.incoming.iterdir()) == []
        assert folder.owner.mark.starts == 2


def test_older_incomplete_and_damaged_ones_go_with_the_last_that_is_kept(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        for second in (1, 2, 3):
            kept(folder, str(second), at=second)
        three, two = checkpoints_in(folder.directory)
        folder.damaged.add(three.name)
        assert folder.latest() == two
        four = kept(folder, "4", at=4)
        assert names(folder.directory) == [four, three.name, two.name]  # two sound ones
        five = kept(folder, "5", at=5)
        assert names(folder.directory) == [five, four]


def test_checkpoint_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=1) as folder:
        first = kept(folder, "a", at=1)
        copying = os.open(tmp_path / "own" / "kept" / first, os.O_RDONLY)
        fcntl.flock(copying, fcntl.LOCK_SH)  # as `flock --shared` does
        second = kept(folder, "b", at=2)
        assert names(folder.directory) == [second, first]
        os.close(copying)
        assert folder.prune(1) == 1
        assert names(folder.directory) == [second]


# Its mark.


@pytest.mark.parametrize(
    "content", [None, "{", "[]", "null", '{"starts": null}', "\x00\xff", '{"starts": -3, "sequence": "x"}']
)
def test_lost_or_damaged_mark_is_written_anew_and_the_checkpoints_stay(tmp_path: Path, content: str | None) -> None:
    with CheckpointFolder(tmp_path / "own", keep=3) as folder:
        first = kept(folder, "a", at=1)
    mark = tmp_path / "own" / "OWNER.json"
    mark.unlink() if content is None else mark.write_text(content, "latin-1")
    assert names(tmp_path / "own") == [first]
    with CheckpointFolder(tmp_path / "own", keep=3) as folder:
        assert folder.owner.mark.starts == 1
        assert names(folder.directory) == [first]
        written(folder.incoming, "b", at=1)
        assert adopted(folder)[0].startswith("00000002-")
    with CheckpointFolder(tmp_path / "own", keep=3) as folder:
        assert folder.owner.mark.starts == 2


def test_reading_of_what_somebody_removes_meanwhile_never_fails(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=1) as folder:
        written(folder.incoming, "a", at=1)
        (one,) = folder.adopt_finished().kept.values()
        shutil.rmtree(one.path)
        assert (one.fault() is None, one.size_bytes, one.written_at.timestamp()) == (False, 0, 0)
        assert folder.kept() == (0, None, 0, None, 0)
        shutil.rmtree(folder.directory / "kept")
        assert folder.kept() == (0, None, 0, None, 0)
        written(folder.incoming, "b", at=1)
        assert adopted(folder)[0].startswith("00000002-")


@pytest.mark.parametrize("stranger", ["lost+found", "zzz", "model.pt", ".DS_Store", "kept/photographs"])
@pytest.mark.parametrize("is_ours", [False, True])
def test_folder_with_anything_else_in_it_is_refused_and_untouched(tmp_path: Path, stranger: str, is_ours: bool) -> None:
    if is_ours:
        CheckpointFolder(tmp_path, keep=1).close()
    (tmp_path / stranger).mkdir(parents=True)
    if is_ours and stranger.startswith("kept"):  # of a folder with its mark only the top is looked at
        CheckpointFolder(tmp_path, keep=1).close()
        return
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="must hold checkpoints and nothing else, found ") as refusal:
        CheckpointFolder(tmp_path, keep=1)
    assert stranger.partition("/")[0] in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_folder_on_a_full_disk_is_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(CheckpointError, match=r"No space left on device.* Give the disk more room") as refusal:
        CheckpointFolder(tmp_path / "new", keep=1)
    assert "chown" not in str(refusal.value)


def test_folder_has_one_server(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=1), pytest.raises(CheckpointError, match="another server uses it"):
        CheckpointFolder(tmp_path, keep=1)
    CheckpointFolder(tmp_path, keep=1).close()


def complete(checkpoint: Checkpoint) -> Checkpoint:
    if fault := checkpoint.fault():
        raise FormatError(fault)
    return checkpoint


@pytest.mark.parametrize("missing", FILES)
def test_checkpoint_that_lacks_a_file_is_incomplete(
    tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointFolder(tmp_path, keep=3) as folder:
        for second in (1, 2):
            kept(folder, str(second), at=second)
        older, newer = reversed(checkpoints_in(tmp_path))
        (newer.path / missing).unlink()
        assert newer.fault() == f"{missing} missing"
        assert first_restorable(tmp_path, "latest", complete) == older
        assert f"checkpoint {newer.name} cannot be restored: {missing} missing" in caplog.text
        with pytest.raises(CheckpointError, match=f"cannot be restored: {missing} missing"):
            first_restorable(tmp_path, newer.name, complete)


def test_server_does_not_begin_empty_because_all_checkpoints_are_incomplete(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=3) as folder:
        assert first_restorable(tmp_path, "latest", complete) is None
        for second in (1, 2):
            kept(folder, str(second), at=second)
        newest, oldest = checkpoints_in(tmp_path)
        os.truncate(newest.path / "chunks.tfrecord", 3)
        (oldest.path / "DONE").unlink()
        fault = "chunks.tfrecord has 3 bytes, expected 8"
        assert newest.fault() == fault
        expected = rf"{newest.name} cannot be restored: {fault} \(and 1 older ones\).* or to \"none\" to begin empty"
        with pytest.raises(CheckpointError, match=expected):
            first_restorable(tmp_path, "latest", complete)
        assert folder.latest() is None
        assert first_restorable(tmp_path, "none", complete) is None


def test_name_that_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=3) as folder:
        written(folder.incoming, "a", at=1)
        folder.adopt_finished()
        assert first_restorable(tmp_path, "none", complete) is None
        with pytest.raises(CheckpointError, match=r"has no checkpoint `b`; found: 00000001-19700101T000001\.000000Z"):
            first_restorable(tmp_path, "b", complete)


def test_folder_and_file_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder of checkpoints"):
        checkpoints_in(tmp_path)
    (tmp_path / "x").write_bytes(b"no zlib stream at all")
    with pytest.raises(FormatError, match="is damaged"):
        list(read_records(tmp_path / "x"))
    assert Checkpoint(tmp_path).fault() is not None


# Differences: the values are worked by hand.


def saved(table: TableConfig) -> Any:
    """Return a table as a checkpoint has it."""
    message = PriorityTableCheckpoint()
    write_table(table, message)
    return message


def test_each_difference_is_a_line() -> None:
    before = TableConfig("a", 100, rate_limiter=MinSize(5))
    assert differences([before], [saved(before)]) == []
    table = TableConfig("a", 50, Prioritized(0.5), "fifo", SampleToInsertRatio(8, 10, 20), 2)
    assert differences([table, TableConfig("new")], [saved(before), saved(TableConfig("old"))]) == [
        "table `old`: in the checkpoint, not configured",
        "table `a`: max_size is 100 in the checkpoint, 50 in the configuration",
        "table `a`: sampler is uniform in the checkpoint, prioritized (0.5) in the configuration",
        "table `a`: max_times_sampled is 0 in the checkpoint, 2 in the configuration",
        "table `a`: samples_per_insert is 1.0 in the checkpoint, 8.0 in the configuration",
        "table `a`: min_size is 5 in the checkpoint, 10 in the configuration",
        "table `a`: min_diff is -inf in the checkpoint, 60.0 in the configuration",
        "table `a`: max_diff is inf in the checkpoint, 100.0 in the configuration",
        "table `new`: configured, not in the checkpoint",
    ]
