"""What loggers of metrics, logs and notebooks get of the public objects."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from episodes import feed
from reading import Serve

import reverb_writer as rw
from reverb_writer import instinct_rl


@pytest.fixture
def address(serve: Serve) -> str:
    return serve(*(rw.TableConfig(name, 100) for name in ("replay", "episodes")), rw.TableConfig("weights", 1)).address


def test_counters_are_one_flat_dict_of_numbers(address: str) -> None:
    with rw.TrajectoryObserver(address, "replay", 3) as observer:
        feed(observer, [5])
        feed(observer, [2])  # too short for a window
        observer.flush()
        scalars = observer.stats().as_scalars("actor/")
        assert {type(value) for value in scalars.values()} == {float}
        assert (scalars["actor/steps"], scalars["actor/items"], scalars["actor/acknowledged_items"]) == (7.0, 3.0, 3.0)
        dropped = {name: value for name, value in scalars.items() if name.startswith("actor/dropped_steps/")}
        assert sum(dropped.values()) == 2.0
    with rw.ReplayDataset(address, "replay", 2) as dataset:
        next(dataset)
        scalars = dataset.stats().as_scalars()
        assert (scalars["batches"], scalars["samples"]) == (1.0, 2.0)
    with rw.Client(address) as client:
        scalars = client.server_info()["replay"].as_scalars("replay/")
        assert scalars["replay/rate_limiter/num_inserts"] == scalars["replay/current_size"] == 3.0
        assert scalars["replay/max_size"] == 100.0


def test_every_object_says_its_state_in_a_line(address: str, tmp_path: Path) -> None:
    observers = {
        rw.TrajectoryObserver: rw.TrajectoryObserver(address, "replay", 3),
        rw.SequenceObserver: rw.SequenceObserver(address, "replay", 3),
        rw.EpisodeObserver: rw.EpisodeObserver(address, "episodes", 9),
    }
    for kind, observer in observers.items():
        with observer:
            feed(observer, [5])
            found = repr(observer)
            table = "episodes" if kind is rw.EpisodeObserver else "replay"
            assert found.startswith(f"<{kind.__name__} of {table} at {address}: 5 steps, "), found
    with rw.Client(address) as client, rw.Variables(client, "weights") as variables:
        assert repr(variables) == f"<Variables of weights at {address}>"
        assert repr(client) == f"<Client of {address}>"
    assert repr(client) == f"<Client of {address} (closed)>"
    with rw.ReplayDataset(address, "replay", 2) as dataset:
        next(dataset)
        assert re.fullmatch(f"<ReplayDataset of replay at {address}: 1 batches, [0-9]+ samples ready>", repr(dataset))
    with rw.files.RolloutWriter(tmp_path) as writer:
        feed(writer, [4])
        assert repr(writer) == f"<RolloutWriter to {tmp_path}: 1 trajectories, 4 steps>"
    (path,) = rw.files.list_trajectories(tmp_path)
    assert repr(rw.files.StoredTrajectory(path)) == f"<StoredTrajectory in {path}: 4 steps>"
    storage = rw.rollouts.RolloutStorage(2, 3, (4,), None, (1,))
    assert repr(storage) == "<RolloutStorage of 3 steps of 2 environments: 0 steps>"
    pairs = instinct_rl.ReplayBuffer((4,), 10)
    assert repr(pairs) == "<ReplayBuffer of 0 pairs of states, at most 10>"
    accumulator = rw.TrajectoryAccumulator({"step": {"n": np.zeros(3)}, "episode": {"m": np.zeros(())}})
    accumulator.add("step", {"n": 1.0})
    assert repr(accumulator) == "<TrajectoryAccumulator: step 1 of 3, episode 0 of 1>"
    assert repr(rw.EpisodeBatch(2)) == "<EpisodeBatch of 2 environments: 0 steps>"
    with rw.TrajectoryObserver(address, "replay", 2) as observer:
        recorder = rw.environments.TimeStepRecorder(observer)
        assert repr(recorder) == f"<TimeStepRecorder to {observer!r}>"
    with rw.ReplayDataset(address, "replay", 2) as one:
        assert re.fullmatch("<MixedDataset of <ReplayDataset of .*ready>>", repr(rw.MixedDataset([one])))
    with rw.LocalServer([rw.TableConfig("replay", 5)]) as local:
        assert repr(local) == f"<LocalServer at {local.address}: replay: 0 items>"


def test_each_package_has_a_logger_of_its_own(address: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with rw.TrajectoryObserver(address, "replay", 3) as observer:
        feed(observer, [2])
    assert {record.name for record in caplog.records} == {"reverb_writer.writing"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TensorBoard and what it brings
def test_tensorboard_shows_the_counters_of_the_example(tmp_path: Path) -> None:
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    script = Path(__file__).parents[3] / "examples" / "watch_in_tensorboard.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, timeout=100)
    events = accumulators.EventAccumulator(str(tmp_path), size_guidance={"tensors": 0})
    events.Reload()
    steps = [event.step for event in events.Tensors("learner/batches")]
    batches = [event.tensor_proto.float_val[0] for event in events.Tensors("learner/batches")]
    assert (steps, batches) == ([1_000, 2_000, 3_000, 4_000, 5_000], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert "table/rate_limiter/num_inserts" in events.Tags()["tensors"]
