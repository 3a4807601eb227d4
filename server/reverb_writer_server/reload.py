"""What a running service takes from its configuration when SIGHUP asks for it, and why it does not take the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from reverb_writer_server.config.schema import CheckpointConfig, ServedTable, ServerConfig

_TAKEN = ("log_level", "log_figures_every_s")
_TAKEN_OF_CHECKPOINTS = ("every_s", "keep", "on_exit", "on_damage", "hook", "hook_timeout_s")
_RESTART = "it needs a restart"
_OF_TABLES = "Reverb cannot change a table while it serves; it needs a restart with checkpoints.on_mismatch = `config`"


def reloaded(now: ServerConfig, wanted: ServerConfig) -> tuple[ServerConfig, list[str], list[str]]:
    """Return the configuration from now on, a line for each change that is taken, and one for each that is refused."""
    checkpoints = dataclasses.replace(
        now.checkpoints, **{name: getattr(wanted.checkpoints, name) for name in _TAKEN_OF_CHECKPOINTS}
    )
    taken = dataclasses.replace(now, checkpoints=checkpoints, **{name: getattr(wanted, name) for name in _TAKEN})
    changes = [f"{key}: {value}" for key, value in _differences(now, taken)]
    refused = [f"{key} stays: {_RESTART}" for key, _ in _differences(taken, wanted)]
    return taken, changes, [*refused, *_tables(now.tables, wanted.tables)]


def _differences(before: Any, after: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield keys with different values, and both values, of all but the tables."""
    for field in dataclasses.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if old == new or field.name == "tables":
            continue
        if isinstance(old, CheckpointConfig):
            yield from _differences(old, new, "checkpoints.")
        else:
            yield f"{prefix}{field.name}", f"{old} -> {new}"


def _tables(before: tuple[ServedTable, ...], after: tuple[ServedTable, ...]) -> Iterator[str]:
    old, new = ({table.config.name: table.config for table in tables} for tables in (before, after))
    for name in sorted(old.keys() ^ new.keys()):
        yield f"table `{name}` {'stays' if name in old else 'is not added'}: {_OF_TABLES}"
    for name in sorted(old.keys() & new.keys()):
        for field in dataclasses.fields(old[name]):
            was, wanted = getattr(old[name], field.name), getattr(new[name], field.name)
            if repr(was) != repr(wanted):  # signatures hold arrays' specs, which a comparison may not take
                yield f"table `{name}`: {field.name} stays {was}, not {wanted}: {_OF_TABLES}"
