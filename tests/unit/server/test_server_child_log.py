"""Levels of the lines that the Reverb process logs: those of dm-reverb 0.14, its gRPC and its TensorFlow."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server.reverb.supervisor import level_of


@pytest.mark.parametrize(
    ("line", "level"),
    [
        ("[reverb/cc/platform/default/server.cc:71] Started replay server on port 40963", logging.DEBUG),
        ("[reverb/cc/platform/tfrecord_checkpointer.cc:162]  Initializing TFRecordCheckpointer in /d.", logging.DEBUG),
        ("[reverb/cc/platform/tfrecord_checkpointer.cc:565] Loading latest checkpoint from /data", logging.DEBUG),
        ("[reverb/cc/reverb_service_impl.cc:164] Stored checkpoint to /data/incoming/2026-08-01", logging.DEBUG),
        ("2026-11-22 05:34:12.862515: I tensorflow/core/platform/cpu_feature_guard.cc:182] This", logging.DEBUG),
        ("I1122 05:34:12.862515734   32492 server_builder.cc:70] hello", logging.DEBUG),
        ("[reverb/cc/table.cc:517] Table worker encountered a fatal error: INTERNAL", logging.WARNING),
        ("[reverb/cc/selectors/prioritized.cc:217] Tree needs to be initialized because node with", logging.WARNING),
        ("[reverb/cc/chunker.cc:71] something that no version has said yet", logging.WARNING),
        ("2026-11-22 05:34:12.862515: W tensorflow/core/x.cc:182] beware", logging.WARNING),
        ("terminate called after throwing an instance of 'std::bad_alloc'", logging.WARNING),
        ("E1122 05:34:12.862515734   32492 tcp_server_posix.cc:216]    Failed accept4: Too many open", logging.ERROR),
        ("[reverb/cc/rate_limiter.cc:71] Check failed: min_size > 0 (0 vs. 0)", logging.ERROR),
        ("Fatal Python error: Segmentation fault", logging.ERROR),
    ],
)
@pytest.mark.parametrize("drains", [False, True])
def test_line_has_the_level_of_what_it_says(line: str, level: int, drains: bool) -> None:
    assert level_of(line, drains=drains) == level


def test_listener_that_fails_is_expected_only_where_it_was_shut_down() -> None:
    line = "E1122 05:34:12.862515734   32492 tcp_server_posix.cc:216]    Failed accept4: Invalid argument"
    assert level_of(line, drains=True) == logging.DEBUG
    assert level_of(line, drains=False) == logging.ERROR
