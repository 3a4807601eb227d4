"""Certificates of a client that are incomplete or cannot be read are refused where they are given."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import pytest

import reverb_writer as rw
from reverb_writer.transport.wire import credentials_of


@pytest.mark.parametrize("given", ["certificate", "private_key"])
def test_a_certificate_and_its_key_are_given_together(given: str) -> None:
    with pytest.raises(rw.errors.SpecError, match="`certificate` and `private_key` must be given together"):
        rw.TLS(**{given: "a.pem"})


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["root_certificates"], "`root_certificates`: cannot use the PEM files {0} (No such file or directory)."),
        (["certificate", "private_key"], "`certificate` and `private_key`: cannot use the PEM files {0}, {1} (No such"),
    ],
)
def test_files_that_cannot_be_used_are_named(names: list[str], text: str, tmp_path: pathlib.Path) -> None:
    files: dict[str, Any] = {name: tmp_path / f"{name}.pem" for name in names}
    with pytest.raises(rw.errors.SpecError, match=re.escape(text.format(*files.values()))):
        credentials_of(rw.TLS(**files))


def test_nothing_needs_to_be_given() -> None:
    assert credentials_of(rw.TLS()) is not None
