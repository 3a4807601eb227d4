"""A dataset as an iterator over transitions, one from each item: what a learner of values needs, in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from reverb_writer.arguments import check_fraction, integer
from reverb_writer.reading.views import Views
from reverb_writer.slices.batch import Batch
from reverb_writer.transitions import NStepTransitions, n_step, to_transitions


class TransitionsView(Views):
    """The result of `dataset.transitions()`: the same dataset, whose `next` and `take` return transitions.

    Each `NStepTransitions` has its `batch`, for `update_priorities(transitions.batch, ...)` and the weights of its
    `info`. All else is the dataset's.
    """

    def __init__(self, dataset: Any, n: int, gamma: float) -> None:
        """Wrap a dataset; arguments and errors as of its `transitions`."""
        self._dataset = dataset
        self._arguments = integer("n", n, minimum=1), check_fraction("gamma", gamma)
        self._make = functools.partial(transitions_of, n=self._arguments[0], gamma=self._arguments[1])

    def __repr__(self) -> str:
        return f"<transitions over {self._arguments[0]} steps of {self._dataset!r}>"

    def __iter__(self) -> Iterator[NStepTransitions]:
        iter(self._dataset)
        return self

    def __next__(self) -> NStepTransitions:
        """Return those of the next batch; errors as those of the dataset and of `rw.to_transitions`."""
        return self._make(next(self._dataset))

    def take(self, timeout_s: float = 0.0) -> NStepTransitions | None:
        """Return those of what has arrived by now, or None; `timeout_s` seconds as of the dataset's `take`."""
        batch = self._dataset.take(timeout_s)
        return None if batch is None else self._make(batch)

    def as_torch(self, device: Any = None) -> Any:
        """Return a `torch.utils.data.IterableDataset` of transitions of tensors on `device`; see the dataset's."""
        from reverb_writer.reading.views.torch import replay_view  # noqa: PLC0415  # brings PyTorch

        return replay_view(self._dataset, device, self._make)

    def as_jax(self, device: Any = None) -> Iterator[Any]:
        """Return an iterator over transitions of JAX arrays on `device`; see the dataset's."""
        return map(self._make, self._dataset.as_jax(device))

    def as_tf(self) -> Any:
        """Return a `tf.data.Dataset` of pairs: the fields of the transitions, and those of the dataset's."""
        from reverb_writer.reading.views.tf import tf_dataset  # noqa: PLC0415  # brings TensorFlow

        return tf_dataset(map(_as_batch, self), 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # `__init__` may not have run, as in a copy
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def close(self, *args: Any, **kwargs: Any) -> None:
        """Close the dataset."""
        self._dataset.close(*args, **kwargs)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return TransitionsView, (self._dataset, *self._arguments)


def transitions_of(batch: Batch, *, n: int, gamma: float) -> NStepTransitions:
    """Return transitions over n steps: of each window the first one, of slices those from each row."""
    found = n_step(to_transitions(batch), n, gamma)
    if found.mask.ndim > 1:
        found = found.first()
    found.batch = batch
    return found


def _as_batch(transitions: NStepTransitions) -> Batch:
    batch = transitions.batch
    return Batch(transitions._asdict(), batch.info, batch.markers)
