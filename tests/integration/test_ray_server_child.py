"""The server of a shard on Ray, kept running by its actor: here without Ray, on real servers and ports."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ports import free_port
from server_process import HAS_REVERB, SERVER_PYTHON
from service_process import eventually

import reverb_writer as rw
from reverb_writer.ray.server_child import ChildView, ServerChild

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_REVERB, reason="the server needs an interpreter with dm-reverb"),
]


@contextlib.contextmanager
def child(folder: Path, **options: Any) -> Iterator[tuple[ServerChild, list[ChildView]]]:
    """Keep a server running within the block; its views are collected."""
    views: list[ChildView] = []

    def configuration(port: int, http_port: int) -> str:
        checkpoints = f'[checkpoints]\ndirectory = "{folder}"\nevery_s = 0\n'
        return f"port = {port}\n[http]\nport = {http_port}\n{checkpoints}[tables.replay]\nmax_size = 10\n"

    made = ServerChild(SERVER_PYTHON, configuration, views.append, **options)
    try:
        yield made, views
    finally:
        made.stop()
        eventually(lambda: made.view.state == "stopped", "the server has stopped")


def test_server_takes_another_port_if_its_last_one_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", free_port())) as other:
        taken = other.getsockname()[1]
        with child(tmp_path / "checkpoints", last_port=taken) as (made, views):
            eventually(lambda: made.view.state == "serving", "the server serves")
            assert made.view.port != taken
            with rw.Client(f"localhost:{made.view.port}") as client:
                client.insert({"number": np.array([1])}, {"replay": 1.0})
    assert "failed" not in [view.state for view in views]


def test_server_keeps_its_last_port_if_it_is_free(tmp_path: Path) -> None:
    port = free_port()
    with child(tmp_path / "checkpoints", last_port=port) as (made, _):
        eventually(lambda: made.view.state == "serving", "the server serves")
        assert made.view.port == port


def test_server_that_must_have_a_port_says_that_it_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", free_port())) as other:
        taken = other.getsockname()[1]
        with child(tmp_path / "checkpoints", port=taken) as (made, _):
            eventually(lambda: made.view.state == "failed", "the start has failed")
            assert f"port {taken} is in use" in made.view.detail
            assert made.view.port == taken


def test_last_checkpoint_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with child(folder) as (made, _):
        eventually(lambda: made.view.state == "serving", "the server serves")
        with rw.Client(f"localhost:{made.view.port}") as client:
            client.insert({"number": np.array([1])}, {"replay": 1.0})
        shutil.rmtree(folder)
        folder.write_text("no folder")
    assert made.view.detail.startswith("the server has ended with code 5:")
