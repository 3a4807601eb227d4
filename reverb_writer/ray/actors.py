"""The actors of shards on Ray: functions to find, ask, stop and kill them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Any

from reverb_writer.background import in_background
from reverb_writer.lazy import needs

_logger = logging.getLogger(__name__)
NAMESPACE = "reverb-writer"  # of all actors, so that every job finds them
ANSWER_TIMEOUT_S = 5.0  # time-out of a question to actors, which is then repeated
POLL_S = 0.2
_FREED_TIMEOUT_S = 10.0
_PATIENCE_S = 60.0  # wait for a silent actor: Ray may be restarting it, or its node may be busy

_handles: dict[str, Any] = {}  # of actors by name; with a handle, an actor answers even without the control store


def connect_ray(address: str | None = None) -> None:
    """Connect to Ray if this process is not connected yet; `address` is an address for `ray.init`.

    Raises:
        MissingExtraError: Ray is not installed.
        ConnectionError: no Ray answers at the address.
    """
    with needs("reverb_writer.ray", "reverb-writer[ray]"):
        import ray  # noqa: PLC0415  # of the extra
    if not ray.is_initialized():
        ray.init(address)


def ask_actors(names: Iterable[str], method: str, timeout_s: float) -> dict[str, Any]:
    """Return the results of a method of actors by name, of the actors that answer within `timeout_s` seconds."""
    asked = in_background(lambda: _ask(list(names), method, timeout_s))
    return asked.result() if asked.wait(timeout_s + 1.0) else {}  # Ray may never return


def _ask(names: list[str], method: str, timeout_s: float) -> dict[str, Any]:
    import ray  # noqa: PLC0415  # of the extra

    handles = {name: actor_of(name) for name in names} if ray.is_initialized() else {}
    calls = {getattr(handle, method).remote(): name for name, handle in handles.items() if handle is not None}
    answers: dict[str, Any] = {}
    ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
    for call in ready:
        try:
            answers[calls[call]] = ray.get(call, timeout=timeout_s)
        except ray.exceptions.ActorDiedError:  # it never returns, and another actor may have its name
            _handles.pop(calls[call], None)
        except ray.exceptions.RayError:
            continue
    return answers


def actor_of(name: str) -> Any:
    """Return the actor with this name, None if none exists now; Ray is asked for it once."""
    import ray  # noqa: PLC0415  # of the extra

    if name not in _handles:
        try:
            _handles[name] = ray.get_actor(name, namespace=NAMESPACE)
        except (ValueError, ray.exceptions.RayError):
            return None
    return _handles.get(name)


def named_shards() -> dict[str, list[str]]:
    """Return the names of the existing shards' actors, by cluster."""
    import ray  # noqa: PLC0415  # of the extra

    found: dict[str, list[str]] = {}
    for one in ray.util.list_named_actors(all_namespaces=True):
        if one["namespace"] == NAMESPACE and one["name"].startswith("replay:"):
            found.setdefault(one["name"].split(":")[1], []).append(one["name"])
    return found


def end_actors(cluster: str, names: Iterable[str]) -> None:
    """End the actors of a cluster for ever; servers that still run are asked to end. Idempotent."""
    import ray  # noqa: PLC0415  # of the extra

    for name in names:
        _handles.pop(name, None)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):
            ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)
    end = time.monotonic() + _FREED_TIMEOUT_S
    while cluster in named_shards() and time.monotonic() < end:
        time.sleep(POLL_S)


def stop_shards(
    cluster: str, names: Iterable[str], timeout_s: float, patience_s: float = _PATIENCE_S
) -> dict[str, str]:
    """End all servers, each with a last checkpoint, then remove the cluster; log and return shards without one.

    An actor is asked until it reports that its server has ended, because a restarted actor does not know the question.
    All actors together may take `timeout_s` seconds, and each may be silent for `patience_s`.

    Returns:
        Reasons for missing last checkpoints, by the name of the shard.
    """
    names = list(names)
    now = time.monotonic()
    end = now + timeout_s
    heard_at = {name: now for name in names if actor_of(name) is not None}  # last answers of running actors
    unsaved: dict[str, str] = {}
    while heard_at and now < end:
        answers = ask_actors(heard_at, "stop", min(ANSWER_TIMEOUT_S, end - now))
        now = time.monotonic()
        heard_at |= dict.fromkeys(answers, now)
        for name, at in list(heard_at.items()):
            if name in answers and answers[name].state == "stopped":
                unsaved[name] = answers[name].detail
            elif actor_of(name) is None:
                unsaved[name] = "its actor is gone"
            elif now - at >= patience_s:
                unsaved[name] = f"its actor has not answered for {patience_s:g} s"
            else:
                continue
            del heard_at[name]
        time.sleep(POLL_S)
    unsaved |= dict.fromkeys(heard_at, f"it has not ended within {timeout_s:g} s")
    unsaved = {name: why for name, why in unsaved.items() if why}
    if unsaved:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(unsaved.items()))
        _logger.warning("cluster `%s` ends without a last checkpoint of %s", cluster, reasons)
    end_actors(cluster, names)
    return unsaved
