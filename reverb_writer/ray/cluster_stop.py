"""The end of a cluster: a last checkpoint of each shard that can write one; then all of it is removed."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from reverb_writer.ray.actors import actor_of, ask_shards, end_actors

_logger = logging.getLogger(__name__)
_POLL_S = 0.2
_ANSWER_TIMEOUT_S = 5.0  # then they are asked again
_PATIENCE_S = 60.0  # with an actor that is silent: Ray may be starting it again, and its node may be busy


def stop_shards(
    cluster: str, names: Iterable[str], timeout_s: float, patience_s: float = _PATIENCE_S
) -> dict[str, str]:
    """End all servers, each with a last checkpoint, then remove the cluster; log and return what has written none.

    An actor is asked again until it tells that its server has ended: one that Ray starts again does not know of it.

    Args:
        cluster: its name.
        names: of its shards.
        timeout_s: how long all last checkpoints may take, seconds.
        patience_s: for how long an actor may be silent, seconds.

    Returns:
        By the name of the shard, why it has no last checkpoint.
    """
    names = list(names)
    now = time.monotonic()
    end = now + timeout_s
    heard_at = {name: now for name in names if actor_of(name) is not None}  # of those that have not ended
    unsaved: dict[str, str] = {}
    while heard_at and now < end:
        answers = ask_shards(list(heard_at), min(_ANSWER_TIMEOUT_S, end - now), "stop")
        now = time.monotonic()
        heard_at |= dict.fromkeys(answers, now)
        for name, at in list(heard_at.items()):
            if name in answers and answers[name].state == "stopped":
                why = answers[name].detail
            elif actor_of(name) is None:
                why = "its actor is gone"
            elif now - at >= patience_s:
                why = f"its actor has not answered for {patience_s:g} s"
            else:
                continue
            del heard_at[name]
            if why:
                unsaved[name] = why
        time.sleep(_POLL_S)
    unsaved |= dict.fromkeys(heard_at, f"it has not ended within {timeout_s:g} s")
    if unsaved:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(unsaved.items()))
        _logger.warning("cluster `%s` ends without a last checkpoint of %s", cluster, reasons)
    end_actors(cluster, names)
    return unsaved
