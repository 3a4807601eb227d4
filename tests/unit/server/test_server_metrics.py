"""The metrics of a server that has not begun to serve."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server.observability.metrics import exposition
from reverb_writer_server.observability.state import Job, ServiceState

PAGE = Path(__file__).parents[3] / "docs/reference/metrics.md"


@pytest.mark.parametrize("job", get_args(Job))
def test_failures_of_every_job_are_counted_from_zero_and_described(job: Job) -> None:
    state = ServiceState()
    assert f'reverb_job_failures_total{{job="{job}"}} 0.0' in exposition(state).decode()
    state.failures[job] += 1
    assert f'reverb_job_failures_total{{job="{job}"}} 1.0' in exposition(state).decode()
    (row,) = (line for line in PAGE.read_text().splitlines() if line.startswith("| `reverb_job_failures_total`"))
    assert f"`{job}`" in row
