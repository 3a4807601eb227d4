"""The server is not installed on every interpreter."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("reverb_writer_server") else ["test_*.py"]
