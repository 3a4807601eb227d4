"""A progress bar for work of more than a second, in terminals and notebooks."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator

_QUIET_S = 1.0


@contextlib.contextmanager
def progress(description: str, total: int | None = None) -> Iterator[Callable[..., None]]:
    """Show a bar on standard error after one second; no bar in pipes, or in notebooks without ipywidgets.

    Args:
        description: name of the work.
        total: number of parts; None if unknown.

    Yields:
        A function that counts one more part; the bar shows its argument `said`.
    """
    in_notebook = "ipykernel" in sys.modules and importlib.util.find_spec("ipywidgets") is not None
    if not in_notebook and not sys.stderr.isatty():
        yield lambda said="": None  # noqa: ARG005  # the same as below
        return

    from rich import progress as rich  # noqa: PLC0415  # as above
    from rich.console import Console  # noqa: PLC0415  # not loaded where no bar is shown

    counts = (rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[said]}")) if total is not None else ()
    times = rich.TimeElapsedColumn(), rich.TimeRemainingColumn()
    columns = rich.TextColumn("{task.description}"), rich.BarColumn(), *counts, *times
    bar = rich.Progress(*columns, console=Console(stderr=True))
    task = bar.add_task(description, total=total, said="")
    starting = threading.Timer(_QUIET_S, bar.start)
    starting.daemon = True
    starting.start()
    try:
        yield lambda said="": bar.update(task, advance=1, said=said)
    finally:
        starting.cancel()
        starting.join()  # so that the bar is not started after its end
        bar.refresh()  # in notebooks, `stop` does not
        bar.stop()
