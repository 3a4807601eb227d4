"""Items that Reverb saves and refuses to restore: the server keeps checkpoints without them."""

from __future__ import annotations

import logging
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from reverb_writer_server import ReplayServer
from reverb_writer_server.checkpoints.contents import Checkpoint, inspect
from reverb_writer_server.checkpoints.folder import CheckpointFolder
from reverb_writer_server.checkpoints.refused import copy_without_refused, refused_items
from reverb_writer_server.cli import commands

import reverb_writer as rw
from reverb_writer.files.saved_replay import SavedReplay
from reverb_writer.files.tfrecord import ITEMS, read_records, write_records
from reverb_writer.protocol import messages

PRIORITIZED = rw.TableConfig("replay", 10, "prioritized")
HEAP = rw.TableConfig("heap", 10, "max_heap")
TABLES = [PRIORITIZED, HEAP]


def saved_with(folder: Path, *priorities: float) -> Path:
    """Save an item of each priority in both tables, as Reverb does whatever the priorities are."""
    with rw.LocalServer(TABLES) as server, rw.Client(server.address) as client:
        for number in range(len(priorities)):
            client.insert(np.array([number]), {"replay": 1.0, "heap": 1.0})
        path = server.save(folder)
    items = [messages.PrioritizedItem.FromString(record) for record in read_records(path / ITEMS)]
    for table in ("replay", "heap"):
        for item, priority in zip([one for one in items if one.table == table], priorities, strict=True):
            item.priority = priority
    write_records(path / ITEMS, [item.SerializeToString() for item in items])
    return path


def sizes(path: Path) -> dict[str, int]:
    """Return the number of items of each table after a restore by Reverb."""
    with ReplayServer(TABLES, restore=path) as server, rw.Client(server.address) as client:
        return {name: info.current_size for name, info in client.server_info().items()}


@pytest.mark.parametrize("wrong", [math.nan, -1.0, -math.inf])
def test_copy_has_all_items_but_those_that_reverb_refuses(tmp_path: Path, wrong: float) -> None:
    saved = SavedReplay(saved_with(tmp_path, 1.0, wrong, 0.0, wrong, math.inf))
    with pytest.raises(RuntimeError, match="Priority must not be"):
        sizes(saved.path)  # Reverb refuses all of it
    assert refused_items(saved) == {"replay": 2}
    assert copy_without_refused(saved, tmp_path / "copy") == {"replay": 2}
    assert sizes(tmp_path / "copy") == {"replay": 3, "heap": 5}


def test_checkpoint_that_reverb_takes_is_not_copied(tmp_path: Path) -> None:
    saved = SavedReplay(saved_with(tmp_path, 0.0, math.inf, 5e-324))
    assert copy_without_refused(saved, tmp_path / "copy") == {}
    assert not (tmp_path / "copy").exists()
    assert sizes(saved.path) == {"replay": 3, "heap": 3}


def test_kept_checkpoint_lacks_refused_items_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = saved_with(tmp_path / "saved", 1.0, math.nan)
    with CheckpointFolder(tmp_path / "own", keep=2) as folder, caplog.at_level(logging.ERROR):
        for _ in range(2):
            shutil.copytree(bad, folder.incoming / "of-reverb")
            (kept,) = folder.adopt_finished().kept.values()
            assert kept.fault() is None
            kept.check()  # its files are those of its manifest
            assert inspect(kept).items == {"replay": 1, "heap": 2}
            assert folder.kept().left_out == 1
        (line,) = [record.getMessage() for record in caplog.records if "NaN or negative" in record.getMessage()]
        assert line == (
            "checkpoint of-reverb, table `replay`: 1 items have a priority that is NaN or negative, and are left out, "
            "because Reverb refuses to restore them. Find the writer that sends such priorities."
        )
        shutil.copytree(saved_with(tmp_path / "good", 1.0), folder.incoming / "later")
        folder.adopt_finished()
        assert folder.kept().left_out == 0


def test_inspect_counts_items_that_a_restore_leaves_out(tmp_path: Path) -> None:
    bad = saved_with(tmp_path, 1.0, math.nan, -2.0)
    assert inspect(Checkpoint(bad)).refused == {"replay": 2}
    result = CliRunner().invoke(commands, ["checkpoints", "inspect", str(bad)])
    assert result.exit_code == 0
    assert result.output.count("2 items with a priority that is NaN or negative: a server leaves them out") == 1
