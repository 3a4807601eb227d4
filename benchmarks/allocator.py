"""The server as a user runs it, with a full table: glibc's allocator and jemalloc."""

from __future__ import annotations

import contextlib
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping

import psutil

from benchmarks.actors import Actor, Run, ours
from benchmarks.comparison import Effort, progress
from benchmarks.processes import TABLE
from benchmarks.report import Table
from benchmarks.workloads import Workload, small_steps

_TABLE_SIZE = 100_000


def allocator(effort: Effort) -> Table:
    """Six small leaves into a full table, which deletes an item for each new one."""
    from reverb_writer_server.reverb.supervisor import with_jemalloc  # other rows need no server

    workload = Workload(small_steps())
    environments = {"glibc": {**os.environ, "LD_PRELOAD": ""}, "jemalloc": with_jemalloc(os.environ)}
    if environments["jemalloc"].get("LD_PRELOAD") == os.environ.get("LD_PRELOAD"):
        raise RuntimeError("there is no jemalloc to compare with: install Debian's libjemalloc2.")
    runs: dict[str, list[Run]] = {name: [] for name in environments}
    memory_mb: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        servers = {name: stack.enter_context(_serve(environment)) for name, environment in environments.items()}
        actors = {
            name: stack.enter_context(contextlib.closing(ours(address, workload)))
            for name, (address, _) in servers.items()
        }
        for actor in actors.values():
            actor.write(600.0, 2 * _TABLE_SIZE)
        for i in range(effort.rounds):
            for name, actor in actors.items():
                runs[name].append(_write(actor, servers[name][1], effort.seconds))
                memory_mb[name] = servers[name][1].memory_info().rss >> 20
                progress(f"round {i + 1} of {effort.rounds}: {name}: {runs[name][-1].items_per_s:,.0f} items/s")
    rows = []
    for name, of_one in runs.items():
        cpu_us = statistics.median(1e6 * run.server_cpu_s / run.items for run in of_one)
        rate = statistics.median(run.items_per_s for run in of_one)
        rows.append([name, f"{rate:,.0f}", f"{cpu_us:.2f}", f"{memory_mb[name]:,}"])
    columns = ["allocator", "items/s", "server CPU, us/item", "resident at the end, MB"]
    return Table(f"Six small leaves, L=20, S=1, into a full table of {_TABLE_SIZE:,}", columns, rows)


@contextlib.contextmanager
def _serve(environment: Mapping[str, str]) -> Iterator[tuple[str, psutil.Process]]:
    """Run the server's command; yield its address and the Reverb process."""
    command = [sys.executable, "-m", "reverb_writer_server", "--port", "0", "--table", TABLE]
    command += ["--max-size", str(_TABLE_SIZE)]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    with subprocess.Popen(command, stdout=pipe, stderr=nothing, env=environment, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().partition("ready at ")[2].partition(",")[0]
            (reverb,) = psutil.Process(process.pid).children()
            yield address, reverb
        finally:
            process.terminate()


def _write(actor: Actor, reverb: psutil.Process, seconds: float) -> Run:
    before = reverb.cpu_times()
    run = actor.write(seconds)
    after = reverb.cpu_times()
    return Run(
        run.steps,
        run.items,
        run.start_s,
        run.end_s,
        run.cpu_s,
        after.user - before.user + after.system - before.system,
    )
