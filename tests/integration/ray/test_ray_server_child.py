"""The server of a shard on Ray as its actor starts it: here without Ray, on real servers and ports."""

from __future__ import annotations

import contextlib
import queue
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from server_process import HAS_REVERB, SERVER_PYTHON
from waiting import eventually

import reverb_writer as rw
from reverb_writer.ray.shard_actor import ChildEnd, ServerChild

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_REVERB, reason="the server needs an interpreter with dm-reverb"),
]


@contextlib.contextmanager
def child(folder: Path, python: str = SERVER_PYTHON, port: int = 0) -> Iterator[ServerChild]:
    ends: queue.Queue[ChildEnd] = queue.Queue()
    configuration = f'[checkpoints]\ndirectory = "{folder}"\nevery_s = 0\n[tables.replay]\nmax_size = 10\n'
    made = ServerChild(python, configuration, ["--port", str(port)], lambda _, end: ends.put(end))
    try:
        yield made
    finally:
        made.stop()
        assert ends.get(timeout=60) is made.end


def script(folder: Path, text: str) -> str:
    """Return the path of a program that is run in place of an interpreter."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return str(file)


def test_variables_for_this_interpreter_are_not_for_that_of_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHOME", "/no/python")
    monkeypatch.setenv("MORE", "1")
    with child(tmp_path, script(tmp_path, 'echo "home is $PYTHONHOME, $MORE"; exit 3')) as one:
        end = eventually(lambda: one.end, "it has ended")
    assert end.detail == "the server has ended with code 3:\nhome is , 1"


def test_server_that_must_have_a_port_says_that_it_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", free_port())) as other:
        taken = other.getsockname()[1]
        with child(tmp_path / "checkpoints", port=taken) as made:
            end = eventually(lambda: made.end, "the start has failed")
            assert (end.state, made.port) == ("failed", 0)
            assert f"port {taken} is in use" in end.detail


def test_last_checkpoint_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with child(folder) as made:
        eventually(lambda: made.port, "the server serves")
        with rw.Client(f"localhost:{made.port}") as client:
            client.insert({"number": np.array([1])}, {"replay": 1.0})
        shutil.rmtree(folder)
        folder.write_text("no folder")
    assert made.end is not None
    assert made.end.detail.startswith("the server has ended with code 5:")


def test_server_is_left_alone_whatever_it_writes(tmp_path: Path) -> None:
    """The server ends itself if it is to end: nothing that it writes ends it from outside."""
    lines = r"printf 'reverb_writer_server: ready at nowhere \377\n\0 the last line\n'"
    with child(tmp_path / "checkpoints", script(tmp_path, f"{lines}; exec sleep 600")) as made:
        eventually(lambda: made.last_line == "\0 the last line", "its lines are read")
        assert made.port == 0
        assert made.pid is not None
