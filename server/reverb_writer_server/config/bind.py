"""The addresses that a server can accept connections on."""

from __future__ import annotations

LOOPBACK, ALL = "127.0.0.1", "0.0.0.0"  # noqa: S104  # the user says so
