"""The journal of an import: names of delivered trajectories, so that a stopped import can continue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reverb_writer.errors import SpecError


class Journal:
    """A file of JSON lines: first the purpose of the import, then the names of confirmed trajectories.

    Attributes:
        path: the file.
        done: names of the trajectories that were delivered.
    """

    def __init__(self, path: Path, purpose: Mapping[str, Any]) -> None:
        """Read the file if it exists.

        Raises:
            SpecError: the file belongs to another import.
            OSError: it cannot be read.
        """
        self.path = path
        self._purpose = dict(purpose)
        self.done: set[str] = set()
        lines = path.read_text("utf-8").splitlines() if path.exists() else []
        if not lines:
            return
        found = json.loads(lines[0])
        if found != self._purpose:
            raise SpecError(
                f"journal {path} belongs to another import: it has {found}, expected {self._purpose}. "
                "Name another file."
            )
        for line in lines[1:]:
            try:
                self.done.add(json.loads(line))
            except ValueError:  # the last line, if the process was killed while it wrote
                break

    def add(self, names: Iterable[str]) -> None:
        """Add the names of delivered trajectories."""
        names = list(names)
        is_new = not self.path.exists()
        with self.path.open("a", encoding="utf-8") as file:
            if is_new:
                file.write(json.dumps(self._purpose) + "\n")
            file.writelines(json.dumps(name) + "\n" for name in names)
        self.done.update(names)
