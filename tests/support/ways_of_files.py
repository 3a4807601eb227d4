"""Ways of episodes through files: written by the programs of `ways_of_servers.STEPS`, imported, exported and read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tree
from played import Pair, Played
from ways_of_servers import STEPS

import reverb_writer as rw
from reverb_writer.files import RolloutDataset, RolloutWriter, export_items, import_trajectories, list_trajectories

WRITTEN = [name for name in STEPS if name != "extend"]
"""Programs that also write files: a writer of files has no `extend`."""


def without_discounts(pairs: Iterable[Pair]) -> Iterator[Pair]:
    """Yield pairs with the discount 0 or 1, because files deliver ends and no discounts."""
    return (pair._replace(discount=float(pair.discount != 0)) for pair in pairs)


def write_files(folder: Path, steps: str, episodes: Sequence[Played]) -> None:
    """Write episodes into a folder."""
    way = STEPS[steps]
    with RolloutWriter(folder, **way.options) as writer:
        way.write(writer, episodes)


def import_files(folder: Path, observer: Any) -> None:
    """Send all trajectories of a folder to an observer."""
    with observer:
        failed = [done.error for done in import_trajectories(list_trajectories(folder), observer) if done.error]
    assert not failed


def export_table(client: rw.Client, folder: Path) -> None:
    """Write all items of the table `a` into a folder."""
    with RolloutWriter(folder) as writer:
        failed = [done.error for done in export_items(client, "a", writer) if done.error]
    assert not failed


def read_files(folder: Path) -> Iterator[Pair]:
    """Yield the transitions of a folder."""
    for batch in RolloutDataset(folder, num_envs=1, wait_timeout_s=0.0):
        columns = (batch.observation, batch.action, batch.reward, batch.done & ~batch.truncated, batch.next_observation)
        observation, action, reward, terminated, following = (np.asarray(column)[0].item() for column in columns)
        yield Pair(observation, action, reward, 1.0 - terminated, following)


def pairs_of_episodes(samples: Iterable[rw.Sample]) -> Iterator[Pair]:
    """Yield the transitions of items, each of which is an episode or a part of one."""
    for sample in samples:
        if len(tree.flatten(sample.data)[0]) > 1:
            one = rw.Episode.from_steps(sample.data, kinds=sample.kinds)
            seen, actions, rewards = one.get_observations(), one.get_actions(), one.get_rewards()
            for t in range(len(actions)):
                is_terminal = one.is_terminated and t == len(actions) - 1
                yield Pair(int(seen[t]), int(actions[t]), float(rewards[t]), float(not is_terminal), int(seen[t + 1]))
