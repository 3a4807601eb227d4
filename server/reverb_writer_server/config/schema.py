"""The configuration of a server: tables, checkpoints, ports, log. Each field is a key; its section is a class."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from reverb_writer.errors import SpecError
from reverb_writer.tables import TableConfig
from reverb_writer.tables.table_dicts import TableKeyError, table_from_dict
from reverb_writer_server.config import textproto
from reverb_writer_server.config.advice import advice
from reverb_writer_server.config.keys import PATH, Key, Kind, by_dotted_name, count, key, keys_of, quantity
from reverb_writer_server.config.shares import shares_of
from reverb_writer_server.config.sources import ConfigError, Settings

_MAX_COUNT = 2**31 - 1
_Selector: TypeAlias = Literal["uniform", "fifo", "lifo", "max_heap", "min_heap", "prioritized"]
_Port: TypeAlias = Annotated[int, count(0, 65535)]
_Path: TypeAlias = Annotated[Path | None, PATH]
_Seconds: TypeAlias = Annotated[float, quantity("seconds")]
_Priority: TypeAlias = Annotated[float, quantity("of the priority")]
_AtLeast0: TypeAlias = Annotated[int, count(0, _MAX_COUNT)]
_AtLeast1: TypeAlias = Annotated[int, count(1, _MAX_COUNT)]
_Length: TypeAlias = Annotated[int | None, count(1, _MAX_COUNT)]


@dataclass(frozen=True)
class HttpConfig:
    """Health checks, metrics and status page."""

    port: _Port = key(0, "port of health checks, metrics and status page; 0 for none", "--http-port")
    host: Annotated[str, Kind("an address of this machine")] = key(
        "127.0.0.1", "address that this port listens on; `0.0.0.0` for all interfaces"
    )
    address_file: _Path = key(
        None, "file that gets the address of this port while it is served, for `docker/healthcheck`"
    )
    max_silence_s: _Seconds = key(
        120.0,
        "time without an answer of Reverb after which `/livez` fails, so that the server is restarted; 0 for no limit",
    )


@dataclass(frozen=True)
class ClusterConfig:
    """Several servers that are one replay."""

    shards: Annotated[int, count(1, 1000)] = key(
        1, "number of servers with this file that are one replay: each serves its share of every table", "--shards"
    )
    shard: Annotated[int | None, count(0, 999)] = key(None, "number of this server among them, from 0", "--shard")


@dataclass(frozen=True)
class GatewayConfig:
    """What stands in front of the server."""

    certificate: _Path = key(None, "PEM file with the gateway's certificate, whose end is a metric")


@dataclass(frozen=True)
class CheckpointConfig:
    """What is saved and restored."""

    directory: _Path = key(
        None,
        "folder that holds checkpoints and nothing else; without one, data are lost when the server ends",
        "--checkpoints",
    )
    every_s: _Seconds = key(600.0, "time between checkpoints; 0 for no periodic ones")
    keep: Annotated[int, count(1, 1000)] = key(3, "number of checkpoints to keep")
    restore: Annotated[str, Kind('"latest", "none" or the name of a checkpoint')] = key(
        "latest", "checkpoint to restore; `latest` is the newest complete one", "--restore"
    )
    on_mismatch: Literal["refuse", "checkpoint", "config"] = key(
        "refuse", "whose tables are served if checkpoint and configuration differ", "--on-mismatch"
    )


@dataclass(frozen=True)
class MemoryConfig:
    """What happens if memory becomes scarce."""

    alert_bytes: Annotated[int, count(0, 2**62)] = key(
        0, "resident memory of the server above which it writes a checkpoint and an alert fires; 0 for none"
    )


@dataclass(frozen=True)
class LogConfig:
    """What is logged."""

    format: Literal["text", "json"] = key("text", "format of the log", "--log-format")
    level: Literal["debug", "info", "warning", "error"] = key(
        "info", "lowest level that is logged; `debug` includes Reverb's log"
    )
    figures_every_s: _Seconds = key(60.0, "time between log lines with the sizes and rates of tables; 0 for none")


@dataclass(frozen=True)
class TableKeys:
    """What can be set of a table. `table_from_dict` makes its rules of it, where a key that is not set counts."""

    max_size: _AtLeast1 = key(1_000_000, "maximum number of items")
    sampler: _Selector = key("uniform", "chooses the next item to sample")
    sampler_exponent: _Priority = key(1.0, "exponent of a prioritized sampler")
    remover: _Selector = key("fifo", "chooses the item to remove if the table is full")
    remover_exponent: _Priority = key(1.0, "exponent of a prioritized remover")
    max_times_sampled: _AtLeast0 = key(0, "number of samples after which an item is removed; 0 for no limit")
    rate_limiter: Literal["min_size", "ratio", "queue", "stack"] = key(
        "min_size", "when inserts and samples wait; queue and stack set sampler, remover and max_times_sampled"
    )
    min_size: _AtLeast1 = key(1, "number of items that the table needs before sampling starts")
    samples_per_insert: Annotated[float | None, quantity("samples")] = key(
        None, "number of samples per insert; required by rate limiter ratio"
    )
    error_buffer: Annotated[Any, Kind("a number, or an array [min_diff, max_diff]", (int, float, list))] = key(
        None, "allowed deviation of inserts x samples_per_insert - samples; required by rate limiter ratio"
    )
    sequence_length: _Length = key(None, "number of steps of an item; for signature and memory estimate")
    stride_length: _AtLeast1 = key(1, "number of steps between the starts of two items; for the memory estimate")
    episode_length: _Length = key(
        None, "number of steps of an episode, for the memory estimate; long ones if it is not set"
    )
    signature: Annotated[Any, Kind('a table of leaves such as obs = "uint8[84, 84, 4]"', (dict, list, str))] = key(
        None, "dtype and shape of each leaf of a step"
    )


@dataclass(frozen=True)
class ServedTable:
    """A table, and how it is used.

    Attributes:
        config: the table.
        sequence_length: number of steps of an item; None if unknown.
        stride_length: number of steps between the starts of two items.
        advice: warnings about its rules, a sentence each.
        episode_length: number of steps of an episode; None for long ones.
    """

    config: TableConfig
    sequence_length: int | None = None
    stride_length: int = 1
    advice: tuple[str, ...] = ()
    episode_length: int | None = None


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of a server."""

    port: _Port = key(8000, "port of the Reverb server; 0 for a free one", "--port")
    bind: Literal["127.0.0.1", "0.0.0.0"] = key(  # noqa: S104  # the user says so
        "127.0.0.1",
        "address that this port accepts connections on; `0.0.0.0` for all, which asks for a gateway or a firewall",
        "--bind",
    )
    http: HttpConfig = HttpConfig()
    cluster: ClusterConfig = ClusterConfig()
    gateway: GatewayConfig = GatewayConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    memory: MemoryConfig = MemoryConfig()
    log: LogConfig = LogConfig()
    tables: tuple[ServedTable, ...] = field(default=(), metadata={"each": TableKeys})


KEYS: Mapping[str, Key] = dict(by_dotted_name(keys_of(ServerConfig)))
"""All keys by name, such as "http.port" and "tables.*.max_size"."""


def load(
    path: Path | None,
    environment: Mapping[str, str],
    flags: Mapping[tuple[str, ...], Any] | None = None,
    tables: Sequence[str] = (),
) -> ServerConfig:
    """Read the configuration.

    Args:
        path: a TOML file, or a textproto file of Reverb (`.textproto`, `.pbtxt`, `.textpb`); None for no file.
        environment: environment variables, such as `os.environ`.
        flags: command line options by key, such as `("tables", "replay", "max_size")`.
        tables: names of tables on the command line, which are served even if nothing sets a key of theirs.

    Raises:
        ConfigError: a value is not allowed, or a table would always block; the message names its origin, the key, the
                value and what is allowed.
    """
    settings = Settings(keys_of(ServerConfig))
    given: tuple[ServedTable, ...] = ()
    if path is not None and path.suffix in textproto.SUFFIXES:
        port, read = textproto.read(path)
        given = tuple(ServedTable(table, advice=tuple(advice(table))) for table in read)
        if port:
            settings.set(("port",), port, str(path))
    elif path is not None:
        settings.read_file(path)
    settings.read_environment(environment)
    for name in tables:
        settings.set(("tables", name), {}, "command line")
    for one, flag in (flags or {}).items():
        settings.set(one, flag, "command line")
    named = tuple(_table(settings, name) for name in settings.values("tables"))
    twice = {table.config.name for table in given} & {table.config.name for table in named}
    if twice:
        raise ConfigError(
            f"{path}: table `{min(twice)}` cannot be changed by other settings: textproto sets all of it."
        )
    config = settings.make(ServerConfig)
    served = given + named or (ServedTable(TableConfig("replay")),)
    shards, shard, checkpoints = config.cluster.shards, config.cluster.shard, config.checkpoints
    if checkpoints.directory is not None and shards > 1:
        checkpoints = replace(checkpoints, directory=checkpoints.directory / f"shard-{shard}")  # each locks its own
    return replace(config, tables=shares_of(settings, served, shards, shard), checkpoints=checkpoints)


def _table(settings: Settings, name: str) -> ServedTable:
    values, keys = settings.values("tables", name), settings.make(TableKeys, "tables", name)
    origin = settings.origin("tables", name)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = table_from_dict(name, values)
    except TableKeyError as error:
        origin = settings.origin("tables", name, error.key) if error.key in values else origin
        raise ConfigError(f"{origin}: `tables.{name}.{error.key}`: {error.fault}") from error
    except SpecError as error:
        raise ConfigError(f"{origin}: `tables.{name}`: {error}") from error
    warned = (*(str(warning.message) for warning in caught), *advice(config))
    return ServedTable(config, keys.sequence_length, keys.stride_length, warned, keys.episode_length)
