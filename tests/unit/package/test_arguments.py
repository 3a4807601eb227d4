"""A misspelt option is refused in the name of the class that the user has called."""

from __future__ import annotations

import re
from typing import Any

import pytest

import reverb_writer as rw

ADDRESS = "localhost:1"  # nothing connects to it: the arguments are checked first


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (rw.TrajectoryObserver, {"max_dely_s": 1}, "'max_dely_s'. Did you mean 'max_delay_s'?"),
        (rw.EpisodeObserver, {"on_blok": "raise"}, "'on_blok'. Did you mean 'on_block'?"),
        (rw.SequenceObserver, {"qqq": 1}, "'qqq'."),
        (rw.ReplayDataset, {"timeout": 1}, "'timeout'. Did you mean 'timeout_s'?"),
    ],
)
def test_misspelt_option_is_refused_with_a_similar_name(kind: Any, options: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^{kind.__name__}.. got an unexpected keyword argument {re.escape(text)}$"):
        kind(ADDRESS, "replay", 2, **options)
