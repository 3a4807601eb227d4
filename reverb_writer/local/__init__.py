"""A replay server inside this process, in pure Python; see docs/deploy/local-server.md."""

from __future__ import annotations

from reverb_writer.local.server import LocalServer

__all__ = ["LocalServer"]
