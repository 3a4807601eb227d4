"""Datasets as iterators of a framework's arrays; a framework is imported at the first call that needs it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tree

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.errors import IncompleteError
from reverb_writer.lazy import needs
from reverb_writer.slices.batch import Batch
from reverb_writer.transitions import NStepTransitions, n_step, to_transitions

if TYPE_CHECKING:
    from typing_extensions import Self


class Views:
    """An iterator over batches, with its views for PyTorch, JAX and TensorFlow."""

    _num_open_sizes = 2  # leading dimensions of leaves that may differ from batch to batch: B and T

    def transitions(self, n: int = 1, gamma: float = 0.99) -> Any:
        """Return this dataset as an iterator over transitions over n steps, `NStepTransitions` with leaves [B, ...].

        Each window gives its first transition, so write windows of n + 1 steps; a warning says if they have fewer.
        Slices give a transition from each row, with a mask. The target of values is `reward + gamma * discount *
        value(next_observation)` for every n.

        Args:
            n: steps of a transition, >= 1; fewer at the end of an episode.
            gamma: the agent's discount, in [0, 1]; not used with n = 1.

        Raises:
            SpecError: a number is out of range.

        Example:
            for transitions in dataset.transitions(n=3, gamma=0.99):
                errors = train(transitions, transitions.batch.info.importance_weights(0.6))
                dataset.update_priorities(transitions.batch, errors)
        """
        return TransitionsView(self, n, gamma)

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of batches of tensors; see `views.torch`.

        Args:
            device: device of the tensors; None for the CPU. For a CUDA device memory is pinned.

        With `DataLoader(dataset.as_torch(), batch_size=None, num_workers=N, multiprocessing_context="spawn")` each
        worker process opens an equal dataset, with a client of the same servers, certificates and token. Close this
        dataset then, because it also fetches.
        """
        from reverb_writer.reading.views.torch import replay_view  # noqa: PLC0415  # brings PyTorch

        return replay_view(self, device)

    def as_jax(self, device: Any = None) -> Iterator[Batch]:
        """Return an iterator over batches of JAX arrays on `device`; None for JAX's default. Strings stay NumPy arrays.

        JAX makes 64-bit numbers 32-bit ones unless `jax_enable_x64` is set.
        """
        with needs("`as_jax`", "reverb-writer[jax]"):
            import jax  # noqa: PLC0415

        def put(array: Any) -> Any:
            return array if array.dtype.kind == "O" else jax.device_put(array, device)

        # An error would end a generator, and the next batch is still there.
        return iter(lambda: next(self).map_arrays(put), None)  # type: ignore[call-overload]  # every view is an iterator

    def as_tf(self) -> Any:
        """Return a `tf.data.Dataset` of pairs: data, and a dict of info and markers; waits for the first batch.

        With `with_next` it has triples, whose third element is `batch.next`. Each iteration of a `single_pass` has the
        items of its beginning, and the first one the items of this call.

        Raises:
            IncompleteError: the dataset has ended, as at an empty table with `single_pass`. Other errors are as in
                `next`.
        """
        return _tf_dataset(self, self._num_open_sizes)

    def close(self) -> None:
        """Stop fetching, and close all resources."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TransitionsView(Views):
    """The result of `dataset.transitions()`: the same dataset, whose `next` and `poll` return transitions.

    Each `NStepTransitions` has its `batch`, for `update_priorities(transitions.batch, ...)` and the weights of its
    `info`. All other attributes are the dataset's.
    """

    def __init__(self, dataset: Any, n: int, gamma: float) -> None:
        """Wrap a dataset; arguments and errors are as in its method `transitions`."""
        self._dataset = dataset
        self._arguments = integer("n", n, minimum=1), check_fraction("gamma", gamma)
        self._make = functools.partial(_transitions_of, n=self._arguments[0], gamma=self._arguments[1])

    def __repr__(self) -> str:
        return f"<transitions over {self._arguments[0]} steps of {self._dataset!r}>"

    def __iter__(self) -> Iterator[NStepTransitions]:
        iter(self._dataset)
        return self

    def __next__(self) -> NStepTransitions:
        """Return the transitions of the next batch; errors are as in the dataset and in `rw.to_transitions`."""
        return self._make(next(self._dataset))

    def poll(self, timeout_s: float = 0.0) -> NStepTransitions | None:
        """Return transitions of the samples that have arrived, or None; see `poll` of the dataset."""
        batch = self._dataset.poll(timeout_s)
        return None if batch is None else self._make(batch)

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of transitions on `device`; see `as_torch` of the dataset."""
        from reverb_writer.reading.views.torch import replay_view  # noqa: PLC0415  # brings PyTorch

        return replay_view(self._dataset, device, self._make)

    def as_jax(self, device: Any = None) -> Iterator[Any]:
        """Return an iterator over transitions of JAX arrays on `device`; see `as_jax` of the dataset."""
        return map(self._make, self._dataset.as_jax(device))

    def as_tf(self) -> Any:
        """Return a `tf.data.Dataset` of pairs: the fields of transitions, and the second element of the dataset's."""

        def batches() -> Iterator[Batch]:
            for found in self:
                yield Batch(found._asdict(), found.batch.info, found.batch.markers)

        return _tf_dataset(batches(), 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `__init__` may not have run, as in a copy
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def close(self, *args: Any, **kwargs: Any) -> None:
        """Close the dataset."""
        self._dataset.close(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return TransitionsView, (self._dataset, *self._arguments)


def _transitions_of(batch: Batch, *, n: int, gamma: float) -> NStepTransitions:
    """Return transitions over n steps: the first one of each window, or one from each row of slices."""
    found = n_step(to_transitions(batch), n, gamma)
    if found.mask.ndim > 1:
        if (most := found.mask.shape[1]) < n:
            text = f"windows of {most + 1} rows give transitions over at most {most} steps, not {n}. Write windows"
            warnings.warn(f"{text} of n + 1 rows.", stacklevel=2)
        found = found.first()
    found.batch = batch
    return found


def _tf_dataset(dataset: Any, num_open: int = 2) -> Any:
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


def _element(batch: Any) -> Any:
    named = {**vars(batch.info), **({} if batch.markers is None else vars(batch.markers))}
    pair = _tuples(batch.data), {name: value for name, value in named.items() if isinstance(value, np.ndarray)}
    return pair if batch.next is None else (*pair, _tuples(batch.next))


def _tuples(nest: Any) -> Any:
    return tree.traverse(lambda part: tuple(part) if isinstance(part, list) else None, nest, top_down=False)
