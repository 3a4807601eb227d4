"""The server's pages say what the server does: every key, every metric, and nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server.config.schema import KEYS, load
from reverb_writer_server.observability.metrics import exposition
from reverb_writer_server.observability.state import ServiceState

ROOT = Path(__file__).parents[3]
METRIC = re.compile(r"\b(?:reverb|process)_[a-z_]+[a-z]\b")
PROSE = {"reverb_writer", "reverb_writer_server"}


@pytest.mark.parametrize("name", KEYS)
def test_manual_has_every_key_with_its_default_and_what_is_allowed(name: str) -> None:
    key = KEYS[name]
    default = "" if key.default is None else f"`{json.dumps(key.default)}`"
    row = f"| `{name.replace('*', 'NAME')}` | {default} | {key.allowed} | {key.meaning} |"
    assert row in (ROOT / "docs/reference/configuration.md").read_text()


def test_configurations_to_copy_and_of_the_tutorial_are_valid(tmp_path: Path) -> None:
    (table,) = load(ROOT / "examples/server.toml", {}).tables
    assert (table.config.name, table.advice) == ("replay", ())
    page = (ROOT / "docs/tutorials/real-server.md").read_text("utf-8")
    (block,) = re.findall(r"^```toml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "server.toml").write_text(block)
    config = load(tmp_path / "server.toml", {})
    assert [(table.config.name, table.config.max_size) for table in config.tables] == [("replay", 100_000)]


def test_service_itself_tells_only_metrics_that_the_guide_explains() -> None:
    lines = exposition(ServiceState()).decode().splitlines()
    told = {line.split("{")[0].split()[0] for line in lines if line[0] != "#"}
    assert "reverb_ready" in told
    assert told <= documented()


@pytest.mark.parametrize("file", ["docker/prometheus/alerts.yml", "docker/grafana/replay.json"])
def test_rules_and_dashboard_use_metrics_that_there_are(file: str) -> None:
    used = set(METRIC.findall((ROOT / file).read_text())) - PROSE
    assert used
    assert used <= documented()


def documented() -> set[str]:
    """Return the metrics of the guide's second table."""
    _, _, table = (ROOT / "docs/reference/metrics.md").read_text().partition("## All metrics")
    return set(METRIC.findall(table))
