"""jemalloc is for whoever has it and has not chosen otherwise."""

from __future__ import annotations

import ctypes.util
import os
from pathlib import Path

import pytest

pytest.importorskip("reverb_writer_server", reason="the server is not installed on this interpreter")

from reverb_writer_server.reverb.supervisor import ReverbProcess, with_jemalloc

LIBRARY = ctypes.util.find_library("jemalloc")


@pytest.mark.parametrize("choice", ["", "/usr/lib/libtcmalloc.so"])
def test_who_preloads_a_library_or_none_decides(choice: str) -> None:
    environment = {"LD_PRELOAD": choice, "HOME": "/root"}
    assert with_jemalloc(environment) == environment


def test_library_of_the_system_is_preloaded_and_nothing_else_changes() -> None:
    expected = {"HOME": "/root"} if LIBRARY is None else {"HOME": "/root", "LD_PRELOAD": LIBRARY}
    assert with_jemalloc({"HOME": "/root"}) == expected


@pytest.mark.skipif(LIBRARY is None, reason="the system has no jemalloc")
def test_reverb_process_has_it_loaded_and_this_one_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    process = ReverbProcess()
    try:
        maps = Path(f"/proc/{process.pid}/maps")
        loaded = ""
        while process.alive() and "libc.so" not in loaded:  # which is loaded after what is preloaded
            loaded = maps.read_text()
        assert "jemalloc" in loaded
    finally:
        process.kill()
    assert "LD_PRELOAD" not in os.environ
