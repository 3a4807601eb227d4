"""The configuration of a server: tables, checkpoints, ports, log. Each field is a key."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import tomllib

from reverb_writer.errors import SpecError
from reverb_writer.tables import TableConfig
from reverb_writer.tables.memory_estimate import Estimate, estimate
from reverb_writer.tables.shares import share_of
from reverb_writer.tables.table_dicts import TableKeyError, table_from_dict
from reverb_writer_server.config import textproto
from reverb_writer_server.config.keys import ConfigError, Key, Settings, choice, key, path, quantity, whole

_MAX = 2**31 - 1
_Path: TypeAlias = Path | None
_SELECTORS = "uniform fifo lifo max_heap min_heap prioritized"


@dataclass(frozen=True)
class TableKeys:
    """The keys of a table; `table_from_dict` makes the table of the keys that are set."""

    max_size: int = whole(1_000_000, 1, _MAX, "maximum number of items")
    sampler: str = choice(_SELECTORS, "chooses the next item to sample")
    sampler_exponent: float = quantity(1.0, "of the priority", "exponent of a prioritized sampler")
    remover: str = choice(_SELECTORS, "chooses the item to remove if the table is full", default="fifo")
    remover_exponent: float = quantity(1.0, "of the priority", "exponent of a prioritized remover")
    max_times_sampled: int = whole(0, 0, _MAX, "number of samples after which an item is removed; 0 for no limit")
    rate_limiter: str = choice(
        "min_size ratio queue stack", "when sides wait; queue and stack set sampler, remover and max_times_sampled"
    )
    min_size: int = whole(1, 1, _MAX, "number of items that the table needs before sampling starts")
    samples_per_insert: float | None = quantity(None, "samples", "samples per insert; required by rate limiter ratio")
    error_buffer: Any = key(
        None,
        "a number, or an array [min_diff, max_diff]",
        "allowed deviation of inserts x samples_per_insert - samples; required by rate limiter ratio",
        types=(int, float, list),
    )
    sequence_length: int | None = whole(None, 1, _MAX, "number of steps of an item; for signature and memory estimate")
    stride_length: int = whole(1, 1, _MAX, "number of steps between the starts of two items; for the memory estimate")
    episode_length: int | None = whole(None, 1, _MAX, "number of steps of an episode; for the memory estimate")
    signature: Any = key(
        None,
        'a table of leaves such as obs = "uint8[84, 84, 4]"',
        "dtype and shape of each leaf of a step",
        types=(dict, list, str),
    )


@dataclass(frozen=True)
class ServedTable:
    """A table, and facts about its use."""

    config: TableConfig
    sequence_length: int | None = None  # steps of an item; None if unknown
    stride_length: int = 1  # steps between the starts of two items
    advice: tuple[str, ...] = ()  # warnings about its rules, a sentence each
    episode_length: int | None = None  # steps of an episode; None for long ones

    def estimate(self) -> Estimate:
        """Return its estimated memory when it is full."""
        return estimate(self.config, self.sequence_length, self.stride_length, self.episode_length)


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a server; if a name has several words, the first is its section."""

    port: int = whole(8000, 0, 65535, "port of the Reverb server; 0 for a free one", "--port")
    bind: str = choice("127.0.0.1 0.0.0.0", "address of this port; `0.0.0.0` needs a gateway or a firewall", "--bind")
    http_port: int = whole(0, 0, 65535, "port of health checks, metrics and status page; 0 for none", "--http-port")
    http_host: str = key("127.0.0.1", "an address of this machine", "address of `http.port`; `0.0.0.0` for all")
    http_max_silence_s: float = quantity(120.0, "seconds", "silence of Reverb that fails `/livez`; 0 for no limit")
    cluster_shards: int = whole(1, 1, 1000, "number of servers that are one replay and share its tables", "--shards")
    cluster_shard: int | None = whole(None, 0, 999, "number of this server among them, from 0", "--shard")
    gateway_certificate: _Path = path("PEM file with the gateway's certificate, whose end is a metric")
    checkpoints_directory: _Path = path("folder for checkpoints only; without one, no data are kept", "--checkpoints")
    checkpoints_every_s: float = quantity(600.0, "seconds", "time between checkpoints; 0 for no periodic ones")
    checkpoints_keep: int = whole(3, 1, 1000, "number of checkpoints to keep")
    checkpoints_safe_after: int = whole(
        1, 1, 1000, "number of checkpoints that must have an item before its writer releases it"
    )
    checkpoints_restore: str = key(
        "latest", '"latest", "none" or a name', "checkpoint to restore; `latest` is the newest sound one", "--restore"
    )
    checkpoints_on_mismatch: str = choice(
        "refuse checkpoint config", "whose tables are served if checkpoint and configuration differ", "--on-mismatch"
    )
    memory_alert_bytes: int = whole(0, 0, 2**62, "resident memory that causes a checkpoint and an alert; 0 for none")
    log_format: str = choice("text json", "format of the log", "--log-format")
    log_level: str = choice("debug info warning error", "lowest level; `debug` includes Reverb's log", default="info")
    log_figures_every_s: float = quantity(60.0, "seconds", "time between lines with the tables' figures; 0 for none")
    tables: tuple[ServedTable, ...] = ()


KEYS: dict[str, Key] = {
    **{one.name.replace("_", ".", 1): one.metadata["key"] for one in fields(ServerConfig) if one.metadata},
    **{f"tables.*.{one.name}": one.metadata["key"] for one in fields(TableKeys)},
}
"""All keys by name, such as "http.port" and "tables.*.max_size"."""


def load(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[tuple[str, ...], Any] | None = None,
    tables: Sequence[str] = (),
) -> ServerConfig:
    """Read the configuration from TOML, JSON or textproto of Reverb, the environment, and options by key.

    Tables that the command line names are served even if none of their keys is set.

    Raises:
        ConfigError: a value is not allowed, or a table would always block.
    """
    settings = Settings(KEYS)
    made: dict[str, TableConfig] = {}
    if file is not None:
        values, made = _read(file)
        settings.set((), values, str(file))
    settings.read_environment(environment)
    for at, value in [*((("tables", name), {}) for name in tables), *(flags or {}).items()]:
        settings.set(at, value, "command line")
    if twice := settings.tables.keys() & made.keys():
        raise ConfigError(f"{file}: table `{min(twice)}` cannot be changed elsewhere: textproto sets all its keys.")
    found = {
        name.replace(".", "_"): value for name, value in settings.values().items() if not name.startswith("tables.")
    }
    config = ServerConfig(**found)
    if config.checkpoints_safe_after > config.checkpoints_keep:
        origin, allowed = settings.origin("checkpoints", "safe_after"), f"at most `keep`, {config.checkpoints_keep}"
        raise ConfigError(
            f"{origin}: `checkpoints.safe_after`: got {config.checkpoints_safe_after}, allowed: {allowed}."
        )
    shards, shard, directory = config.cluster_shards, config.cluster_shard, config.checkpoints_directory
    if shards > 1 or shard:
        if shard is None or shard >= shards:
            origin = settings.origin("cluster", "shards" if shard is None else "shard")
            got = "nothing" if shard is None else shard
            allowed = f"0 to {shards - 1}, because `cluster.shards` is {shards}"
            raise ConfigError(f"{origin}: `cluster.shard`: got {got}, allowed: {allowed}.")
        directory = directory and directory / f"shard-{shard}"  # each server locks its own folder
    names = [*made, *settings.tables] or ["replay"]
    served = tuple(_served(settings, name, made.get(name), shard or 0, shards) for name in names)
    return replace(config, tables=served, checkpoints_directory=directory)


def _read(file: Path) -> tuple[dict[str, Any], dict[str, TableConfig]]:
    """Return the values of a file, or the tables of a file in Reverb's format."""
    form = "TOML"
    try:
        text = file.read_bytes().decode()
        if file.suffix in textproto.SUFFIXES:
            port, tables = textproto.parse(text, file)
            return {"port": port} if port else {}, {table.name: table for table in tables}
        if text.lstrip().startswith("{"):
            form = "JSON"
            return json.loads(text), {}
        return tomllib.loads(text), {}
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror}). Check the path and its permissions.") from error
    except (json.JSONDecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: is not valid {form}: {error}.") from error


def _served(settings: Settings, name: str, made: TableConfig | None, shard: int, shards: int) -> ServedTable:
    """Return the share of a table on one of several servers, with all warnings about it."""
    values = settings.values("tables", name)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = made or table_from_dict(name, values)
            if shards > 1:
                caught.clear()
                config = share_of(config, shard, shards)
    except TableKeyError as error:
        at = ("tables", name, error.key) if error.key in values else ("tables", name)
        raise ConfigError(f"{settings.origin(*at)}: `tables.{name}.{error.key}`: {error.fault}") from error
    except SpecError as error:
        raise ConfigError(f"{settings.origin('tables', name)}: `tables.{name}`: {error}") from error
    lengths = {key: values[key] for key in ("sequence_length", "stride_length", "episode_length") if key in values}
    return ServedTable(config, advice=tuple(dict.fromkeys(str(one.message) for one in caught)), **lengths)
