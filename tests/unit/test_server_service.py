"""Parts of the server's life that need no server."""

from __future__ import annotations

import logging
import threading

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")
pytest.importorskip("prometheus_client", reason="it comes with the server")

from reverb_writer_server.service import wait_for_checkpoint


def test_checkpoint_that_does_not_end_is_not_waited_for_without_bound(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    end = threading.Event()
    checkpoint = threading.Thread(target=end.wait, daemon=True)
    checkpoint.start()
    assert not wait_for_checkpoint(checkpoint, 0.1)
    end.set()
    assert wait_for_checkpoint(checkpoint, 60.0)
    checkpoint.join()
    assert [(record.levelname, record.getMessage().split(":")[0]) for record in caplog.records][:2] == [
        ("INFO", "a checkpoint is under way"),
        ("ERROR", "the checkpoint under way has not ended within 0.1 s"),
    ]
    assert "no last one is written" in caplog.text


def test_where_no_checkpoint_is_under_way_nothing_is_waited_for_or_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ended = threading.Thread(target=int)
    ended.start()
    ended.join()
    assert wait_for_checkpoint(None, 60.0)
    assert wait_for_checkpoint(ended, 60.0)
    assert not caplog.records
