"""The levels of what the Reverb process logs.

gRPC and TensorFlow write theirs. Reverb 0.14 writes none, but in three of its files each message is for information,
and the others only tell what is wrong.
"""

from __future__ import annotations

import logging
import re

_INFO = re.compile(
    r"\[reverb/cc/(platform/default/server|platform/tfrecord_checkpointer|reverb_service_impl)\.cc:"
    r"|[ID]\d{4} |\S+ \S+: I \S+\.cc:|WARNING: All log messages before absl"
)
_ERROR = re.compile(
    r"[EF]\d{4} |\S+ \S+: [EF] \S+\.cc:|\[reverb/cc/\S+\] (Check failed|\S+\(\) failed)|Fatal Python error"
)
_EXPECTED_WHEN_DRAINING = "Failed accept4: Invalid argument"  # of gRPC, whose listener is shut down


def level_of(line: str, *, drains: bool) -> int:
    """Return the level of `logging` of a line; `drains` if the process has been told to refuse connections."""
    if _INFO.match(line) or (drains and _EXPECTED_WHEN_DRAINING in line):
        return logging.DEBUG
    return logging.ERROR if _ERROR.match(line) else logging.WARNING
