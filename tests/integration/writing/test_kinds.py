"""Kinds of rows from an observer to a reader, over every kind of server, and through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import contents
from reading import Serve

import reverb_writer as rw
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL

pytestmark = contents


def step(number: int) -> dict[str, Any]:
    return {"observation": np.float32(number), "action": np.int64(number), "reward": np.float32(1)}


def write_three_ends(observer: Any) -> None:
    """Write three episodes of two actions: terminated, truncated, and one whose end is unknown."""
    observer(step(0))
    observer(step(1), terminated=True, truncated=False, final_observation=np.float32(2))
    observer(step(10))
    observer(step(11), terminated=False, truncated=True, final_observation=np.float32(12))
    observer(step(20))
    observer(step(21), end_of_episode=True)


KINDS = {
    0: [FIRST | ACTION, ACTION, LAST | TERMINAL],
    10: [FIRST | ACTION, ACTION, LAST],
    20: [FIRST | ACTION, ACTION | LAST, PADDING],
}


def test_reader_gets_the_kinds_of_each_end_and_counts_ends_that_are_unknown(serve: Serve) -> None:
    client = serve(rw.TableConfig("episodes"), rw.TableConfig("windows"))
    with rw.EpisodeObserver(client, "episodes", 9) as observer:
        write_three_ends(observer)
        observer.flush()
        assert observer.stats().unknown_ends == 1
    with rw.ReplayDataset(client, "episodes", 64, collate="pad", max_in_flight_batches=1) as dataset:
        batch = next(dataset)
        assert dataset.stats().masked_ends == (batch.kinds == ACTION | LAST).sum() > 0
    by_episode = dict(zip(batch.data["observation"][:, 0].tolist(), batch.kinds.tolist(), strict=True))
    assert by_episode == KINDS
    for sample in client.sample("episodes", 3):
        start = int(sample.data["observation"][0])
        assert sample.kinds is not None
        assert sample.kinds.tolist() == [kind for kind in KINDS[start] if kind != PADDING]
    with rw.TrajectoryObserver(client, "windows", 2, end_of_episode="tile") as observer:
        write_three_ends(observer)
    with rw.ReplayDataset(client, "windows", 64) as dataset:
        found = rw.to_transitions(next(dataset))
    ends = {float(o): float(d) for o, d in zip(found.observation[found.mask], found.discount[found.mask], strict=True)}
    assert ends == {0: 1, 1: 0, 10: 1, 11: 1, 20: 1}


def test_kinds_outlive_a_checkpoint(tmp_path: Path) -> None:
    with rw.LocalServer([rw.TableConfig("episodes")]) as server:
        with rw.EpisodeObserver(server, "episodes", 9) as observer:
            write_three_ends(observer)
        server.save(tmp_path)
    with rw.LocalServer.restore(tmp_path) as server, rw.Client(server) as client:
        for sample in client.sample("episodes", 20):
            assert sample.kinds is not None
            assert sample.kinds.tolist() == [k for k in KINDS[int(sample.data["observation"][0])] if k != PADDING]


@pytest.mark.parametrize("with_flags", [False, True])
def test_items_that_rows_of_this_package_did_not_write_have_no_kinds(serve: Serve, with_flags: bool) -> None:
    """The leaves decide where they can; otherwise the question is refused, and the data are read as they are."""
    client = serve(rw.TableConfig("replay"))
    flags = {"is_last": np.array([False, True]), "is_terminal": np.array([False, True])} if with_flags else {}
    client.insert({"observation": np.arange(2.0), **flags}, {"replay": 1.0})
    with rw.ReplayDataset(client, "replay", 2) as dataset:
        batch = next(dataset)
    assert batch.row_kinds is None
    assert batch.data["observation"].tolist() == [[0, 1]] * 2
    if with_flags:
        assert batch.kinds.tolist() == [[ACTION, LAST | TERMINAL]] * 2
    else:
        assert batch.mask.all()
        with pytest.raises(rw.errors.StructureError, match="no leaf shows where episodes end"):
            _ = batch.is_terminal
