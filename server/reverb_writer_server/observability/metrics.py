"""The metrics of a server for Prometheus; docs/reference/metrics.md describes them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from reverb_writer.tables.rate_limits import insert_room, keeps_ratio, reached_ratio, sample_room
from reverb_writer.tables.table_info import TableInfo
from reverb_writer_server.observability.banner import versions
from reverb_writer_server.observability.memory import available_bytes, used_bytes
from reverb_writer_server.observability.monitor import ServerSnapshot
from reverb_writer_server.observability.state import Job, ServiceState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_TableValue: TypeAlias = Callable[[TableInfo], float]

_GAUGES: dict[str, tuple[str, _TableValue]] = {
    "size": ("items in the table", lambda table: table.current_size),
    "max_size": ("maximum number of items", lambda table: table.max_size),
    "fill_ratio": ("size / max_size", lambda table: table.current_size / table.max_size),
    "ratio_reached": ("samples per insert so far", lambda table: reached_ratio(table) or 0.0),
    "min_diff": ("the lowest diff that a sample may lead to", lambda table: table.rate_limiter.min_diff),
    "max_diff": ("the highest diff that an insert may lead to", lambda table: table.rate_limiter.max_diff),
    "insert_room": ("inserts before something must be sampled", insert_room),
    "sample_room": ("samples before something must be inserted", sample_room),
    "episodes": ("episodes that its items come from", lambda table: table.num_episodes),
}
_OF_RATIOS: dict[str, tuple[str, _TableValue]] = {
    "ratio_wanted": (
        "samples per insert that the rate limiter aims at",
        lambda table: table.rate_limiter.samples_per_insert,
    ),
    "diff": ("inserts x ratio_wanted - samples", lambda table: table.rate_limiter.diff),
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
    ProcessCollector(registry=registry)
    child = state.reverb_pid
    if child is not None:
        ProcessCollector("reverb", pid=lambda: child, registry=registry)
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, state: ServiceState) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        yield from self._service()
        yield from self._checkpoints()
        monitor = self._state.monitor
        if monitor is None:
            return
        answered_at = time.time() - monitor.age_s()
        yield GaugeMetricFamily("reverb_answer_timestamp_seconds", "last answer of Reverb, Unix time", answered_at)
        if monitor.answers():  # old figures would pass for those of now
            snapshot = monitor.latest()
            yield from _of_tables(list(snapshot.tables.values()))
            yield from _blocked(snapshot)

    def _service(self) -> Iterator[Metric]:
        state, disk = self._state, self._state.disk
        yield InfoMetricFamily("reverb_build", "versions of the packages that run", versions())
        yield GaugeMetricFamily("reverb_ready", "whether clients can use the server", float(state.ready()[0]))
        yield GaugeMetricFamily(
            "reverb_memory_alert", "whether memory is above memory.alert_bytes", float(state.memory_is_high)
        )
        yield CounterMetricFamily("reverb_starts", "starts of a server with this checkpoint folder", state.starts)
        ended = GaugeMetricFamily("reverb_previous_end", "how the server before has ended: 1", labels=["how"])
        ended.add_metric([state.previous_end], 1)
        yield ended
        yield GaugeMetricFamily("reverb_start_time_seconds", "start of this server, Unix time", state.started_at)
        yield GaugeMetricFamily("reverb_memory_bytes", "resident memory of the server", used_bytes(state.process_ids))
        yield GaugeMetricFamily(
            "reverb_memory_limit_bytes", "memory limit of the container, or memory of the machine", available_bytes()
        )
        if disk.free_bytes is not None and disk.total_bytes is not None:
            yield GaugeMetricFamily("reverb_disk_free_bytes", "room for checkpoints", disk.free_bytes)
            yield GaugeMetricFamily("reverb_disk_size_bytes", "size of their file system", disk.total_bytes)
        if disk.certificate_expires_at is not None:
            yield GaugeMetricFamily(
                "reverb_certificate_expiry_timestamp_seconds",
                "end of the gateway's certificate, Unix time",
                disk.certificate_expires_at,
            )

    def _checkpoints(self) -> Iterator[Metric]:
        log = self._state.checkpoints
        yield GaugeMetricFamily("reverb_checkpoints_kept", "complete checkpoints on disk", log.kept)
        yield CounterMetricFamily("reverb_checkpoint_failures", "checkpoints that failed", log.failures)
        yield GaugeMetricFamily(
            "reverb_checkpoints_damaged",
            "checkpoints that could not be restored at this start",
            len(self._state.damaged),
        )
        failed = CounterMetricFamily("reverb_job_failures", "failures of what the service does", labels=["job"])
        for job in get_args(Job):
            failed.add_metric([job], self._state.failures[job])
        yield failed
        if self._state.checkpoint_every_s:
            yield GaugeMetricFamily(
                "reverb_checkpoint_interval_seconds", "time between checkpoints", self._state.checkpoint_every_s
            )
        if log.written_at is not None:
            yield GaugeMetricFamily(
                "reverb_checkpoint_timestamp_seconds", "newest complete checkpoint, Unix time", log.written_at
            )
            yield GaugeMetricFamily("reverb_checkpoint_bytes", "size of the newest complete checkpoint", log.size_bytes)
        if log.took_s is not None:
            yield GaugeMetricFamily(
                "reverb_checkpoint_duration_seconds", "duration of this server's last checkpoint", log.took_s
            )


def _of_tables(tables: list[TableInfo]) -> Iterator[Metric]:
    with_ratio = [table for table in tables if keeps_ratio(table)]
    for gauges, those in ((_GAUGES, tables), (_OF_RATIOS, with_ratio)):
        for name, (meaning, value_of) in gauges.items():
            gauge = GaugeMetricFamily(f"reverb_table_{name}", meaning, labels=["table"])
            for table in those:
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
