"""Sends the counters of an actor, a learner and the tables to TensorBoard, every thousand steps.

    python examples/watch_in_tensorboard.py runs/first      # then: tensorboard --logdir runs

`as_scalars` returns a flat dict of numbers, so other loggers need one line: `wandb.log(scalars, step)`,
`trackio.log(scalars)`, `mlflow.log_metrics(scalars, step)`.
"""

from __future__ import annotations

import argparse

import gymnasium
from tensorboard.summary import Writer

import reverb_writer as rw

NUM_STEPS = 5_000
LOG_STEPS = 1_000


def main() -> None:
    parser = argparse.ArgumentParser(description="Send counters of actor, learner and tables to TensorBoard.")
    parser.add_argument("folder", help="folder of the run, for `tensorboard --logdir`")
    writer = Writer(parser.parse_args().folder)
    with (
        rw.LocalServer([rw.TableConfig("replay", max_size=10_000), rw.TableConfig.returns("returns")]) as server,
        rw.Client(server.address) as client,
        rw.TrajectoryObserver(client, "replay", sequence_length=10, stride_length=5) as observer,
        rw.EpisodeReturns(client, "returns") as returns,
        rw.ReplayDataset(client, "replay", batch_size=32) as dataset,
    ):
        env = rw.environments.record(gymnasium.make("CartPole-v1"), observer)
        env.reset(seed=1)
        for step in range(1, NUM_STEPS + 1):
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            returns.add(reward, terminated or truncated)
            if terminated or truncated:
                env.reset()
            if step % LOG_STEPS == 0:
                next(dataset)
                scalars = {
                    **observer.stats().as_scalars("actor/"),
                    **dataset.stats().as_scalars("learner/"),
                    **client.server_info()["replay"].as_scalars("table/"),
                    **returns.as_scalars("episodes/"),  # from all actors, also of other processes
                }
                for name, value in scalars.items():
                    writer.add_scalar(name, value, step)
    writer.close()


if __name__ == "__main__":
    main()
