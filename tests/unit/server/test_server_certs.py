"""The certificates of `reverb-writer-server certs` beside the end of their authority."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest
from cryptography import x509
from reverb_writer_server import certs

import reverb_writer as rw


def end_of(path: Path) -> dt.datetime:
    return x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc


def test_certificate_ends_no_later_than_its_authority(tmp_path: Path) -> None:
    certs.make_certificates(tmp_path, ["localhost"], ["actor"], days=2)
    end = end_of(tmp_path / "authority" / "ca.crt")
    certs.make_certificates(tmp_path, ["localhost"], ["learner"], days=30)
    assert end_of(tmp_path / "authority" / "ca.crt") == end
    assert end_of(tmp_path / "replay" / "server.crt") == end_of(tmp_path / "clients" / "learner.crt") == end


def test_authority_that_has_expired_signs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certs, "_CLOCK_SKEW", dt.timedelta(days=3))  # so that it was valid once
    certs.make_certificates(tmp_path, ["localhost"], ["actor"], days=-1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    with pytest.raises(rw.errors.SpecError, match=r"ca\.crt: has expired .* Delete .*authority, and run"):
        certs.make_certificates(tmp_path, ["localhost"], ["learner"], days=30)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
