"""Compare contenders that write in turn, A B A B ...: each turn to a new server, and the median of each contender.

The server is new because a used one is slower: it still frees the memory of the previous turn (glibc's
`malloc_consolidate` alone can take seconds).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from benchmarks.actors import Run
from benchmarks.processes import Remote, Server


@dataclass(frozen=True)
class Effort:
    """The duration of a benchmark.

    Attributes:
        rounds: turns of each contender.
        seconds: how long a turn takes.
        num_steps: steps of the long run.
        minutes: of the long run of a learner.
    """

    rounds: int = 5
    seconds: float = 3.0
    num_steps: int = 10_000_000
    minutes: float = 30.0


def progress(text: str) -> None:
    """Log to standard error."""
    print(f"  {text}", file=sys.stderr, flush=True)


class Comparison:
    """The processes of the contenders, by name."""

    def __init__(self) -> None:
        """Start without contenders."""
        self._processes = contextlib.ExitStack()
        self._contenders: dict[str, Sequence[Remote]] = {}

    def add(self, name: str, factory: Callable[..., Any], *arguments: Any, processes: int = 1, **options: Any) -> None:
        """Add a contender: `factory(*arguments, **options)` in each of `processes` processes.

        The factory's result has the methods `open(address)`, `write(seconds)` and `close()`, as `Contender` has.
        """
        self._contenders[name] = [
            self._processes.enter_context(Remote(factory, *arguments, **options)) for _ in range(processes)
        ]

    def rounds(self, effort: Effort) -> dict[str, Run]:
        """Let each contender write in turn, and return its median run by steps a second."""
        runs: dict[str, list[Run]] = {name: [] for name in self._contenders}
        for i in range(effort.rounds):
            for name, of in runs.items():
                with self.turn(name, effort) as server:
                    of.append(self.write(name, server, effort.seconds))
                progress(f"round {i + 1} of {effort.rounds}: {name}: {of[-1].steps_per_s:,.0f} steps/s")
        return {name: median(of) for name, of in runs.items()}

    @contextlib.contextmanager
    def turn(self, name: str, effort: Effort, **table: int) -> Iterator[Server]:
        """Connect a contender to a new server, and let it warm up."""
        with Server(**table) as server:
            self.call(name, "open", server.address)
            self.call(name, "write", effort.seconds / 4)
            try:
                yield server
            finally:
                self.call(name, "close")

    def write(self, name: str, server: Server, seconds: float) -> Run:
        """Let a contender write, and check that the server has all its items."""
        num_items, server_cpu_s = server.num_items(), server.cpu_s()
        run = Run.together(self.call(name, "write", seconds), server.cpu_s() - server_cpu_s)
        found = server.num_items() - num_items
        if found != run.items:
            raise RuntimeError(f"{name} wrote {run.items} items, the server has {found}.")
        return run

    def call(self, name: str, method: str, *arguments: Any) -> list[Any]:
        """Call a method in all processes of a contender at once, and return their results."""
        for remote in self._contenders[name]:
            remote.start(method, *arguments)
        return [remote.result() for remote in self._contenders[name]]

    def rss_bytes(self, name: str) -> int:
        """Return the resident memory of a contender's processes."""
        return sum(remote.rss_bytes() for remote in self._contenders[name])

    def __enter__(self) -> Comparison:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End all processes."""
        self._processes.close()


def median(runs: Sequence[Run]) -> Run:
    """Return the median run by steps a second."""
    return sorted(runs, key=lambda run: run.steps_per_s)[(len(runs) - 1) // 2]
