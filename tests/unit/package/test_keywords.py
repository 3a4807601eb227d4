"""`help` describes every keyword that a class or a function takes, also those that several of them share."""

from __future__ import annotations

import inspect
import pydoc
import re
from typing import Any

import pytest

import reverb_writer as rw
from reverb_writer.keywords import takes

DELIVERY = ["timeout_s", "max_delay_s", "max_in_flight_items", "max_in_flight_bytes", "max_kept_bytes", "on_block"]
DELIVERY += ["patience_s", "until"]
STREAM = [*DELIVERY, "chunk_length", "last_row", "store_flags"]
READING = ["max_in_flight_batches", "timeout_s", "single_pass", "skip_unsafe", "max_cache_bytes", "max_sample_bytes"]
READING += ["transform"]
RETURNS = ["rewards", "values", "gamma", "discounts", "continues", "next_values", "time_axis"]


@pytest.mark.parametrize(
    ("of", "keywords"),
    [
        (rw.TrajectoryObserver.__init__, [*STREAM]),
        (rw.SequenceObserver.__init__, STREAM),
        (rw.EpisodeObserver.__init__, [*STREAM, "max_sequence_length"]),
        (rw.ItemWriter.__init__, DELIVERY),
        (rw.ReplayDataset.__init__, [*READING, "collate"]),
        (rw.SliceDataset.__init__, [*READING, "slice_len"]),
        (rw.returns.gae, [*RETURNS, "lambda_"]),
        (rw.returns.vtrace, [*RETURNS, "lambda_", "max_rho"]),
        (rw.returns.n_step_returns, [*RETURNS, "n"]),
    ],
)
def test_help_describes_every_keyword_once(of: Any, keywords: list[str]) -> None:
    shown = pydoc.plain(pydoc.render_doc(of))
    text = inspect.getdoc(of) or ""
    assert all(line.strip() in shown for line in text.splitlines())
    parameters = inspect.signature(of).parameters
    for keyword in keywords:
        assert len(re.findall(rf"^ +{keyword}: \S", text, re.MULTILINE)) == 1, f"`{keyword}`"
        assert keyword in parameters, f"`{keyword}` is not in the signature"
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def test_shapes_of_returns_are_in_their_help() -> None:
    assert "values: [B, T + 1, ...]" in (rw.returns.gae.__doc__ or "")


def test_function_without_a_docstring_gets_the_keywords() -> None:
    class Options:
        def __init__(self, size: int = 8) -> None: ...

    @takes(Options)
    def make(**options: Any) -> Any:
        return options

    assert "size" in pydoc.plain(pydoc.render_doc(make))
    assert make(size=3) == {"size": 3}
