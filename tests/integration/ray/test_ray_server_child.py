"""The server of a shard on Ray as its actor starts it: here without Ray, on real servers and ports."""

from __future__ import annotations

import contextlib
import queue
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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

# A server that is alive as far as its process tells, and whose pages are all wrong.
WRONG = """#!{python}
import http.server, sys
class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if self.path == "/livez" else 200)
        self.end_headers()
        self.wfile.write(b'{{"tables": 1}}')
port = int(sys.argv[sys.argv.index("--http-port") + 1])
print("reverb_writer_server: ready at nowhere \\udcff".encode(errors="surrogateescape").decode("latin1"), flush=True)
http.server.HTTPServer(("127.0.0.1", port), Page).serve_forever()
"""


@contextlib.contextmanager
def child(folder: Path, python: str = SERVER_PYTHON, **options: Any) -> Iterator[ServerChild]:
    ends: queue.Queue[ChildEnd] = queue.Queue()
    configuration = f'[checkpoints]\ndirectory = "{folder}"\nevery_s = 0\n[tables.replay]\nmax_size = 10\n'
    made = ServerChild(python, configuration, ends.put, **options)
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


def serving(made: ServerChild) -> None:
    eventually(lambda: made.status().get("phase") == "serving", "the server serves")


def test_server_whose_port_another_process_takes_gets_another_one(tmp_path: Path) -> None:
    python = script(tmp_path, f'echo "$$" >> {tmp_path}/ran; echo "port 1 is in use"; exit $(wc -l < {tmp_path}/ran)')
    with child(tmp_path, python) as made:
        end = eventually(lambda: made.end, "all of its tries have failed")
    assert end.detail == "the server has ended with code 6:\nport 1 is in use"


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
            assert (end.state, made.has_served) == ("failed", False)
            assert f"port {taken} is in use" in end.detail
            assert made.port == taken


def test_last_checkpoint_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with child(folder) as made:
        serving(made)
        with rw.Client(f"localhost:{made.port}") as client:
            client.insert({"number": np.array([1])}, {"replay": 1.0})
        shutil.rmtree(folder)
        folder.write_text("no folder")
    assert made.end is not None
    assert made.end.detail.startswith("the server has ended with code 5:")


def test_server_whose_pages_are_wrong_is_left_alone(tmp_path: Path) -> None:
    """The server ends itself if it is to end: nothing that it tells, or does not, ends it from outside."""
    python = tmp_path / "python"
    python.write_text(WRONG.format(python=sys.executable))
    python.chmod(0o755)
    with child(tmp_path / "checkpoints", str(python)) as made:
        eventually(made.status, "its page answers")
        pid = made.pid
        for _ in range(20):
            assert eventually(made.status, "its page answers, which may take longer than one question waits") == {
                "tables": 1
            }
        assert made.pid == pid is not None
