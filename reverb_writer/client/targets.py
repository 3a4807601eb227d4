"""Which servers are one replay: targets, and the sources that tell them.

A target is a list of shards at one moment. Sources tell the newest: a fixed list, a file, or an object of your own,
such as one that asks Ray.

    source -> look_up() -> Target(shards) -> kept by each client, which goes on with it while the source is gone

The shard of an episode, or of a version of weights, is chosen by rendezvous hashing: each pair of a writer's name and a
shard has a score, a hash of both, and the shard of the highest score is chosen. So every process computes the same
without asking anyone. A shard that is added takes those writers for which its score is the highest, about 1 of n; one
that is removed gives away its own. No other moves.

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
        name: it stays when the server starts again at another address.
        address: `host:port`, `unix:path` or `dns:host:port`.
        state: "up"; "draining" to be read, but not written any more; "lost" for neither.

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
        shards: servers with the same tables and different names, at least one.

    Raises:
        SpecError: there is no shard, or two have one name.

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
        """Return the target of servers at fixed `addresses`, which are their names, too.

        Raises:
            SpecError: there is no address, two are the same, or a text cannot be an address.
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
    """A file of shards, one per line: `address`, or `name address`, or `name address state`; `#` begins a comment.

    Clients read the file every five seconds. To change it, write another file and rename it, because a client may read
    a half-written file.

    Attributes:
        path: of the file.
    """

    path: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(os.fspath(self.path)))  # noqa: PTH100  # `~` is deliberately not expanded

    def look_up(self, timeout_s: float) -> Target:  # noqa: ARG002  # of the protocol; a file answers at once
        """Return what the file says now, within any `timeout_s` seconds.

        Raises:
            ServerUnavailableError: it cannot be read.
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
    """Return the source that a `replay` argument stands for.

    That is an address or several; `file:PATH`; a `Target` or another source; or an object with a `target()`, as a
    `ReplayCluster`, an `address`, as a `LocalServer`, or a `server_address`, as a `reverb.Client`.

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
    """Return the shards in the order in which a writer chooses them: the next one if those before are lost or full.

    The order depends on nothing but the arguments, not even on the order of the names.

    >>> rank_shards("actor-7", ["a", "b", "c"]), rank_shards("actor-7", ["c", "a"])
    (['a', 'c', 'b'], ['a', 'c'])
    """

    def score(name: str) -> tuple[bytes, str]:
        # The length of the first name keeps "a" + "bc" and "ab" + "c" apart.
        return hashlib.blake2b(f"{len(writer)}:{writer}{name}".encode(), digest_size=8).digest(), name

    return sorted(names, key=score, reverse=True)


def default_actor_id() -> str:
    """Return an id that no other writer has: this machine, this process, and how many had one before in it."""
    return f"{socket.gethostname()}:{os.getpid()}:{next(_numbers)}"
