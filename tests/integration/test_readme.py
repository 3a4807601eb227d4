"""The README's three programs run as they stand, in its order, on one machine; but for the port, which must be free."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from server_process import HAS_REVERB, SERVER_PYTHON

import reverb_writer as rw

README = Path(__file__).parents[2] / "README.md"
ENDS_WITHIN_S = 240
PORT = "8000"
NUM_BATCHES, BATCH_SIZE = 1_000, 256  # of the learner


def programs() -> list[str]:
    """Return the Python blocks of the README, in its order."""
    return re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(not HAS_REVERB, reason="the README's server is dm-reverb's")
def test_server_actor_and_learner_run_as_they_stand_in_order() -> None:
    pytest.importorskip("gymnasium")
    port = free_port()
    assert [program.count(PORT) for program in programs()] == [1, 1, 1]
    server, actor, learner = (program.replace(PORT, str(port)) for program in programs())
    with subprocess.Popen([SERVER_PYTHON, "-c", server], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"serving at localhost:{port}\n"
            for program in (actor, learner):
                done = subprocess.run(
                    [sys.executable, "-c", program], capture_output=True, text=True, timeout=ENDS_WITHIN_S, check=False
                )
                assert done.returncode == 0, done.stderr
            with rw.Client(f"localhost:{port}") as client:
                assert client.server_info()["replay"].rate_limiter.num_samples >= NUM_BATCHES * BATCH_SIZE
                samples = list(client.sample("replay", 20))
            assert {sample.data["observation"].shape for sample in samples} == {(20, 4)}
            assert {sample.info.priority for sample in samples} != {1.0}  # the learner has set them
            assert process.poll() is None, "the server has ended by itself"
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(ENDS_WITHIN_S)
