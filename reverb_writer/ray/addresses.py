"""The addresses of a shard's servers: numbered files beside its checkpoints. The highest number counts. Pure.

FOLDER/00000007.json   the file of the seventh server, which writes its address and state every second
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
    """The content of a server's file; empty if the file has just been created."""

    number: int  # number of the server, higher than the numbers of all earlier servers
    address: str = ""  # `host:port`; empty before it serves
    phase: str = "starting"  # the phase of the server's status page; "ended" at its end
    machine: str = ""  # id of its machine's boot
    pid: int = 0  # process id of the server on this machine
    beat: int = 0  # number of writes of the file


def path_of(folder: Path, number: int) -> Path:
    """Return the file of this number."""
    return folder / f"{number:08d}.json"


def numbers_in(folder: Path) -> list[int]:
    """Return the numbers that servers have taken, in order; raise OSError if the folder cannot be read."""
    return sorted(int(path.stem) for path in folder.iterdir() if _NAME.fullmatch(path.name))


def read_claim(folder: Path, number: int) -> Claim:
    """Return the content of a server's file; raise OSError if it is unreadable, or removed for a newer one."""
    try:
        found: Any = json.loads(path_of(folder, number).read_bytes())
        return Claim(number, **found)
    except (ValueError, TypeError):  # created and not written yet
        return Claim(number)


def newest_claim(folder: Path | None) -> Claim | None:
    """Return the claim of the highest number; None if none exists or the folder cannot be read."""
    try:
        numbers = [] if folder is None else numbers_in(folder)
        return read_claim(folder, numbers[-1]) if folder is not None and numbers else None
    except OSError:
        return None
