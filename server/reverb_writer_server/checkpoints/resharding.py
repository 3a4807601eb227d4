"""A replay on M servers becomes one on N: checkpoints in the folders of the servers that a configuration describes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reverb_writer.files.saved_replay import SavedReplay, open_saved
from reverb_writer.progress import progress
from reverb_writer_server.checkpoints.convert import Target, convert
from reverb_writer_server.checkpoints.folder import CheckpointFolder, finished_in
from reverb_writer_server.checkpoints.owner import CheckpointError
from reverb_writer_server.config import schema as configuration
from reverb_writer_server.config.keys import ConfigError

_INCOMING = "resharded"  # `CheckpointFolder` moves it to its place when it is complete


def reshard(saved: Sequence[Path], config: Path, environment: Mapping[str, str], shards: int | None) -> Iterator[str]:
    """Write checkpoints, and yield a line about each, and about what is left out.

    Args:
        saved: of each old server: a checkpoint, or a folder of checkpoints, of which the newest is taken.
        config: the configuration of the new servers.
        environment: environment variables, such as `os.environ`.
        shards: number of new servers, in place of the configuration's.

    Raises:
        ConfigError: the configuration is wrong, or has no folder for checkpoints.
        CheckpointError: a server uses such a folder, or has not kept the newest checkpoint of an old one yet.
        FormatError: something that was saved is damaged.
        OSError: a checkpoint cannot be written.
    """
    flags: dict[tuple[str, ...], Any] = {} if shards is None else {("cluster", "shards"): shards}
    num_shards = configuration.load(config, environment, {**flags, ("cluster", "shard"): 0}).cluster.shards
    loaded = [
        configuration.load(config, environment, {**flags, ("cluster", "shard"): shard}) for shard in range(num_shards)
    ]
    with contextlib.ExitStack() as stack:
        folders = []
        for one in loaded:
            if one.checkpoints.directory is None:
                raise ConfigError(f"{config}: `checkpoints.directory`: got nothing, allowed: a path.")
            folders.append(stack.enter_context(CheckpointFolder(one.checkpoints.directory, one.checkpoints.keep)))
        sources = [_open(path) for path in saved]  # now that what was finished in the new folders is kept
        targets = [
            Target(folder.incoming / _INCOMING, {table.config.name: table.config for table in one.tables})
            for folder, one in zip(folders, loaded, strict=True)
        ]
        with progress(f"resharding {len(sources)} checkpoints to {num_shards}"):
            left_out = convert(sources, targets)
        for folder, target in zip(folders, targets, strict=True):
            adopted = folder.adopt_finished()
            for reason in adopted.refused.values():
                raise CheckpointError(f"{folder.directory}: the new checkpoint is damaged: {reason}")
            counts = ", ".join(f"{name} {len(items):,}" for name, items in sorted(target.items.items()))
            yield f"{adopted.kept[_INCOMING].path}: {counts or 'no items'}"
    for name, count in sorted(left_out.items()):
        yield f"table `{name}`: {count:,} items left out: it has no room for them, or is not configured"


def _open(path: Path) -> SavedReplay:
    if finished := finished_in(path):
        raise CheckpointError(
            f"{path}: {finished[-1].name} is finished, but its server has ended before it has kept it. Start that "
            "server and end it, or name a checkpoint."
        )
    return open_saved(path)
