"""When a waiting call is looked at again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from reverb_writer.transport import delivery


def test_room_that_is_gone_again_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender would look for it without a pause, for as long as a rate limiter blocks."""
    now = 100.0
    monkeypatch.setattr(delivery, "time", SimpleNamespace(monotonic=lambda: now))
    wait = delivery.Wait("room", 60.0, row=5)
    assert not wait.had_room_for(0.002, has_room=True)
    assert wait.left_s() == pytest.approx(0.002)
    now += 0.01
    assert not wait.had_room_for(0.002, has_room=False)
    assert wait.left_s() > 0.1
    assert not wait.had_room_for(0.002, has_room=True)
    now += 0.01
    assert wait.had_room_for(0.002, has_room=True)
