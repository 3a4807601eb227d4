"""The log of a server: one line per event, as text or as JSON."""

from __future__ import annotations

import json
import logging
from datetime import datetime, timezone


class _Json(logging.Formatter):
    """One JSON object per line: time (UTC), level, logger and message."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, timezone.utc).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def set_up(form: str, level: str) -> None:
    """Send the log of this process to standard error, as the keys `log.format` and `log.level` say."""
    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_Json() if form == "json" else text)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
