"""The folder of checkpoints: whose it is, which are kept, which are complete. No server takes part."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from reverb_writer.errors import FormatError
from reverb_writer.tables import MinSize, Prioritized, SampleToInsertRatio, TableConfig

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server.checkpoints.contents import Checkpoint, TableState, differences
from reverb_writer_server.checkpoints.folder import CheckpointError, CheckpointFolder, checkpoints_in, select_checkpoint
from reverb_writer_server.checkpoints.tfrecord import DONE, FILES, read_records


def written(incoming: Path, name: str, *, at: float, done: bool = True) -> Path:
    """Do as Reverb does: a folder of that name, with its files, and DONE at the end."""
    path = incoming / name
    path.mkdir()
    for file in FILES:
        if file != DONE or done:
            (path / file).write_text("" if file == DONE else f"{file} of {name}")
            os.utime(path / file, (at, at))
    return path


def names(directory: Path) -> list[str]:
    return [one.name for one in checkpoints_in(directory)]


def test_finished_checkpoints_are_kept_under_their_time_and_the_newest_only(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        for second in (1, 2, 3):
            path = written(folder.incoming, f"2026-01-01T00:00:0{second}+00:00", at=second)
            assert [one.name for one in folder.keep_finished()] == [f"19700101T00000{second}.000000Z"]
            shutil.rmtree(path)  # as Reverb does at its next checkpoint
        assert names(folder.directory) == ["19700101T000003.000000Z", "19700101T000002.000000Z"]
        latest = folder.latest()
        assert latest is not None
        assert (latest.path / "items.tfrecord").read_text() == "items.tfrecord of 2026-01-01T00:00:03+00:00"


def test_unfinished_checkpoint_is_not_kept(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        written(folder.incoming, "a", at=1, done=False)
        assert folder.keep_finished() == []
        assert folder.latest() is None


def test_checkpoint_is_kept_once_without_a_copy(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        path = written(folder.incoming, "a", at=1)
        (kept,) = folder.keep_finished()
        assert folder.keep_finished() == []
        assert (kept.path / "chunks.tfrecord").samefile(path / "chunks.tfrecord")


def test_next_start_keeps_what_was_finished_and_clears_what_was_not(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        written(folder.incoming, "finished", at=1)
        written(folder.incoming, "unfinished", at=2, done=False)
        assert folder.starts == 1
    with CheckpointFolder(tmp_path / "own", keep=2) as folder:
        assert names(folder.directory) == ["19700101T000001.000000Z"]
        assert list(folder.incoming.iterdir()) == []
        assert folder.starts == 2


@pytest.mark.parametrize("stranger", ["lost+found", "zzz", "model.pt", ".DS_Store"])
def test_folder_with_anything_else_in_it_is_refused_and_untouched(tmp_path: Path, stranger: str) -> None:
    (tmp_path / stranger).mkdir()
    with pytest.raises(CheckpointError, match="must hold checkpoints and nothing else, found ") as refusal:
        CheckpointFolder(tmp_path, keep=1)
    assert stranger in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == [stranger]


def test_stranger_in_a_folder_of_ours_is_refused(tmp_path: Path) -> None:
    CheckpointFolder(tmp_path / "own", keep=1).close()
    (tmp_path / "own" / "lost+found").mkdir()
    with pytest.raises(CheckpointError, match="found lost"):
        CheckpointFolder(tmp_path / "own", keep=1)


def test_folder_has_one_server(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=1), pytest.raises(CheckpointError, match="another server uses it"):
        CheckpointFolder(tmp_path, keep=1)
    CheckpointFolder(tmp_path, keep=1).close()


@pytest.mark.parametrize("missing", FILES)
def test_checkpoint_that_lacks_a_file_is_incomplete(
    tmp_path: Path, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointFolder(tmp_path, keep=3) as folder:
        for second in (1, 2):
            written(folder.incoming, str(second), at=second)
            folder.keep_finished()
        older, newer = reversed(checkpoints_in(tmp_path))
        (newer.path / missing).unlink()
        assert newer.fault() == f"{missing} missing"
        assert select_checkpoint(tmp_path, "latest") == older
        assert f"{newer.name} is incomplete and not restored: {missing} missing" in caplog.text
        with pytest.raises(CheckpointError, match=f"{missing} missing. It is incomplete"):
            select_checkpoint(tmp_path, newer.name)


def test_checkpoint_that_was_cut_short_is_incomplete(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=3) as folder:
        written(folder.incoming, "a", at=1)
        (kept,) = folder.keep_finished()
        os.truncate(kept.path / "chunks.tfrecord", 3)
        assert kept.fault() == "chunks.tfrecord has 3 bytes, expected 20"
        assert folder.latest() is None


def test_server_does_not_begin_empty_because_all_checkpoints_are_incomplete(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=3) as folder:
        assert select_checkpoint(tmp_path, "latest") is None
        for second in (1, 2):
            written(folder.incoming, str(second), at=second)
            folder.keep_finished()
        newest, oldest = checkpoints_in(tmp_path)
        os.truncate(newest.path / "chunks.tfrecord", 3)
        (oldest.path / "DONE").unlink()
        expected = (
            rf"all 2 checkpoints are incomplete; .* {newest.name}: chunks.tfrecord has 3 bytes.*restore = \"none\""
        )
        with pytest.raises(CheckpointError, match=expected):
            select_checkpoint(tmp_path, "latest")
        assert select_checkpoint(tmp_path, "none") is None


def test_name_that_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with CheckpointFolder(tmp_path, keep=3) as folder:
        written(folder.incoming, "a", at=1)
        folder.keep_finished()
        assert select_checkpoint(tmp_path, "none") is None
        with pytest.raises(CheckpointError, match=r"there is no checkpoint `b`; found: 19700101T000001\.000000Z"):
            select_checkpoint(tmp_path, "b")


def test_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder of checkpoints"):
        checkpoints_in(tmp_path)


def test_file_that_is_no_record_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no zlib stream at all")
    with pytest.raises(FormatError, match="is damaged"):
        list(read_records(tmp_path / "x"))
    assert Checkpoint(tmp_path).fault() is not None


# Differences: the values are worked by hand.

STATE = TableState("a", 100, "uniform", "fifo", 0, (1.0, 5, -float("inf"), float("inf")), 7, 3, 0, None)


def test_equal_tables_do_not_differ() -> None:
    assert differences([TableConfig("a", 100, rate_limiter=MinSize(5))], [STATE]) == []


def test_each_difference_is_a_line() -> None:
    table = TableConfig("a", 50, Prioritized(0.5), "fifo", SampleToInsertRatio(8, 10, 20), 2)
    assert differences([table, TableConfig("new")], [STATE, TableState(**{**vars(STATE), "name": "old"})]) == [
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
