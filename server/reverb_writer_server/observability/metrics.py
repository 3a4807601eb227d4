"""The metrics of a server for Prometheus; docs/metrics.md describes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from reverb_writer.rate_limits import insert_room, reached_ratio, sample_room
from reverb_writer.table_info import TableInfo
from reverb_writer_server.observability.memory import available_bytes, used_bytes
from reverb_writer_server.observability.monitor import ServerSnapshot
from reverb_writer_server.observability.state import ServiceState

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TableValue: TypeAlias = Callable[[TableInfo], float]

_GAUGES: dict[str, tuple[str, _TableValue]] = {
    "size": ("items in the table", lambda table: table.current_size),
    "max_size": ("maximum number of items", lambda table: table.max_size),
    "fill_ratio": ("size / max_size", lambda table: table.current_size / table.max_size),
    "ratio_wanted": (
        "samples per insert that the rate limiter aims at",
        lambda table: table.rate_limiter.samples_per_insert,
    ),
    "ratio_reached": ("samples per insert so far", lambda table: reached_ratio(table) or 0.0),
    "diff": ("inserts x ratio_wanted - samples", lambda table: table.rate_limiter.diff),
    "min_diff": ("the lowest diff that a sample may lead to", lambda table: table.rate_limiter.min_diff),
    "max_diff": ("the highest diff that an insert may lead to", lambda table: table.rate_limiter.max_diff),
    "insert_room": ("inserts before something must be sampled", insert_room),
    "sample_room": ("samples before something must be inserted", sample_room),
    "episodes": ("episodes that its items come from", lambda table: table.num_episodes),
}
_COUNTERS: dict[str, tuple[str, _TableValue]] = {
    "inserts": ("items inserted", lambda table: table.rate_limiter.num_inserts),
    "samples": (
        "items sampled, including those that learners fetched ahead",
        lambda table: table.rate_limiter.num_samples,
    ),
    "unique_samples": ("items sampled at least once", lambda table: table.num_unique_samples),
    "deleted_episodes": ("episodes of which no item is left", lambda table: table.num_deleted_episodes),
}


def exposition(state: ServiceState) -> bytes:
    """Return the current values in Prometheus's text format."""
    registry = CollectorRegistry()
    registry.register(_Collector(state))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._service()
        if self._state.monitor is not None:
            snapshot = self._state.monitor.latest()
            yield from _of_tables(list(snapshot.tables.values()))
            yield from _blocked(snapshot)

    def _service(self) -> Iterator[Metric]:
        state, log = self._state, self._state.checkpoints
        yield GaugeMetricFamily("reverb_ready", "whether clients can use the server", float(state.phase == "serving"))
        yield CounterMetricFamily("reverb_starts", "starts of a server with this checkpoint folder", state.starts)
        yield GaugeMetricFamily("reverb_start_time_seconds", "start of this server, Unix time", state.started_at)
        yield GaugeMetricFamily("reverb_memory_bytes", "resident memory of the server", used_bytes(state.process_ids))
        yield GaugeMetricFamily(
            "reverb_memory_limit_bytes", "memory limit of the container, or memory of the machine", available_bytes()
        )
        yield GaugeMetricFamily("reverb_checkpoints_kept", "complete checkpoints on disk", log.kept)
        yield CounterMetricFamily("reverb_checkpoint_failures", "checkpoints that failed", log.failures)
        yield GaugeMetricFamily(
            "reverb_checkpoints_damaged", "checkpoints that could not be restored at this start", len(state.damaged)
        )
        failed = CounterMetricFamily("reverb_job_failures", "failures of what the service does", labels=["job"])
        for job in ("checkpoint", "keep", "hook", "figures", "reload"):
            failed.add_metric([job], state.failures[job])
        yield failed
        age = log.age_s()
        if age is not None:
            yield GaugeMetricFamily("reverb_checkpoint_age_seconds", "age of the newest complete checkpoint", age)
            yield GaugeMetricFamily("reverb_checkpoint_bytes", "size of the newest complete checkpoint", log.size_bytes)
        if log.took_s is not None:
            yield GaugeMetricFamily(
                "reverb_checkpoint_duration_seconds", "duration of this server's last checkpoint", log.took_s
            )


def _of_tables(tables: list[TableInfo]) -> Iterator[Metric]:
    for name, (meaning, value_of) in _GAUGES.items():
        gauge = GaugeMetricFamily(f"reverb_table_{name}", meaning, labels=["table"])
        for table in tables:
            gauge.add_metric([table.name], float(value_of(table)))
        yield gauge
    for name, (meaning, value_of) in _COUNTERS.items():
        counter = CounterMetricFamily(f"reverb_table_{name}", meaning, labels=["table"])
        for table in tables:
            counter.add_metric([table.name], value_of(table))
        yield counter
    worker = CounterMetricFamily(
        "reverb_table_worker_seconds", "time of the table's worker by state", labels=["table", "state"]
    )
    for table in tables:
        for state, milliseconds in table.worker_time_ms.items():
            worker.add_metric([table.name, state], milliseconds / 1000)
    yield worker


def _blocked(snapshot: ServerSnapshot) -> Iterator[Metric]:
    seconds = {(one.table, one.side): one.seconds for one in snapshot.standstills}
    gauge = GaugeMetricFamily(
        "reverb_table_blocked_seconds",
        "seconds for which inserts or samples have been blocked; 0 if they are not",
        labels=["table", "side"],
    )
    for name in snapshot.tables:
        for side in ("inserts", "samples"):
            gauge.add_metric([name, side], math.ceil(seconds.get((name, side), 0.0)))
    yield gauge
