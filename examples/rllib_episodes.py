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

TABLES = [rw.TableConfig("replay", 100_000)]


class ReplayEnvRunner(SingleAgentEnvRunner):  # type: ignore[misc]  # RLlib is not installed where mypy runs
    """An env runner of RLlib that writes its episodes."""

    def write_episodes(self, source: Any, num_episodes: int) -> tuple[int, float]:
        """Play whole episodes and write them; return their number of steps and their mean return."""
        episodes = self.sample(num_episodes=num_episodes)
        with rw.TrajectoryObserver(source, "replay", sequence_length=8, end_of_episode="align_end") as observer:
            for episode in episodes:
                observer.write_episode(ours(episode))
        return sum(map(len, episodes)), sum(one.get_return() for one in episodes) / len(episodes)


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


def collect(source: Any, num_runners: int, num_episodes: int) -> list[tuple[int, float]]:
    """Let `num_runners` runners play `num_episodes` episodes each; return the steps and the mean return of each."""
    config = PPOConfig().environment("CartPole-v1")
    runners = [ray.remote(num_cpus=0)(ReplayEnvRunner).remote(config=config) for _ in range(num_runners)]
    try:
        found: list[tuple[int, float]] = ray.get([one.write_episodes.remote(source, num_episodes) for one in runners])
        return found
    finally:
        for one in runners:
            ray.kill(one)


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect CartPole with RLlib into shards on Ray.")
    parser.add_argument("--name", default="rllib", help="name of the cluster of shards")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--python", default=sys.executable, help="interpreter of the servers, on every node")
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=10, help="of each runner")
    given = parser.parse_args()
    with rwr.ReplayCluster.start(given.name, TABLES, given.shards, python=given.python) as cluster:
        collected = collect(cluster.target(), given.runners, given.episodes)
        print(f"{sum(steps for steps, _ in collected)} steps", flush=True)
        with rw.ReplayDataset(cluster.target(), "replay", 32) as dataset:
            transitions = rw.to_transitions(next(dataset))
            print("windows of", transitions.observation.shape, "observations", flush=True)


if __name__ == "__main__":
    main()
