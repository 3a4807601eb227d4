"""Plays CartPole, writes the steps to a replay server, and fetches the learner's newest weights from it.

    python examples/actor.py --server localhost:8000

Start any number of actors, on any machine. They end when the learner ends.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import signal
import time

import gymnasium
import numpy as np
from dqn_split import QNetwork

import reverb_writer as rw

EXPLORING_STEPS = 1_500  # steps over which the share of random actions falls
EXPLORATION = 0.02  # the final share of random actions
LINE_S = 10.0  # time between lines of progress
NUM_LAST = 20  # number of episodes in the mean return


def play(client: rw.Client, seed: int | None) -> None:
    """Play until the learner ends the run, or the process is ended."""
    rng = np.random.default_rng(seed)
    network = QNetwork(rng)
    num_steps = num_episodes = 0
    returns: collections.deque[float] = collections.deque(maxlen=NUM_LAST)
    next_line_at = time.monotonic()

    # Windows share one step, so that each transition, also the terminal one, is in a window. `align_end` moves the last
    # window back, so that no end of an episode is lost. With few windows in flight, the actor's weights stay fresh.
    with (
        contextlib.suppress(rw.errors.FinishedError),  # the run has ended while a step waited for the rate limiter
        rw.Variables(client, "variables") as variables,
        rw.TrajectoryObserver(
            client,
            "cartpole",
            sequence_length=9,
            stride_length=8,
            end_of_episode="align_end",
            max_in_flight_items=8,
            until=lambda: variables.finished,
        ) as replay,
        rw.EpisodeReturns(client, "returns") as episode_returns,
    ):
        env = rw.environments.record(gymnasium.make("CartPole-v1"), replay)
        network.weights = variables.latest()
        while not variables.finished:
            observation, _ = env.reset(seed=seed if num_steps == 0 else None)
            is_over, episode_return = False, 0.0
            while not is_over:
                network.weights = variables.poll(network.weights)
                if rng.random() < max(EXPLORATION, 1 - num_steps / EXPLORING_STEPS):
                    action = int(rng.integers(2))
                else:
                    action = int(network(observation).argmax())
                observation, reward, terminated, truncated, _ = env.step(action)
                is_over = terminated or truncated
                episode_returns.add(reward, is_over)
                episode_return += float(reward)
                num_steps += 1
            num_episodes += 1
            returns.append(episode_return)
            if time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + LINE_S
                mean = sum(returns) / len(returns)
                print(f"{num_episodes:,} episodes, {num_steps:,} steps; recent mean return {mean:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Play CartPole for a learner until the learner ends.")
    parser.add_argument("--server", default="localhost:8000", metavar="ADDRESS", help="of the replay server")
    parser.add_argument("--seed", type=int, help="without it, each run is different")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C; the first process of a container needs it
    with contextlib.suppress(KeyboardInterrupt), rw.Client(arguments.server) as client:
        play(client, arguments.seed)


if __name__ == "__main__":
    main()
