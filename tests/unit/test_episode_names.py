"""The names that later releases of RLlib have, beside those of 2.35."""

from __future__ import annotations

import numpy as np

from reverb_writer.episodes import Episode


def grown(num_steps: int) -> Episode:
    """Return an ongoing episode of so many steps."""
    episode = Episode("x")
    episode.add_env_reset(0)
    for t in range(num_steps):
        episode.add_env_step(t + 1, t, 1.0)
    return episode


def test_rllibs_newer_names_are_there_beside_the_older_ones() -> None:
    episode = Episode()
    assert (episode.is_reset, episode.is_numpy, episode.is_finalized) == (False, False, False)
    episode.add_env_reset(0)
    assert episode.is_reset
    episode.add_env_step(1, 2, 0.5)
    assert episode.to_numpy() is episode
    assert (episode.is_reset, episode.is_numpy, episode.is_finalized) == (True, True, True)
    assert isinstance(episode.get_observations(), np.ndarray)
    assert episode.cut().is_reset


def test_custom_data_goes_on_with_the_chunks_and_is_not_shared() -> None:
    episode = grown(3)
    episode.custom_data["marks"] = [1]
    chunk, part = episode.cut(), episode[:2]
    chunk.custom_data["marks"].append(2)
    chunk.custom_data["more"] = True
    assert (episode.custom_data, part.custom_data) == ({"marks": [1]}, {"marks": [1]})
    episode.to_numpy()
    assert episode.custom_data == {"marks": [1]}
    whole = part[:]
    whole.concat_episode(episode[2:])
    assert whole.custom_data == {"marks": [1]}
    episode = grown(3)
    episode.custom_data = {"marks": [1], "own": 0}
    episode.concat_episode(chunk)
    assert episode.custom_data == {"marks": [1, 2], "own": 0, "more": True}
