"""Alert rules fire when they should: those of one series each, whose PromQL means the same in Python."""

from __future__ import annotations

import collections
import json
import math
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

RULES = Path(__file__).parents[3] / "docker/prometheus/alerts.yml"
NOW, HOUR = 1_000_000.0, 3600.0


class Series(float):
    """One series of PromQL at one moment, NaN if it is missing: comparisons filter as PromQL's do."""

    def __bool__(self) -> bool:
        return not math.isnan(self)

    def __gt__(self, other: float) -> Series:  # type: ignore[misc,override]  # as PromQL's
        return self if float(self) > other else Series("nan")


def fires(alert: str, **metrics: float) -> bool:
    """Evaluate an alert's rule; `time()` is NOW."""
    (rule,) = (rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
               if rule["alert"] == alert)  # fmt: skip
    series = {f"reverb_{name}": Series(value) for name, value in metrics.items()}
    names = collections.defaultdict(lambda: Series("nan"), series, time=lambda: NOW)
    return bool(eval(rule["expr"], {"__builtins__": {}}, names))  # noqa: S307  # our own file


def ages(start: float, checkpoint: float | None = None, every_s: float | None = 600.0) -> dict[str, float]:
    """Return the metrics of a server that started, and wrote its last checkpoint, so many seconds ago."""
    times = {"start_time_seconds": start, "checkpoint_timestamp_seconds": checkpoint}
    interval = {} if every_s is None else {"checkpoint_interval_seconds": every_s}
    return {**interval, **{name: NOW - age for name, age in times.items() if age is not None}}


@pytest.mark.parametrize(
    ("alert", "metrics", "expected"),
    [
        ("ReplayCheckpointOld", ages(2 * HOUR, 500.0), False),
        ("ReplayCheckpointOld", ages(2 * HOUR, 2099.0), False),  # 3 x 600 + 300 = 2100
        ("ReplayCheckpointOld", ages(2 * HOUR, 2101.0), True),
        ("ReplayCheckpointOld", ages(9 * HOUR, 5 * HOUR, 7200.0), False),  # an hour is nothing for who saves every two
        ("ReplayCheckpointOld", ages(2 * HOUR), True),  # none was ever written
        ("ReplayCheckpointOld", ages(1000.0), False),  # none was due
        ("ReplayCheckpointOld", ages(1000.0, 9 * HOUR), False),  # that of the run before, just restored
        ("ReplayCheckpointOld", ages(2 * HOUR, 9 * HOUR), True),
        ("ReplayCheckpointOld", ages(9 * HOUR, every_s=None), False),  # no periodic ones are asked for
        ("ReplayMemoryShort", {"memory_bytes": 91.0, "memory_limit_bytes": 100.0}, True),
        ("ReplayMemoryShort", {"memory_bytes": 89.0, "memory_limit_bytes": 100.0}, False),
        ("ReplayDiskShort", {"disk_free_bytes": 19.0, "checkpoint_bytes": 10.0}, True),
        ("ReplayDiskShort", {"disk_free_bytes": 21.0, "checkpoint_bytes": 10.0}, False),
        ("ReplayDescriptorsShort", {"process_open_fds": 81.0, "process_max_fds": 100.0}, True),
        ("ReplayDescriptorsShort", {"process_open_fds": 79.0, "process_max_fds": 100.0}, False),
        ("ReplayCertificateEnds", {"certificate_expiry_timestamp_seconds": NOW + 6 * 24 * HOUR}, True),
        ("ReplayCertificateEnds", {"certificate_expiry_timestamp_seconds": NOW + 8 * 24 * HOUR}, False),
        ("ReplayCertificateEnds", {}, False),
        ("ReplayCheckpointDamaged", {"checkpoints_damaged": 1.0}, True),
        ("ReplayCheckpointDamaged", {"checkpoints_damaged": 0.0}, False),
    ],
)
def test_alert_fires_at_its_limit(alert: str, metrics: dict[str, float], expected: bool) -> None:
    assert fires(alert, **metrics) is expected


def test_each_failure_that_the_server_counts_has_an_alert() -> None:
    expressions = [rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    for metric in ("checkpoint_failures_total", "checkpoints_damaged", "job_failures_total", "previous_end"):
        assert [one for one in expressions if f"reverb_{metric}" in one], metric


def test_dashboard_names_the_instance_and_shows_readiness_restarts_and_failures() -> None:
    panels = json.loads((RULES.parents[1] / "grafana/replay.json").read_text())["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    assert not [target["legendFormat"] for target in targets if "{{instance}}" not in target["legendFormat"]]
    shown = " ".join(target["expr"] for target in targets)
    for metric in ("ready", "start_time_seconds", "previous_end", "job_failures_total", "checkpoints_damaged"):
        assert f"reverb_{metric}" in shown
