"""Whatever is written to the ring, and whenever its rows are taken: the items are the windows of `WindowSpec`."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensor_codec
from episodes import specs
from hypothesis import given, settings
from hypothesis import strategies as st

from reverb_writer.protocol.messages import InsertStreamRequest
from reverb_writer.rows import ACTION, FIRST, LAST, PADDING, TERMINAL
from reverb_writer.steps import StepStructure
from reverb_writer.transport.in_flight import InFlight, InsertRequest
from reverb_writer.windows import EndOfEpisode, WindowSpec
from reverb_writer.writing.cutter import Cutter
from reverb_writer.writing.encoders import Encoder
from reverb_writer.writing.ring import Reset, StepRing
from reverb_writer.writing.step_kinds import Boundary, Row
from reverb_writer.writing.step_layout import StepLayout
from reverb_writer.writing.stream_options import Books
from reverb_writer.writing.window_target import WindowTarget

pytestmark = [
    pytest.mark.filterwarnings("ignore:`stride_length`"),
    pytest.mark.filterwarnings("error::RuntimeWarning"),
]

ENV = 1_000_000  # steps are numbered from this on times the environment's number, so that zeros are padding


def mean_of_real_steps(window: Any, kinds: Any) -> float:
    """Return the mean, unless it is a multiple of three: those windows are lost."""
    mean = float(window["n"][kinds != PADDING].mean())
    if mean % 3 == 0:
        raise ZeroDivisionError
    return mean


class Item(NamedTuple):
    """An item as the server gets it, or as it should."""

    steps: tuple[int, ...]
    kinds: tuple[int, ...]
    priority: float


class Config(NamedTuple):
    """An observer."""

    target: WindowTarget
    num_envs: int | None
    has_boundary: bool
    store_flags: bool
    chunk_length: int
    ring_size: int


Operation = tuple[str, Any]


# ------------------------------------------------------------------------------------------------- what should come


class Oracle:
    """The windows of every episode, from its length alone."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.items: dict[str, list[Item]] = collections.defaultdict(list)  # by table and environment
        self.num_items = self.num_dropped = self.num_failed = 0
        self._priority = config.target.priority
        count = config.num_envs or 1
        self._episodes: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # numbers and kinds of rows
        self._known = [0] * count  # windows complete so far

    def step(self, env: int, number: int, kind: int, *, last: bool) -> None:
        episode = self._episodes[env]
        episode.append((number, kind))
        target = self.config.target
        if target.spec.sequence_length is not None:
            self._complete(env, target.spec.spanning_windows(len(episode)))
        if last and not target.spans_episodes:
            self.end(env)

    def end(self, env: int, *, align: bool = False, discard: bool = False) -> None:
        n = len(self._episodes[env])
        spec, length = self.config.target.spec, self.config.target.spec.sequence_length
        if n > self.config.target.max_steps:
            windows = []
        elif discard:
            windows = [] if length is None else spec.spanning_windows(n)
        else:
            windows = spec.windows(n)
            if align and length and spec.end_of_episode is EndOfEpisode.DROP and n >= length:
                windows = sorted({*windows, (n - length, n)})
        self._complete(env, windows)
        covered = set().union(*(range(*window) for window in windows))
        self.num_dropped += len(set(range(n)) - covered)
        self._episodes[env], self._known[env] = [], 0

    def new_priority(self, priority: float) -> None:
        self._priority = priority

    def _complete(self, env: int, windows: Sequence[tuple[int, int]]) -> None:
        new = windows[self._known[env] :]
        self._known[env] = len(windows)
        target, n = self.config.target, len(self._episodes[env])
        for start, stop in new:
            steps = [number for number, _ in self._episodes[env][start:stop]]
            kinds = [kind for _, kind in self._episodes[env][start:stop]]
            priority: Any = self._priority
            self.num_items += len(target.tables)
            if callable(priority):
                priority = sum(steps) / len(steps)
                if priority % 3 == 0:
                    self.num_failed += len(target.tables)
                    continue
            num_padding = stop - max(start, n) if stop > n else 0
            item = Item((*steps, *[0] * num_padding), (*kinds, *[PADDING] * num_padding), priority)
            for table in target.tables:
                self.items[f"{table}/{env}"].append(item)


# ----------------------------------------------------------------------------------------------------- what does come


class Server:
    """The end of an insert stream: keeps the chunks that it is told to keep, and refuses items of others."""

    def __init__(self) -> None:
        self.items: dict[str, list[Item]] = collections.defaultdict(list)
        self.chunks: dict[int, Any] = {}
        self._keys: set[int] = set()
        self._sent: set[int] = set()  # chunks over the connection

    def lose(self) -> None:
        """Lose the connection, and the chunks with it."""
        self.chunks.clear()
        self._sent.clear()

    def receive(self, message: bytes, *, has_flags: bool) -> list[int]:
        """Take a message; return the keys of its items."""
        request = InsertStreamRequest.FromString(message)
        for chunk in request.chunks:
            assert chunk.chunk_key not in self._sent, "a connection gets a chunk once"
            self._sent.add(chunk.chunk_key)
            self.chunks[chunk.chunk_key] = chunk
        for item in request.items:
            stored = item.flat_trajectory.columns
            columns = [self._column(column) for column in stored]
            kinds = self._column(stored[0], -2)  # before the spec, and no item refers to it
            if has_flags:  # in the order of their names
                first, last, mask, numbers, doubled, terminated, truncated = columns
                np.testing.assert_array_equal(first, kinds & 1 != 0)
                np.testing.assert_array_equal(last, kinds & 4 != 0)
                np.testing.assert_array_equal(mask, numbers > 0)
                np.testing.assert_array_equal(terminated, kinds & 8 != 0)
                np.testing.assert_array_equal(truncated, kinds & 12 == 4)
            else:
                numbers, doubled = columns
            np.testing.assert_array_equal(doubled, np.stack([numbers, 2 * numbers], axis=1))
            if item.key in self._keys:  # sent again after a loss
                continue
            self._keys.add(item.key)
            env = int(numbers[0]) // ENV - 1
            found = Item(tuple(numbers.tolist()), tuple(kinds.tolist()), item.priority)
            self.items[f"{item.table}/{env}"].append(found)
        keep = set(request.keep_chunk_keys)
        assert keep <= self.chunks.keys(), "the server refuses to keep chunks that it does not have"
        self.chunks = {key: self.chunks[key] for key in keep}
        return [item.key for item in request.items]

    def _column(self, column: Any, index: int | None = None) -> Any:
        """Return the rows of a column, or of another tensor of the same chunks."""
        parts = []
        for piece in column.chunk_slices:
            chunk = self.chunks[piece.chunk_key]
            assert len(chunk.data.tensors) in (4, 9), "the leaves, the flags if they are stored, the kinds and the spec"
            tensor = tensor_codec.decode(chunk.data.tensors[piece.index if index is None else index])
            assert len(tensor) == chunk.sequence_range.end - chunk.sequence_range.start + 1
            assert piece.offset + piece.length <= len(tensor)
            parts.append(tensor[piece.offset : piece.offset + piece.length])
        return np.concatenate(parts)


class Writer:
    """Both sides of the ring in one thread, without a connection: what an observer and its sender do between them."""

    def __init__(self, config: Config) -> None:
        self.config, self.num_envs = config, config.num_envs or 1
        self.oracle, self.server = Oracle(config), Server()
        self.books = Books()
        shape = () if config.num_envs is None else (config.num_envs,)
        example = {"n": np.zeros(shape, np.int64), "pair": np.zeros((*shape, 2), np.float64)}
        structure = StepStructure(example, batch_size=config.num_envs)
        layout = StepLayout(structure, store_flags=config.store_flags)
        size, target = config.ring_size, config.target
        self.ring = StepRing(structure.dtypes, structure.shapes, config.num_envs, size, target)
        keeps_columns = callable(target.priority)
        encoder = Encoder(self.ring, layout, self.books, lambda _: 1.0, keeps_columns=keeps_columns)
        length = min(config.chunk_length, max(size // (2 * self.num_envs), 1))
        self.cutter = Cutter(encoder, target, length)
        self.flight = InFlight(self.cutter.needed_chunks)
        self._unconfirmed: collections.deque[list[int]] = collections.deque()  # keys of each message
        self._next = [ENV * (env + 1) for env in range(self.num_envs)]
        self._begins = [True] * self.num_envs  # whether the next row is the first of its episode
        self._is_cut = False

    # The observer's side.

    def step(self, env_ids: Sequence[int], last: Sequence[bool]) -> None:
        """Write a step of some environments; `last` has a flag for each environment.

        The end is the step itself, or a boundary row after it.
        """
        self._make_room()
        has_boundary = self.config.has_boundary
        kinds = np.array([FIRST * begins | ACTION for begins in self._begins], np.uint8)
        if not has_boundary:
            kinds |= np.where(last, np.uint8(LAST), np.uint8(0))
        ends = [is_last and not has_boundary for is_last in last]
        ended = np.array([env for env in env_ids if last[env]], np.int64) if has_boundary else np.zeros(0, np.int64)
        boundary = None
        if len(ended):
            kind = np.full(self.num_envs, LAST | TERMINAL, np.uint8)
            boundary = Boundary(self._rows(1), kind, ended)
        leaves = self._rows(0)
        if self.config.num_envs is not None:
            ids = np.array(env_ids, np.int64)
            self.ring.write_envs(leaves, Row(kinds, kinds, np.array(ends, bool), boundary), ids)
        else:
            alone = boundary and Boundary([leaf[0] for leaf in boundary.leaves], int(boundary.kind[0]), None)
            of_row = int(kinds[0])
            self.ring.write([leaf[0] for leaf in leaves], Row(of_row, of_row, ends[0], alone))
        for env in env_ids:
            self.oracle.step(env, self._next[env], int(kinds[env]), last=ends[env])
            self._next[env] += 1
            if env in ended:
                self.oracle.step(env, self._next[env], LAST | TERMINAL, last=True)
                self._next[env] += 1
            self._begins[env] = last[env]
        self._check_count()

    def _rows(self, offset: int) -> list[Any]:
        numbers = np.array(self._next, np.int64) + offset
        return [numbers, np.stack([numbers, 2 * numbers], axis=1).astype(np.float64)]

    def block(self, num_steps: int) -> None:
        """Write steps of the only environment at once, as many as are granted."""
        if self.config.num_envs is not None or self.ring.head[1] + num_steps > self.config.target.max_steps:
            return
        self._make_room()
        count = min(num_steps, self._granted() - self.ring.head[0])
        numbers = self._next[0] + np.arange(count)
        kinds = np.full(count, ACTION, np.uint8)
        kinds[0] |= FIRST * self._begins[0]
        leaves = [numbers, np.stack([numbers, 2 * numbers], axis=1).astype(np.float64)]
        self.ring.write_block(leaves, kinds, int(kinds[-1]), last=False)
        for number, kind in zip(numbers.tolist(), kinds.tolist(), strict=True):
            self.oracle.step(0, number, kind, last=False)
        self._next[0] += count
        self._begins[0] = False
        self._check_count()

    def reset(self, env_ids: Sequence[int], *, discard: bool) -> None:
        if not env_ids:
            return
        self._mark(Reset(env_ids, discard))
        for env in env_ids:
            self._begins[env] = True
            self.oracle.end(env, align=not discard, discard=discard)
        self._check_count()

    def leave(self, env_ids: Sequence[int]) -> None:
        """Cut some episodes, as the outbox of several servers does with those of a lost server."""
        self.take()
        episodes = [self.cutter.open_origins()[env] for env in env_ids]
        self.cutter.cut(lambda origin: origin in episodes, "lost_shard")
        self._is_cut = True
        for env in env_ids:
            self.oracle.end(env, align=False, discard=True)

    def new_priority(self, priority: float) -> None:
        if self.config.target.spec.sequence_length is None:
            self._mark(priority)
            self.oracle.new_priority(priority)

    def _mark(self, mark: Any) -> None:
        self.ring.mark(mark)

    def _granted(self) -> int:
        return self.cutter.first_needed + self.config.ring_size - self.ring.rows_per_call + 1

    def _make_room(self) -> None:
        if self.ring.head[0] >= self._granted():
            self.take()
        assert self.ring.head[0] < self._granted(), "the ring always has room again"

    def _check_count(self) -> None:
        """The observer counts the items that are complete, unless the sender has cut an episode."""
        if not self._is_cut:
            assert self.ring.head[4] == self.oracle.num_items

    # The sender's side.

    def take(self) -> None:
        self.cutter.take()
        assert self.books.counts["items"] + self.cutter.num_unencoded == self.oracle.num_items

    def encode(self) -> None:
        for request in self.cutter.requests(self.cutter.take_ready()):
            self._check_request(request)
            self.flight.add(request)

    def _check_request(self, request: InsertRequest) -> None:
        """A request has the chunks that its items name, and no other."""
        items = InsertStreamRequest.FromString(b"".join(row.tobytes() for row in request.rows)).items
        columns = itertools.chain(*(item.flat_trajectory.columns for item in items))
        assert request.chunks.keys() == {piece.chunk_key for column in columns for piece in column.chunk_slices}

    def message(self) -> None:
        if self.flight.has_queued:
            self._unconfirmed.append(
                self.server.receive(self.flight.take_message(1), has_flags=self.config.store_flags)
            )

    def confirm(self) -> None:
        if self._unconfirmed:
            self.flight.acknowledge(np.array(self._unconfirmed.popleft(), np.uint64))

    def lose(self) -> None:
        """Lose the connection, and the confirmations that were to come by it."""
        self.server.lose()
        self._unconfirmed.clear()
        self.flight.requeue()

    def send(self) -> None:
        self.take()
        self.cutter.seal_open()
        self.encode()

    def send_late(self) -> None:
        """Send what is complete in rows of the first half, as the sender does when they are open for long."""
        self.take()
        self.cutter.seal_open(self.cutter.taken // 2)
        self.encode()

    def send_fullest(self) -> None:
        """Send what is complete in the fullest environments, as the sender does when much is."""
        self.take()
        keep = self.cutter.num_unencoded // 2
        self.cutter.seal_fullest(keep)
        self.encode()
        assert self.cutter.num_unencoded <= keep

    def run(self, operations: Sequence[Operation]) -> None:
        """Do all of it, and end the episodes that are under way."""
        every = range(self.num_envs)
        for name, value in operations:
            if name == "steps":
                count, mask, last = value
                env_ids = [0] if self.config.num_envs is None else [env for env in every if mask >> env & 1]
                for i in range(count):
                    self.step(env_ids, [i == count - 1 and bool(last >> env & 1) for env in every])
            elif name == "reset":
                mask, discard = value
                env_ids = [env for env in every if mask >> env & 1]
                self.reset(env_ids, discard=discard)
            elif name == "leave":
                self.leave([env for env in every if value[0] >> env & 1])
            else:
                getattr(self, name)(*value)
        self.reset(every, discard=True)
        self.send()
        while self.flight.pending:
            self.message()
            self.confirm()

    def check(self) -> None:
        """Compare all that has come with what should."""
        assert dict(self.server.items) == dict(self.oracle.items)
        assert self.books.counts["items"] == self.oracle.num_items
        assert self.cutter.num_unencoded == 0
        assert self.books.counts["failed_priorities"] == self.oracle.num_failed
        assert self.flight.acknowledged == self.oracle.num_items - self.oracle.num_failed
        assert sum(self.books.dropped_steps.values()) == self.oracle.num_dropped
        assert self.cutter.taken == sum(number - ENV * (env + 1) for env, number in enumerate(self._next))
        # Nothing is left behind: no chunk is held any more, here or at the server.
        assert (self.flight.pending, self.flight.pending_bytes) == (0, 0)
        assert InsertStreamRequest.FromString(self.flight.take_message(1)).keep_chunk_keys == []
        assert self.cutter.first_needed == self.cutter.taken == self.ring.head[0]


# --------------------------------------------------------------------------------------------------------- the cases


SPECS = st.sampled_from(specs(range(1, 7), range(1, 9))) | st.just(WindowSpec.whole_episode())
PRIORITIES: st.SearchStrategy[Any] = st.sampled_from([1.0, 0.5, mean_of_real_steps])
SOME = st.integers(0, 15)  # environments, as bits
SENDING = st.sampled_from(["take", "encode", "send", "send_late", "send_fullest", "message", "confirm", "lose"])
OPERATIONS = st.lists(
    st.tuples(st.just("steps"), st.tuples(st.integers(1, 12), SOME, SOME))
    | st.tuples(st.just("steps"), st.tuples(st.integers(1, 12), st.just(15), SOME))
    | st.tuples(st.just("block"), st.tuples(st.integers(1, 12)))
    | st.tuples(st.just("reset"), st.tuples(SOME, st.booleans()))
    | st.tuples(st.just("leave"), st.tuples(SOME))
    | st.tuples(st.just("new_priority"), st.tuples(st.sampled_from([2.0, 3.0])))
    | st.tuples(SENDING, st.just(())),
    max_size=40,
)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    spec, tables = draw(SPECS), tuple("ab"[: draw(st.integers(1, 2))])
    is_episode = spec.sequence_length is None
    spans_episodes = draw(st.booleans()) and not is_episode
    max_steps = draw(st.just(math.inf) | st.integers(1, 12)) if is_episode else math.inf
    target = WindowTarget(spec, tables, draw(PRIORITIES), spans_episodes, max_steps)
    num_envs = draw(st.none() | st.integers(1, 4))
    return Config(
        target,
        num_envs,
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(1, 9)),
        draw(st.integers(4, 30)) * (num_envs or 1),
    )


PLAIN: Any = {"has_boundary": False, "store_flags": False}


@settings(max_examples=150)
@given(configs(), OPERATIONS)
def test_items_are_the_windows_of_the_closed_form(config: Config, operations: list[Operation]) -> None:
    writer = Writer(config)
    writer.run(operations)
    writer.check()


def test_chunks_of_an_ended_episode_are_kept_until_its_last_windows_are_sent() -> None:
    writer = Writer(Config(WindowTarget(WindowSpec(2), ("a",)), None, chunk_length=1, ring_size=16, **PLAIN))
    for _ in range(2):  # two requests in the queue; the second one has the chunk of step 3
        writer.step([0], [False])
        writer.step([0], [False])
        writer.send()
    assert [chunk.stop for chunk in writer.cutter.open_origins()[0].chunks] == [3, 4], "step 2 is in no later window"
    writer.message()
    writer.step([0], [True])
    writer.take()  # the window of the steps 3 and 4 is not encoded yet
    writer.message()
    writer.run([])  # the server refuses a chunk that it gets twice
    writer.check()


def test_no_more_environments_are_sealed_than_needed() -> None:
    writer = Writer(Config(WindowTarget(WindowSpec(1), ("a",)), 4, chunk_length=9, ring_size=99, **PLAIN))
    writer.step(range(4), [False] * 4)
    writer.send_fullest()
    assert writer.cutter.num_unencoded == 2


@pytest.mark.slow
@settings(max_examples=2000)
@given(configs(), OPERATIONS)
def test_items_are_the_windows_of_the_closed_form_at_length(config: Config, operations: list[Operation]) -> None:
    writer = Writer(config)
    writer.run(operations)
    writer.check()
