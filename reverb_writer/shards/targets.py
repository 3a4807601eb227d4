"""The servers of one replay: targets, and sources of targets.

A target is a list of shards at one moment. A source returns the newest target. It is a fixed list, a file, or your own
object, which may ask Ray.

    source -> look_up() -> Target(shards) -> kept by each client while the source is unavailable

The shard of an episode, or of a version of weights, is chosen by rendezvous hashing: the score of a shard for a writer
is a hash of both names, and the shard with the highest score is chosen. So every process computes the same shard
without communication. An added shard takes about 1 of n writers; a removed shard's writers are spread over the others.
No other writer moves.

Source: Thaler and Ravishankar 1998, Using name-based mappings to increase hit rates.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import pathlib
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

from reverb_writer.arguments import check_address
from reverb_writer.errors import ServerUnavailableError, SpecError

ShardState = Literal["up", "draining", "lost"]

_STATES = ("up", "draining", "lost")
_FILE = "file:"

_numbers = itertools.count()


@dataclass(frozen=True)
class Shard:
    """One server of a target.

    Attributes:
        name: constant, also when the server starts again at another address.
        address: `host:port`, `unix:path` or `dns:host:port`.
        state: "up"; "draining" for reads only; "lost" for neither reads nor writes.

    Raises:
        SpecError: an attribute is invalid.
    """

    name: str
    address: str
    state: ShardState = "up"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError(f"`name` of a shard must be a string that is not empty, got {self.name!r}.")
        check_address(self.address)
        if self.state not in _STATES:
            raise SpecError(
                f"`state` of shard {self.name} must be one of {', '.join(map(repr, _STATES))}, got {self.state!r}."
            )


@dataclass(frozen=True)
class Target:
    """The shards of a replay at one moment; also a source that always returns itself. Picklable.

    Attributes:
        shards: at least one; servers with the same tables and different names.

    Raises:
        SpecError: there is no shard, or two shards have the same name.

    >>> Target.of(["localhost:8000", "localhost:8001"]).shards[1]
    Shard(name='localhost:8001', address='localhost:8001', state='up')
    """

    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shards", tuple(self.shards))
        names = [shard.name for shard in self.shards]
        if not names or len(set(names)) < len(names):
            raise SpecError(f"a target must be one server or different ones, got {', '.join(names) or 'none'}.")

    @classmethod
    def of(cls, addresses: Sequence[str]) -> Target:
        """Return the target of servers at fixed `addresses`, which are also the names.

        Raises:
            SpecError: there is no address, two are equal, or one is invalid.
        """
        return cls(tuple([Shard(check_address(address), address) for address in addresses]))

    def look_up(self, timeout_s: float) -> Target:  # noqa: ARG002  # of the protocol
        """Return the target itself, within any `timeout_s` seconds."""
        return self


@runtime_checkable
class TargetSource(Protocol):
    """A source of targets. It must be picklable."""

    def look_up(self, timeout_s: float) -> Target:
        """Return the newest target, within `timeout_s` seconds.

        Raises:
            ReverbWriterError: the source does not know a target now. A client continues with the last target.
        """
        ...  # pragma: no cover


@dataclass(frozen=True)
class TargetFile:
    """A file of shards, one per line: `address`, `name address` or `name address state`; `#` begins a comment.

    Clients read the file every five seconds. To change it, write another file and rename that: a client may read a
    half-written file.

    Attributes:
        path: of the file.
    """

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(os.fspath(self.path)))  # noqa: PTH100  # `~` is deliberately not expanded

    def look_up(self, timeout_s: float) -> Target:  # noqa: ARG002  # of the protocol; a file answers at once
        """Return the target in the file now, within any `timeout_s` seconds.

        Raises:
            ServerUnavailableError: the file cannot be read.
            SpecError: a line is not a shard, or the file has no shard.
        """
        try:
            text = pathlib.Path(self.path).read_text("utf-8")
        except OSError as error:
            raise ServerUnavailableError(
                f"the file of shards {self.path} cannot be read ({error.strerror}). Write it, one address a line."
            ) from None
        shards = []
        for number, line in enumerate(text.splitlines(), 1):
            words: list[Any] = line.partition("#")[0].split()
            try:
                if len(words) > 3:  # noqa: PLR2004  # a name, an address and a state
                    text = "a shard is `address`, `name address` or `name address state`, got "
                    raise SpecError(f"{text}{words[3]!r} after {words[2]!r}.")  # noqa: TRY301  # as those of Shard
                if words:
                    shards.append(Shard(*(words if len(words) > 1 else words * 2)))
            except SpecError as error:
                raise SpecError(f"{self.path}, line {number}: {error}") from None
        if not shards:
            raise SpecError(f"{self.path} names no shard. Write one address a line.")
        return Target(tuple(shards))


def source_of(address: Any) -> TargetSource:
    """Return the source of a `replay` argument.

    The argument is an address or a list of addresses; `file:PATH`; a `Target` or another source; or an object with a
    `target()` (`ReplayCluster`), an `address` (`LocalServer`) or a `server_address` (`reverb.Client`).

    >>> source_of("file:/etc/replay/shards")
    TargetFile(path='/etc/replay/shards')
    """
    if isinstance(address, list | tuple):
        return Target.of(address)
    if isinstance(address, str):
        if address.startswith(_FILE):
            return TargetFile(address.removeprefix(_FILE))
        return Target.of([address])
    if isinstance(address, TargetSource):
        return address
    if callable(target := getattr(address, "target", None)):
        return source_of(target())
    for name in ("address", "server_address"):
        if isinstance(of := getattr(address, name, None), str):
            return source_of(of)
    raise SpecError(
        "`address` must be `host:port`, a list of these, a Target or a source of one, or an object with an address, "
        f"such as a server; got {address!r}."
    )


def rank_shards(writer: str, names: Iterable[str]) -> list[str]:
    """Return the shards in the order of a writer's choice: each is used if all before it are lost or full.

    The order depends only on the writer and the set of names.

    >>> rank_shards("actor-7", ["a", "b", "c"]), rank_shards("actor-7", ["c", "a"])
    (['a', 'c', 'b'], ['a', 'c'])
    """

    def score(name: str) -> tuple[bytes, str]:
        # The length of the first name keeps "a" + "bc" and "ab" + "c" apart.
        return hashlib.blake2b(f"{len(writer)}:{writer}{name}".encode(), digest_size=8).digest(), name

    return sorted(names, key=score, reverse=True)


def writer_name() -> str:
    """Return a unique name for a writer: machine, process, and a number in the process."""
    return f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}"
