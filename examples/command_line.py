"""What the examples that learn have in common: the command line, a server, and a line of progress."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Generator
from typing import Any

import reverb_writer as rw

Learn = Callable[[Any, int, int], Generator[tuple[int, float], None, None]]
"""Gets an address or a target, a number of steps and a seed; yields steps so far and the mean of the last episodes."""


def run(
    learn: Learn, table: rw.TableConfig, task: str, num_steps: int, goal: float, *, measure: str = "length"
) -> None:
    """Learn until the goal or the last step, and print the progress.

    Args:
        learn: the example's function.
        table: of the server that is started if the command line names none.
        task: what is learned, for `--help`.
        num_steps: default of `--steps`.
        goal: default of `--goal`.
        measure: what the mean is of: the length, or the return, of episodes.
    """
    parser = argparse.ArgumentParser(description=f"Learn {task}.")
    parser.add_argument(
        "--server", metavar="ADDRESS", help="of a server with the table; without it, one in this process"
    )
    parser.add_argument("--ray", metavar="NAME", help="of a cluster on Ray, which is started if it is not there")
    parser.add_argument("--shards", type=int, default=1, help="of that cluster")
    parser.add_argument("--python", default=sys.executable, help="interpreter of its servers, on every node")
    parser.add_argument("--steps", type=int, default=num_steps)
    parser.add_argument("--goal", type=float, default=goal, help=f"mean {measure} of episodes at which to stop")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        if arguments.ray:
            from reverb_writer.ray import ReplayCluster

            cluster = ReplayCluster.start(arguments.ray, [table], arguments.shards, python=arguments.python)
            source: Any = stack.enter_context(cluster).target()
        else:
            source = arguments.server or stack.enter_context(rw.LocalServer([table])).address
        for step, mean in learn(source, arguments.steps, arguments.seed):
            print(f"{step:6} steps: {mean:6.0f}", end="\r", flush=True)
            if mean >= arguments.goal:
                break
    print()
