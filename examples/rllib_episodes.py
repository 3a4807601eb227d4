"""RLlib's env runners play CartPole on Ray and write their episodes to shards; a learner elsewhere samples windows.

    python examples/rllib_episodes.py --python /opt/replay/bin/python

RLlib collects `SingleAgentEpisode`s; `rw.Episode` has the same getters. Needs `ray[rllib]` 2.55 and PyTorch.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import ray
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

import reverb_writer as rw
import reverb_writer.ray as rwr


class ReplayEnvRunner(SingleAgentEnvRunner):  # type: ignore[misc]  # RLlib is not installed where mypy runs
    """An env runner of RLlib that writes its episodes."""

    def write_episodes(self, source: Any, num_episodes: int) -> int:
        """Play whole episodes and write them; return their number of steps."""
        episodes = self.sample(num_episodes=num_episodes)
        with rw.TrajectoryObserver(source, "replay", sequence_length=8, end_of_episode="align_end") as observer:
            for episode in episodes:
                observer.write_episode(ours(episode))
        return sum(map(len, episodes))


def ours(episode: Any) -> rw.Episode:
    """Return RLlib's episode as ours, with the log-probabilities of its actions."""
    return rw.Episode(
        observations=episode.get_observations(),
        actions=episode.get_actions(),
        rewards=episode.get_rewards(),
        extra_model_outputs={"action_logp": episode.get_extra_model_outputs("action_logp")},
        terminated=episode.is_terminated,
        truncated=episode.is_truncated,
        len_lookback_buffer=0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect CartPole with RLlib into a shard on Ray.")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the server, on every node")
    parser.add_argument("--runners", type=int, default=2)
    given = parser.parse_args()
    config = PPOConfig().environment("CartPole-v1")
    with rwr.ReplayCluster.start("rllib", [rw.TableConfig("replay", 100_000)], 1, python=given.python) as cluster:
        source = cluster.target()
        runners = [ray.remote(num_cpus=0)(ReplayEnvRunner).remote(config=config) for _ in range(given.runners)]
        num_steps = ray.get([runner.write_episodes.remote(source, num_episodes=10) for runner in runners])
        print(f"{sum(num_steps)} steps", flush=True)
        with rw.ReplayDataset(source, "replay", 32) as dataset:
            transitions = rw.to_transitions(next(dataset))
            print("windows of", transitions.observation.shape, "observations", flush=True)


if __name__ == "__main__":
    main()
