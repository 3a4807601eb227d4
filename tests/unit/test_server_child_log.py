"""Levels of the lines that the Reverb process logs: those of dm-reverb 0.14, its gRPC and its TensorFlow."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server.reverb.supervisor import level_of


@pytest.mark.parametrize(
    "line",
    [
        "[reverb/cc/platform/default/server.cc:71] Started replay server on port 40963",
        "[reverb/cc/platform/tfrecord_checkpointer.cc:162]  Initializing TFRecordCheckpointer in /data/incoming.",
        "[reverb/cc/platform/tfrecord_checkpointer.cc:565] Loading latest checkpoint from /data/incoming",
        "[reverb/cc/reverb_service_impl.cc:164] Stored checkpoint to /data/incoming/2026-08-01T12:00:00",
        "2026-11-22 05:34:12.862515: I tensorflow/core/platform/cpu_feature_guard.cc:182] This binary is optimized",
        "I1122 05:34:12.862515734   32492 server_builder.cc:70] hello",
    ],
)
def test_information_is_quiet(line: str) -> None:
    assert level_of(line, drains=False) == logging.DEBUG


@pytest.mark.parametrize(
    "line",
    [
        "[reverb/cc/table.cc:517] Table worker encountered a fatal error: INTERNAL",
        "[reverb/cc/selectors/prioritized.cc:217] Tree needs to be initialized because node with index 3 has error",
        "[reverb/cc/chunker.cc:71] something that no version has said yet",
        "2026-11-22 05:34:12.862515: W tensorflow/core/x.cc:182] beware",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_what_reverb_says_beyond_that_is_heard(line: str) -> None:
    assert level_of(line, drains=False) == logging.WARNING


@pytest.mark.parametrize(
    "line",
    [
        "E1122 05:34:12.862515734   32492 tcp_server_posix.cc:216]    Failed accept4: Too many open files",
        "[reverb/cc/rate_limiter.cc:71] Check failed: min_size > 0 (0 vs. 0)",
        "Fatal Python error: Segmentation fault",
    ],
)
@pytest.mark.parametrize("drains", [False, True])
def test_error_is_one(line: str, drains: bool) -> None:
    assert level_of(line, drains=drains) == logging.ERROR


def test_listener_that_fails_is_expected_only_where_it_was_shut_down() -> None:
    line = "E1122 05:34:12.862515734   32492 tcp_server_posix.cc:216]    Failed accept4: Invalid argument"
    assert level_of(line, drains=True) == logging.DEBUG
    assert level_of(line, drains=False) == logging.ERROR
