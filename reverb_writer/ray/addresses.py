"""Where the servers of a shard are: numbered files beside its checkpoints, of which the highest counts. Pure.

FOLDER/00000007.json   the seventh server's: it writes where it is and how it fares every second
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = re.compile(r"\d{8,}\.json")


@dataclass(frozen=True)
class Claim:
    """The content of a server's file; empty where the file has just been created."""

    number: int  # of the server: higher than that of each one before it
    address: str = ""  # `host:port`
    phase: str = "starting"  # as on the server's status page; "ended" when it has ended
    machine: str = ""  # id of the boot of its machine
    pid: int = 0  # of the server there
    beat: int = 0  # how often the file was written


def path_of(folder: Path, number: int) -> Path:
    """Return the file of that number."""
    return folder / f"{number:08d}.json"


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers that servers have taken, in order; OSError if the folder cannot be read."""
    return sorted(int(path.stem) for path in folder.iterdir() if _NAME.fullmatch(path.name))


def read_claim(folder: Path, number: int) -> Claim:
    """Return what a server's file says; OSError if it cannot be read, or was removed because a newer one exists."""
    try:
        found: Any = json.loads(path_of(folder, number).read_bytes())
        return Claim(number, **found)
    except (ValueError, TypeError):  # created and not written yet
        return Claim(number)


def newest_claim(folder: Path | None) -> Claim | None:
    """Return the claim of the highest number; None if there is none, or the folder cannot be read."""
    try:
        numbers = [] if folder is None else numbers_in(folder)
        return read_claim(folder, numbers[-1]) if folder is not None and numbers else None
    except OSError:
        return None
