"""The metrics of a server for Prometheus; docs/reference/metrics.md describes them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from reverb_writer.tables.rate_limits import figures
from reverb_writer.tables.table_info import TableInfo
from reverb_writer_server.machine import available_bytes, used_bytes
from reverb_writer_server.observability.banner import versions
from reverb_writer_server.observability.monitor import ServerSnapshot
from reverb_writer_server.observability.state import Job, ServiceState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Meaning of each metric of a table, by name; the values are in `_values`.
_GAUGES = {
    "size": "items in the table",
    "max_size": "maximum number of items",
    "fill_ratio": "size / max_size",
    "ratio_reached": "samples per insert so far",
    "min_diff": "the lowest diff after a sample",
    "max_diff": "the highest diff after an insert",
    "insert_room": "inserts that are possible before the next sample",
    "sample_room": "samples that are possible before the next insert",
    "episodes": "episodes of its items",
    "ratio_wanted": "samples per insert that the rate limiter aims at",
    "diff": "inserts x ratio_wanted - samples",
}
_COUNTERS = {
    "inserts": "items inserted",
    "samples": "items sampled, including those that learners fetched ahead",
    "unique_samples": "items sampled at least once",
    "deleted_episodes": "episodes whose items were all removed",
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
        state = self._state
        yield InfoMetricFamily("reverb_build", "versions of the installed packages", versions())
        yield CounterMetricFamily("reverb_starts", "starts of a server with this checkpoint folder", state.starts)
        yield CounterMetricFamily("reverb_checkpoint_failures", "checkpoints that failed", state.failures["checkpoint"])
        failed = CounterMetricFamily("reverb_job_failures", "failures of jobs of the service", labels=["job"])
        for job in get_args(Job):
            failed.add_metric([job], state.failures[job])
        yield failed
        ended = GaugeMetricFamily("reverb_previous_end", "end of the previous server: 1", labels=["how"])
        ended.add_metric([state.previous_end], 1)
        yield ended
        for name, (meaning, value) in _of_service(state).items():
            if value is not None:
                yield GaugeMetricFamily(f"reverb_{name}", meaning, value)
        if state.monitor is not None and state.monitor.answers():  # old figures would look like present ones
            snapshot = state.monitor.latest()
            yield from _of_tables(list(snapshot.tables.values()))
            yield _blocked(snapshot)


def _of_service(state: ServiceState) -> dict[str, tuple[str, float | None]]:
    """Return meaning and value of each gauge of the whole server; the value is None if the gauge is missing now."""
    kept, monitor = state.kept, state.monitor
    free, size_of_disk = state.disk or (None, None)
    return {
        "ready": ("whether clients can use the server", state.ready()[0]),
        "start_time_seconds": ("start of this server, Unix time", state.started_at),
        "answer_timestamp_seconds": (
            "last answer of Reverb, Unix time",
            None if monitor is None else time.time() - monitor.age_s(),
        ),
        "memory_alert": ("whether memory is above memory.alert_bytes", state.memory_is_high),
        "memory_bytes": ("resident memory of the server", used_bytes(state.process_ids)),
        "memory_limit_bytes": ("memory limit of the container, or memory of the machine", available_bytes()),
        "disk_free_bytes": ("room for checkpoints", free),
        "disk_size_bytes": ("size of their file system", size_of_disk),
        "certificate_expiry_timestamp_seconds": (
            "end of the gateway's certificate, Unix time",
            state.certificate_expires_at,
        ),
        "checkpoints_kept": ("complete checkpoints on disk", kept.number),
        "checkpoints_damaged": ("checkpoints that could not be restored at this start", len(state.damaged)),
        "checkpoint_items_left_out": (
            "items that the newest checkpoint, or the restore, lacks because Reverb refuses to restore them",
            kept.left_out,
        ),
        "checkpoint_interval_seconds": ("time between checkpoints", state.checkpoint_every_s or None),
        "checkpoint_timestamp_seconds": ("newest complete checkpoint, Unix time", kept.written_at),
        "checkpoint_bytes": ("size of the newest complete checkpoint", kept.size_bytes if kept.number else None),
        "checkpoint_duration_seconds": ("duration of this server's last checkpoint", state.checkpoint_took_s),
    }


def _values(table: TableInfo) -> dict[str, Any]:
    """Return the values of a table's metrics by name; None for a missing value."""
    found = figures(table)
    diff = None if found["ratio_wanted"] is None else found["diff"]
    return {**found, "fill_ratio": found["fill"], "ratio_reached": found["ratio_reached"] or 0.0, "diff": diff}


def _of_tables(tables: list[TableInfo]) -> Iterator[Metric]:
    values = [_values(table) for table in tables]
    for kind, metrics in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for name, meaning in metrics.items():
            metric = kind(f"reverb_table_{name}", meaning, labels=["table"])
            for of_table in values:
                if of_table[name] is not None:
                    metric.add_metric([of_table["name"]], float(of_table[name]))
            yield metric
    worker = CounterMetricFamily(
        "reverb_table_worker_seconds", "time of the table's worker by state", labels=["table", "state"]
    )
    for table in tables:
        for state, milliseconds in table.worker_time_ms.items():
            worker.add_metric([table.name, state], milliseconds / 1000)
    yield worker


def _blocked(snapshot: ServerSnapshot) -> Metric:
    seconds = {(one.table, one.side): one.seconds for one in snapshot.standstills}
    gauge = GaugeMetricFamily(
        "reverb_table_blocked_seconds",
        "seconds for which inserts or samples have been blocked; 0 if they are not",
        labels=["table", "side"],
    )
    for name in snapshot.tables:
        for side in ("inserts", "samples"):
            gauge.add_metric([name, side], math.ceil(seconds.get((name, side), 0.0)))
    return gauge
