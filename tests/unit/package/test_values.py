"""Which values fit a leaf, by policy, and which options fit a class."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import reverb_writer as rw
from reverb_writer.errors import StructureError
from reverb_writer.leaves import Fit, fit, padded_rows

F4, F8, I4, U1, B, STRINGS, C8 = map(np.dtype, ("f4", "f8", "i4", "u1", "?", "O", "c8"))
SAFE, ROUNDED, LOSSY = {*Fit}, {Fit.LOSSLESS, Fit.LOSSY}, {Fit.LOSSY}

CASES = [
    (np.float32(1), F4, SAFE),
    (np.array(1, ">f4"), F4, SAFE),
    (1.5, F4, SAFE),
    (1, F4, SAFE),
    (True, I4, SAFE),
    (np.float64(0.1), F4, ROUNDED),
    (np.int64(3), U1, ROUNDED),
    (np.float64(3), U1, ROUNDED),
    (3.0, U1, ROUNDED),
    (np.bool_(1), F8, ROUNDED),
    (np.float32(1), C8, ROUNDED),
    (np.float64(1e300), F4, LOSSY),
    (1e300, F4, LOSSY),
    (np.float64(0.5), I4, LOSSY),
    (300, U1, LOSSY),
    (np.nan, I4, LOSSY),
    (2, B, LOSSY),
    (np.complex64(1), F4, set()),
    (np.datetime64(1, "s"), F4, set()),
    (1.0, STRINGS, set()),
    ("text", STRINGS, SAFE),
    (b"text", STRINGS, SAFE),
    ("text", F4, set()),
]


@pytest.mark.parametrize("policy", Fit)
@pytest.mark.parametrize(("value", "dtype", "policies"), CASES)
@pytest.mark.filterwarnings("error")
def test_a_value_fits_by_policy(value: Any, dtype: Any, policies: set[Fit], policy: Fit) -> None:
    if policy not in policies:
        with pytest.raises(StructureError, match=r"^here: "):
            fit(value, dtype, (), "here", "as there", policy)
        return
    found = np.asarray(fit(value, dtype, (), "here", "as there", policy), None if dtype != STRINGS else STRINGS)
    assert found.shape == ()
    assert found.dtype == dtype
    if policies >= ROUNDED and dtype != STRINGS:
        np.testing.assert_allclose(found, value, rtol=1e-6)


def test_another_shape_is_refused_whatever_the_policy() -> None:
    for policy in Fit:
        with pytest.raises(StructureError) as caught:
            fit(np.zeros((2, 1), np.float32), F4, (2,), "here", "as there", policy)
        assert str(caught.value) == "here: float32 (2, 1), expected float32 (2,) as there."


def test_a_number_that_does_not_fit_is_named_with_what_to_do() -> None:
    with pytest.raises(StructureError) as caught:
        fit(np.array([1.0, 1.9]), I4, (2,), "here", "as there", Fit.LOSSLESS, "Round it.")
    assert str(caught.value) == "here: 1.9 (float64) does not fit into int32. Round it."


@pytest.mark.parametrize("dtype", ["f4", "O"])
def test_padding_is_zeros_or_empty_strings(dtype: str) -> None:
    leaf = np.array([[b"a", b"b"]], "O") if dtype == "O" else np.ones((1, 2), dtype)
    padded = padded_rows(leaf, 3)
    assert padded.dtype == leaf.dtype
    assert padded[0].tolist() == leaf[0].tolist()
    assert padded[1:].tolist() == [[b"", b""] if dtype == "O" else [0, 0]] * 2


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
