"""The configuration of a server: tables, checkpoints, ports, log."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reverb_writer.errors import SpecError
from reverb_writer.tables import TableConfig
from reverb_writer.tables.table_dicts import TableKeyError, table_from_dict
from reverb_writer_server.config import rate_limiter_checks, textproto
from reverb_writer_server.config.bind import ALL, LOOPBACK
from reverb_writer_server.config.shares import shares_of
from reverb_writer_server.config.sources import ConfigError, Kind, Settings, boolean, choice, count, quantity, text

_SELECTORS = ("uniform", "fifo", "lifo", "max_heap", "min_heap", "prioritized")
_LIMITERS = ("min_size", "ratio", "queue", "stack")
_MAX_COUNT = 2**31 - 1
_PORT = count(0, 65535)
_PATH = text("a path")


@dataclass(frozen=True)
class Key:
    """One key of the configuration.

    Attributes:
        kind: the allowed values.
        default: the value if the key is not set; None if `meaning` describes it.
        meaning: a line for the manual, and for the help of its option.
        option: the option of `serve` that sets it; empty if there is none.
    """

    kind: Kind
    default: Any
    meaning: str
    option: str = ""


KEYS: Mapping[str, Key] = {
    "port": Key(_PORT, 8000, "port of the Reverb server; 0 for a free one", "--port"),
    "bind": Key(
        choice(LOOPBACK, ALL),
        LOOPBACK,
        "address that this port accepts connections on; `0.0.0.0` for all, which asks for a gateway or a firewall",
        "--bind",
    ),
    "http.port": Key(_PORT, 0, "port of health checks, metrics and status page; 0 for none", "--http-port"),
    "http.host": Key(
        text("an address of this machine"),
        "127.0.0.1",
        "address that this port listens on; `0.0.0.0` for all interfaces",
    ),
    "http.address_file": Key(
        _PATH, None, "file that gets the address of this port while it is served, for `docker/healthcheck`"
    ),
    "http.max_silence_s": Key(
        quantity("seconds"),
        120.0,
        "time without an answer of Reverb after which `/livez` fails, so that the server is restarted; 0 for no limit",
    ),
    "cluster.shards": Key(
        count(1, 1000),
        1,
        "number of servers with this file that are one replay: each serves its share of every table",
        "--shards",
    ),
    "cluster.shard": Key(count(0, 999), None, "number of this server among them, from 0", "--shard"),
    "gateway.certificate": Key(_PATH, None, "PEM file with the gateway's certificate, whose end is a metric"),
    "checkpoints.directory": Key(
        _PATH,
        None,
        "folder that holds checkpoints and nothing else; without one, data are lost when the server ends",
        "--checkpoints",
    ),
    "checkpoints.every_s": Key(quantity("seconds"), 600.0, "time between checkpoints; 0 for no periodic ones"),
    "checkpoints.keep": Key(count(1, 1000), 3, "number of checkpoints to keep"),
    "checkpoints.on_exit": Key(boolean, True, "whether a stop writes a last checkpoint"),
    "checkpoints.restore": Key(
        text('"latest", "none" or the name of a checkpoint'),
        "latest",
        "checkpoint to restore; `latest` is the newest complete one",
        "--restore",
    ),
    "checkpoints.on_mismatch": Key(
        choice("refuse", "checkpoint", "config"),
        "refuse",
        "whose tables are served if checkpoint and configuration differ",
        "--on-mismatch",
    ),
    "checkpoints.on_damage": Key(
        choice("older", "stop"),
        "older",
        "what to do if the newest checkpoint is damaged: restore the next older sound one, or stop",
        "--on-damage",
    ),
    "memory.on_excess": Key(
        choice("warn", "refuse"), "warn", "what to do if the tables may need more memory than the machine has"
    ),
    "memory.alert_bytes": Key(
        count(0, 2**62),
        0,
        "resident memory of the server above which it writes a checkpoint and an alert fires; 0 for none",
    ),
    "log.format": Key(choice("text", "json"), "text", "format of the log", "--log-format"),
    "log.level": Key(
        choice("debug", "info", "warning", "error"),
        "info",
        "lowest level that is logged; `debug` includes Reverb's log",
    ),
    "log.figures_every_s": Key(
        quantity("seconds"), 60.0, "time between log lines with the sizes and rates of tables; 0 for none"
    ),
    "tables.*.max_size": Key(count(1, _MAX_COUNT), 1_000_000, "maximum number of items"),
    "tables.*.sampler": Key(choice(*_SELECTORS), "uniform", "chooses the next item to sample"),
    "tables.*.sampler_exponent": Key(quantity("of the priority"), 1.0, "exponent of a prioritized sampler"),
    "tables.*.remover": Key(choice(*_SELECTORS), "fifo", "chooses the item to remove if the table is full"),
    "tables.*.remover_exponent": Key(quantity("of the priority"), 1.0, "exponent of a prioritized remover"),
    "tables.*.max_times_sampled": Key(
        count(0, _MAX_COUNT), 0, "number of samples after which an item is removed; 0 for no limit"
    ),
    "tables.*.rate_limiter": Key(
        choice(*_LIMITERS),
        "min_size",
        "when inserts and samples wait; queue and stack set sampler, remover and max_times_sampled",
    ),
    "tables.*.min_size": Key(count(1, _MAX_COUNT), 1, "number of items that the table needs before sampling starts"),
    "tables.*.samples_per_insert": Key(
        quantity("samples"), None, "number of samples per insert; required by rate limiter ratio"
    ),
    "tables.*.error_buffer": Key(
        Kind("a number, or an array [min_diff, max_diff]", (int, float, list)),
        None,
        "allowed deviation of inserts x samples_per_insert - samples; required by rate limiter ratio",
    ),
    "tables.*.samples_in_flight": Key(
        count(0, _MAX_COUNT),
        0,
        "number of samples that a learner fetches before its actor goes on; used to check the rate limiter",
    ),
    "tables.*.sequence_length": Key(
        count(1, _MAX_COUNT), None, "number of steps of an item; for signature and memory estimate"
    ),
    "tables.*.stride_length": Key(
        count(1, _MAX_COUNT), 1, "number of steps between the starts of two items; for the memory estimate"
    ),
    "tables.*.episode_length": Key(
        count(1, _MAX_COUNT), None, "number of steps of an episode, for the memory estimate; long ones if it is not set"
    ),
    "tables.*.signature": Key(
        Kind('a table of leaves such as obs = "uint8[84, 84, 4]"', (dict, list, str)),
        None,
        "dtype and shape of each leaf of a step",
    ),
}


@dataclass(frozen=True)
class ServedTable:
    """A table, and how it is used.

    Attributes:
        config: the table.
        sequence_length: number of steps of an item; None if unknown.
        stride_length: number of steps between the starts of two items.
        episode_length: number of steps of an episode; None for long ones.
        advice: warnings about its rules, a sentence each.
    """

    config: TableConfig
    sequence_length: int | None = None
    stride_length: int = 1
    advice: tuple[str, ...] = ()
    episode_length: int | None = None


@dataclass(frozen=True)
class CheckpointConfig:
    """The keys under `checkpoints`; see `KEYS`."""

    directory: Path | None
    every_s: float
    keep: int
    on_exit: bool
    restore: str
    on_mismatch: str
    on_damage: str


@dataclass(frozen=True)
class ServerConfig:
    """All keys of `KEYS`, with `_` in place of `.`."""

    port: int
    bind: str
    http_host: str
    http_port: int
    http_address_file: Path | None
    http_max_silence_s: float
    cluster_shards: int
    cluster_shard: int | None
    gateway_certificate: Path | None
    checkpoints: CheckpointConfig
    memory_on_excess: str
    memory_alert_bytes: int
    log_format: str
    log_level: str
    log_figures_every_s: float
    tables: tuple[ServedTable, ...]


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
    settings = Settings({name: key.kind for name, key in KEYS.items()})
    given: tuple[ServedTable, ...] = ()
    if path is not None and path.suffix in textproto.SUFFIXES:
        port, read = textproto.read(path)
        given = tuple(ServedTable(table, advice=tuple(rate_limiter_checks.advice(table))) for table in read)
        if port:
            settings.set(("port",), port, str(path))
    elif path is not None:
        settings.read_file(path)
    settings.read_environment(environment)
    for name in tables:
        settings.declare(("tables", name), "command line")
    for key, flag in (flags or {}).items():
        settings.set(key, flag, "command line")
    named = tuple(_table(settings, name) for name in settings.names("tables"))
    twice = {table.config.name for table in given} & {table.config.name for table in named}
    if twice:
        raise ConfigError(
            f"{path}: table `{min(twice)}` cannot be changed by other settings: textproto sets all of it."
        )

    values = {name: _value(settings, name) for name in KEYS if "*" not in name}
    shards, shard, folder = values["cluster.shards"], values["cluster.shard"], values["checkpoints.directory"]
    served = shares_of(settings, given + named or (ServedTable(TableConfig("replay")),), shards, shard)
    if folder is not None and shards > 1:
        values["checkpoints.directory"] = folder / f"shard-{shard}"  # each server locks its own
    of_checkpoints = {name: one for name, one in values.items() if name.startswith("checkpoints.")}
    return ServerConfig(
        **{name.replace(".", "_"): one for name, one in values.items() if name not in of_checkpoints},
        checkpoints=CheckpointConfig(**{name.partition(".")[2]: one for name, one in of_checkpoints.items()}),
        tables=served,
    )


def _value(settings: Settings, name: str) -> Any:
    key = KEYS[name]
    found = settings.get(*name.split("."), default=key.default)
    if key.kind is _PATH:
        return Path(found) if found else None
    return found


def _table(settings: Settings, name: str) -> ServedTable:
    values = {key: settings.get("tables", name, key) for key in settings.names("tables", name)}
    origin = settings.origin("tables", name)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            config = table_from_dict(name, values)
        rate_limiter_checks.check(config, values.get("samples_in_flight", 0))
    except TableKeyError as error:
        origin = settings.origin("tables", name, error.key) if error.key in values else origin
        raise ConfigError(f"{origin}: `tables.{name}.{error.key}`: {error.fault}") from error
    except SpecError as error:
        raise ConfigError(f"{origin}: `tables.{name}`: {error}") from error
    advice = (*(str(warning.message) for warning in caught), *rate_limiter_checks.advice(config))
    stride = values.get("stride_length", ServedTable.stride_length)
    return ServedTable(config, values.get("sequence_length"), stride, advice, values.get("episode_length"))
