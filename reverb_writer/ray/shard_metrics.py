"""A shard's figures as metrics of Ray, beside those of the cluster in its dashboard and its Prometheus."""

from __future__ import annotations

from reverb_writer.ray.shard_report import ShardReport

_OF_SHARDS = {
    "up": "1 if the shard serves, 0 if not",
    "attempts": "starts of the server by its actor",
    "memory_bytes": "resident memory of the server",
    "checkpoint_age_seconds": "age of the newest checkpoint",
}
_OF_TABLES = {
    "size": "items in the table",
    "inserts": "items inserted since the server's data began",
    "samples": "items sampled since the server's data began",
}


class ShardMetrics:
    """The gauges of one shard: `reverb_writer_shard_...` by cluster and shard, and by table."""

    def __init__(self, cluster: str, number: int) -> None:
        """Create the gauges; only in a process that is connected to Ray."""
        from ray.util.metrics import Gauge  # noqa: PLC0415  # of the extra

        tags = {"cluster": cluster, "shard": str(number)}

        def gauge(name: str, meaning: str, *more: str) -> Gauge:
            made = Gauge(f"reverb_writer_shard_{name}", meaning, (*tags, *more))
            made.set_default_tags(tags)
            return made

        self._shard = {name: gauge(name, meaning) for name, meaning in _OF_SHARDS.items()}
        self._table = {name: gauge(f"table_{name}", meaning, "table") for name, meaning in _OF_TABLES.items()}

    def set(self, report: ShardReport) -> None:
        """Tell Ray the figures of now."""
        values = {
            "up": float(report.state == "serving"),
            "attempts": report.attempts,
            "memory_bytes": report.memory_bytes,
            "checkpoint_age_seconds": report.checkpoint_age_s,
        }
        for name, value in values.items():
            if value is not None:
                self._shard[name].set(value)
        for table, figures in report.tables.items():
            for name, gauge in self._table.items():
                gauge.set(getattr(figures, name), {"table": table})
