"""A TensorDict is refused by a message that says how to make a nest of it, at each entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.errors import StructureError
from reverb_writer.rows import kinds_of
from reverb_writer.steps import StepStructure


class LikeATensorDict(Mapping[str, Any]):
    """A mapping that yields rows instead of keys, as tensordict's `TensorDict`; it raises the same errors."""

    def __init__(self, parts: dict[str, Any]) -> None:
        self._parts = parts

    def __getitem__(self, key: str) -> Any:
        return self._parts[key]

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError("generator raised StopIteration")

    def keys(self) -> Any:
        return self._parts.keys()

    def items(self) -> Any:
        return self._parts.items()

    def __len__(self) -> int:
        return len(self._parts)

    def __bool__(self) -> bool:
        raise RuntimeError("Converting a tensordict to boolean value is not permitted")


ROWS = LikeATensorDict({name: np.zeros(4) for name in ("observation", "action", "reward", "is_last", "discount")})
ROW = LikeATensorDict({"x": np.zeros(2)})
MADE = rw.TrajectoryAccumulator({"step": {"x": np.zeros((4, 2))}})


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(StepStructure, id="the first step of observers and writers"),
        pytest.param(lambda row: StepStructure({"x": 0}).flatten(row, 1), id="a later step"),
        pytest.param(lambda row: rw.Episode().add_env_reset(observation=row), id="episodes"),
        pytest.param(lambda row: rw.TrajectoryAccumulator({"step": row}), id="the example of an accumulator"),
        pytest.param(lambda row: MADE.add("step", row), id="rows of an accumulator"),
    ],
)
def test_a_row(entry: Callable[[Any], Any], nested: bool) -> None:
    with pytest.raises(StructureError, match=r"such as a TensorDict. Pass `.to_dict\(\)` of it"):
        entry({"part": ROW} if nested else ROW)


@pytest.mark.parametrize(
    "entry",
    [kinds_of, rw.to_transitions, rw.Episode.from_steps],
    ids=["kinds", "transitions", "episodes"],
)
def test_many_rows(entry: Callable[[Any], Any]) -> None:
    with pytest.raises(StructureError, match=r"such as a TensorDict. Pass `.to_dict\(\)` of it"):
        entry(ROWS)


def test_rows_of_a_file(tmp_path: Path) -> None:
    with rw.files.RolloutWriter(tmp_path) as writer:
        for entry in (writer, writer.save):
            with pytest.raises(StructureError, match=r"such as a TensorDict. Pass `.to_dict\(\)` of it"):
                entry(ROWS)


def test_rows_of_a_storage_and_of_a_table() -> None:
    storage = rw.rollouts.RolloutStorage(4, 2, {"x": ()}, None, ())
    with pytest.raises(StructureError, match=r"such as a TensorDict. Pass `.to_dict\(\)` of it"):
        storage.add_transitions(storage.Transition(observations=ROWS))
    with (
        rw.LocalServer([rw.TableConfig("t")]) as server,
        rw.TrajectoryObserver(server, "t", 2) as observer,
        rw.Client(server) as client,
    ):
        for entry in (observer, observer.extend, lambda rows: client.insert(rows, {"t": 1.0})):
            with pytest.raises(StructureError, match=r"such as a TensorDict. Pass `.to_dict\(\)` of it"):
                entry(ROWS)
