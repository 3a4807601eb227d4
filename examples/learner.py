"""Trains a Q-network on windows of steps from a replay server, and sends its weights to the actors.

    python examples/learner.py --server localhost:8000

Start one learner. Actors and learner wait for each other, and the actors end when the learner ends.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import signal
import time

import numpy as np
from dqn_split import Adam, QNetwork

import reverb_writer as rw

BATCH_SIZE = 16  # windows
PUBLISH_UPDATES = 25  # updates between two versions of the weights
DISCOUNT = 0.99
TRACE_DECAY = 0.95  # lambda: 0 for one-step targets, 1 for returns up to the end of the window
TARGET_RATE = 0.01  # step of the target network towards the online network
LEARNING_RATE = 1e-3
LINE_S = 10.0  # time between lines of progress


def learn(client: rw.Client, seed: int | None) -> None:
    """Learn until the process is ended; then end the run."""
    online = QNetwork(np.random.default_rng(seed))
    target = copy.deepcopy(online)
    optimizer = Adam(online.weights, LEARNING_RATE)
    with (
        rw.Variables(client, "variables") as variables,
        rw.ReplayDataset(client, "cartpole", BATCH_SIZE, timeout_s=float("inf")) as batches,  # waits for a lost server
        contextlib.ExitStack() as end,
    ):
        variables.publish(online.weights)
        end.callback(variables.finish)
        next_line_at = time.monotonic()
        for update, batch in enumerate(batches, start=1):
            observations, transitions = batch.data["observation"], rw.to_transitions(batch)
            best = online(observations).argmax(axis=-1, keepdims=True)  # double Q: `online` chooses, `target` evaluates
            values = np.take_along_axis(target(observations), best, axis=-1)[..., 0]
            returns = rw.returns.lambda_returns(transitions, values, gamma=DISCOUNT, lambda_=TRACE_DECAY)
            real = transitions.mask
            gradients = online.gradient(transitions.observation[real], transitions.action[real], returns[real])
            optimizer.descend(online.weights, gradients)
            for slow, fast in zip(target.weights, online.weights, strict=True):
                slow[:] += TARGET_RATE * (fast - slow)
            if update % PUBLISH_UPDATES == 0:
                with contextlib.suppress(rw.errors.ReplayTimeoutError, rw.errors.ServerUnavailableError):
                    variables.publish(online.weights)  # if it fails, the next one has newer weights
            if time.monotonic() >= next_line_at:
                next_line_at = time.monotonic() + LINE_S
                print(f"{update:,} updates; mean value of a state {values.mean():.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train a Q-network for the actors of a replay server, until Ctrl-C or SIGTERM."
    )
    parser.add_argument("--server", default="localhost:8000", metavar="ADDRESS", help="address of the replay server")
    parser.add_argument("--seed", type=int, help="without it, each run is different")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C; the first process of a container needs it
    with contextlib.suppress(KeyboardInterrupt), rw.Client(arguments.server) as client:
        learn(client, arguments.seed)


if __name__ == "__main__":
    main()
