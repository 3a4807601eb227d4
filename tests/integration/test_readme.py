"""The README's programs run as they stand, on a server of the tests."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from server_process import HostedServer

import reverb_writer as rw

README = Path(__file__).parents[2] / "README.md"


def program(after: str) -> str:
    """Return the first Python block below a heading."""
    (block,) = re.findall(rf"^## {after}\n.*?```python\n(.*?)```", README.read_text(), re.DOTALL | re.MULTILINE)[:1]
    return str(block)


class EnoughError(Exception):
    """Ends a learner that would go on for ever."""


def test_actor_writes_and_learner_reads_what_it_wrote(replay_server: Callable[..., HostedServer]) -> None:
    pytest.importorskip("gymnasium")
    server = replay_server(rw.TableConfig("replay", sampler=rw.tables.Prioritized(1.0), max_size=100_000))
    exec(program("Actor side").replace("localhost:8000", server.address), {})  # noqa: S102  # that is the test
    batches = []

    def train(data: Any, weights: Any) -> Any:
        batches.append((data, weights))
        if len(batches) == 3:
            raise EnoughError
        return weights

    with pytest.raises(EnoughError):
        exec(program("Learner side").replace("localhost:8000", server.address), {"rw": rw, "train": train})  # noqa: S102
    for data, weights in batches:
        assert data["observation"].shape == (256, 20, 4)
        assert weights.shape == (256,)
