"""Configurations in Reverb's own format, `ReverbServerConfig` as text."""

from __future__ import annotations

from pathlib import Path

from google.protobuf import text_format

from reverb_writer.errors import SpecError
from reverb_writer.protocol import messages
from reverb_writer.tables import TableConfig, check_unique_names
from reverb_writer.tables.table_messages import read_table
from reverb_writer_server.config.keys import ConfigError

SUFFIXES = frozenset({".textproto", ".textpb", ".pbtxt", ".prototxt"})


def parse(text: str, path: Path) -> tuple[int, list[TableConfig]]:
    """Return the port, or 0 without one, and the tables of a file's text."""
    message = messages.ReverbServerConfig()
    try:
        text_format.Parse(text, message)
        check_unique_names([table.table_name for table in message.tables])
        tables = [read_table(table) for table in message.tables]
    except text_format.ParseError as error:
        raise ConfigError(f"{path}: line {error}. Allowed: a ReverbServerConfig of Reverb 0.14 as text.") from error
    except SpecError as error:
        raise ConfigError(f"{path}: {error}") from error
    if not tables:
        raise ConfigError(f"{path}: `tables`: got none, allowed: at least one.")
    return message.port, tables
