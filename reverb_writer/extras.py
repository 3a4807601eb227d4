"""Optional packages: if one is missing, the error says how to install it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from reverb_writer.errors import MissingExtraError


@contextlib.contextmanager
def needs(what: str, install: str) -> Iterator[None]:
    """Turn a failed import in the block into an error that says what to install.

    `what` is the feature that needs it, `install` the argument of `pip install`, such as "reverb-writer[torch]".
    """
    try:
        yield
    except MissingExtraError:
        raise
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"{what} needs `{error.name}`, which is not installed: pip install '{install}'", name=error.name
        ) from error
