"""On-policy PPO in PyTorch: many actor processes play CartPole, one learner uses each step once.

    python examples/ppo.py --actors 4

    actor: windows of T steps and the observation after them ─┐
    actor: ...                                                ├─> table `rollouts`, a queue ─> learner: fill_from,
    actor: ...                                                ┘                               compute_returns, PPO
      ▲                                                                                                  │
      └─────────────────── table `weights`, the newest only <────────────────────────────────────────────┘

Each actor writes its share of a rollout and then waits for newer weights. So every step of a rollout was played by the
weights that the learner published last. Another server (`--server`) needs the tables `TABLES`.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Generator, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import reverb_writer as rw
from reverb_writer.rollouts import RolloutStorage

NUM_STEPS = 64  # T, steps in a window
NUM_WINDOWS = 16  # B, windows in a rollout
BATCH_SIZE = 4  # windows that are fetched together
GAMMA, LAM, CLIP = 0.99, 0.95, 0.2
NUM_EPOCHS, NUM_MINI_BATCHES = 6, 4
LEARNING_RATE, ENTROPY, MAX_GRADIENT = 1e-3, 0.01, 0.5
GOAL = 400.0  # mean length of the episodes of a rollout
TIMEOUT_S = 120.0

TABLES = [rw.TableConfig.queue("rollouts", NUM_WINDOWS), rw.TableConfig.variables("weights")]


def actor_critic() -> Any:
    """Return a policy and its critic, two small networks."""
    return nn.ModuleDict(
        {
            name: nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))
            for name, num_outputs in (("policy", 2), ("critic", 1))
        }
    )


def actions_of(network: Any, observations: Any) -> Any:
    """Return the distribution of actions."""
    return torch.distributions.Categorical(logits=network["policy"](observations))


def act(address: str, seed: int, num_windows: int) -> None:
    """Play `num_windows` windows with each version of the weights, until the learner ends the run."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    network, env = actor_critic(), gymnasium.make("CartPole-v1")
    with (
        rw.Variables(address, "weights", TIMEOUT_S) as weights,
        rw.SequenceObserver(address, "rollouts", NUM_STEPS + 1, NUM_STEPS + 1, timeout_s=TIMEOUT_S) as observer,
        torch.no_grad(),
    ):
        observation, _ = env.reset(seed=seed)
        while (newest := weights.wait()) is not None:
            network.load_state_dict({name: torch.as_tensor(array) for name, array in newest.items()})
            for _ in range(num_windows):
                for _ in range(NUM_STEPS):
                    step, observation = play(network, env, observation)
                    observer(step)
                value = network["critic"](torch.as_tensor(observation))[0].numpy()
                observer({**step, "observations": observation, "values": value})  # the learner uses only these two
            observer.flush()


def play(network: Any, env: Any, observation: Any) -> tuple[dict[str, Any], Any]:
    """Return a step, with the policy's log-probability and the critic's value, and the next observation."""
    seen = torch.as_tensor(observation)
    actions = actions_of(network, seen)
    action = actions.sample()
    final, reward, terminated, truncated, _ = env.step(int(action))
    truncated = truncated and not terminated
    step = {
        "observations": observation,
        "actions": action.numpy(),
        "rewards": np.float32(reward),
        "dones": np.bool_(terminated or truncated),
        "values": network["critic"](seen)[0].numpy(),
        "actions_log_prob": actions.log_prob(action).numpy(),
        "truncated": np.bool_(truncated),
        "final_values": network["critic"](torch.as_tensor(final))[0].numpy() if truncated else np.float32(0),
    }
    return step, env.reset()[0] if terminated or truncated else final


def learn(address: str, seed: int, actors: Sequence[Any]) -> Generator[float, None, None]:
    """Start the actors, and yield the mean length of the episodes of each rollout, after learning from it."""
    torch.set_num_threads(1)  # the networks are small, and the actors need the other cores
    torch.manual_seed(seed)
    network = actor_critic()
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    storage = RolloutStorage(NUM_WINDOWS, NUM_STEPS, 4, None, np.zeros((), np.int64), device="cpu", seed=seed)
    with (
        rw.Variables(address, "weights", TIMEOUT_S) as weights,
        rw.ReplayDataset(address, "rollouts", BATCH_SIZE, timeout_s=TIMEOUT_S) as dataset,
        contextlib.ExitStack() as end,
    ):
        end.callback(weights.finish)
        weights.publish(network)
        for actor in actors:  # started now, because the table may hold the end of an earlier run
            actor.start()
        while True:
            following = storage.fill_from(dataset)
            assert following is not None, "windows have the step after the last one"
            storage.compute_returns(following.values, GAMMA, LAM)
            for batch in storage.mini_batch_generator(NUM_MINI_BATCHES, NUM_EPOCHS):
                optimizer.zero_grad()
                loss(network, batch).backward()
                nn.utils.clip_grad_norm_(network.parameters(), MAX_GRADIENT)
                optimizer.step()
            num_ends = int(storage.dones.sum())
            yield NUM_STEPS * NUM_WINDOWS / max(num_ends, 1)
            storage.clear()
            weights.publish(network)


def loss(network: Any, batch: Any) -> Any:
    """Return the loss of PPO with a clipped ratio (Schulman et al., 2017)."""
    actions, values = actions_of(network, batch.obs), network["critic"](batch.obs)
    ratio = (actions.log_prob(batch.actions) - batch.old_actions_log_prob[:, 0]).exp()
    advantages = batch.advantages[:, 0]
    gain = torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return ((values - batch.returns) ** 2).mean() / 2 - gain.mean() - ENTROPY * actions.entropy().mean()


def run(address: str, num_actors: int, seed: int, seconds: float, goal: float) -> bool:
    """Learn with `num_actors` actors, and return whether the goal was reached in time."""
    processes, share = multiprocessing.get_context("spawn"), NUM_WINDOWS // num_actors
    actors = [processes.Process(target=act, args=(address, seed + i, share), daemon=True) for i in range(num_actors)]
    deadline, mean = time.monotonic() + seconds, 0.0
    with contextlib.closing(learn(address, seed, actors)) as rollouts:
        for number, length in enumerate(rollouts, 1):
            mean += 0.2 * (length - mean)
            if number % 10 == 0:
                steps = number * NUM_WINDOWS * NUM_STEPS
                print(f"{steps:8,} steps: episodes of {mean:5.0f} steps", flush=True)
            if mean >= goal or time.monotonic() > deadline:
                break
    for actor in actors:
        actor.join()  # the learner has ended the run
    return mean >= goal


def main() -> int:
    parser = argparse.ArgumentParser(description="Learn CartPole-v1 by PPO, with many actor processes.")
    parser.add_argument(
        "--server", metavar="ADDRESS", help="address of a server with the tables; by default a server in this process"
    )
    parser.add_argument("--actors", type=int, default=2, choices=[1, 2, 4, 8, 16])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=300.0, help="time to learn")
    parser.add_argument(
        "--goal", type=float, default=GOAL, help=f"mean length of episodes to reach (default: {GOAL:g})"
    )
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        address = arguments.server or stack.enter_context(rw.LocalServer(TABLES)).address
        learnt = run(address, arguments.actors, arguments.seed, arguments.seconds, arguments.goal)
    print("learnt" if learnt else "not learnt in time")
    return 0 if learnt else 1


if __name__ == "__main__":
    sys.exit(main())
