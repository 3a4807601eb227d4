"""The configuration of a server: tables, checkpoints, ports, log. Each field is a key; its section is a class."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from reverb_writer.errors import SpecError
from reverb_writer.tables import TableConfig
from reverb_writer.tables.shares import share_of
from reverb_writer.tables.table_dicts import TableKeyError, table_from_dict
from reverb_writer.writing.memory_estimate import Estimate, estimate
from reverb_writer_server.config import textproto
from reverb_writer_server.config.keys import ConfigError, Settings, choice, key, keys_of, path, quantity, whole

_MAX = 2**31 - 1
_Path: TypeAlias = Path | None
_SELECTORS = "uniform fifo lifo max_heap min_heap prioritized"


@dataclass(frozen=True)
class HttpConfig:
    """Health checks, metrics and status page."""

    port: int = whole(0, 0, 65535, "port of health checks, metrics and status page; 0 for none", "--http-port")
    host: str = key(
        "127.0.0.1", "an address of this machine", "address that this port listens on; `0.0.0.0` for all interfaces"
    )
    max_silence_s: float = quantity(
        120.0, "seconds", "time without an answer of Reverb after which `/livez` fails; 0 for no limit"
    )


@dataclass(frozen=True)
class ClusterConfig:
    """Several servers that are one replay."""

    shards: int = whole(
        1, 1, 1000, "number of servers that are one replay, each of which serves its share of every table", "--shards"
    )
    shard: int | None = whole(None, 0, 999, "number of this server among them, from 0", "--shard")


@dataclass(frozen=True)
class GatewayConfig:
    """The gateway in front of the server."""

    certificate: _Path = path("PEM file with the gateway's certificate, whose end is a metric")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and restoring."""

    directory: _Path = path(
        "folder that holds checkpoints and nothing else; without one, data are lost when the server ends",
        "--checkpoints",
    )
    every_s: float = quantity(600.0, "seconds", "time between checkpoints; 0 for no periodic ones")
    keep: int = whole(3, 1, 1000, "number of checkpoints to keep")
    restore: str = key(
        "latest", '"latest", "none" or a name', "checkpoint to restore; `latest` is the newest sound one", "--restore"
    )
    on_mismatch: str = choice(
        "refuse checkpoint config", "whose tables are served if checkpoint and configuration differ", "--on-mismatch"
    )


@dataclass(frozen=True)
class MemoryConfig:
    """Behaviour if memory becomes scarce."""

    alert_bytes: int = whole(
        0, 0, 2**62, "resident memory of the server above which it writes a checkpoint and an alert fires; 0 for none"
    )


@dataclass(frozen=True)
class LogConfig:
    """The log."""

    format: str = choice("text json", "format of the log", "--log-format")
    level: str = choice(
        "debug info warning error", "lowest level that is logged; `debug` includes Reverb's log", default="info"
    )
    figures_every_s: float = quantity(
        60.0, "seconds", "time between log lines with the sizes and rates of tables; 0 for none"
    )


@dataclass(frozen=True)
class TableKeys:
    """The keys of a table. `table_from_dict` makes its rules of it, where a key that is not set counts."""

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
    samples_per_insert: float | None = quantity(
        None, "samples", "number of samples per insert; required by rate limiter ratio"
    )
    error_buffer: Any = key(
        None,
        "a number, or an array [min_diff, max_diff]",
        "allowed deviation of inserts x samples_per_insert - samples; required by rate limiter ratio",
        types=(int, float, list),
    )
    sequence_length: int | None = whole(None, 1, _MAX, "number of steps of an item; for signature and memory estimate")
    stride_length: int = whole(1, 1, _MAX, "number of steps between the starts of two items; for the memory estimate")
    episode_length: int | None = whole(
        None, 1, _MAX, "number of steps of an episode, for the memory estimate; long ones if it is not set"
    )
    signature: Any = key(
        None,
        'a table of leaves such as obs = "uint8[84, 84, 4]"',
        "dtype and shape of each leaf of a step",
        types=(dict, list, str),
    )


@dataclass(frozen=True)
class ServedTable:
    """A table, and how it is used."""

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
    """The configuration of a server."""

    port: int = whole(8000, 0, 65535, "port of the Reverb server; 0 for a free one", "--port")
    bind: str = choice(
        "127.0.0.1 0.0.0.0", "address of this port; `0.0.0.0` for all, which asks for a gateway or a firewall", "--bind"
    )
    http: HttpConfig = HttpConfig()
    cluster: ClusterConfig = ClusterConfig()
    gateway: GatewayConfig = GatewayConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    memory: MemoryConfig = MemoryConfig()
    log: LogConfig = LogConfig()
    tables: tuple[ServedTable, ...] = field(default=(), metadata={"each": TableKeys})


KEYS = keys_of(ServerConfig)
"""All keys by name, such as "http.port" and "tables.*.max_size"."""


def load(
    file: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[tuple[str, ...], Any] | None = None,
    tables: Sequence[str] = (),
) -> ServerConfig:
    """Read the configuration from TOML, JSON or textproto of Reverb, the environment, and options by key.

    Tables that the command line names are served even if nothing sets a key of theirs.

    Raises:
        ConfigError: a value is not allowed, or a table would always block.
    """
    settings = Settings(KEYS)
    given: list[TableConfig] = []
    if file is not None and file.suffix in textproto.SUFFIXES:
        port, given = textproto.read(file)
        if port:
            settings.set(("port",), port, str(file))
    elif file is not None:
        settings.read_file(file)
    settings.read_environment(environment)
    for at, value in [*((("tables", name), {}) for name in tables), *(flags or {}).items()]:
        settings.set(at, value, "command line")
    named = settings.values("tables")
    if twice := named.keys() & {table.name for table in given}:
        raise ConfigError(
            f"{file}: table `{min(twice)}` cannot be changed by other settings: textproto sets all of it."
        )
    config = settings.make(ServerConfig)
    served = [ServedTable(table) for table in given] + [_table(settings, name) for name in named]
    shards, shard = config.cluster.shards, config.cluster.shard
    checkpoints = config.checkpoints
    if shards > 1 or shard:
        if shard is None or shard >= shards:
            got = "nothing" if shard is None else shard
            raise ConfigError(
                f"{settings.origin('cluster', 'shards' if shard is None else 'shard')}: `cluster.shard`: got {got}, "
                f"allowed: 0 to {shards - 1}, for `cluster.shards` is {shards}."
            )
        if checkpoints.directory is not None:  # each locks its own
            checkpoints = replace(checkpoints, directory=checkpoints.directory / f"shard-{shard}")
    served = [_share(settings, table, shard or 0, shards) for table in served or [ServedTable(TableConfig("replay"))]]
    return replace(config, tables=tuple(served), checkpoints=checkpoints)


def _table(settings: Settings, name: str) -> ServedTable:
    values, keys = settings.values("tables", name), settings.make(TableKeys, "tables", name)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = table_from_dict(name, values)
    except TableKeyError as error:
        at = ("tables", name, error.key) if error.key in values else ("tables", name)
        raise ConfigError(f"{settings.origin(*at)}: `tables.{name}.{error.key}`: {error.fault}") from error
    except SpecError as error:
        raise ConfigError(f"{settings.origin('tables', name)}: `tables.{name}`: {error}") from error
    warned = tuple(str(warning.message) for warning in caught)
    return ServedTable(config, keys.sequence_length, keys.stride_length, warned, keys.episode_length)


def _share(settings: Settings, table: ServedTable, shard: int, shards: int) -> ServedTable:
    """Return what one of several servers serves of a table, with all warnings about it."""
    config, name = table.config, table.config.name
    warned = table.advice
    if shards > 1:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                config = share_of(table.config, shard, shards)
        except SpecError as error:
            raise ConfigError(f"{settings.origin('tables', name)}: `cluster.shards` = {shards}: {error}") from error
        warned = tuple(dict.fromkeys(str(warning.message) for warning in caught))
    return replace(table, config=config, advice=(*warned, *_advice(config)))


def _advice(table: TableConfig) -> list[str]:
    """Return what to know of a ratio that `max_times_sampled` makes unreachable."""
    balance, times = table.rate_limiter.balance, table.max_times_sampled
    if not times or not math.isfinite(balance.max_diff) or balance.samples_per_insert <= times:
        return []
    grows, most = balance.samples_per_insert - times, math.ceil(balance.samples_per_insert)
    sentence = (
        f"table `{table.name}`: samples_per_insert {balance.samples_per_insert:g} cannot be reached, because an "
        f"item is removed after {times} samples: each insert raises diff by {grows:g} for good. After "
        f"{math.floor(balance.max_diff / grows)} inserts the limiter blocks inserts that would take the table above "
        f"min_size {balance.min_size}. Raise max_times_sampled to {most}."
    )
    return [sentence]
