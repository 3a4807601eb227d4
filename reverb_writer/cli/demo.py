"""`reverb-writer demo`: a server, actors and a learner on CartPole, live in this terminal."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import click

_PACKAGE = Path(__file__).parents[1]
# A wheel holds the scripts beside the package's modules; a working copy has them in `examples`.
_FOLDERS = (_PACKAGE / "demo", _PACKAGE.parent / "examples")


@click.command("demo", context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Run server, actors and a learner on CartPole, live in the terminal; `--help` lists its options."""
    if not importlib.util.find_spec("gymnasium"):
        raise click.ClickException("the demo needs gymnasium: pip install 'reverb-writer[demo]'")
    script = next((folder / "demo.py" for folder in _FOLDERS if (folder / "demo.py").exists()), None)
    if script is None:
        raise click.ClickException("the demo's scripts are not installed: reinstall reverb-writer from a wheel")
    process = subprocess.Popen([sys.executable, str(script), *arguments])  # noqa: S603  # our own script
    while True:
        try:
            sys.exit(process.wait())
        except KeyboardInterrupt:  # Ctrl-C reaches the demo, too, which ends in order
            continue
