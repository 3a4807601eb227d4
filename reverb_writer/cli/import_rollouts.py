"""`reverb-writer import`: write trajectories on disk to a server's tables, in the same windows as an observer."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import click

from reverb_writer.cli.server_options import connection_options, new_client, report_errors
from reverb_writer.cli.transfer import run_transfer
from reverb_writer.client.client import Client, only_server
from reverb_writer.files.importing import Journal, import_trajectories
from reverb_writer.files.trajectory_file import list_trajectories
from reverb_writer.windows import EndOfEpisode
from reverb_writer.writing.observers import EpisodeObserver, TrajectoryObserver

_WHOLE = (1 << 31) - 1


@click.command("import", short_help="Write trajectories on disk to a table.")
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR")
@click.option(
    "--table",
    "-t",
    "tables",
    multiple=True,
    required=True,
    help="Table to write to; repeat it to write the same items to several.",
)
@click.option("--sequence-length", "-l", type=click.IntRange(min=1), help="Number of steps in a window.")
@click.option(
    "--stride-length",
    "-s",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Number of steps between the starts of two windows.",
)
@click.option(
    "--end-of-episode",
    type=click.Choice([mode.value for mode in EndOfEpisode]),
    default="drop",
    show_default=True,
    help="How the last steps of an episode are written.",
)
@click.option("--whole-episodes", is_flag=True, help="Write each trajectory as one item, instead of windows.")
@click.option("--mask", is_flag=True, help="Write a column that marks real steps, in contrast to padding.")
@click.option(
    "--priority",
    default="1.0",
    show_default=True,
    help="Priority of all items; `stored`, with --whole-episodes: the exported ones.",
)
@click.option(
    "--journal",
    "journal_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File that records what is delivered.",
)
@click.option("--again", is_flag=True, help="Send everything again, without a journal.")
@connection_options
def command(
    directory: Path,
    tables: tuple[str, ...],
    sequence_length: int | None,
    stride_length: int,
    end_of_episode: str,
    whole_episodes: bool,
    mask: bool,
    priority: str,
    journal_path: Path | None,
    again: bool,
    **connection: Any,
) -> None:
    """Write the trajectories in DIR to a table, in the same windows as an observer.

    \b
    reverb-writer import rollouts --table replay --sequence-length 20 --stride-length 10
    reverb-writer import rollouts --table episodes --whole-episodes

    Ctrl-C ends the import after the current trajectory; the same command continues it. A hidden journal in DIR records
    what was delivered, for each server process, table and kind of window; after a restart of the server everything is
    sent again. A journal named by --journal is valid for any server.

    Damaged and incomplete trajectories are skipped and named.

    \b
    Exit codes:
      0    everything is on the server
      1    server or disk failed; the same command continues
      2    wrong arguments
      3    everything except the damaged trajectories, which are named
      130  stopped by Ctrl-C or SIGTERM; the same command continues
    """  # noqa: D301  # \b is click's mark for lines to keep
    if whole_episodes == (sequence_length is not None):
        raise click.UsageError("Give either --sequence-length or --whole-episodes.")
    context = click.get_current_context()
    for name in ("stride_length", "end_of_episode", "mask"):
        if whole_episodes and context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name.replace('_', '-')} is for windows. Leave it out with --whole-episodes.")
    if priority == "stored" and not whole_episodes:
        raise click.UsageError("--priority stored needs --whole-episodes: windows have no stored priorities.")
    windows: dict[str, Any] = {"whole_episodes": True}
    if sequence_length is not None:
        windows = {"length": sequence_length, "stride": stride_length, "end_of_episode": end_of_episode, "mask": mask}
    with report_errors(), new_client(**connection) as client:
        observer: Any
        if sequence_length is None:
            observer = EpisodeObserver(client, tables, _WHOLE, _number(priority))
        else:
            observer = TrajectoryObserver(
                client,
                tables,
                sequence_length,
                stride_length,
                _number(priority),
                end_of_episode=end_of_episode,
                mask=mask,
            )
        purpose = {"tables": list(tables), **windows}
        journal = None if again else _journal(client, directory, journal_path, purpose)
        with observer:
            code = _run(directory, observer, journal, stored=priority == "stored")
    raise SystemExit(code)


def _run(directory: Path, observer: Any, journal: Journal | None, *, stored: bool) -> int:
    def take_priority(trajectory: Any) -> None:
        observer.update_priority(float(trajectory.manifest.metadata.get("priority", 1.0)))

    paths = list_trajectories(directory)
    todo = [path for path in paths if journal is None or journal.name_of(path) not in journal.done]
    before = take_priority if stored else None
    transfer = import_trajectories(todo, observer, journal=journal, before=before)
    result = run_transfer(transfer, "importing", len(todo))
    num_items = observer.stats().items
    click.echo(
        f"{result.num_done} trajectories, {result.num_steps} steps, {num_items} items in {result.seconds:.1f} s "
        f"({num_items / result.seconds:,.0f} items/s); already delivered: {len(paths) - len(todo)}, "
        f"damaged: {result.num_left_out}, to do: {len(todo) - result.num_done - result.num_left_out}."
    )
    return result.exit_code


def _number(priority: str) -> float:
    try:
        return 1.0 if priority == "stored" else float(priority)
    except ValueError:
        raise click.BadParameter(f"must be a number or `stored`, got {priority!r}.", param_hint="--priority") from None


def _journal(client: Client, directory: Path, path: Path | None, purpose: dict[str, Any]) -> Journal:
    if path is not None:
        return Journal(path, purpose, directory)
    purpose = {**purpose, "server": f"{only_server(client).request_info().state_id:032x}"}
    digest = hashlib.sha256(json.dumps(purpose, sort_keys=True).encode()).hexdigest()[:16]
    return Journal(directory / f".import_{digest}.jsonl", purpose, directory)
