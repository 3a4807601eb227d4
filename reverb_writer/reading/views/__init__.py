"""A dataset's batches as transitions, or as the arrays of a framework, which the call that needs it imports.

    batch  ->  Transitions(n)  ->  Tensors(device)  ->  the learner     a form: functions, applied in this order

The thread that fetches applies them to each batch ahead of its use.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tree

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.errors import IncompleteError
from reverb_writer.lazy import needs
from reverb_writer.reading.views.forms import Form, converted
from reverb_writer.reading.views.window_transitions import ToTransitions
from reverb_writer.slices.batch import Batch

if TYPE_CHECKING:
    from typing_extensions import Self

_64_BITS = frozenset(map(np.dtype, (np.int64, np.uint64, np.float64, np.complex128)))


class View:
    """An iterator over the batches of a reader, in a form. A context manager, which closes the reader.

    One thread at a time may iterate over the views of a dataset; all other methods are thread-safe.

    Attributes:
        reader: a `TableReader`, or the datasets of a `MixedDataset`; views of a dataset share it.
    """

    _num_open_sizes = 2  # leading dimensions of leaves that may differ from batch to batch: B and T

    def __init__(self, reader: Any, form: Form = (), num_open_sizes: int | None = None) -> None:
        """Take a reader, the form of the batches, and the number of their first dimensions that may differ."""
        self.reader, self._form = reader, form
        if num_open_sizes is not None:
            self._num_open_sizes = num_open_sizes

    def __iter__(self) -> Iterator[Any]:
        """Begin to fetch, and return the object itself. A later iteration continues where the last one stopped.

        After the end of a single pass, the next one begins: it returns the items that are in the table now.
        """
        self.reader.begin(self._form)
        return self

    def __next__(self) -> Any:
        """Return the next batch; after `close()` or a single pass, a last batch of the remaining samples, then stop.

        The first call begins to fetch. The time-out starts again whenever less is missing than ever before in this
        call: samples of the batch, or inserts that a rate limiter waits for.

        Raises:
            ReplayTimeoutError: no batch within the time-out; names the cause with its numbers. No sample is lost.
            ServerUnavailableError: no batch within the time-out, and no server can be reached.
            UnsafeDataError, FormatError: a sample must not or cannot be decoded. It is skipped; call again.
            StructureError: samples differ in length or shape, which the dataset does not allow; or the table no longer
                exists. From `transitions`, also as in `rw.to_transitions`.
            IncompleteError: all trajectories that arrived within the time-out are too short for a slice.
            ClosedError: in a forked child.
        """
        return self.reader.next(self._form)

    def poll(self, timeout_s: float = 0.0) -> Any:
        """Return a batch of the samples that have arrived, which may be a smaller one; None if none have arrived.

        It ends no iteration, and raises no error because a server is slow or unreachable. It does not wait for the
        `transform` of another batch. A `MixedDataset` returns the samples that have arrived of each dataset.

        Args:
            timeout_s: time to wait for a full batch, in seconds, >= 0.

        Raises:
            UnsafeDataError, FormatError, StructureError, ClosedError: as `next`.
        """
        return self.reader.poll(timeout_s, self._form)

    def transitions(self, n: int = 1, gamma: float = 0.99) -> View:
        """Return this dataset as an iterator over transitions over n steps, `NStepTransitions` with leaves [B, ...].

        A window of n + 1 rows gives its first transition. A longer window gives the transition from one of its rows,
        each equally likely, whose n steps are in the window or end with the episode; rows near the ends of an episode
        are in fewer windows. If the table is sampled by priority, windows must have n + 1 rows, because a priority
        belongs to a window. A warning says if windows have fewer. Slices give a transition from each row, with a mask.
        The target of values is `reward + gamma * discount * value(next_observation)` for every n. `update_priorities`
        also takes transitions; the `info` of their `batch` has keys and weights.

        Args:
            n: steps of a transition, >= 1; fewer at the end of an episode.
            gamma: the agent's discount, in [0, 1]; not used with n = 1.

        Raises:
            SpecError: a number is out of range. The iteration raises SpecError if windows are too long for a
                prioritized table.

        Example:
            for transitions in dataset.transitions(n=3, gamma=0.99):
                errors = train(transitions, transitions.batch.info.importance_weights(0.6))
                dataset.update_priorities(transitions, errors)
        """
        form = ToTransitions(integer("n", n, minimum=1), check_fraction("gamma", gamma), self.reader.is_prioritized)
        return View(self.reader, (*self._form, form), 1)

    def as_torch(self, device: Any = None) -> Any:
        """Return this dataset as an iterator over tensors, which is a `torch.utils.data.IterableDataset`.

        Leaves of strings stay NumPy arrays.

        Args:
            device: device of the tensors; None for the CPU. For a CUDA device memory is pinned.

        With `DataLoader(dataset.as_torch(), batch_size=None, num_workers=N, multiprocessing_context="spawn")` each
        worker process opens an equal dataset, with a client of the same servers, certificates and token. Close this
        dataset then, because it also fetches.
        """
        from reverb_writer.reading.views.torch import TensorConverter, loadable  # noqa: PLC0415  # brings PyTorch

        return loadable(View)(self.reader, (*self._form, TensorConverter(device)), self._num_open_sizes)

    def as_jax(self, device: Any = None) -> View:
        """Return this dataset as an iterator over JAX arrays on `device`; None for JAX's default.

        Strings and info stay NumPy arrays. JAX makes 64-bit numbers 32-bit ones unless `jax_enable_x64` is set; a
        warning names such leaves.
        """
        with needs("`as_jax`", "reverb-writer[jax]"):
            import jax  # noqa: PLC0415

        return View(
            self.reader,
            (*self._form, ToJax(jax.device_put, device, bool(jax.config.jax_enable_x64))),
            self._num_open_sizes,
        )

    def as_tf(self) -> Any:
        """Return a `tf.data.Dataset` of pairs: data, and a dict of the info's arrays; waits for the first batch.

        The dict also has `kinds` if the table has them, and for slices the arrays of `batch.slices` under `slices`.
        With `with_next` it has triples, whose third element is `batch.next`. The data of transitions are a dict of
        their fields. Each iteration of a `single_pass` has the items of its beginning, and the first one the items of
        this call.

        Raises:
            IncompleteError: the dataset has ended, as at an empty table with `single_pass`. Other errors are as in
                `next`.
        """
        return _tf_dataset(self, self._num_open_sizes)

    def update_priorities(self, batch_or_keys: Any, priorities: Any) -> None:
        """Set priorities of items, soon: the learner does not wait for the server.

        Args:
            batch_or_keys: a batch of this dataset or its transitions, in any framework, or a batch's info, or keys, [n]
                integers, except of a `MixedDataset`. The server ignores keys of items that it has removed.
            priorities: [n], finite and >= 0, of any framework: tensors may have gradients and be on any device. If a
                key has several priorities, the last one counts. A batch of slices has a key for each slice.

        Raises:
            SpecError: a priority is out of range, or keys and priorities differ in number. Nothing changed.
            ClosedError: after `close()`.
        """
        self.reader.update_priorities(batch_or_keys, priorities)

    def flush_priorities(self, timeout_s: float | None = None) -> None:
        """Wait until all priorities given so far are set, or are counted as not set.

        The counters are `failed_priority_updates` and `gone_priority_updates` of `stats()`.

        Raises:
            ReplayTimeoutError: not within `timeout_s` seconds, or the dataset's time-out.
        """
        self.reader.flush_priorities(timeout_s)

    def stats(self) -> Any:
        """Return the counters so far, `DatasetStats`.

        A `MixedDataset` returns the sums over its `datasets`, which also have `stats()`. The largest number counts for
        `batches` and `last_age_s`, because each of its batches has a batch of each dataset.
        """
        return self.reader.stats()

    def close(self, timeout_s: float | None = None) -> None:
        """Stop fetching, and set the remaining priorities. Idempotent.

        The iteration can still return the samples that have arrived (`ready_samples` of `stats()`); the last batch may
        be smaller. If sampling removes items from a table, the samples in flight are read first.

        Args:
            timeout_s: time-out of the whole call, in seconds: at most half of it for samples in flight, and the rest
                for priorities that are not set yet. None for the dataset's time-out.
        """
        self.reader.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{', '.join(map(repr, self._form))} of {self.reader}>"


@dataclass(frozen=True)
class ToJax:
    """Puts arrays on a device of JAX, except strings and the info of a batch."""

    put: Callable[[Any, Any], Any]  # JAX's `device_put`
    device: Any
    keeps_64_bits: bool

    def __call__(self, found: Any) -> Any:
        """Return a batch, transitions or a nest with arrays of JAX."""
        if not self.keeps_64_bits:
            _warn_of_64_bits(found.data if isinstance(found, Batch) else found)
        return converted(found, self._put)

    def _put(self, array: Any) -> Any:
        is_number = isinstance(array, np.ndarray | np.generic) and array.dtype.kind != "O"
        return self.put(array, self.device) if is_number else array


def _warn_of_64_bits(nest: Any) -> None:
    """Warn of leaves with 64-bit numbers; Python shows each such warning once."""
    if any(getattr(leaf, "dtype", None) in _64_BITS for leaf in tree.flatten(nest)):
        leaves = [
            f"`{'/'.join(map(str, path))}` {leaf.dtype}"
            for path, leaf in tree.flatten_with_path(nest)
            if getattr(leaf, "dtype", None) in _64_BITS
        ]
        warnings.warn(
            f"JAX keeps 32 bits of the numbers of {', '.join(leaves)}. To keep 64 bits, call "
            "`jax.config.update('jax_enable_x64', True)`; or store these leaves in 32 bits.",
            stacklevel=2,
        )


def _tf_dataset(dataset: View, num_open: int) -> Any:
    """Return a `tf.data.Dataset` with the element spec of the first batch, except the first `num_open` sizes.

    These sizes are None because the last batch may be smaller. Lists become tuples, as `tf.data` requires.
    """
    with needs("`as_tf`", "tensorflow"):
        import tensorflow as tf  # noqa: PLC0415

    try:
        first = next(iter(dataset))
    except StopIteration:
        raise IncompleteError(
            "`as_tf` learns the structure of the batches from the first one, and there is none. Call it when the table "
            "has items."
        ) from None
    held = [first]

    def elements() -> Iterator[Any]:
        batches = iter(dataset)
        while held:
            yield _element(held.pop())
        yield from map(_element, batches)

    def spec(array: Any) -> Any:
        dtype = tf.string if array.dtype == np.object_ else tf.as_dtype(array.dtype)
        open_sizes = min(array.ndim, num_open)
        return tf.TensorSpec((None,) * open_sizes + array.shape[open_sizes:], dtype)

    signature = tree.map_structure(spec, _element(first))
    return tf.data.Dataset.from_generator(elements, output_signature=signature)


def _element(found: Any) -> Any:
    is_batch = isinstance(found, Batch)
    batch, data = (found, found.data) if is_batch else (found.batch, found._asdict())
    about = _arrays(batch.info)
    about |= _arrays({"kinds": batch.row_kinds, "next_kinds": batch.next_kinds})
    about |= {} if batch.slices is None else {"slices": _arrays(batch.slices)}
    pair = _tuples(data), about
    return (*pair, _tuples(batch.next)) if is_batch and batch.next is not None else pair


def _arrays(record: Any) -> dict[str, Any]:
    """Return the arrays of a record or dict, by name."""
    fields = record if isinstance(record, dict) else vars(record)
    return {name: value for name, value in fields.items() if isinstance(value, np.ndarray)}


def _tuples(nest: Any) -> Any:
    return tree.traverse(lambda part: tuple(part) if isinstance(part, list) else None, nest, top_down=False)
