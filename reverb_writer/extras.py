"""Packages that the client can do without: where one is missing, the error says what installs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from reverb_writer.errors import MissingExtraError

__all__ = ["needs"]


@contextlib.contextmanager
def needs(what: str, install: str) -> Iterator[None]:
    """Say what to install where an import within the block finds no module.

    Args:
        what: what cannot go on without it.
        install: what `pip install` brings it, such as "reverb-writer[torch]".

    Raises:
        MissingExtraError: a module is missing; names it.
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs `{error.name}`, which is not installed: pip install '{install}'", name=error.name
        ) from error
