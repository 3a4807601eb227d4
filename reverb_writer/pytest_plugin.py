"""What pytest loads by the package's entry point: an option and a setting, and `reverb_writer.testing` if asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__: list[str] = []

_HELP = "give tests the fixture `replay_server`, a reverb_writer.LocalServer"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--reverb-writer-server` and the setting `reverb_writer_server`."""
    parser.getgroup("reverb-writer").addoption("--reverb-writer-server", action="store_true", help=_HELP)
    parser.addini("reverb_writer_server", _HELP, type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Load the fixture if either asks for it."""
    if config.getoption("--reverb-writer-server") or config.getini("reverb_writer_server"):
        config.pluginmanager.import_plugin("reverb_writer.testing")
