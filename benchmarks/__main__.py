"""`python -m benchmarks [NAME ...]`: measure, and print Markdown."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.accumulate import accumulator_add
from benchmarks.allocator import allocator
from benchmarks.call_times import call_times
from benchmarks.chunk_length import chunk_length_frames, chunk_length_small
from benchmarks.comparison import Effort
from benchmarks.endurance import endurance, learner_endurance
from benchmarks.episodes import episode_getters, episode_steps
from benchmarks.failover import failover
from benchmarks.footprint import footprint
from benchmarks.gateway import gateway
from benchmarks.in_flight import in_flight
from benchmarks.items import items_fields, items_sequences
from benchmarks.kept_items import kept_frames, kept_small
from benchmarks.local_server import local_server
from benchmarks.one_process import one_process
from benchmarks.read import (
    learner_processes,
    read_ahead,
    read_episodes,
    read_frames,
    read_one_by_one,
    read_sequences,
    read_small,
    read_tf_agents,
)
from benchmarks.record import record_cartpole
from benchmarks.report import Table, machine
from benchmarks.rollout_files import import_rollouts, read_rollouts
from benchmarks.rollout_storages import rollout_gae, rollout_mini_batches, rollout_recurrent_mini_batches
from benchmarks.scaling import actor_processes
from benchmarks.shards import shards
from benchmarks.slices import slices
from benchmarks.vector import write_vector
from benchmarks.video import video
from benchmarks.write import write_frames, write_small, write_small_strided

BENCHMARKS: dict[str, Callable[[Effort], Table]] = {
    benchmark.__name__: benchmark
    for benchmark in (
        write_small,
        write_small_strided,
        write_frames,
        write_vector,
        actor_processes,
        read_small,
        read_tf_agents,
        read_frames,
        read_episodes,
        read_one_by_one,
        read_sequences,
        read_ahead,
        slices,
        video,
        items_sequences,
        items_fields,
        learner_processes,
        shards,
        failover,
        local_server,
        one_process,
        call_times,
        footprint,
        endurance,
        learner_endurance,
        chunk_length_small,
        chunk_length_frames,
        in_flight,
        kept_small,
        kept_frames,
        allocator,
        gateway,
        episode_steps,
        episode_getters,
        accumulator_add,
        record_cartpole,
        read_rollouts,
        import_rollouts,
        rollout_gae,
        rollout_mini_batches,
        rollout_recurrent_mini_batches,
    )
}
QUICK = Effort(rounds=1, seconds=0.2, num_steps=20_000, minutes=0.05)


def main() -> None:
    """Run what the command line asks for."""
    arguments = _parser().parse_args()
    effort = QUICK if arguments.quick else Effort(arguments.rounds, arguments.seconds)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # Actors and server share two cores: what the ratios were asked for on.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    parts = [machine()]
    for name in arguments.names or BENCHMARKS:
        print(name, file=sys.stderr, flush=True)
        parts.append(BENCHMARKS[name](effort).markdown())
        print(f"\n{parts[-1]}\n", flush=True)
    print(parts[0])
    if arguments.output:
        arguments.output.write_text("\n\n".join(parts) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Ours and the peers in turn, on a real server; medians, as Markdown.",
        epilog="\n".join(f"  {name:32}{(function.__doc__ or '').strip()}" for name, function in BENCHMARKS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="which benchmarks (default: all)")
    parser.add_argument("--quick", action="store_true", help="only see that they run; the figures mean nothing")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contender (default: 5)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn (default: 3)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the Markdown to this file")
    return parser


if __name__ == "__main__":
    main()
