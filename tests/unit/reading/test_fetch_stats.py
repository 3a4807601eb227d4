"""Counters of a dataset as Prometheus reads them."""

from __future__ import annotations

from reverb_writer.reading.stats import DatasetStats


def test_what_goes_up_and_down_is_a_gauge_and_the_rest_are_counters() -> None:
    lines = DatasetStats(ready_samples=3, received_samples=7).metrics().splitlines()
    kinds = dict(line.split()[2:] for line in lines[::2])
    assert [name for name, kind in kinds.items() if kind == "gauge"][:2] == [
        "reverb_writer_dataset_in_flight_samples",
        "reverb_writer_dataset_ready_samples",
    ]
    assert kinds["reverb_writer_dataset_received_samples_total"] == "counter"
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds.items())
    assert "reverb_writer_dataset_ready_samples 3" in lines
    assert "reverb_writer_dataset_received_samples_total 7" in lines
