"""The log of a server: one line an event, for people or as JSON."""

from __future__ import annotations

import json
import logging
import time
from typing import Literal

__all__ = ["set_up"]


class _Json(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, and what was given as `extra={"fields": ...}`."""

    converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": f"{self.formatTime(record, '%Y-%m-%dT%H:%M:%S')}.{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up(form: Literal["text", "json"] | str, level: str) -> None:
    """Send the log of this process to standard error.

    Args:
        form: "text" or "json".
        level: the least that is logged: "debug", "info", "warning" or "error".
    """
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_Json() if form == "json" else text)
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
