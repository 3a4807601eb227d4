"""`reverb-writer export`: write the items of a table to disk, of a server or of what one has saved."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import click

from reverb_writer.cli.server_options import connection_options, new_client, report_errors
from reverb_writer.cli.transfer import run_transfer
from reverb_writer.errors import SpecError
from reverb_writer.files.exporting import export_items, export_saved
from reverb_writer.files.rollout_writer import RolloutWriter
from reverb_writer.files.trajectory_file import list_trajectories


@click.command("export", short_help="Write the items of a table to disk.")
@click.option("--table", "-t", required=True, help="Table to read.")
@click.option(
    "--saved",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkpoint, folder of checkpoints, or save of a LocalServer to read, instead of a server.",
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@connection_options
def command(table: str, saved: Path | None, directory: Path, **connection: Any) -> None:
    """Write each item of a table to DIR as a separate trajectory; DIR is created if it does not exist.

    \b
    reverb-writer export --saved checkpoints --table replay backup
    reverb-writer export --table replay --address localhost:8000 backup
    reverb-writer import backup --table replay --whole-episodes --priority stored

    With --saved, each item of a checkpoint is read once; of a folder of checkpoints, that of the newest.

    A server cannot list a table, so its items are sampled until each one was sampled at least once. It takes several
    times as many samples as there are items, and these count for the rate limiter. The table keeps its items. So it
    must have a uniform or prioritized sampler, and no max_times_sampled; of other tables export a checkpoint.

    Ctrl-C ends the export after the current item. The same command continues it: it skips the items that DIR has.

    \b
    Exit codes:
      0    every item is on disk
      1    server or disk failed, or not all items were received; the same command continues
      2    wrong arguments, or a table that can only be read by removing its items
      3    all items except those named in the output, such as those whose columns have different lengths
      130  stopped by Ctrl-C or SIGTERM; the same command continues
    """  # noqa: D301  # \b is click's mark for lines to keep
    with report_errors(), RolloutWriter(directory) as writer, contextlib.ExitStack() as stack:
        if saved is not None:
            items = export_saved(saved, table, writer)
        else:
            items = export_items(stack.enter_context(new_client(**connection)), table, writer)
        try:
            result = run_transfer(items, "exporting", None)
        except SpecError as error:  # a table that cannot be read
            raise click.UsageError(str(error)) from error
        click.echo(
            f"{result.num_done} items, {result.num_steps} steps in {result.seconds:.1f} s "
            f"({result.num_done / result.seconds:,.0f} items/s); left out: {result.num_left_out}. "
            f"{directory} has {len(list_trajectories(directory))} trajectories."
        )
    raise SystemExit(result.exit_code)
