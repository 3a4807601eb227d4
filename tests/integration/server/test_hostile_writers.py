"""Writers that send what stops a table of Reverb, on purpose or by mistake. dm-reverb's own clients can send it."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import numpy as np
import pytest
from numbered import insert_items
from service_process import configuration, insert, kept, service, sizes
from waiting import PATIENCE_S, eventually

import reverb_writer as rw
from reverb_writer.client.whole_items import one_item
from reverb_writer.files.tfrecord import ITEMS, read_records, write_records
from reverb_writer.protocol import messages

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytestmark = pytest.mark.timeout(300)  # several servers a test, and TensorFlow takes seconds to load

TABLES = """sampler = "prioritized"
        [tables.other]
        max_size = 1000"""


def insert_with(address: str, priority: float) -> None:
    """Insert an item without our client's check of priorities; it is never confirmed."""
    with rw.Client(address) as client:
        request = one_item([np.array([99])], [False], {"replay": priority})
        with contextlib.suppress(rw.errors.ReverbWriterError):
            insert_items(client.shards[0].channel, request, 2.0)


def change_priority(address: str, priority: float) -> None:
    """Give one item of `replay` a priority, without our client's check; Reverb refuses it, and stores it."""
    with rw.Client(address) as client:
        (sample,) = client.sample("replay", 1)
        request = messages.MutatePrioritiesRequest(
            table="replay", updates=[messages.KeyWithPriority(key=sample.info.key, priority=priority)]
        )
        with pytest.raises(rw.errors.ReverbWriterError, match="Priority must not be"):
            client.shards[0].channel.call(messages.MUTATE_PRIORITIES, request.SerializeToString(), 30.0)


@pytest.mark.parametrize("priority", [math.nan, -1.0])
def test_priority_that_ends_a_tables_thread_costs_one_restart_and_no_confirmed_item(
    tmp_path: Path, priority: float
) -> None:
    text = configuration(tmp_path, TABLES)
    with service(tmp_path, text) as server:
        insert(server.address, *range(5))
        insert(server.address, *range(3), table="other")
        insert_with(server.address, priority)
        assert server.process.wait(PATIENCE_S) == 6
        assert "the server ends itself, because a table has stopped for good" in server.log()
        assert "table `replay`: 1 items have a priority that is NaN or negative, and are left out" in server.log()
    with service(tmp_path, text) as server:
        assert sizes(server.address) == {"replay": 5, "other": 3}
        assert 'how="unhealthy"' in server.get("/metrics")[1]
        insert(server.address, 5)
        with rw.Client(server.address) as client:
            assert {int(np.squeeze(sample.data)) for sample in client.sample("replay", 200)} <= {*range(6)}
        assert server.end() == 0


def test_changed_priority_that_a_restore_would_refuse_spoils_no_checkpoint(tmp_path: Path) -> None:
    text = configuration(tmp_path, TABLES)
    with service(tmp_path, text) as server:
        insert(server.address, *range(5))
        change_priority(server.address, math.nan)
        with rw.Client(server.address) as client:
            client.checkpoint()
        eventually(lambda: server.status()["checkpoints"]["left_out"] == 1, "the checkpoint without the item is kept")
        assert server.metrics()["reverb_checkpoint_items_left_out"] == 1
        assert server.get("/readyz")[0] == 200
        assert server.end() == 0
        assert server.log().count("1 items have a priority that is NaN or negative") == 1
    with service(tmp_path, text) as server:
        assert sizes(server.address)["replay"] == 4
        assert server.end() == 0


@pytest.mark.slow
@pytest.mark.parametrize("max_size", [1000, 3], ids=["same tables", "other tables"])
def test_restore_leaves_out_what_reverb_refuses_and_counts_it(tmp_path: Path, max_size: int) -> None:
    """A checkpoint of an earlier version has such items."""
    text = configuration(tmp_path, TABLES)
    with service(tmp_path, text) as server:
        insert(server.address, *range(5))
        assert server.end() == 0
    (name,) = kept(tmp_path)
    path = tmp_path / "checkpoints" / "kept" / name
    items = [messages.PrioritizedItem.FromString(record) for record in read_records(path / ITEMS)]
    items[3].priority = math.nan
    write_records(path / ITEMS, [item.SerializeToString() for item in items])
    (path / "MANIFEST.json").unlink()
    text = text.replace("max_size = 1000", f"max_size = {max_size}", 1)
    with service(tmp_path, text, "--on-mismatch", "config") as server:
        assert sizes(server.address)["replay"] == min(4, max_size)
        assert f"restored checkpoint {name}" in server.log()
        assert "table `replay`: 1 items have a priority that is NaN or negative" in server.log()
        assert server.status()["checkpoints"]["damaged"] == []
        assert server.end() == 0
    assert len(kept(tmp_path)) == 2
