"""The life cycle of every dataset of replay tables: open, iterate, convert, count, close, pickle.

A dataset owns a client and a `TableReader` for each of its tables, and makes batches of their samples.
"""

from __future__ import annotations

import abc
import functools
import inspect
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from reverb_writer.arguments import check_timeout, check_wait
from reverb_writer.background import in_background, may_be_interrupted
from reverb_writer.client.client import Client, as_client
from reverb_writer.errors import SpecError
from reverb_writer.reading.batches import Batch
from reverb_writer.reading.fetchers import MAX_SILENCE_S, stop_fetchers
from reverb_writer.reading.read_options import ReadOptions
from reverb_writer.reading.table_reader import TableReader

if TYPE_CHECKING:
    from typing_extensions import Self

_END_S = 5.0  # how long the main thread waits for the end of a dataset that was not closed


class Views:
    """An iterator over batches, and what it is for PyTorch, JAX and TensorFlow."""

    _num_open_sizes = 2  # leading dimensions of leaves that may differ from batch to batch: B and T

    @property
    def reuses_buffers(self) -> bool:
        """Whether the arrays of a batch are overwritten when a later one is asked for."""
        return False

    def transitions(self, n: int = 1, gamma: float = 0.99) -> Any:
        """Return this dataset as an iterator over transitions over n steps, `NStepTransitions` with leaves [B, ...].

        From each window comes its first transition, so `sequence_length` is n + 1; from slices one from each row, with
        a mask. The target of values is `reward + gamma * discount * value(next_observation)`, whatever n is.

        Args:
            n: maximum of steps, >= 1; fewer at the end of an episode.
            gamma: the agent's discount, in [0, 1]; with n = 1 it is not used.

        Raises:
            SpecError: a number out of range.

        Example:
            for transitions in dataset.transitions(n=3, gamma=0.99):
                errors = train(transitions, transitions.batch.info.importance_weights(0.6))
                dataset.update_priorities(transitions.batch, errors)
        """
        from reverb_writer.reading.views.transitions import TransitionsView  # noqa: PLC0415  # imports this module

        return TransitionsView(self, n, gamma)

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of batches of tensors; see `views.torch`.

        Args:
            device: where the tensors go; None for the CPU. For a CUDA device memory is pinned.

        With `DataLoader(dataset.as_torch(), batch_size=None, num_workers=N, multiprocessing_context="spawn")` each
        worker process opens a dataset like this one, with a client of the same servers, certificates and token. This
        dataset should be closed then: it fetches as well.
        """
        from reverb_writer.reading.views.torch import replay_view  # noqa: PLC0415  # brings PyTorch

        return replay_view(self, device)

    def as_jax(self, device: Any = None) -> Iterator[Batch]:
        """Return an iterator over batches of JAX arrays on `device`; None for JAX's default.

        Raises:
            SpecError: with `reuse_buffers`: JAX's arrays on a CPU may be the batch's own memory, and change with it.
        """
        if self.reuses_buffers:
            raise SpecError("`reuse_buffers` must be False for as_jax, got True: JAX's arrays may share those buffers.")
        from reverb_writer.reading.views.jax import jax_batches  # noqa: PLC0415  # brings JAX

        return jax_batches(self, device)

    def as_tf(self) -> Any:
        """Return a `tf.data.Dataset` of pairs: data, and a dict of info and markers; waits for the first batch.

        With `with_next` it has triples, `batch.next` as the third.
        """
        from reverb_writer.reading.views.tf import tf_dataset  # noqa: PLC0415  # brings TensorFlow

        return tf_dataset(self, self._num_open_sizes)

    def close(self) -> None:
        """Stop to fetch, and close what was opened for it."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Dataset(Views, abc.ABC):
    """An endless iterator over batches. Iterated by one thread at a time; the rest is thread-safe.

    Attributes:
        timeout_s: time-out of a batch, in seconds.
    """

    timeout_s: float
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the arguments: where the dataset is unpickled, they open another one."""
        dataset = super().__new__(cls)
        dataset._arguments = args, kwargs
        return dataset

    def _open(
        self, client: Any, options: ReadOptions, make_readers: Callable[[Client, float], Iterable[TableReader]]
    ) -> None:
        """Connect to the servers and start to fetch. If that fails, all that has started is stopped.

        `make_readers` gets the client, and the deadline of `time.monotonic()` for connecting.
        """
        self._options = options
        self._client, self._owns_client = as_client(client, options.timeout_s)
        self.timeout_s = self._client.timeout_s if options.timeout_s is None else options.timeout_s
        self._readers: list[TableReader] = []
        # A dataset that is not closed must not hang the interpreter's end; nor one whose opening was interrupted.
        owned_client = self._client if self._owns_client else None
        self._finalizer = weakref.finalize(self, _shut_down, self._readers, owned_client)
        try:
            connect_s = self.timeout_s if options.connect_timeout_s is None else options.connect_timeout_s
            self._readers.extend(make_readers(self._client, time.monotonic() + connect_s))
        except BaseException:
            self._finalizer()
            raise
        for reader in self._readers:
            reader.start()

    @property
    def reuses_buffers(self) -> bool:
        """Whether the arrays of a batch are overwritten when a later one is asked for."""
        return self._options.reuse_buffers

    def __iter__(self) -> Iterator[Batch]:
        """Return the dataset itself; it continues where the last iteration ended, also after a time-out."""
        for reader in self._readers:
            reader.restart()
        return self

    def __next__(self) -> Batch:
        """Return the next batch; after `close()` or a single pass, a last batch of the remaining samples, then stop.

        Raises:
            ReplayTimeoutError: no batch within the time-out; names the cause with its numbers. No sample is lost.
            ServerUnavailableError: no batch within the time-out, and no server can be reached.
            UnsafeDataError, FormatError: a sample must not or cannot be decoded; it is skipped, the next call goes on.
            StructureError: samples differ in length or shape, which the dataset does not allow; or the table is gone.
            IncompleteError: all trajectories that arrived within the time-out are too short for a slice.
            ClosedError: in a forked child.
        """
        batch = self._next_batch(time.monotonic())
        if batch is None:
            raise StopIteration
        return batch

    @abc.abstractmethod
    def _next_batch(self, start: float) -> Batch | None:
        """Return the next batch; None at the end. The time-out counts from `start`, of `time.monotonic()`."""

    def take(self, timeout_s: float = 0.0) -> Batch | None:
        """Return what has arrived by now: a batch, or a smaller one of what has; None if there is nothing.

        It ends no iteration, and raises nothing because of a server that is slow or gone.

        Args:
            timeout_s: how long to wait for a full batch, in seconds, >= 0.

        Raises:
            UnsafeDataError, FormatError, StructureError, ClosedError: as `next`.
        """
        return self._take_batch(time.monotonic(), check_wait(timeout_s))

    @abc.abstractmethod
    def _take_batch(self, start: float, timeout_s: float) -> Batch | None:
        """Return what has arrived; None if there is nothing. Checked arguments; the time-out counts from `start`."""

    def close(self, timeout_s: float | None = None) -> None:
        """Stop fetching, and set the priorities that are on their way. Idempotent.

        The samples that have arrived can still be iterated over, in a last, smaller batch if need be;
        `undelivered_samples` of `stats()` counts those that are not. If sampling removes items from a table, the
        samples in flight are read first.

        Args:
            timeout_s: time-out of the whole call, in seconds: half of it at most for samples in flight, and the rest
                for priorities that are not set yet. None for the dataset's.
        """
        timeout_s = self.timeout_s if timeout_s is None else check_timeout(timeout_s)
        fetchers = [fetcher for reader in self._readers for fetcher in reader.fetchers]
        # The finalizer is alive until the end of all below, which may be interrupted.
        if not self._finalizer.alive or any(fetcher.is_forked for fetcher in fetchers):
            return
        deadline = time.monotonic() + timeout_s
        stop_fetchers(fetchers, MAX_SILENCE_S, timeout_s)
        for reader in self._readers:
            reader.finish(deadline)
        if self._owns_client:
            self._client.close()
        self._finalizer.detach()

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open a dataset like this one in another process; samples fetched by this one stay here."""
        args, kwargs = self._arguments
        given = inspect.signature(type(self)).bind(*args, **kwargs).arguments
        return functools.partial(type(self), **{**given, "client": _picklable(given["client"])}), ()

    def __repr__(self) -> str:
        stats = [reader.stats() for reader in self._readers]
        counts = f"{sum(one.batches for one in stats)} batches, {sum(one.ready_samples for one in stats)} samples ready"
        tables = ", ".join(reader.table for reader in self._readers)
        return f"<{type(self).__name__} of {tables} at {self._client.address}: {counts}>"


def _shut_down(readers: Sequence[TableReader], client: Client | None) -> None:
    """End the threads of a dataset, and close `client` if the dataset owns one. Does nothing in a forked child.

    The garbage collector may call this in any thread, such as one that is to end here or holds a lock that is needed.
    So another thread does it. Only the main thread waits for that: it may be about to end the process.
    """
    if any(fetcher.is_forked for reader in readers for fetcher in reader.fetchers):
        return
    ended = in_background(functools.partial(_end, readers, client))
    if may_be_interrupted() and ended.wait(_END_S):
        ended.result()


def _end(readers: Sequence[TableReader], client: Client | None) -> None:
    stop_fetchers([fetcher for reader in readers for fetcher in reader.fetchers])
    for reader in readers:
        reader.updates.close(1.0)
    if client is not None:
        client.close()


def _picklable(client: Any) -> Any:
    """Return a picklable argument from which another process can make the same client."""
    return client if isinstance(client, Client) else getattr(client, "server_address", client)
