"""`reverb-writer reshard`: insert what M servers have saved into N servers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from reverb_writer.cli.server_options import new_client, report_errors, security_options, timeout_option
from reverb_writer.cli.transfer import run_transfer


@click.command("reshard", short_help="Insert the items of checkpoints into other servers.")
@click.argument(
    "saved", type=click.Path(exists=True, file_okay=False, path_type=Path), nargs=-1, required=True, metavar="DIR..."
)
@click.option(
    "--to", "addresses", multiple=True, required=True, metavar="ADDRESS", help="A server; repeat it for more."
)
@timeout_option(60.0, "Seconds to wait for an answer, or for progress.")
@security_options
def command(saved: tuple[Path, ...], addresses: tuple[str, ...], timeout: float, **security: Any) -> None:
    """Insert the items of checkpoints into other servers, in equal shares: a replay on M shards becomes one on N.

    Each DIR is a checkpoint, or a folder of checkpoints, of which the newest is taken.

    \b
    reverb-writer reshard old-0/checkpoints old-1/checkpoints --to a:8000 --to b:8000 --to c:8000

    Keys, priorities, data and order are kept; how often items were sampled is not. It needs the memory of one
    checkpoint. Nothing is changed if the servers lack a table or room.

    \b
    Exit codes:
      0    all items are on the servers
      1    failed; if the message tells how many items arrived, empty the tables first
      2    wrong arguments
      130  stopped by Ctrl-C or SIGTERM: empty the tables before another attempt
    """  # noqa: D301  # \b is click's mark for lines to keep
    from reverb_writer.files.resharding import Resharding  # noqa: PLC0415  # loads gRPC
    from reverb_writer.files.saved_replay import open_saved  # noqa: PLC0415  # as above

    with report_errors(), new_client(list(addresses), timeout, **security) as client:
        resharding = Resharding([open_saved(path) for path in saved], client, timeout)
        result = run_transfer(resharding.run(), "resharding", resharding.num_items)
        twice = f"; {resharding.num_twice} were there twice" if resharding.num_twice else ""
        click.echo(
            f"{result.num_done} of {resharding.num_items} items of {len(saved)} checkpoints in {result.seconds:.1f} s "
            f"({result.num_done / result.seconds:,.0f} items/s){twice}."
        )
        for address, tables in resharding.counts().items():
            click.echo(f"  {address}: {', '.join(f'{name} {count:,}' for name, count in sorted(tables.items())) or 0}")
    raise SystemExit(result.exit_code)
