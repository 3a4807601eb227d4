"""`reverb-writer import` and `export`: send trajectories on disk to a server, and write a table's items to disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import click

from reverb_writer.cli.server_options import connection_options, new_client, report_errors
from reverb_writer.errors import SpecError
from reverb_writer.files.exporting import export_items, export_saved
from reverb_writer.files.importing import Journal, Transferred, import_trajectories
from reverb_writer.files.rollout_writer import RolloutWriter
from reverb_writer.files.trajectory_file import list_trajectories
from reverb_writer.progress import progress
from reverb_writer.replay.client import Client, only_server
from reverb_writer.replay.observers import EpisodeObserver, TrajectoryObserver
from reverb_writer.rows import LastRow
from reverb_writer.windows import EndOfEpisode

_DONE, _INCOMPLETE, _INTERRUPTED = 0, 3, 130  # 1 is an error, 2 is click's code for wrong arguments
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
    help="Treatment of the last steps of an episode.",
)
@click.option("--whole-episodes", is_flag=True, help="Write each trajectory as one item, instead of windows.")
@click.option(
    "--priority",
    default="1.0",
    show_default=True,
    help="Priority of all items, or `stored` with --whole-episodes for the exported priorities.",
)
@click.option(
    "--last-row",
    type=click.Choice(get_args(LastRow)),
    help="Row of the flags of an end, for files without kinds of rows: the last action's, or the final observation's.",
)
@click.option("--again", is_flag=True, help="Send everything again, without a journal.")
@connection_options
def import_command(
    directory: Path,
    tables: tuple[str, ...],
    sequence_length: int | None,
    stride_length: int,
    end_of_episode: str,
    whole_episodes: bool,
    priority: str,
    last_row: LastRow | None,
    again: bool,
    **connection: Any,
) -> None:
    """Write the trajectories in DIR to a table, in the same windows as an observer.

    \b
    reverb-writer import rollouts --table replay --sequence-length 20 --stride-length 10
    reverb-writer import rollouts --table episodes --whole-episodes

    Ctrl-C ends the import after the current trajectory; the same command continues it. A hidden journal in DIR records
    the delivered trajectories, for each server process, table and kind of window; after a restart of the server all
    trajectories are sent again.

    Damaged and incomplete trajectories are skipped and named.

    \b
    Exit codes:
      0    all trajectories are on the server
      1    server or disk failed; the same command continues
      2    wrong arguments
      3    all trajectories except the damaged ones, which are named
      130  stopped by Ctrl-C or SIGTERM; the same command continues
    """  # noqa: D301  # \b is click's mark for lines to keep
    if whole_episodes == (sequence_length is not None):
        raise click.UsageError("Give either --sequence-length or --whole-episodes.")
    context = click.get_current_context()
    for name in ("stride_length", "end_of_episode"):
        if whole_episodes and context.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT:
            raise click.UsageError(f"--{name.replace('_', '-')} is for windows. Leave it out with --whole-episodes.")
    if priority == "stored" and not whole_episodes:
        raise click.UsageError("--priority stored needs --whole-episodes: windows have no stored priorities.")
    windows: dict[str, Any] = {"whole_episodes": True}
    if sequence_length is not None:
        windows = {"length": sequence_length, "stride": stride_length, "end_of_episode": end_of_episode}
    if last_row is not None:
        windows["last_row"] = last_row
    with report_errors(), new_client(**connection) as client:
        observer: Any
        if sequence_length is None:
            observer = EpisodeObserver(client, tables, _WHOLE, _number(priority))
        else:
            window = sequence_length, stride_length, _number(priority)
            observer = TrajectoryObserver(client, tables, *window, end_of_episode=end_of_episode)
        journal = None if again else _journal(client, directory, {"tables": list(tables), **windows})
        paths = list_trajectories(directory)
        todo = [path for path in paths if journal is None or journal.name_of(path) not in journal.done]

        def take_priority(trajectory: Any) -> None:
            observer.update_priority(float(trajectory.manifest.metadata.get("priority", 1.0)))

        with observer:
            before = take_priority if priority == "stored" else None
            transfer = import_trajectories(todo, observer, journal=journal, before=before, last_row=last_row)
            result = run_transfer(transfer, "importing", len(todo))
            num_items = observer.stats().items
    click.echo(
        f"{result.num_done} trajectories, {result.num_steps} steps, {num_items} items in {result.seconds:.1f} s "
        f"({num_items / result.seconds:,.0f} items/s); already delivered: {len(paths) - len(todo)}, "
        f"damaged: {result.num_left_out}, to do: {len(todo) - result.num_done - result.num_left_out}."
    )
    raise SystemExit(result.exit_code)


def _number(priority: str) -> float:
    try:
        return 1.0 if priority == "stored" else float(priority)
    except ValueError:
        raise click.BadParameter(f"must be a number or `stored`, got {priority!r}.", param_hint="--priority") from None


def _journal(client: Client, directory: Path, purpose: dict[str, Any]) -> Journal:
    purpose = {**purpose, "server": f"{only_server(client).channel.server_info(client.timeout_s).state_id:032x}"}
    digest = hashlib.sha256(json.dumps(purpose, sort_keys=True).encode()).hexdigest()[:16]
    return Journal(directory / f".import_{digest}.jsonl", purpose, directory)


@click.command("export", short_help="Write the items of a table to disk.")
@click.option("--table", "-t", required=True, help="Table to read.")
@click.option(
    "--saved",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Checkpoint, folder of checkpoints, or save of a LocalServer to read, instead of a server.",
)
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@connection_options
def export_command(table: str, saved: Path | None, directory: Path, **connection: Any) -> None:
    """Write each item of a table to DIR as a separate trajectory; DIR is created if it does not exist.

    \b
    reverb-writer export --saved checkpoints --table replay backup
    reverb-writer export --table replay --address localhost:8000 backup
    reverb-writer import backup --table replay --whole-episodes --priority stored

    With --saved, each item of a checkpoint is read once. In a folder of checkpoints, the newest one is read.

    A server cannot list a table, so the export samples until it has each item at least once. This takes several times
    as many samples as the table has items, and the rate limiter counts them. The table keeps its items. The table must
    have a uniform or prioritized sampler, and no max_times_sampled; export other tables from a checkpoint.

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
        except SpecError as error:  # the table cannot be read
            raise click.UsageError(str(error)) from error
        click.echo(
            f"{result.num_done} items, {result.num_steps} steps in {result.seconds:.1f} s "
            f"({result.num_done / result.seconds:,.0f} items/s); left out: {result.num_left_out}. "
            f"{directory} has {len(list_trajectories(directory))} trajectories."
        )
    raise SystemExit(result.exit_code)


@dataclass
class TransferResult:
    """The result of a transfer."""

    num_done: int = 0  # number of trajectories or items transferred
    num_steps: int = 0  # number of their steps
    num_left_out: int = 0  # number of unreadable ones
    exit_code: int = _DONE
    seconds: float = 0.0  # its duration


def run_transfer(transfer: Generator[Transferred, None, None], description: str, total: int | None) -> TransferResult:
    """Run a transfer to its end, or until Ctrl-C or SIGTERM, which end it after the current outcome.

    At the end it is always closed, which waits until all sent items are acknowledged. `total` is the number of
    outcomes; None if it is unknown. A second signal interrupts.
    """
    result, start = TransferResult(), time.monotonic()
    with _signals() as received, progress(description, total) as advance, contextlib.closing(transfer):
        for outcome in transfer:
            result.num_steps += outcome.num_steps
            if not outcome.error:
                result.num_done += 1
            else:
                result.num_left_out += 1
                result.exit_code = _INCOMPLETE
                click.echo(f"left out: {outcome.error}", err=True)
            advance(f"{result.num_steps / max(time.monotonic() - start, 1e-6):,.0f} steps/s")
            if received:
                if result.num_done + result.num_left_out != total:
                    result.exit_code = _INTERRUPTED
                break
    result.seconds = max(time.monotonic() - start, 1e-6)
    return result


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Yield a list to which the first Ctrl-C or SIGTERM is added; the second one interrupts."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            signal.default_int_handler(number, frame)
        received.append(number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
