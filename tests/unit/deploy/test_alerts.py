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


@pytest.mark.parametrize(
    ("every_s", "ages", "expected"),
    [
        (600.0, {"start": 2 * HOUR, "checkpoint": 500.0}, False),
        (600.0, {"start": 2 * HOUR, "checkpoint": 2099.0}, False),  # 3 x 600 + 300 = 2100
        (600.0, {"start": 2 * HOUR, "checkpoint": 2101.0}, True),
        (7200.0, {"start": 9 * HOUR, "checkpoint": 5 * HOUR}, False),  # an hour is nothing for who saves every two
        (600.0, {"start": 2 * HOUR}, True),  # none was ever written
        (600.0, {"start": 1000.0}, False),  # none was due
        (600.0, {"start": 1000.0, "checkpoint": 9 * HOUR}, False),  # that of the run before, just restored
        (600.0, {"start": 2 * HOUR, "checkpoint": 9 * HOUR}, True),
        (None, {"start": 9 * HOUR}, False),  # no periodic ones are asked for
    ],
)
def test_checkpoint_is_old_by_the_interval_that_is_configured(
    every_s: float | None, ages: dict[str, float], expected: bool
) -> None:
    metrics = {"start_time_seconds": NOW - ages["start"]}
    if "checkpoint" in ages:
        metrics["checkpoint_timestamp_seconds"] = NOW - ages["checkpoint"]
    if every_s is not None:
        metrics["checkpoint_interval_seconds"] = every_s
    assert fires("ReplayCheckpointOld", **metrics) is expected


@pytest.mark.parametrize(
    ("alert", "metrics", "expected"),
    [
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
def test_shortage_fires_at_its_limit(alert: str, metrics: dict[str, float], expected: bool) -> None:
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
